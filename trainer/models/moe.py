"""The mixture-of-experts sub-layer: router, permute, exchange, experts, combine, shared expert (SPEC section 8)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from trainer.models.config import ModelConfig
from trainer.models.lora import Adapted, drop, project, split_frozen
from trainer.ops.exchange import (
    Exchange,
    collect,
    dispatch,
    further_rounds,
    gather_sizes,
    plan_round,
    queue_lengths,
    rounds_needed,
)
from trainer.ops.permute import Permutation, Permute, sort_by_expert
from trainer.params import constant, distinct_ids, param
from trainer.sharding import TENSOR, gather_length, scatter_length, varying_like


@dataclass(frozen=True)
class MoEOptions:
    """How the routed experts run; chosen once, when the step is built."""

    permute: Permute
    expert_axes: tuple[str, ...]
    ragged_exchange: bool  # whether the mesh's platform has ragged_all_to_all
    capacity_factor: float  # receive buffer over the mean load; -1: no load can overflow it
    rounds: bool  # whether rows over the receive buffer go in further rounds; else they are dropped
    frozen: bool  # whether the experts' weights only train through adapters
    balance_loss: bool

    def exchange(self, num_tokens: int, c: ModelConfig) -> Exchange | None:
        """The exchange for `num_tokens` per device; None where every device holds every expert."""
        devices = lax.axis_size(self.expert_axes)
        if devices == 1:
            return None
        block = num_tokens * min(c.num_experts_per_tok, c.num_experts // devices)
        worst = devices * block
        mean = num_tokens * c.num_experts_per_tok
        capacity = worst if self.capacity_factor == -1 else min(worst, max(1, round(self.capacity_factor * mean)))
        return Exchange(self.expert_axes, self.ragged_exchange, capacity, block, worst)


class Routing(struct.PyTreeNode):
    """Where n tokens go."""

    experts: jax.Array  # [n, K] int32
    weights: jax.Array  # [n, K] float32, summing to the routed scaling factor
    scores: jax.Array  # [n, E] float32


class MoEStats(struct.PyTreeNode):
    """What one layer of one device reports; summed over devices by the step."""

    load: jax.Array  # [E] int32: assignments of this device's tokens
    dropped: jax.Array  # [] int32: assignments over this device's receive buffer that no round took
    rounds: jax.Array  # [] int32: rounds of the exchange
    balance: jax.Array  # [] float32: this device's part of the balance loss, summed over its rows
    finite: jax.Array  # [] bool: router scores are numbers


class Overflow(struct.PyTreeNode):
    """What became of rows beyond the receive buffer."""

    dropped: jax.Array  # [] int32: rows meant for this device that no round took
    rounds: jax.Array  # [] int32

    @classmethod
    def none(cls) -> "Overflow":
        return cls(jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


class SharedExpert(struct.PyTreeNode):
    """The expert every token visits. Each device runs its own tokens through the whole of it."""

    gate: jax.Array  # [D, F]
    up: jax.Array  # [D, F]
    down: jax.Array  # [F, D]

    @classmethod
    def spec(cls, c: ModelConfig) -> "SharedExpert":
        width = c.moe_mlp_dim * c.shared_experts
        return cls(
            gate=param((c.emb_dim, width), ("embed", "inner")),
            up=param((c.emb_dim, width), ("embed", "inner")),
            down=param((width, c.emb_dim), ("inner", "embed")),
        )

    def __call__(self, x: jax.Array, limit: float) -> jax.Array:
        """[B, S / tensor, D] -> the same."""
        gate, up = (project("bsd,df->bsf", x, w) for w in (self.gate, self.up))
        return project("bsf,fd->bsd", clamped_swiglu(gate, up, limit), self.down)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit), in float32, in gate's dtype."""
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (jax.nn.silu(jnp.minimum(gate32, limit)) * jnp.clip(up32, -limit, limit)).astype(gate.dtype)


def root_softplus(x: jax.Array) -> jax.Array:
    """sqrt(softplus(x)) whose gradient stays 0 where softplus underflows (plain autodiff gives 0 / 0 there)."""
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(x), jnp.finfo(jnp.float32).tiny))


