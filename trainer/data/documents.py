"""The tokenized documents of a dataset, kept in memory: read once, in parallel and in order, by Grain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grain
import numpy as np

from trainer.data.chat import Part, UnusableError, is_conversation, parts_of
from trainer.data.files import find_files
from trainer.data.records import BadRecord, Chunk, chunks_of, read_chunk, readable
from trainer.data.tokenizer import Encoded, Tokenizer
from trainer.errors import ConfigError

RECORDS_PER_CALL = 512
READ = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
NAMED_BAD_RECORDS = 3


@dataclass(frozen=True)
class Form:
    """How a record becomes tokens."""

    columns: list[str]
    tokenizer: Tokenizer
    everything: bool  # all tokens are targets, the prompt's too


@dataclass
class Tally:
    """What the records were. `bad` holds the first few that cannot be read."""

    conversations: int = 0
    empty: int = 0
    without_target: int = 0
    num_bad: int = 0
    bad: list[BadRecord] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.conversations += other.conversations
        self.empty += other.empty
        self.without_target += other.without_target
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:NAMED_BAD_RECORDS]

    def describe(self) -> str:
        bad = f"{self.num_bad:,} that cannot be read"
        if self.bad:
            bad += f", the first at {self.bad[0].where()}: {self.bad[0].reason}"
        return f"left out: {self.empty:,} empty records, {self.without_target:,} without a target, {bad}"


@dataclass(frozen=True)
class Documents:
    """Documents end to end. The one at `starts[d]` has `lengths[d]` tokens that are inputs, and one more that is only
    a target. `targets` says of each token whether it is to be predicted; None: all of them are."""

    tokens: np.ndarray  # [sum(lengths + 1)] int32
    targets: np.ndarray | None  # [sum(lengths + 1)] bool
    starts: np.ndarray  # [documents] int64
    lengths: np.ndarray  # [documents] int64

    @classmethod
    def join(cls, tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray | None] = ()) -> "Documents":
        """From each document's tokens, at least two, and its targets."""
        sizes = np.array([document.size for document in tokens], np.int64)
        flags = None
        if any(some is not None for some in targets):
            pairs = zip(tokens, targets, strict=True)
            flags = np.concatenate([np.ones(t.size, bool) if some is None else some for t, some in pairs])
        every = np.concatenate([np.zeros(0, np.int32), *tokens])
        return cls(every, flags, np.cumsum(sizes) - sizes, sizes - 1)

    @property
    def num_targets(self) -> int:
        """Of one pass over all of them. A document's first token is never one."""
        if self.targets is None:
            return int(self.lengths.sum())
        return int(self.targets.sum() - self.targets[self.starts].sum())


def read_documents(
    paths: Iterable[str], form: Form, skip_bad: bool, key: str = "dataset_path"
) -> tuple[Documents, Tally]:
    """Every document of the files, in order. Raises ConfigError for a bad record unless they are to be skipped."""
    chunks = [chunk for file in find_files(paths, key) for chunk in chunks_of(file, form.columns)]
    tally = Tally()
    read: list[Documents] = []
    chunks_in_order = grain.MapDataset.source(chunks).map(lambda chunk: _documents_of(chunk, form))
    for documents, others in chunks_in_order.to_iter_dataset(READ):
        tally.add(others)
        if others.bad and not skip_bad:
            first = others.bad[0]
            raise ConfigError(f"{key}: {first.where()}: {first.reason} (on_bad_record=skip leaves it out)")
        read.append(documents)
    return concatenate(read), tally


def concatenate(parts: Sequence[Documents]) -> Documents:
    sizes = np.array([part.tokens.size for part in parts], np.int64)
    offsets = np.cumsum(sizes) - sizes
    flagged = any(part.targets is not None for part in parts)
    flags = [np.ones(part.tokens.size, bool) if part.targets is None else part.targets for part in parts]
    return Documents(
        tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
        targets=np.concatenate([np.zeros(0, bool), *flags]) if flagged else None,
        starts=np.concatenate([np.zeros(0, np.int64), *(p.starts + o for p, o in zip(parts, offsets, strict=True))]),
        lengths=np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]),
    )


def _documents_of(chunk: Chunk, form: Form) -> tuple[Documents, Tally]:
    tally = Tally()
    documents: list[Encoded] = []
    waiting: list[list[Part]] = []
    for at, record in read_chunk(chunk, form.columns):
        try:
            fields = readable(record)
            waiting.append(parts_of(fields, form.columns, form.tokenizer.chat, form.everything))
            tally.conversations += is_conversation(fields, form.columns)
        except UnusableError as error:
            tally.add(Tally(num_bad=1, bad=[BadRecord(chunk.file, at, str(error))]))
        if len(waiting) == RECORDS_PER_CALL:
            documents += _encoded(waiting, form.tokenizer, tally)
            waiting = []
    documents += _encoded(waiting, form.tokenizer, tally)
    return Documents.join([ids for ids, _ in documents], [targets for _, targets in documents]), tally


def _encoded(records: list[list[Part]], tokenizer: Tokenizer, tally: Tally) -> list[Encoded]:
    """The records that are documents: their tokens with the ends in place. The others are counted."""
    encoded = iter(tokenizer.encode([part for parts in records for part in parts]))
    end = np.array([tokenizer.eos_id], np.int32)
    documents: list[Encoded] = []
    for parts in records:
        pieces: list[Encoded] = []
        for part in parts:
            pieces.append(next(encoded))
            if part.end is not None:
                pieces.append((end, None if part.end else np.zeros(1, bool)))
        ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in pieces)])
        targets = None
        if any(some is not None for _, some in pieces):
            targets = np.concatenate([np.ones(ids.size, bool) if some is None else some for ids, some in pieces])
        if all(not part.text for part in parts):
            tally.empty += 1
        elif ids.size < 2 or (targets is not None and not targets[1:].any()):
            tally.without_target += 1
        else:
            documents.append((ids, targets))
    return documents
