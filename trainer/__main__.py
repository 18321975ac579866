"""The command line: `python -m trainer COMMAND ...`. Nothing here imports JAX before a config is known to be right."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config import Resolved, describe, load
from trainer.config_values import nearest
from trainer.devices import before_jax
from trainer.errors import ConfigError, RunError
from trainer.validate import validate, validate_run

TERMINATION_LOG = "/dev/termination-log"  # where Kubernetes looks for a container's last word
HELP = ("-h", "--help")


@dataclass(frozen=True)
class Command:
    """One of the things that can be done."""

    run: Callable[..., int]  # (*needed, rest of the arguments) -> exit code
    needed: tuple[str, ...]  # arguments that have to be there, first
    rest: str  # what else can follow, as help shows it
    summary: str
    examples: tuple[str, ...]

    def usage(self, name: str) -> str:
        return f"python -m trainer {name} {' '.join(self.needed)} {self.rest}"


def train(path: str, overrides: Sequence[str]) -> int:
    config = load(path, overrides).config
    validate(config)
    validate_run(config)
    before_jax(config.hardware, config.libtpu_init_args)
    from trainer.run_folder import open_run
    from trainer.signals import StopSignal

    folder = open_run(config)
    with StopSignal() as stop:
        from trainer.loop import train

        return train(config, folder, stop)


def evaluate(path: str, overrides: Sequence[str]) -> int:
    config = load(path, overrides).config
    validate(config)
    validate_run(config)
    before_jax(config.hardware, config.libtpu_init_args)
    from trainer.evaluate import evaluate_run
    from trainer.run_folder import existing_run

    return evaluate_run(config, existing_run(config), write)


def data(path: str, overrides: Sequence[str]) -> int:
    config = load(path, overrides).config
    validate(config)
    before_jax("cpu")  # imported by Grain: no device is touched
    from trainer.data.command import show

    return show(config, write)


def compile(path: str, arguments: Sequence[str]) -> int:
    vs = None
    rest = list(arguments)
    if "--vs" in rest:
        at = rest.index("--vs")
        if at + 1 == len(rest):
            raise ConfigError('--vs needs what to change in the second variant, as in --vs "moe_permute=repeat"')
        vs = rest.pop(at + 1)
        del rest[at]
    from trainer.dryrun.command import run

    return run(path, rest, vs)


def config(path: str, overrides: Sequence[str]) -> int:
    resolved = load(path, overrides)
    validate(resolved.config)
    write(describe(resolved))
    write(f"# {parameters(resolved)}")
    return 0


def parameters(resolved: Resolved) -> str:
    before_jax("cpu")  # imported for the shapes alone: no device is touched
    from trainer.models.deepseek_v4 import DeepSeekV4, active_params
    from trainer.params import count

    model = resolved.config.model
    total = count(DeepSeekV4.spec(model))
    active = active_params(model, total)
    return f"{short(total)} parameters in all ({total:,}), {short(active)} active per token"


def short(number: int) -> str:
    """284.33B, 992.0K."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{name}"
    return f"{number / 1000:.1f}K"


def verify(folder: str, golden: str, overrides: Sequence[str]) -> int:
    before_jax("cpu")
    from trainer.verify import verify

    return verify(folder, golden, overrides, write)


def convert(form: str, arguments: Sequence[str]) -> int:
    before_jax("cpu")  # imported for the shapes alone
    from trainer.convert.command import convert

    return convert(form, arguments, write)


OVERRIDES = "[key=value ...]"