class RoutedMoE(struct.PyTreeNode):
    """Routed experts. Hash layers look experts up by token id; the others take the top K of score + bias."""

    router: jax.Array  # [D, E] float32
    bias: jax.Array | None  # [E] float32: moves by load, never by gradient; None in hash layers
    tid2eid: jax.Array | None  # [K, V] int32: experts of each token id; None in all but hash layers
    gate: jax.Array  # [E, D, F]
    up: jax.Array  # [E, D, F]
    down: jax.Array  # [E, F, D]

    @classmethod
    def spec(cls, c: ModelConfig, hashed: bool) -> "RoutedMoE":
        e, d, f, k = c.num_experts, c.emb_dim, c.moe_mlp_dim, c.num_experts_per_tok
        fixed = {"trainable": False, "decay": False}
        return cls(
            router=param((d, e), ("embed", None), dtype=jnp.float32),
            bias=None if hashed else param((e,), (None,), constant(0.0), dtype=jnp.float32, **fixed),
            tid2eid=param((k, c.vocab_size), (None, None), distinct_ids(e), dtype=jnp.int32, **fixed)
            if hashed
            else None,
            gate=param((e, d, f), ("experts", "expert_embed", "expert_mlp")),
            up=param((e, d, f), ("experts", "expert_embed", "expert_mlp")),
            down=param((e, f, d), ("experts", "expert_mlp", "expert_embed")),
        )

    def route(self, x: jax.Array, tokens: jax.Array, c: ModelConfig) -> Routing:
        """x [n, D], tokens [n] -> Routing. Scores in float32; at ties the lower expert wins, and -0.0 ties 0.0."""
        logits = jnp.einsum("nd,de->ne", x.astype(jnp.float32), self.router, precision=lax.Precision.HIGHEST)
        scores = root_softplus(logits)
        if self.tid2eid is not None:
            # A gather from [K, V] at once makes TPUs copy the table, padded to twice its size.
            experts = jnp.stack([ids[tokens] for ids in self.tid2eid], axis=1)
        else:
            biased = lax.stop_gradient(scores)
            if self.bias is not None:
                biased = biased + self.bias
            _, experts = lax.top_k(jnp.where(biased == 0, 0.0, biased), c.num_experts_per_tok)
        chosen = jnp.take_along_axis(scores, experts, axis=1)
        weights = c.routed_scaling_factor * chosen / (jnp.sum(chosen, axis=1, keepdims=True) + 1e-20)
        return Routing(experts, weights, scores)

    def permute(self, x: jax.Array, p: Permutation, o: MoEOptions) -> jax.Array:
        """Activations [n, D] -> rows [n K, D] sorted by expert, gathered from the originals."""
        return o.permute.gather(x, p)

    def unpermute(self, rows: jax.Array, weights: jax.Array, p: Permutation, o: MoEOptions) -> jax.Array:
        """Sorted expert outputs [n K, D] -> each token's weighted sum [n, D]."""
        return o.permute.combine(rows, weights, p)

    def __call__(
        self, x: jax.Array, routing: Routing, valid: jax.Array, c: ModelConfig, o: MoEOptions
    ) -> tuple[jax.Array, Overflow]:
        """Tokens [n, D] through their experts -> [n, D]. Tokens not `valid` [n] visit none."""
        p = sort_by_expert(routing.experts, valid, c.num_experts)
        with jax.named_scope("permute"):
            rows = self.permute(x, p, o)
        exchange = o.exchange(x.shape[0], c)
        weights = (self.gate, self.up, self.down)
        if exchange is None:
            rows = experts(weights, hide_unused(rows, p.group_sizes), p.group_sizes, c.mlp_activations_limit)
            rows, overflow = hide_unused(rows, p.group_sizes), Overflow.none()
        else:
            rows, overflow = exchanged(weights, rows, p.group_sizes, exchange, c.mlp_activations_limit, o)
        with jax.named_scope("combine"):
            return self.unpermute(rows, routing.weights, p, o), overflow


def experts(
    weights: tuple[jax.Array, jax.Array, jax.Array], rows: jax.Array, group_sizes: jax.Array, limit: float
) -> jax.Array:
    """Rows [R, D] sorted by this device's experts -> their outputs [R, D]; undefined past the last group.

    weights: gate and up [E', D, F], down [E', F, D].
    """
    gate, up, down = weights
    h = clamped_swiglu(grouped_project(rows, gate, group_sizes), grouped_project(rows, up, group_sizes), limit)
    return grouped_project(hide_unused(h, group_sizes), down, group_sizes)


def exchanged(
    weights: tuple, rows: jax.Array, group_sizes: jax.Array, e: Exchange, limit: float, o: MoEOptions
) -> tuple[jax.Array, Overflow]:
    """My sorted rows [n K, D] through experts on other devices, and back: [n K, D]."""

    def run(weights: tuple, rows: jax.Array, sizes: jax.Array, number: jax.Array | int) -> jax.Array:
        plan = plan_round(sizes, number, e)
        with jax.named_scope("dispatch"):
            received = dispatch(rows, plan, e)
        with jax.named_scope("experts"):
            received = experts(weights, received, plan.group_sizes, limit)
        with jax.named_scope("collect"):
            return collect(received, plan, rows.shape[0], e)

    sizes = gather_sizes(group_sizes, e)
    out = run(weights, rows, sizes, 0)
    if e.capacity == e.worst_load:
        return out, Overflow.none()
    if not o.rounds:
        mine = queue_lengths(sizes)[lax.axis_index(e.axes)]
        return out, Overflow(jnp.maximum(mine - e.capacity, 0), jnp.ones((), jnp.int32))
    num_rounds = rounds_needed(sizes, e)
    trained, fixed = zip(*(split_frozen(w, o.frozen) for w in weights), strict=True)
    with jax.named_scope("further_rounds"):
        out = further_rounds(run, (trained, fixed), out, rows, sizes, num_rounds)
    return out, Overflow(jnp.zeros((), jnp.int32), num_rounds)


