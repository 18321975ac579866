"""Documents laid into rows of one length. Pure NumPy.

A document of n tokens is n inputs: its tokens; and n targets: the tokens after the first, then EOS. So neither
targets nor positions ever reach into another document. The documents of an epoch are laid one after
another into rows of S; one that does not fit the rest of a row goes on in the next as a new segment, with its
targets still right at the cut. Every token is an input once per epoch, none is dropped, and only an epoch's
last row has padding.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trainer.errors import ConfigError

NO_LOSS = -100  # target where there is nothing to predict: padding


@dataclass(frozen=True)
class Documents:
    """Tokenized documents, end to end. The document at `starts[d]` has `lengths[d]` tokens, then EOS."""

    tokens: np.ndarray  # [sum(lengths) + documents] int32
    starts: np.ndarray  # [documents] int64
    lengths: np.ndarray  # [documents] int64, without EOS
    num_empty: int  # documents without a token, left out

    @classmethod
    def join(cls, documents: Iterable[np.ndarray], eos_id: int) -> "Documents":
        """From each document's ids. Raises ConfigError when no document has a token."""
        every = [np.asarray(document, np.int32) for document in documents]
        full = [document for document in every if document.size]
        if not full:
            raise ConfigError(f"dataset_path: no text to train on: {len(every)} documents, all of them empty")
        eos = np.array([eos_id], np.int32)
        lengths = np.array([document.size for document in full], np.int64)
        return cls(
            tokens=np.concatenate([part for document in full for part in (document, eos)]),
            starts=np.cumsum(lengths + 1) - (lengths + 1),
            lengths=lengths,
            num_empty=len(every) - len(full),
        )


class PackedRows:
    """The endless stream of packed rows, epoch after epoch; each epoch has its own order of the documents.

    Row g is a function of (documents, row_length, seed, shuffle, g) alone, and is found without walking
    through the rows before it: the position in the data is a number.
    """

    def __init__(self, documents: Documents, row_length: int, seed: int, shuffle: bool):
        self.row_length = row_length
        self.tokens_per_epoch = int(documents.lengths.sum())
        self.rows_per_epoch = -(-self.tokens_per_epoch // row_length)
        self._documents, self._seed, self._shuffle = documents, seed % 2**64, shuffle
        # A batch lies in one epoch or on the border of two; a border is met from both sides.
        self._laid_out = functools.lru_cache(maxsize=2)(self._lay_out)

    def row(self, number: int, columns: slice = slice(None)) -> dict[str, np.ndarray]:
        """Row `number`'s arrays, int32, for these columns.

        tokens, targets (-100 in padding), segment_ids (1, 2, ... along the row; 0 in padding) and positions
        (from 0 in each segment). Tokens and positions are 0 in padding.
        """
        epoch, row = divmod(number, self.rows_per_epoch)
        order, ends = self._laid_out(epoch)
        row_start = row * self.row_length
        line = np.arange(row_start, row_start + self.row_length)[columns]  # places on the epoch's line of tokens
        filled = line < self.tokens_per_epoch
        line = np.minimum(line, self.tokens_per_epoch - 1)
        nth = np.searchsorted(ends, line, side="right")  # which document of the order lies there
        document = order[nth]
        document_start = ends[nth] - self._documents.lengths[document]
        token = self._documents.starts[document] + (line - document_start)
        first = np.searchsorted(ends, row_start, side="right")
        arrays = {
            "tokens": np.where(filled, self._documents.tokens[token], 0),
            "targets": np.where(filled, self._documents.tokens[token + 1], NO_LOSS),
            "segment_ids": np.where(filled, nth - first + 1, 0),
            "positions": np.where(filled, line - np.maximum(document_start, row_start), 0),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def describe(self) -> str:
        places = self.rows_per_epoch * self.row_length
        padding = places - self.tokens_per_epoch
        return (
            f"text: {len(self._documents.lengths):,} documents ({self._documents.num_empty:,} empty ones skipped), "
            f"{self.tokens_per_epoch:,} tokens an epoch, 0 dropped, in {self.rows_per_epoch:,} rows of "
            f"{self.row_length:,} with {padding:,} places of padding ({padding / places:.2%})"
        )

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of documents, and where each of them ends on the epoch's line of tokens."""
        order = np.arange(len(self._documents.lengths))
        if self._shuffle:
            # Sorted raw bits of Philox: unlike Generator.permutation, the same in every NumPy.
            key = np.array([self._seed, epoch], np.uint64)
            order = np.argsort(np.random.Philox(key=key).random_raw(len(order)), kind="stable")
        return order, np.cumsum(self._documents.lengths[order])
