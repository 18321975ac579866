"""The devices of a run: exactly those that `hardware` names, never another kind in their place.

Free of JAX until `find_devices` is called.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.libtpu import VARIABLE, init_args
from trainer.parallel import planned_slice

# Set by `launch local`, and by hand; TPU pods and GKE tell JAX by themselves.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "TRAINER_COORDINATOR", "TRAINER_NUM_PROCESSES", "TRAINER_PROCESS_ID"

# What JAX is told to start. Left to choose for GPUs: asked for CUDA without its plugin, JAX fails an assertion.
PLATFORMS = {"tpu": "tpu", "gpu": "", "cpu": "cpu"}


class Process(NamedTuple):
    """One process of a run."""

    index: int
    count: int


def before_jax(hardware: str, libtpu_init_args: str = "") -> None:
    """What JAX and libtpu read from the environment as they are loaded. The flags are the dry run's; ConfigError where
    the environment has others."""
    os.environ["JAX_PLATFORMS"] = PLATFORMS[hardware]
    if hardware != "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # where libtpu is installed, it looks for a TPU even so
        return
    flags = init_args(libtpu_init_args, os.environ)
    if flags:
        os.environ[VARIABLE] = flags


def this_process(environ: Mapping[str, str]) -> Process:
    """Which process of how many this is, as the launcher or a TPU pod's own variables say."""
    if COORDINATOR in environ:
        texts = [environ[name] if name in environ else "nothing" for name in (PROCESS_ID, NUM_PROCESSES)]
    elif "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        texts = [environ.get("TPU_WORKER_ID", "nothing"), str(len(environ["TPU_WORKER_HOSTNAMES"].split(",")))]
    else:
        return Process(0, 1)
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise ConfigError(
            f"process {texts[0]} of {texts[1]}: {PROCESS_ID} (or TPU_WORKER_ID) has to be from 0 to one less than "
            f"the number of processes, {NUM_PROCESSES} (or the names in TPU_WORKER_HOSTNAMES)"
        )
    return Process(int(texts[0]), int(texts[1]))


def find_devices(config: Config, say: Callable[[str], None]) -> list[Any]:
    """Start JAX on the config's hardware and return the devices of all processes.

    Has to run before anything else touches JAX's devices; `say` gets this process's number before that. Raises
    ConfigError where the hardware is not there.
    """
    process = this_process(os.environ)
    say(f"process {process.index}/{process.count}")
    import jax

    jax.config.update("jax_platforms", PLATFORMS[config.hardware])
    if config.hardware == "cpu":
        jax.config.update("jax_num_cpu_devices", _cpu_devices_here(config, process))
    if COORDINATOR in os.environ:
        jax.distributed.initialize(os.environ[COORDINATOR], process.count, process.index)
    elif process.count > 1:
        jax.distributed.initialize()
    try:
        found, reason = jax.devices(), ""
    except RuntimeError as error:
        reason = f" ({str(error).strip().splitlines()[0]})"
        jax.config.update("jax_platforms", "")
        found = jax.devices()
    if {device.platform for device in found} != {config.hardware}:
        raise ConfigError(
            f"hardware={config.hardware}, and JAX finds {describe(found)} here{reason}; set hardware to what is here, "
            "such as hardware=cpu"
        )
    planned = planned_slice(config)
    if planned is not None and found[0].device_kind not in planned.chip.kinds:
        raise ConfigError(
            f"compile_topology={config.compile_topology} is made of {planned.chip.name} chips, and JAX finds "
            f"{describe(found)} here; name what the run is on, or leave compile_topology empty"
        )
    return found


def _cpu_devices_here(config: Config, process: Process) -> int:
    """This process's part of the pretended devices."""
    each, rest = divmod(config.num_cpu_devices, process.count)
    if rest:
        raise ConfigError(f"num_cpu_devices={config.num_cpu_devices} don't divide into {process.count} processes")
    return each


def describe(devices: list[Any]) -> str:
    """Number, platform and kind, as in `8 cpu (cpu)`."""
    kinds = Counter(f"{device.platform} ({device.device_kind})" for device in devices)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())
