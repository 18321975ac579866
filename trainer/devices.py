"""The devices of a run: exactly those that `hardware` names, never another kind in their place."""

import os
from typing import Any

from trainer.config import Config
from trainer.errors import ConfigError

# Set by `launch local`, and by hand; TPU pods and GKE tell JAX by themselves.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "TRAINER_COORDINATOR", "TRAINER_NUM_PROCESSES", "TRAINER_PROCESS_ID"


PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


def before_jax(hardware: str) -> None:
    """What JAX reads when it is imported."""
    os.environ["JAX_PLATFORMS"] = PLATFORMS[hardware]
    if hardware != "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # where libtpu is installed, it looks for a TPU even so


def find_devices(config: Config) -> list[Any]:
    """Start JAX on the config's hardware and return the devices of all processes.

    Has to run before anything else touches JAX's devices. Raises ConfigError where the hardware is not there.
    """
    import jax

    jax.config.update("jax_platforms", PLATFORMS[config.hardware])
    if config.hardware == "cpu":
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices // _num_processes())
    _join_processes()
    try:
        return jax.devices()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"hardware={config.hardware}, and JAX finds no such device here ({reason}); "
            "set hardware=cpu for a run on this machine's CPU"
        ) from None


def _num_processes() -> int:
    return int(os.environ[NUM_PROCESSES]) if NUM_PROCESSES in os.environ else 1


def _join_processes() -> None:
    """Join the other processes of the run: those the launcher names, or the other hosts of a TPU slice."""
    import jax

    if COORDINATOR in os.environ:
        jax.distributed.initialize(os.environ[COORDINATOR], _num_processes(), int(os.environ[PROCESS_ID]))
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()
