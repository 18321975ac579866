"""Text to token ids: raw bytes, or a `tokenizer.json`; and the chat template that comes with it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import tokenizers

from trainer.config import BYTE_TOKENIZER
from trainer.data.chat import ChatTemplate, Part
from trainer.errors import ConfigError

# How tokenizers without a `tokenizer_config.json` beside them name the end of a document.
END_OF_DOCUMENT_NAMES = ("<｜end▁of▁sentence｜>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")


Encoded: TypeAlias = tuple[np.ndarray, np.ndarray | None]  # ids int32 [n]; targets bool [n], or None: all of them


class Tokenizer(Protocol):
    """What the data needs of a tokenizer. Ids are 0 .. num_ids - 1, `eos_id` among them."""

    eos_id: int
    num_ids: int
    chat: ChatTemplate | None

    def encode(self, parts: Sequence[Part]) -> list[Encoded]:
        """Each part's ids, without BOS or EOS. A token is a target if any of its characters is."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids, 0 .. 255; 256 ends a document."""

    eos_id = 256
    num_ids = 257
    chat: ChatTemplate | None = None

    def encode(self, parts: Sequence[Part]) -> list[Encoded]:
        return [self._encode(part) for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < self.eos_id).decode("utf-8", "replace")

    def _encode(self, part: Part) -> Encoded:
        ids = np.frombuffer(part.text.encode("utf-8"), np.uint8).astype(np.int32)
        if part.whole:
            return ids, None
        targets = np.zeros(ids.size, bool)
        for span in part.spans:
            start, stop = (len(part.text[:place].encode("utf-8")) for place in span)
            targets[start:stop] = True
        return ids, targets


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package, with the chat template beside it if any.

    Text is data: what spells a special token inside a document is encoded as the plain text it is, and the
    truncation, padding and added BOS/EOS a file may ask for are off. In conversations that a chat template wrote,
    special tokens are themselves, as the template means them. Raises ConfigError for a file that is
    missing or no tokenizer, and for one that doesn't say which token ends a document.
    """

    def __init__(self, path: Path):
        file = path / "tokenizer.json" if path.is_dir() else path
        self._path = file
        self._text, self._special = _open(file, special=False), _open(file, special=True)
        ids = self._text.get_vocab(with_added_tokens=True)
        beside = _config_beside(file)
        end = _end_of_document(file, beside, ids)
        self.eos_id = ids[end]
        self.num_ids = max(ids.values()) + 1
        self.chat = _chat_template(file, beside, end)

    def encode(self, parts: Sequence[Part]) -> list[Encoded]:
        encoded: list[Encoded] = [(np.zeros(0, np.int32), None)] * len(parts)
        for special, tokenizer in ((False, self._text), (True, self._special)):
            for whole in (True, False):
                some = [n for n, part in enumerate(parts) if (part.special, part.whole) == (special, whole)]
                encode = tokenizer.encode_batch_fast if whole else tokenizer.encode_batch  # fast: without offsets
                for n, encoding in zip(some, self._encode(encode, [parts[n].text for n in some]), strict=True):
                    targets = None if whole else _targets(parts[n], encoding.offsets)
                    encoded[n] = (np.array(encoding.ids, np.int32), targets)
        return encoded

    def _encode(self, encode: Callable[..., list[tokenizers.Encoding]], texts: list[str]) -> list[tokenizers.Encoding]:
        if not texts:
            return []
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"tokenizer_path={self._path} cannot encode the text of dataset_path: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(tokenizer_path: str, vocab_size: int) -> Tokenizer:
    """The tokenizer `tokenizer_path` names: "byte", a `tokenizer.json`, or the folder that holds one.

    Raises ConfigError when the file is missing or broken, or when it has an id the model has no row for.
    """
    tokenizer = ByteTokenizer() if tokenizer_path == BYTE_TOKENIZER else FileTokenizer(Path(tokenizer_path))
    if tokenizer.num_ids > vocab_size:
        raise ConfigError(
            f"tokenizer_path={tokenizer_path} has token ids up to {tokenizer.num_ids - 1}, and model.vocab_size="
            f"{vocab_size} has rows up to {vocab_size - 1} only: set model.vocab_size to {tokenizer.num_ids} or more, "
            "or use the model's own tokenizer"
        )
    return tokenizer


def _targets(part: Part, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens have a character of the part's spans. Offsets and spans count characters."""
    wanted = np.zeros(len(part.text) + 1, np.int64)
    for start, stop in part.spans:
        wanted[start + 1 : stop + 1] = 1
    before = np.cumsum(wanted)  # before[i]: wanted ones of the first i characters
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    return before[stops] > before[starts]


def _open(path: Path, *, special: bool) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(_read(path))
    except Exception as error:  # tokenizers raises nothing narrower
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"tokenizer_path={path} is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not special
    return tokenizer


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenizer_path: cannot read {path}: {error}") from error


def _config_beside(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing."""
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    try:
        content = json.loads(_read(config))
    except ValueError as error:
        raise ConfigError(f"tokenizer_path: {config} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer_path: {config} is not a JSON object")
    return content


def _name(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _end_of_document(path: Path, beside: dict[str, Any], ids: dict[str, int]) -> str:
    """The token that ends a document: `eos_token` of the tokenizer_config.json beside, else the one usual name."""
    config = path.with_name("tokenizer_config.json")
    token = _name(beside.get("eos_token"))
    if isinstance(token, str) and token in ids:
        return token
    if token is not None:
        raise ConfigError(f"tokenizer_path: {config} has eos_token={token!r}, which {path} doesn't know")
    found = [name for name in END_OF_DOCUMENT_NAMES if name in ids]
    if len(found) != 1:
        raise ConfigError(
            f"tokenizer_path={path} has {' and '.join(found) or 'no usual token'} to end a document: name one as "
            f'"eos_token" in {config}'
        )
    return found[0]


def _chat_template(path: Path, beside: dict[str, Any], eos: str) -> ChatTemplate | None:
    """chat_template.jinja beside the tokenizer, or `chat_template` of its tokenizer_config.json."""
    bos = _name(beside.get("bos_token")) or ""
    file = path.with_name("chat_template.jinja")
    if file.exists():
        return ChatTemplate(_read(file), str(file), bos, eos)
    source = beside.get("chat_template")
    if isinstance(source, list):  # several by name: {"name": ..., "template": ...}
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get(
            "default"
        )
    if not source:
        return None
    return ChatTemplate(str(source), f"in {path.with_name('tokenizer_config.json')}", bos, eos)
