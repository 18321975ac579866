"""Text to token ids: raw bytes, or a `tokenizer.json`."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from trainer.config import BYTE_TOKENIZER
from trainer.errors import ConfigError

# How tokenizers without a `tokenizer_config.json` beside them name the end of a document.
END_OF_DOCUMENT_NAMES = ("<｜end▁of▁sentence｜>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")
TEXTS_PER_BATCH = 1024


class Tokenizer(Protocol):
    """What the packing needs of a tokenizer. Ids are 0 .. num_ids - 1, `eos_id` among them."""

    eos_id: int
    num_ids: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One int32 array of ids per text, without BOS or EOS."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids, 0 .. 255; 256 ends a document."""

    eos_id = 256
    num_ids = 257

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package.

    Text is data: what spells a special token inside a document is encoded as the plain text it is, and the
    truncation, padding and added BOS/EOS a file may ask for are off. Raises ConfigError for a file that is
    missing or no tokenizer, and for one that doesn't say which token ends a document.
    """

    def __init__(self, path: Path):
        if path.is_dir():
            raise ConfigError(f"tokenizer_path={path} is a folder; name its file: {path / 'tokenizer.json'}")
        content = _read(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"tokenizer_path={path} is not a tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self._path, self._tokenizer = path, tokenizer
        self.eos_id = ids[_end_of_document(path, ids)]
        self.num_ids = max(ids.values()) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"tokenizer_path={self._path} cannot encode the text of dataset_path: {error}") from error
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def load_tokenizer(tokenizer_path: str, vocab_size: int) -> Tokenizer:
    """The tokenizer `tokenizer_path` names: "byte", or the path of a `tokenizer.json`.

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


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each text, in order. Texts go to the tokenizer in batches, which it encodes in parallel."""
    texts = iter(texts)
    while batch := list(itertools.islice(texts, TEXTS_PER_BATCH)):
        yield from tokenizer.encode(batch)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenizer_path: cannot read {path}: {error}") from error


def _end_of_document(path: Path, ids: dict[str, int]) -> str:
    """The token that ends a document: `eos_token` of the tokenizer_config.json beside, else the one usual name."""
    config = path.with_name("tokenizer_config.json")
    if config.exists():
        try:
            named = json.loads(_read(config)).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"tokenizer_path: {config} is not a JSON object: {error}") from error
        token = named.get("content") if isinstance(named, dict) else named
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
