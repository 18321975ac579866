"""Compare the model with golden numbers of an independent implementation: forward, loss and gradients, in float32."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from trainer.config import Config, from_values
from trainer.devices import find_devices
from trainer.errors import ConfigError
from trainer.hf.config import model_values
from trainer.hf.load import load
from trainer.hf.names import leaves, split_experts
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import Batch, DeepSeekV4, decode, logits
from trainer.ops.cross_entropy import IGNORE
from trainer.parallel import resolve_degrees
from trainer.params import merge, named_leaves, pspecs, split_trainable
from trainer.step import Program, build_program, forward_sums
from trainer.validate import validate

TOLERANCE = 1e-4  # of an array's largest magnitude
SHOWN = 10  # differences in the table


def read_golden(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            golden = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path}: not a golden .npz file: {error}") from None
    ids = golden.get("input_ids")
    if ids is None or ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{path}: has no input_ids of shape [batch, length]")
    return golden


def verify_config(folder: Path, ids: np.ndarray, overrides: Sequence[str]) -> Config:
    """A float32 run on the folder's model whose batch holds `ids`, padded to what the mesh needs."""
    values: dict[str, Any] = {
        "model": model_values(folder),
        "run_name": "verify",
        "hardware": "cpu",
        "dtype": "float32",
        "weight_dtype": "float32",
        "remat_policy": "none",
        "load_balance_loss_weight": 0.0,
    }
    config = from_values(values, overrides, str(folder)).config
    degrees = resolve_degrees(config, config.num_cpu_devices)
    rows = -(-ids.shape[0] // degrees.batch_shards) * degrees.batch_shards
    multiple = degrees.tensor * config.model.compress_multiple
    values["max_target_length"] = -(-ids.shape[1] // multiple) * multiple
    values["per_device_batch_size"] = rows / degrees.product
    resolved = from_values(values, overrides, str(folder))
    if ids.max() >= config.model.vocab_size or ids.min() < 0:
        raise ConfigError(
            f"input_ids run from {ids.min()} to {ids.max()}; the vocabulary has {config.model.vocab_size}"
        )
    return resolved.config


def golden_batch(ids: np.ndarray, rows: int, length: int, program: Program) -> Batch:
    """One document per row; padding rows and columns are segment 0."""
    pad = ((0, rows - ids.shape[0]), (0, length - ids.shape[1]))
    real = np.pad(np.ones_like(ids, np.int32), pad)
    targets = np.pad(np.roll(ids, -1, axis=1), pad)
    targets[:, ids.shape[1] - 1] = IGNORE
    targets = np.where(real, targets, IGNORE)
    host = Batch(
        tokens=np.pad(ids, pad).astype(np.int32),
        targets=targets.astype(np.int32),
        segment_ids=real,
        positions=np.arange(length, dtype=np.int32) * real,
    )
    return jax.device_put(host, NamedSharding(program.mesh, program.batch_spec))


def activations(program: Program, params: DeepSeekV4, batch: Batch) -> dict[str, jax.Array]:
    """Logits, final hidden and every layer's streams, over the whole batch."""

    def local(params: DeepSeekV4, batch: Batch) -> dict[str, jax.Array]:
        h, _, streams = decode(params, batch, program.model, program.options, keep_streams=True)
        out = {f"L{i}.streams_out": s for i, s in enumerate(streams)}
        return out | {"last_hidden": h, "logits": logits(program.spec, params, h, program.options)}

    c, lay = program.model, program.layout
    specs = {f"L{i}.streams_out": lay.pspec("batch", "length") for i in range(c.num_layers)}
    specs |= {"last_hidden": lay.pspec("batch", "length"), "logits": lay.pspec("batch", None, "vocab")}
    run = program.on_mesh(local, (pspecs(program.spec, lay), program.batch_spec), specs)
    return jax.jit(run)(params, batch)


def loss_and_gradients(program: Program, params: DeepSeekV4, batch: Batch) -> tuple[jax.Array, DeepSeekV4]:
    """Mean cross-entropy and its gradient, with None where nothing trains."""
    trainable, fixed = split_trainable(program.spec, params)
    forward = forward_sums(program)

    def loss(trainable: DeepSeekV4) -> jax.Array:
        return forward(merge(trainable, fixed), batch).loss / jnp.sum(batch.targets != IGNORE)

    return jax.jit(jax.value_and_grad(loss))(trainable)


def golden_gradients(golden: dict[str, np.ndarray], program: Program) -> Iterator[tuple[str, tuple, np.ndarray]]:
    """(our path, index of the layer in it, the golden gradient in our shape) for every parameter golden knows."""
    tensors: dict[str, np.ndarray] = {}
    for name, array in golden.items():
        if name.startswith("grad/"):
            tensors |= split_experts(name.removeprefix("grad/"), array)
    for leaf in leaves(program.model, program.spec):
        for at, layer in enumerate(leaf.layers or (None,)):
            names = leaf.tensors(program.model, layer)
            if not tensors.keys() >= set(names):
                continue
            made = [leaf.source.conversion.to_part(program.model, tensors[name]) for name in names]
            yield leaf.path, () if layer is None else (at,), np.stack(made) if leaf.source.per_expert else made[0]


def difference(ours: np.ndarray, golden: np.ndarray) -> float:
    """Largest difference, relative to the golden array's scale; infinite for another shape or a non-number."""
    if ours.shape != golden.shape:
        return float("inf")
    error = float(np.max(np.abs(ours.astype(np.float64) - golden), initial=0.0))
    scale = float(np.max(np.abs(golden), initial=0.0))
    relative = error / scale if scale else error
    return relative if np.isfinite(relative) else float("inf")


def closeness(ours: np.ndarray, golden: np.ndarray) -> dict[str, float]:
    """Of logits [B, S, V]: mean KL divergence of our next-token distribution from the golden one, in nats, and the
    part of tokens where both have the same most likely next one."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))

    log_p, log_q = log_softmax(golden), log_softmax(ours)
    kl = np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))
    return {"kl": float(kl), "top1": float(np.mean(ours.argmax(axis=-1) == golden.argmax(axis=-1)))}


def differences(
    config: Config, folder: Path, golden: dict[str, np.ndarray]
) -> tuple[dict[str, float], dict[str, float]]:
    """Every golden array this model can answer -> how far it is off; and the `closeness` of logits, if it has some."""
    degrees = resolve_degrees(config, config.num_cpu_devices)
    mesh = make_mesh(degrees)
    program = build_program(config, mesh)
    params = load(str(folder), program)
    ids = golden["input_ids"]
    rows = round(config.per_device_batch_size * degrees.product)
    batch = golden_batch(ids, rows, config.max_target_length, program)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        ours = activations(program, params, batch)
        loss, gradients = loss_and_gradients(program, params, batch)
    result = {
        name: difference(np.asarray(array)[: ids.shape[0], : ids.shape[1]], golden[name])
        for name, array in ours.items()
        if name in golden
    }
    if "loss" in golden:
        result["loss"] = difference(np.asarray(loss), golden["loss"])
    close: dict[str, float] = {}
    if "logits" in result and np.isfinite(result["logits"]):
        close = closeness(np.asarray(ours["logits"])[: ids.shape[0], : ids.shape[1]], golden["logits"])
    leaves = dict(named_leaves(gradients))
    for path, index, reference in golden_gradients(golden, program):
        layer = f"[{index[0]}]" if index else ""
        result[f"grad/{path}{layer}"] = difference(np.asarray(leaves[path])[index], reference)
    return result, close


def verify(folder: str, golden_path: str, overrides: Sequence[str], write: Callable[[str], None]) -> int:
    """The whole command: a table of the largest differences, and one JSON line last. Returns the exit code."""
    golden = read_golden(Path(golden_path))
    config = verify_config(Path(folder), golden["input_ids"], overrides)
    validate(config)
    find_devices(config, say=lambda _: None)
    max_rel, close = differences(config, Path(folder), golden)
    if not max_rel:
        raise ConfigError(f"{golden_path}: holds nothing to compare: no logits, loss, streams or grad/*")
    worst = sorted(max_rel, key=lambda name: -max_rel[name])
    write(f"{len(max_rel)} arrays compared; the largest differences, relative to each array's scale:")
    for name in worst[:SHOWN]:
        write(f"  {max_rel[name]:9.2e}  {name}")
    if close:
        write(f"logits: KL divergence {close['kl']:.3g} nats a token, same most likely token in {close['top1']:.2%}")
    ok = max_rel[worst[0]] <= TOLERANCE
    write(f"{'within' if ok else 'beyond'} the tolerance of {TOLERANCE:g}")
    finite = {name: value if np.isfinite(value) else None for name, value in max_rel.items()}
    write(json.dumps({"ok": ok, "max_rel": finite} | close))
    return 0 if ok else 1
