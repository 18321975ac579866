"""Memory of a run's devices and of its process. What nobody reports is None, never 0."""

from dataclasses import dataclass
from typing import Any

import psutil

from trainer.console import gib


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, and what was counted. None where nothing is known."""

    num_bytes: int | None
    source: str


@dataclass(frozen=True)
class ProgramMemory:
    """What a compiled program needs on one device, as the compiler says."""

    arguments: int
    outputs: int
    donated: int  # of the outputs, in the arguments' place
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} per device: arguments {gib(self.arguments)}, outputs {gib(self.outputs)} of which "
            f"{gib(self.donated)} take their place, temporaries {gib(self.temporaries)}, code {gib(self.code)}"
        )


def program_memory(compiled: Any) -> ProgramMemory | None:
    """Of a `jax.stages.Compiled`; None where its backend does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return ProgramMemory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        donated=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def device_memory(devices: list[Any], program: ProgramMemory | None) -> Memory:
    """The largest peak that the devices report; what the compiled step needs where they report none, as on the CPU.

    A TPU's allocator leaves out the temporaries inside a program, so they are added; a GPU's has them in its peak.
    """
    reported = [device.memory_stats() for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in reported if stats and "peak_bytes_in_use" in stats]
    if peaks and devices[0].platform != "tpu":
        return Memory(max(peaks), "peak of the device's allocator")
    if peaks and program is not None:
        return Memory(max(peaks) + program.temporaries, "peak of the device's allocator + compiled temporaries")
    return Memory(None if program is None else program.total, "compiled memory analysis")


def process_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss
