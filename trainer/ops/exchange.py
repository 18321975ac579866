"""The expert exchange: sorted rows to the devices that hold their experts, and back.

Every device sees the whole table of group sizes (P x E integers), so each knows where any row goes and no sizes are
negotiated. A receiver's rows form one queue, in order of (local expert, sending device, row). Round r moves rows
r R .. (r + 1) R of every queue, R being the rows of the receive buffer: they land sorted by expert, with no second
sort. One round does while no queue is longer than R; `further_rounds` runs the rest, until the longest is empty.

`ragged_all_to_all` moves only what is sent. XLA has it for TPU; elsewhere the same plan drives an `all_to_all` of
blocks padded to the largest block possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from trainer.params import merge
from trainer.sharding import AXES, varying_like


@dataclass(frozen=True)
class Exchange:
    """What is known when the step is built."""

    axes: tuple[str, ...]  # mesh axes the experts are spread over
    ragged: bool  # whether the mesh's platform has ragged_all_to_all
    capacity: int  # R, rows of the receive buffer
    block: int  # most rows one device can send another: tokens x min(K, local experts)
    worst_load: int  # most rows that can be meant for one device


class ExchangePlan(struct.PyTreeNode):
    """One round's segments of rows, one per (device, device's expert): [P, E / P] arrays of int32."""

    send_start: jax.Array  # in my sorted rows, by receiver
    send_size: jax.Array
    remote_start: jax.Array  # where my rows land at each receiver
    receive_start: jax.Array  # in my buffer, by sender
    receive_size: jax.Array
    source_start: jax.Array  # where my buffer's rows lie at each sender
    group_sizes: jax.Array  # [E / P] rows in my buffer per local expert


def _before(x: jax.Array) -> jax.Array:
    """Exclusive cumulative sum along the last dim."""
    return jnp.cumsum(x, axis=-1) - x


def gather_sizes(group_sizes: jax.Array, e: Exchange) -> jax.Array:
    """My rows per expert [E] -> everybody's [P, E]: one all-gather of E integers over the expert axes."""
    return lax.all_gather(group_sizes, e.axes)


def queue_lengths(sizes: jax.Array) -> jax.Array:
    """[P, E] -> rows meant for each device, [P]."""
    return jnp.sum(sizes.reshape(sizes.shape[0], sizes.shape[0], -1), axis=(0, 2))


def rounds_needed(sizes: jax.Array, e: Exchange) -> jax.Array:
    """Rounds until every queue of the mesh is empty, equal on all devices: [] int32."""
    longest = jnp.max(queue_lengths(sizes))
    differs = tuple(axis for axis in AXES if axis in jax.typeof(longest).manual_axis_type.varying)
    return -(-lax.pmax(longest, differs) // e.capacity)


def plan_round(sizes: jax.Array, number: jax.Array | int, e: Exchange) -> ExchangePlan:
    """Everybody's rows per expert [P, E] -> what moves in round `number`."""
    num = sizes.shape[0]
    me = lax.axis_index(e.axes)
    by_receiver = sizes.reshape(num, num, -1)  # [sender, receiver, local expert]
    starts = _before(sizes).reshape(by_receiver.shape)  # in the sender's sorted rows
    queue = by_receiver.transpose(1, 2, 0)  # [receiver, local expert, sender]
    place = _before(queue.reshape(num, -1)).reshape(queue.shape) - number * e.capacity
    first, last = jnp.clip(-place, 0, queue), jnp.clip(e.capacity - place, 0, queue)
    place, first, taken = (a.transpose(2, 0, 1) for a in (place + first, first, last - first))
    starts = starts + first
    return ExchangePlan(
        send_start=starts[me],
        send_size=taken[me],
        remote_start=place[me],
        receive_start=place[:, me],
        receive_size=taken[:, me],
        source_start=starts[:, me],
        group_sizes=jnp.sum(taken[:, me], axis=0),
    )


class _Route(NamedTuple):
    """Segments on their way: mine to send and where they land, and what arrives here; all [P, E / P] int32."""

    start: jax.Array  # of my segments, by receiver
    size: jax.Array
    remote: jax.Array  # where they land
    landing: jax.Array  # where the segments for me land, by sender
    incoming: jax.Array  # their sizes


def _move(rows: jax.Array, num_rows: int, r: _Route, e: Exchange) -> jax.Array:
    """Move segments of rows [n, D] to other devices: -> [num_rows, D], zero where nothing lands."""
    empty = varying_like(jnp.zeros((num_rows, rows.shape[1]), rows.dtype), rows, r.start)
    if e.ragged:
        flat = [a.reshape(-1) for a in (r.start, r.size, r.remote, r.incoming)]
        return lax.ragged_all_to_all(rows, empty, *flat, axis_name=e.axes)
    slot = jnp.arange(e.block)
    blocks = rows[_slot_to_row(r.start, r.size, slot, rows.shape[0])]  # [P, block, D]
    blocks = lax.all_to_all(blocks, e.axes, split_axis=0, concat_axis=0, tiled=True)
    target = _slot_to_row(r.landing, r.incoming, slot, num_rows)
    return empty.at[target.reshape(-1)].set(blocks.reshape(-1, rows.shape[1]), mode="drop")


def _slot_to_row(start: jax.Array, size: jax.Array, slot: jax.Array, nowhere: int) -> jax.Array:
    """Blocks hold a device's segments one after another. start, size [P, E/P], slot [block] -> [P, block] rows."""
    ends = jnp.cumsum(size, axis=-1)
    segment = jax.vmap(lambda end: jnp.searchsorted(end, slot, side="right"))(ends)
    within = slot - jnp.take_along_axis(ends - size, segment, axis=-1, mode="clip")
    row = jnp.take_along_axis(start, segment, axis=-1, mode="clip") + within
    return jnp.where(slot < ends[:, -1:], row, nowhere)


def _no_gradients(p: ExchangePlan) -> ExchangePlan:
    return jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), p)


