"""The training step: one function for training, for evaluation of memory and for tests.

`step(state, frozen, batch)`: only `state` is differentiated, optimised, donated and saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trainer.config import Config
from trainer.mesh import platform
from trainer.models.attention import OUTPUT
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import Batch, DeepSeekV4, Options, Remat, decode, layer_kinds, segments
from trainer.models.lora import LoRA, at_step
from trainer.models.moe import MoEOptions, MoEStats
from trainer.ops.attend import attention_forms
from trainer.ops.cross_entropy import IGNORE, cross_entropy
from trainer.ops.permute import PERMUTE
from trainer.optimizer import as_float32, learning_rate_schedule
from trainer.params import gather_leaf, merge, pspecs, split_trainable
from trainer.sharding import AXES, Layout

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

REMAT = {
    "none": Remat(layer=lambda layer: layer, attention=lambda part: part),
    "minimal": Remat(
        layer=lambda layer: jax.checkpoint(
            layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        ),
        attention=lambda part: part,
    ),
    # Attention has the layer's largest arrays: they are made again only once the experts' backward is done with its
    # own, which the barriers of the inner checkpoint see to. Keeping its output spares a third forward of it.
    "full": Remat(
        layer=lambda layer: jax.checkpoint(
            layer, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(OUTPUT)
        ),
        attention=jax.checkpoint,
    ),
}


class TrainState(struct.PyTreeNode):
    """All that training changes."""

    step: jax.Array  # [] int32: updates done
    params: Any  # DeepSeekV4
    opt_state: Any


class Sums(struct.PyTreeNode):
    """What a microbatch adds up to over the whole mesh."""

    loss: jax.Array  # [] float32: cross-entropy summed over targets
    balance: jax.Array  # [] float32: balance loss summed over rows and layers
    load: jax.Array  # [L, E] int32: assignments per layer and expert
    dropped: jax.Array  # [L] int32: assignments over the receive buffers
    rounds: jax.Array  # [L] int32: most rounds of the expert exchange
    finite: jax.Array  # [L] bool: the layer's router scores are numbers

    def total(self) -> "Sums":
        """Of several microbatches, stacked in front of every leaf."""
        total = jax.tree.map(lambda each: jnp.sum(each, axis=0), self)
        return total.replace(rounds=jnp.max(self.rounds, axis=0), finite=jnp.all(self.finite, axis=0))


@dataclass(frozen=True)
class Program:
    """The model on a mesh: what every compiled function of a run is built from."""

    model: ModelConfig
    options: Options
    layout: Layout
    mesh: Mesh
    weight_dtype: Any
    spec: Any  # DeepSeekV4 of Param

    def on_mesh(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    @property
    def batch_spec(self) -> P:
        return self.layout.pspec("batch", "length")


def build_program(config: Config, mesh: Mesh) -> Program:
    """Turn the config's names into functions and shapes, once."""
    layout = Layout.of(config.moe_expert_axes, config.weight_axes)
    moe_options = MoEOptions(
        permute=PERMUTE[config.moe_permute],
        expert_axes=layout.expert_axes,
        ragged_exchange=platform(mesh) == "tpu",
        capacity_factor=config.moe_capacity_factor,
        rounds=config.moe_overflow == "rounds",
        frozen=config.lora_rank > 0,
        balance_loss=config.load_balance_loss_weight > 0,
    )
    lora = lora_of(config)
    options = Options(
        dtype=DTYPES[config.dtype],
        layout=layout,
        attend=attention_forms(interpret=platform(mesh) != "tpu")[config.attention],
        moe=moe_options,
        remat=REMAT[config.remat_policy],
        loss_chunk_tokens=config.loss_chunk_tokens,
        lora=lora,
    )
    spec = DeepSeekV4.spec(config.model, lora)
    return Program(config.model, options, layout, mesh, DTYPES[config.weight_dtype], spec)


def lora_of(config: Config) -> LoRA | None:
    if not config.lora_rank:
        return None
    return LoRA(
        rank=config.lora_rank,
        scale=config.lora_alpha / config.lora_rank,
        dropout=config.lora_dropout,
        targets=tuple(config.lora_targets),
        dtype=DTYPES[config.lora_weight_dtype],
    )


def stacked_stats(stats: list[MoEStats]) -> MoEStats:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


def forward_sums(program: Program) -> Callable[[DeepSeekV4, Batch], Sums]:
    """The loss of a microbatch on the mesh: (params, batch [B, S]) -> Sums, equal on all devices."""
    o = program.options

    def local(params: DeepSeekV4, batch: Batch) -> Sums:
        h, stats, _ = decode(params, batch, program.model, o)
        with jax.named_scope("loss"):
            head = gather_leaf(program.spec.head, params.head, program.weight_dtype, o.layout)
            h, targets = h.reshape(-1, h.shape[-1]), batch.targets.reshape(-1)
            loss = cross_entropy(h, head, targets, o.loss_chunk_tokens)
        s = stacked_stats(stats)
        bad = lax.psum((~s.finite).astype(jnp.int32), AXES)
        loss, balance, load, dropped = lax.psum((loss, jnp.sum(s.balance), s.load, s.dropped), AXES)
        return Sums(loss, balance, load, dropped, lax.pmax(s.rounds, AXES), bad == 0)

    return program.on_mesh(local, (pspecs(program.spec, program.layout), program.batch_spec), P())


