"""libtpu's flags: what is taken for one, whose hold, and what libtpu says of those it refuses."""

from pathlib import Path

import pytest

from trainer.config import load
from trainer.errors import ConfigError
from trainer.libtpu import VARIABLE, check_flags, init_args, refused_flag
from trainer.validate import validate

VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304"
TINY = Path(__file__).parent.parent / "configs/models/deepseek_v4_tiny.yml"


def test_the_configs_flags_or_the_environments():
    assert init_args("", {}) == ""
    assert init_args(VMEM, {}) == init_args("", {VARIABLE: VMEM}) == init_args(VMEM, {VARIABLE: f" {VMEM} "}) == VMEM


def test_both_have_to_agree():
    with pytest.raises(ConfigError, match=f"'--xla_a=1' and the environment's {VARIABLE}='--xla_a=2' differ"):
        init_args("--xla_a=1", {VARIABLE: "--xla_a=2"})


@pytest.mark.parametrize("flags", ["", VMEM, f"{VMEM}  --xla_enable_async_all_gather", "--megascale_debug_port=8081"])
def test_flags(flags):
    check_flags(flags, "here")


@pytest.mark.parametrize(
    "flags", ["xla_tpu_x=1", "-xla_tpu_x=1", "--xla_tpu_x 1", "--tpu_x=1", f"{VMEM} y", "--xla_x=", "$(x)"]
)
def test_what_is_no_flag(flags):
    with pytest.raises(ConfigError, match="^here: .* is no flag of libtpu"):
        check_flags(flags, "here")


def test_the_config_is_checked():
    with pytest.raises(ConfigError, match="^libtpu_init_args='vmem': 'vmem' is no flag"):
        validate(load(TINY, ["libtpu_init_args=vmem"]).config)
    with pytest.raises(ConfigError, match=f"^the environment's {VARIABLE}='vmem'"):
        init_args("", {VARIABLE: "vmem"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("WARNING: x\nERROR: Unknown command line flag 'xla_tpu_x'\n", "Unknown command line flag 'xla_tpu_x'"),
        (
            "ERROR: Unknown command line flag 'foo'. Did you mean: gid, uid, v ?\n",
            "Unknown command line flag 'foo'. Did you mean: gid, uid, v ?",
        ),
        (
            "ERROR: Illegal value 'abc' specified for flag 'xla_tpu_x'\n",
            "Illegal value 'abc' specified for flag 'xla_tpu_x'",
        ),
        (
            "ERROR: Missing the value for the flag 'xla_tpu_x'\nERROR: Illegal value '' specified\n",
            "Missing the value for the flag 'xla_tpu_x'",
        ),
        ("ERROR: something else\n", None),
    ],
)
def test_what_libtpu_refuses(text, said):
    assert refused_flag(text) == said
