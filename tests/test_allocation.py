"""Temporaries from the compiler's buffer assignment."""

from trainer.dryrun.allocation import temporary_bytes

ACCOUNT = """\
allocation 281: size 1024, parameter 10, shape |f32[2,32]| at ShapeIndex {}, maybe-live-out:
 value: <1 p> (size=1024,offset=0): f32[2,32]
allocation 2987: size 260, color 2, preallocated-temp:
allocation 2988: size 136987392, preallocated-temp:
 value: <2 allocation 3: size 7, preallocated-temp: (size=4,offset=0): f32[1]
allocation 2989: size 8, preallocated-temp:
allocation 2990: size 26452480, color 1, preallocated-temp:
"""


def account(folder, module):
    path = folder / f"module_0000.{module}.cl_933746096.after_optimizations-buffer-assignment.txt"
    path.write_text(ACCOUNT)
    path.with_name(path.name.replace("assignment", "assignment-values")).write_text("allocation 1: size 5")


def test_temporaries_in_hbm_are_counted_once(tmp_path):
    account(tmp_path, "jit_step")
    account(tmp_path, "jit_convert")
    assert temporary_bytes(tmp_path) == 136987392 + 8


def test_without_an_account_nothing_is_claimed(tmp_path):
    account(tmp_path, "jit_convert")
    assert temporary_bytes(tmp_path) is None
    assert temporary_bytes(tmp_path / "none") is None
