"""A run's adapter as a PEFT folder, or folded into its base."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from etils import epath

from trainer.convert.to_hf import Tensor, of_model_folder, run_config, write_folder
from trainer.errors import ConfigError, RunError
from trainer.hf.arrays import newest_state, open_array
from trainer.hf.peft import CONFIG, Adapter, of_arrays, read_adapter, save


def of_run(folder: epath.Path) -> tuple[Adapter, str, float]:
    """(adapter of the newest checkpoint, the base it was trained on, its dropout)."""
    config = run_config(folder)
    state = newest_state(folder)
    adapter = of_arrays(config, lambda path: open_array(state, f"params/{path}").read().result())
    return adapter, config.load_parameters_path, config.lora_dropout


def lora_to_peft(source: str, dest: str, write: Callable[[str], None]) -> int:
    """The whole command. Raises ConfigError where the run has no such adapter, RunError where writing fails."""
    target = epath.Path(dest)
    if (target / CONFIG).exists():
        raise ConfigError(f"{target}: holds an adapter already; remove it, or name another folder")
    adapter, base, dropout = of_run(epath.Path(source))
    try:
        save(adapter, target, base, dropout)
    except OSError as error:
        raise RunError(f"{target}: writing failed: {error}") from error
    write(f"{target}: rank {adapter.rank}, scale {adapter.scale:g}, {len(adapter.matrices)} modules")
    if any(path == "attention/wo_a" for _, path in adapter.matrices):
        # PEFT adds lora_B(lora_A(x)) to the layer's output, and a grouped layer's has one group's width, not all's.
        write(
            "o_a_proj is a grouped layer, which PEFT runs with an adapter only once it is folded in: call "
            "merge_and_unload() after loading, or leave attention/wo_a out of lora_targets"
        )
    return 0


def merge(base: str, adapter_from: str, dest: str, write: Callable[[str], None]) -> int:
    """The whole command: a model folder and an adapter, of a run or of PEFT -> a Hugging Face folder in the base's
    types, bfloat16 for what was quantised. Sums are taken in float32 and rounded once."""
    source = epath.Path(adapter_from)
    adapter = read_adapter(source) if (source / CONFIG).exists() else of_run(source)[0]
    tensors, folder = of_model_folder(epath.Path(base))
    unused = adapter.matrices.keys() - {(tensor.layer, tensor.path) for tensor in tensors}
    if unused:
        layer, path = min(unused)
        raise ConfigError(f"{source}: adapts layer {layer} {path}, which {folder} does not have")
    write_folder([folded(tensor, adapter) for tensor in tensors], folder, epath.Path(dest), write)
    return 0


def folded(tensor: Tensor, adapter: Adapter) -> Tensor:
    """With the adapter's product added, if it has one for this tensor. Raises ConfigError for another shape."""
    if tensor.layer is None or (tensor.layer, tensor.path) not in adapter.matrices:
        return tensor
    layer, path = tensor.layer, tensor.path
    a, b = adapter.matrices[layer, path]
    if (b.shape[-2], a.shape[-1]) != tensor.shape:
        raise ConfigError(f"layer {layer} {path}: the adapter is for {[b.shape[-2], a.shape[-1]]}, not {tensor.shape}")

    def read() -> np.ndarray:
        product = adapter.product(layer, path)
        return tensor.read().astype(np.float32) + (product if tensor.expert is None else product[tensor.expert])

    return replace(tensor, read=read)