def _dispatch(rows: jax.Array, p: ExchangePlan, e: Exchange) -> jax.Array:
    """My sorted rows [n K, D] -> the rows for my experts [R, D], sorted by expert; zero past the last. The backward
    is `collect`."""
    route = _Route(p.send_start, p.send_size, p.remote_start, p.receive_start, p.receive_size)
    return _move(rows, e.capacity, route, e)


def _collect(rows: jax.Array, p: ExchangePlan, num_rows: int, e: Exchange) -> jax.Array:
    """My experts' rows [R, D] back to where they came from: my sorted rows [n K, D], zero where none was sent. The
    backward is `dispatch`."""
    route = _Route(p.receive_start, p.receive_size, p.source_start, p.send_start, p.send_size)
    return _move(rows, num_rows, route, e)


dispatch = jax.custom_vjp(_dispatch, nondiff_argnums=(2,))
collect = jax.custom_vjp(_collect, nondiff_argnums=(2, 3))


def _dispatch_forward(rows: jax.Array, p: ExchangePlan, e: Exchange) -> tuple[jax.Array, tuple]:
    return dispatch(rows, p, e), (p, rows.shape[0])


def _dispatch_backward(e: Exchange, residuals: tuple, cotangent: jax.Array) -> tuple:
    p, num_rows = residuals
    return collect(cotangent, p, num_rows, e), _no_gradients(p)


def _collect_forward(rows: jax.Array, p: ExchangePlan, num_rows: int, e: Exchange) -> tuple[jax.Array, ExchangePlan]:
    return collect(rows, p, num_rows, e), p


def _collect_backward(num_rows: int, e: Exchange, p: ExchangePlan, cotangent: jax.Array) -> tuple:
    del num_rows
    return dispatch(cotangent, p, e), _no_gradients(p)


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
collect.defvjp(_collect_forward, _collect_backward)


# run(weights, rows [n K, D], sizes [P, E], round) -> the round's part of [n K, D], zero where nothing was sent.
Round = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def _further_rounds(
    run: Round, weights: tuple[Any, Any], first: jax.Array, rows: jax.Array, sizes: jax.Array, num_rounds: jax.Array
) -> jax.Array:
    """Rounds 1 .. num_rounds added to `first`, what round 0 gave. Each row is in one round, so sums are exact.

    `weights` are the experts' that train and the rest, None in each other's places; only the former have a gradient.
    The loop has no turn while no queue overflows, and its backward runs the rounds again one at a time: what it holds
    does not grow with the rounds.
    """
    return lax.while_loop(
        lambda carry: carry[0] < num_rounds,
        lambda carry: (carry[0] + 1, carry[1] + run(merge(*weights), rows, sizes, carry[0])),
        (jnp.ones_like(num_rounds), first),
    )[1]


further_rounds = jax.custom_vjp(_further_rounds, nondiff_argnums=(0,))


def _further_rounds_forward(run: Round, *args: Any) -> tuple[jax.Array, tuple]:
    weights, _, rows, sizes, num_rounds = args
    return further_rounds(run, *args), (weights, rows, sizes, num_rounds)


def _further_rounds_backward(run: Round, residuals: tuple, cotangent: jax.Array) -> tuple:
    (trained, fixed), rows, sizes, num_rounds = residuals

    def one_round(carry: tuple) -> tuple:
        number, total = carry
        _, pull = jax.vjp(lambda w, x: run(merge(w, fixed), x, sizes, number), trained, rows)
        return number + 1, jax.tree.map(jnp.add, total, pull(cotangent))

    zeros = jax.tree.map(lambda x: varying_like(jnp.zeros(x.shape, x.dtype), x), (trained, rows))
    _, (d_trained, d_rows) = lax.while_loop(
        lambda carry: carry[0] < num_rounds, one_round, (jnp.ones_like(num_rounds), zeros)
    )
    return (d_trained, None), cotangent, d_rows, None, None


further_rounds.defvjp(_further_rounds_forward, _further_rounds_backward)