COMMANDS = {
    "train": Command(
        train,
        ("CONFIG.yml",),
        OVERRIDES,
        "Train, or go on from the run's last checkpoint.",
        (
            "configs/cpu_smoke.yml",
            "configs/cpu_smoke.yml num_cpu_devices=8 ici_expert_parallelism=4 ici_tensor_parallelism=2",
        ),
    ),
    "eval": Command(
        evaluate,
        ("CONFIG.yml",),
        OVERRIDES,
        "Loss and perplexity on held-out data, of the run's newest checkpoint.",
        ("configs/cpu_smoke.yml eval_dataset_path=data/python_reference.jsonl",),
    ),
    "data": Command(
        data,
        ("CONFIG.yml",),
        OVERRIDES,
        "Show what a run would be fed: its first rows with documents and targets marked, token counts, packing, speed.",
        ("configs/cpu_smoke.yml", "configs/cpu_smoke.yml dataset_path=chats.jsonl train_data_columns=messages"),
    ),
    "compile": Command(
        compile,
        ("CONFIG.yml",),
        '[key=value ...] [report=FILE.json] [--vs "key=value ..."]',
        "Compile the step for devices that are not here, and say what each of them would hold.",
        (
            "configs/cpu_smoke.yml compile_topology=cpu",
            'configs/v6e128_flash_lora_seq16384.yml report=report.json --vs "moe_permute=repeat"',
        ),
    ),
    "config": Command(
        config,
        ("CONFIG.yml",),
        OVERRIDES,
        "Print the resolved config, each value with where it comes from, and the model's size.",
        ("configs/cpu_smoke.yml steps=10", "configs/models/deepseek_v4_flash.yml"),
    ),
    "verify": Command(
        verify,
        ("FOLDER", "GOLDEN.npz"),
        OVERRIDES,
        "Compare the model of a Hugging Face folder with golden numbers of an independent implementation.",
        ("tests/data/deepseek_v4_tiny tests/data/deepseek_v4_tiny/golden.npz",),
    ),
    "convert": Command(
        convert,
        ("from-hf|to-hf|lora-to-peft|merge",),
        "SOURCE ... DEST",
        "Weights from and to Hugging Face folders; adapters to PEFT, or folded into their base.",
        (
            "from-hf /data/DeepSeek-V4-Flash /data/flash-bf16",
            "lora-to-peft runs/my_run my_adapter",
            "merge /data/DeepSeek-V4-Flash runs/my_run /data/flash-tuned",
        ),
    ),
}

EXIT_CODES = """exit codes:
  0   done
  1   failed; for verify: beyond the tolerance
  2   the config or the input is wrong
  3   compile: the step does not fit
  75  stopped by SIGTERM or SIGINT, its checkpoint saved: the same command goes on
"""


def help_text(names: Sequence[str]) -> str:
    """Of the commands named."""
    lines = ["usage:", *(f"  {COMMANDS[name].usage(name)}\n      {COMMANDS[name].summary}" for name in names)]
    lines += ["", "examples:"]
    lines += [f"  python -m trainer {name} {example}" for name in names for example in COMMANDS[name].examples]
    return "\n".join([*lines, "", EXIT_CODES.rstrip()])


def dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in HELP:
        write(help_text(list(COMMANDS)))
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        near = nearest(arguments[0], COMMANDS) if arguments else None
        raise ConfigError(
            (f"there is no command {arguments[0]!r}" if arguments else "a command is missing")
            + (f"; did you mean {near}?" if near else f"; the commands are {', '.join(COMMANDS)}")
            + " (python -m trainer --help shows more)"
        )
    name, rest = arguments[0], list(arguments[1:])
    command = COMMANDS[name]
    if any(argument in HELP for argument in rest):
        write(help_text([name]))
        return 0
    needed = rest[: len(command.needed)]
    missing = command.needed[len(needed) :]
    if missing:
        raise ConfigError(f"{name} needs {' '.join(missing)}; usage: {command.usage(name)}")
    return command.run(*needed, rest[len(needed) :])


def write(text: str) -> None:
    sys.stdout.write(text + "\n")


def fail(message: str, code: int) -> int:
    """One message on stderr, and where Kubernetes shows it."""
    sys.stderr.write(f"error: {message}\n")
    if os.path.exists(TERMINATION_LOG) and os.access(TERMINATION_LOG, os.W_OK):
        with open(TERMINATION_LOG, "w", encoding="utf-8") as log:
            log.write(message)
    return code


def main(arguments: Sequence[str]) -> int:
    try:
        return dispatch(arguments)
    except ConfigError as error:
        return fail(str(error), 2)
    except RunError as error:
        return fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does; Python would complain at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
