"""The command line: `python -m trainer COMMAND ...`. Nothing here imports JAX before a config is known to be right."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from trainer.config import Resolved, describe, load
from trainer.devices import before_jax
from trainer.errors import ConfigError, RunError
from trainer.validate import validate, validate_run

TERMINATION_LOG = "/dev/termination-log"  # where Kubernetes looks for a container's last word

EXAMPLES = """examples:
  python -m trainer train configs/cpu_smoke.yml
  python -m trainer train configs/cpu_smoke.yml num_cpu_devices=8 ici_expert_parallelism=4 ici_tensor_parallelism=2
  python -m trainer config configs/models/deepseek_v4_flash.yml
  python -m trainer verify tests/data/deepseek_v4_tiny tests/data/deepseek_v4_tiny/golden.npz

exit codes: 0 done; 1 failed; 2 the config or input is wrong; 75 stopped by a signal, its checkpoint saved
"""


def train(arguments: argparse.Namespace) -> int:
    resolved = load(arguments.config, arguments.overrides)
    validate(resolved.config)
    validate_run(resolved.config)
    before_jax(resolved.config.hardware)
    from trainer.loop import train

    return train(resolved.config)


def config(arguments: argparse.Namespace) -> int:
    resolved = load(arguments.config, arguments.overrides)
    validate(resolved.config)
    write(describe(resolved))
    write(f"# {parameters(resolved)}")
    return 0


def parameters(resolved: Resolved) -> str:
    before_jax("cpu")
    from trainer.models.deepseek_v4 import DeepSeekV4, active_params
    from trainer.params import count

    model = resolved.config.model
    total = count(DeepSeekV4.spec(model))
    active = active_params(model, total)
    return f"{total / 1e9:.2f}B parameters in all ({total:,}), {active / 1e9:.2f}B active per token"


def verify(arguments: argparse.Namespace) -> int:
    before_jax("tpu" if "hardware=tpu" in arguments.overrides else "cpu")
    from trainer.verify import verify

    return verify(arguments.folder, arguments.golden, arguments.overrides, write)


def write(text: str) -> None:
    sys.stdout.write(text + "\n")


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m trainer", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    overrides: dict[str, Any] = {"nargs": "*", "metavar": "key=value", "help": "values that win over the file's"}

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    for name, run, text in (
        ("train", train, "Train, or go on from the run's last checkpoint."),
        ("config", config, "Print the resolved config, each value with where it comes from."),
    ):
        command = add(name, run, text)
        command.add_argument("config", metavar="CONFIG.yml")
        command.add_argument("overrides", **overrides)
    command = add("verify", verify, "Compare the model with golden numbers of an independent implementation.")
    command.add_argument("folder", metavar="FOLDER", help="Hugging Face folder: config.json and *.safetensors")
    command.add_argument("golden", metavar="GOLDEN.npz")
    command.add_argument("overrides", **overrides)
    return root


def fail(message: str, code: int) -> int:
    """One message on stderr, and where Kubernetes shows it."""
    sys.stderr.write(f"error: {message}\n")
    if os.path.exists(TERMINATION_LOG) and os.access(TERMINATION_LOG, os.W_OK):
        with open(TERMINATION_LOG, "w") as log:
            log.write(message)
    return code


def main(arguments: Sequence[str]) -> int:
    parsed = parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except ConfigError as error:
        return fail(str(error), 2)
    except RunError as error:
        return fail(str(error), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
