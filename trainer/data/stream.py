"""The endless numbered rows that a run trains on: made up, or text from files."""

from typing import Protocol

import numpy as np

from trainer.config import Config
from trainer.data.documents import Documents, Form, Tally, concatenate, read_documents
from trainer.data.packing import NO_LOSS, Order, PackedRows, Source
from trainer.data.synthetic import SyntheticRows
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import ConfigError

FIELDS = ("tokens", "targets", "segment_ids", "positions")
SHOWN_TOKENS = 80


class RowStream(Protocol):
    """Endless numbered rows. `rows_per_epoch` is None where no row ever comes again."""

    @property
    def row_length(self) -> int: ...

    @property
    def rows_per_epoch(self) -> int | None: ...

    def row(self, number: int, columns: slice = slice(None)) -> dict[str, np.ndarray]:
        """FIELDS of row `number` for these columns, int32 [columns]."""
        ...

    def describe(self) -> list[str]:
        """Lines for the log."""
        ...


class TextRows(PackedRows):
    """Packed rows of text, with what is to be said about them."""

    def __init__(self, documents: Documents, order: Order, config: Config, tokenizer: Tokenizer, notes: list[str]):
        super().__init__(documents, order, config.max_target_length)
        self.tokenizer, self.notes = tokenizer, notes
        self.num_documents, self.num_tokens = len(documents.lengths), int(documents.lengths.sum())
        self.num_targets = documents.num_targets

    def describe(self) -> list[str]:
        return [
            f"text: {self.num_documents:,} documents of {self.num_tokens:,} tokens, {self.num_targets:,} of them "
            f"targets; an epoch is {self.rows_per_epoch:,} rows of {self.row_length:,}, {self.utilization():.1%} full",
            *self.notes,
            f"first row: {marked(self.row(0), self.tokenizer)}",
        ]


def open_stream(config: Config) -> RowStream:
    """The rows that `dataset_type` names, of max_target_length tokens. Every process reads and tokenizes all the text.

    Raises ConfigError for a wrong dataset_type, file or tokenizer.
    """
    if config.dataset_type == "synthetic":
        return SyntheticRows(config.model.vocab_size, config.max_target_length, config.seed)
    return open_text(config)


def open_text(config: Config) -> TextRows:
    tokenizer = load_tokenizer(config.tokenizer_path, config.model.vocab_size)
    form = Form(config.train_data_columns, tokenizer, everything=config.train_on == "all")
    skip = config.on_bad_record == "skip"
    weighted = any(weight is not None for weight in config.dataset_path.values())
    groups = [[path] for path in config.dataset_path] if weighted else [list(config.dataset_path)]
    read = [read_documents(paths, form, skip) for paths in groups]
    documents, tally = concatenate([some for some, _ in read]), Tally()
    for _, of_group in read:
        tally.add(of_group)
    numbers = np.arange(len(documents.lengths))
    bounds = np.cumsum([len(some.lengths) for some, _ in read])[:-1]
    kept = [n[fits(n, documents, config)] for n in np.split(numbers, bounds)]
    for paths, some in zip(groups, kept, strict=True):
        if not some.size:
            nothing = f"dataset_path: no text to train on in {', '.join(paths) or 'no file'}"
            raise ConfigError(f"{nothing}; {tally.describe()}")
    weights = [weight or 1.0 for weight in config.dataset_path.values()] if weighted else [1.0]
    sources = [Source(some, weight) for some, weight in zip(kept, weights, strict=True)]
    order = Order(sources, config.seed, config.enable_data_shuffling)
    return TextRows(documents, order, config, tokenizer, notes(config, documents, tally, order, tokenizer))


def fits(numbers: np.ndarray, documents: Documents, config: Config) -> np.ndarray:
    """Which of these documents are kept, bool."""
    if config.long_documents == "split":
        return np.ones(len(numbers), bool)
    return documents.lengths[numbers] <= config.max_target_length


def notes(config: Config, documents: Documents, tally: Tally, order: Order, tokenizer: Tokenizer) -> list[str]:
    """What else is worth a line of the log: what was left out, the mixture, and how conversations were written."""
    lines = []
    if tally.empty or tally.without_target or tally.num_bad:
        lines.append(tally.describe())
    if tally.conversations:
        chat = "in plain `role: content` lines: the tokenizer has no chat template"
        if tokenizer.chat is not None:
            chat = f"by the chat template {tokenizer.chat.path}"
        lines.append(f"{tally.conversations:,} conversations, written {chat}; targets: {config.train_on}")
    long = int((documents.lengths > config.max_target_length).sum())
    if long:
        done = "cut into rows" if config.long_documents == "split" else "left out"
        lines.append(f"{long:,} of {len(documents.lengths):,} documents are longer than a row: {done} (long_documents)")
    if len(order.taken) > 1:
        shares = (f"{n:,} of {path}" for n, path in zip(order.taken, config.dataset_path, strict=True))
        lines.append(f"mixture, documents of an epoch: {', '.join(shares)}")
    return lines


def marked(row: dict[str, np.ndarray], tokenizer: Tokenizer, most: int = SHOWN_TOKENS) -> str:
    """The row's first tokens as text on one line; what is trained on stands between ⟦ and ⟧."""
    filled = int((row["segment_ids"] > 0).sum())
    text = ""
    for start, stop, is_trained in trained_runs(row, min(filled, most)):
        piece = tokenizer.decode(row["tokens"][start:stop].tolist())
        text += f"⟦{piece}⟧" if is_trained else piece
    return repr(text)[1:-1] + (" …" if filled > most else "")


def trained_runs(row: dict[str, np.ndarray], stop: int) -> list[tuple[int, int, bool]]:
    """The row's first `stop` tokens as runs (start, stop, trained) of one document each: a token is trained on where
    it is the target of the one before it."""
    trained = np.zeros(len(row["tokens"]), bool)
    trained[1:] = (row["targets"][:-1] != NO_LOSS) & (row["positions"][1:] > 0)
    kind = 2 * row["segment_ids"] + trained
    edges = [0, *(np.flatnonzero(np.diff(kind[:stop])) + 1).tolist(), stop]
    return [(a, b, bool(trained[a])) for a, b in zip(edges[:-1], edges[1:], strict=True) if a < b]
