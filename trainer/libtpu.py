"""Flags of libtpu, the TPU's compiler and runtime. Free of JAX: they have to be set before it is loaded.

libtpu reads them from the environment, once, and ends the process where it doesn't know one.
"""

import re
from collections.abc import Mapping

from trainer.errors import ConfigError

VARIABLE = "LIBTPU_INIT_ARGS"

_FLAG = re.compile(r"--(xla|megascale)_\w+(=\S+)?")
_REFUSAL = re.compile(r"ERROR: ((?:Unknown command line flag|Illegal value|Missing the value).*)")


def init_args(given: str, environ: Mapping[str, str]) -> str:
    """The flags of a run: `given`, the config's `libtpu_init_args`, or where that is empty the environment's.

    Raises ConfigError where both have some and they differ, so that a dry run and its run can't differ unnoticed.
    """
    inherited = environ[VARIABLE] if VARIABLE in environ else ""
    check_flags(inherited, f"the environment's {VARIABLE}={inherited!r}")
    if given and inherited and set(given.split()) != set(inherited.split()):
        raise ConfigError(
            f"libtpu_init_args={given!r} and the environment's {VARIABLE}={inherited!r} differ; leave one of them empty"
        )
    return given or inherited


def check_flags(flags: str, where: str) -> None:
    """Raises ConfigError for anything that does not look like a flag of libtpu's; `where` names the place."""
    for flag in flags.split():
        if not _FLAG.fullmatch(flag):
            raise ConfigError(
                f"{where}: {flag!r} is no flag of libtpu; they are written --xla_tpu_NAME=VALUE, with spaces between"
            )


def refused_flag(text: str) -> str | None:
    """What libtpu says of a flag that it ended the process for, in what the process wrote; None where it says none."""
    found = _REFUSAL.search(text)
    return found[1] if found else None
