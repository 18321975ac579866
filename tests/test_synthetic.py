"""Made-up rows."""

import numpy as np

from trainer.data.synthetic import SyntheticRows


def test_synthetic_rows_depend_on_seed_and_number_alone():
    rows = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    again = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    far = again.row(10**12)
    for name, array in rows.row(10**12).items():
        assert array.dtype == np.int32 and array.shape == (64,)
        np.testing.assert_array_equal(array, far[name])
    others = [SyntheticRows(1000, 64, 4).row(0), rows.row(1)]
    assert all((rows.row(0)["tokens"] != other["tokens"]).sum() > 50 for other in others)


def test_a_synthetic_row_is_one_full_document():
    row = SyntheticRows(vocab_size=7, row_length=4096, seed=0).row(5)
    np.testing.assert_array_equal(row["targets"][:-1], row["tokens"][1:])
    np.testing.assert_array_equal(row["positions"], np.arange(4096))
    assert set(row["segment_ids"]) == {1}
    assert set(row["tokens"]) == set(range(7)) and 0 <= row["targets"][-1] < 7


def test_synthetic_columns_are_a_cut_of_the_row():
    rows = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    whole, part = rows.row(9), rows.row(9, slice(16, 32))
    for name in whole:
        np.testing.assert_array_equal(part[name], whole[name][16:32])


def test_synthetic_rows_keep_their_values():
    """A resumed run must find the same data under another NumPy."""
    row = SyntheticRows(vocab_size=1000, row_length=6, seed=1).row(2)
    assert row["tokens"].tolist() == [377, 50, 683, 234, 763, 984]
