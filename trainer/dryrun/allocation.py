"""What the TPU's compiler allocates for temporaries, from its own account of where every buffer lies.

`memory_analysis().temp_size_in_bytes` of libtpu counts the gaps between buffers twice: it is the allocation plus what
fragmentation takes of it. Held against the buffer assignment that XLA writes on `--xla_dump_to` and against the limits
set by `--xla_tpu_max_hbm_size_mib`: a step that it puts at 212 MiB compiles under a limit of 172.
"""

import re
from pathlib import Path

DUMP_FLAG = "--xla_dump_to"
_ASSIGNMENT = "*.jit_step.*after_optimizations-buffer-assignment.txt"
# HBM is the memory space without a color.
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.MULTILINE)


def temporary_bytes(dump: Path) -> int | None:
    """HBM allocated for a step's temporaries, per device; None where the compiler left no account of it."""
    accounts = list(dump.glob(_ASSIGNMENT))
    if len(accounts) != 1:
        return None
    return sum(int(size) for size in _TEMPORARY.findall(accounts[0].read_text(encoding="utf-8", errors="replace")))