def grouped_project(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows [R, X] sorted by expert times each one's weights [E, X, Y], and the adapters' part -> [R, Y]."""
    if not isinstance(w, Adapted):
        return lax.ragged_dot(rows, as_stored(w), group_sizes)
    u = hide_unused(lax.ragged_dot(drop(rows, w), w.a.astype(rows.dtype), group_sizes), group_sizes)
    low = lax.ragged_dot(u, w.b.astype(rows.dtype), group_sizes)
    return lax.ragged_dot(rows, as_stored(w.base), group_sizes) + (w.scale * low).astype(rows.dtype)


def as_stored(w: jax.Array) -> jax.Array:
    """One layer's weights [E, X, Y], held to the row-major layout of the arrays they come from.

    The backward reads them transposed. Left free to choose, XLA carries the transposed layout out through the loop
    over microbatches, and keeps a second copy of all layers' weights in it.
    """
    return with_layout_constraint(w, Layout(major_to_minor=tuple(range(w.ndim))))


def hide_unused(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zero the rows past the last group, which nobody wrote; their cotangents too."""
    used = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(used[:, None], rows, 0)


class MoE(struct.PyTreeNode):
    """Routed experts beside the shared one."""

    routed: RoutedMoE
    shared: SharedExpert

    @classmethod
    def spec(cls, c: ModelConfig, hashed: bool) -> "MoE":
        return cls(routed=RoutedMoE.spec(c, hashed), shared=SharedExpert.spec(c))


def moe(
    p: MoE, x: jax.Array, tokens: jax.Array, valid: jax.Array, c: ModelConfig, o: MoEOptions
) -> tuple[jax.Array, MoEStats]:
    """Normed input [B, S / tensor, D], token ids and validity [B, S / tensor] -> ([B, S / tensor, D], stats).

    With experts over (expert, tensor) each device routes and sends its own tokens. With experts over expert alone
    their widths are split over tensor: tokens are gathered over it first and the partial outputs reduce-scattered.
    """
    batch, local, d = x.shape
    with jax.named_scope("route"):
        routing = p.routed.route(x.reshape(-1, d), tokens.reshape(-1), c)
    stats = statistics(p.routed, routing, valid, c, o)
    if TENSOR in o.expert_axes:
        y, overflow = p.routed(x.reshape(-1, d), routing, valid.reshape(-1), c, o)
        y = y.reshape(batch, local, d)
    else:
        tokens_of_row = jax.tree.map(
            lambda a: gather_length(a.reshape(batch, local, -1)).reshape(-1, *a.shape[1:]),
            (x.reshape(-1, d), routing, valid.reshape(-1)),
        )
        y, overflow = p.routed(tokens_of_row[0], tokens_of_row[1], tokens_of_row[2], c, o)
        y = scatter_length(y.reshape(batch, -1, d))
        first = lax.axis_index(TENSOR) == 0  # every tensor device counts the same rows
        overflow = overflow.replace(dropped=jnp.where(first, overflow.dropped, 0))
    with jax.named_scope("shared_expert"):
        y = y + p.shared(x, c.mlp_activations_limit)
    dropped, rounds = (varying_like(a, x) for a in (overflow.dropped, overflow.rounds))
    return y, stats.replace(dropped=dropped, rounds=rounds)


def statistics(p: RoutedMoE, routing: Routing, valid: jax.Array, c: ModelConfig, o: MoEOptions) -> MoEStats:
    """Load, and the sequence-wise balance loss (SPEC section 11): sum over rows of sum_e f_e P_e, where f_e is an
    expert's share of a row's assignments times E and P_e its mean normalised score. f has no gradient, so devices
    that share a row can each add their own tokens' part of P. Hash layers have no such loss."""
    batch, local = valid.shape
    rows = jnp.where(valid.reshape(-1, 1), routing.experts, c.num_experts).reshape(batch, -1)
    counts = jax.vmap(lambda r: jnp.bincount(r, length=c.num_experts))(rows)
    balance = jnp.zeros((), jnp.float32)
    if o.balance_loss and p.bias is not None:
        share = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + 1e-20)
        share = jnp.sum(jnp.where(valid[..., None], share.reshape(batch, local, -1), 0), axis=1)
        length = lax.psum(jnp.sum(valid, axis=1, keepdims=True), TENSOR)
        chosen = lax.psum(counts, TENSOR) * c.num_experts / (c.num_experts_per_tok * jnp.maximum(length, 1))
        balance = jnp.sum(chosen * share / jnp.maximum(length, 1))
    finite = jnp.all(jnp.isfinite(routing.scores))
    nothing = jnp.zeros((), jnp.int32)
    return MoEStats(load=jnp.sum(counts, axis=0), dropped=nothing, rounds=nothing, balance=balance, finite=finite)
