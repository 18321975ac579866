"""`python -m trainer convert FORM SOURCE ... DEST`."""

from collections.abc import Callable, Sequence

from trainer.config_values import nearest
from trainer.convert.adapter import lora_to_peft, merge
from trainer.convert.from_hf import from_hf
from trainer.convert.to_hf import to_hf
from trainer.errors import ConfigError

ARGUMENTS = {
    "from-hf": ("SOURCE", "DEST"),
    "to-hf": ("SOURCE", "DEST"),
    "lora-to-peft": ("RUN", "DEST"),
    "merge": ("BASE", "ADAPTER", "DEST"),
}


def convert(form: str, arguments: Sequence[str], write: Callable[[str], None]) -> int:
    """Raises ConfigError for another form, or for arguments that are not its."""
    if form not in ARGUMENTS:
        near = nearest(form, ARGUMENTS)
        hint = f"did you mean {near}?" if near else f"the forms are {', '.join(ARGUMENTS)}"
        raise ConfigError(f"convert has no form {form!r}; {hint}")
    needed = ARGUMENTS[form]
    given, rest = list(arguments[: len(needed)]), list(arguments[len(needed) :])
    usage = f"usage: python -m trainer convert {form} {' '.join(needed)}"
    if len(given) < len(needed):
        raise ConfigError(f"convert {form} needs {' '.join(needed[len(given) :])}; {usage}")
    if form == "from-hf":
        return from_hf(given[0], given[1], rest, write)
    if rest:
        raise ConfigError(f"convert {form} does not take {rest[0]!r}; {usage}")
    return {"to-hf": to_hf, "lora-to-peft": lora_to_peft, "merge": merge}[form](*given, write)