def make_step(program: Program, config: Config, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """`step(state, frozen, batch) -> (state, metrics)`; batch leaves are [A, B, S], A microbatches one after another.

    The loss is the mean over all targets of the whole batch, so it does not depend on how rows are cut into
    microbatches or spread over devices; the balance loss is the mean over all rows. With LoRA `frozen` is the base
    model, and `state.params` the adapters; without it `frozen` is None.
    """
    forward = forward_sums(program)

    def step(state: TrainState, frozen: DeepSeekV4 | None, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        params = state.params if frozen is None else merge(state.params, frozen)
        trainable, fixed = split_trainable(program.spec, params)
        num_targets = jnp.maximum(jnp.sum(batch.targets != IGNORE), 1)
        num_rows = batch.targets.shape[0] * batch.targets.shape[1]

        def loss_of(trainable: DeepSeekV4, micro: Batch, number: jax.Array) -> tuple[jax.Array, Sums]:
            sums = forward(at_step(merge(trainable, fixed), number), micro)
            balance = config.load_balance_loss_weight * sums.balance / num_rows
            return sums.loss / num_targets + balance, sums

        grads, sums = accumulate(jax.grad(loss_of, has_aux=True), trainable, batch, state.step)
        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, as_float32(trainable))
            params: Any = optax.apply_updates(trainable, updates)
            if frozen is None:
                params = merge(params, fixed)
                params = balance_experts(params, sums.load, config.routed_bias_update_rate, program.model)
        metrics = step_metrics(sums, num_targets, num_rows)
        metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate_schedule(config)(state.step)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def accumulate(
    grad: Callable[..., tuple[Any, Sums]], trainable: Any, batch: Batch, step: jax.Array
) -> tuple[Any, Sums]:
    """Gradients (float32) and sums added up over the microbatches of a batch [A, B, S], which are numbered through
    all steps."""
    num_micro = batch.tokens.shape[0]
    numbers = step * num_micro + jnp.arange(num_micro)
    if num_micro == 1:
        grads, sums = grad(trainable, jax.tree.map(lambda x: x[0], batch), numbers[0])
        return as_float32(grads), sums

    def add(total: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, Sums]:
        grads, sums = grad(trainable, *one)
        return jax.tree.map(jnp.add, total, as_float32(grads)), sums

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trainable)
    grads, sums = lax.scan(add, zeros, (batch, numbers))
    return grads, sums.total()


def balance_experts(params: DeepSeekV4, load: jax.Array, rate: float, c: ModelConfig) -> DeepSeekV4:
    """Move each router's bias by `rate` against its load [L, E] over the whole batch (SPEC section 11)."""
    moves = rate * jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
    blocks, first = [], 0
    for kind, block in zip(segments(layer_kinds(c)), params.segments, strict=True):
        num = len(kind.block)
        of_segment = moves[first : first + num * kind.repeats].reshape(kind.repeats, num, -1)
        blocks.append(tuple(move_bias(layer, of_segment[:, j]) for j, layer in enumerate(block)))
        first += num * kind.repeats
    return params.replace(segments=tuple(blocks))


def move_bias(layer: Any, moves: jax.Array) -> Any:
    """Hash layers have no bias and stay as they are."""
    routed = layer.moe.routed
    if routed.bias is None:
        return layer
    return layer.replace(moe=layer.moe.replace(routed=routed.replace(bias=routed.bias + moves)))


def step_metrics(sums: Sums, num_targets: jax.Array, num_rows: int) -> dict[str, jax.Array]:
    """Scalars, and per-layer vectors [L] under names ending in `_by_layer`."""
    load = sums.load.astype(jnp.float32)
    max_over_mean = jnp.max(load, axis=1) / jnp.maximum(jnp.mean(load, axis=1), 1e-9)
    return {
        "loss": sums.loss / num_targets,
        "num_targets": num_targets,
        "moe_balance_loss": sums.balance / num_rows,
        "moe_dropped_tokens": jnp.sum(sums.dropped),
        "moe_dropped_tokens_by_layer": sums.dropped,
        "moe_exchange_rounds": jnp.max(sums.rounds),
        "moe_load_max_over_mean": jnp.max(max_over_mean),
        "moe_load_max_over_mean_by_layer": max_over_mean,
        "router_finite_by_layer": sums.finite,
    }
