import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded import mesh_of, on_mesh
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

E, D = 16, 4
ROWS = 24  # of each device
MESHES = {
    "expert 4": ({"expert": 4}, ("expert",)),
    "expert 8": ({"expert": 8}, ("expert",)),
    "expert 2 x tensor 4": ({"expert": 2, "tensor": 4}, ("expert", "tensor")),
    "fsdp 2 x expert 4": ({"fsdp": 2, "expert": 4}, ("expert",)),
}


def sizes_of(kind: str, devices: int) -> np.ndarray:
    """Rows each device has for each expert, [P, E]; at most ROWS a device."""
    rng = np.random.default_rng(0)
    sizes = np.zeros((devices, E), np.int32)
    if kind == "uniform":
        sizes[:] = 1
    elif kind == "random":
        sizes = rng.multinomial(ROWS - 3, np.ones(E) / E, devices)
    elif kind == "all to one":
        sizes[:, 5] = ROWS
    elif kind == "last device full":
        sizes[:, -1] = ROWS - 2
        sizes[:, 0] = 2
    elif kind == "first device empty":
        sizes[1:] = 1
        sizes[:, 0] = 0
    return sizes.astype(np.int32)


KINDS = ("uniform", "random", "all to one", "last device full", "first device empty")


@pytest.fixture(params=MESHES)
def case(request):
    degrees, axes = MESHES[request.param]
    mesh = mesh_of(**degrees)
    return mesh, axes, int(np.prod([mesh.shape[a] for a in axes]))


def spread(sizes: np.ndarray, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows of every device [copies P ROWS, D], all different, and their sizes, for each of `copies` groups."""
    num = len(sizes)
    rows = np.arange(copies * num * ROWS * D, dtype=np.float32).reshape(-1, D) + 1
    return rows, np.tile(sizes, (copies, 1))


def received(rows: np.ndarray, sizes: np.ndarray, capacity: int, number: int) -> list[np.ndarray]:
    """What lands at each device of one group in a round: queues in order of (local expert, sender, row)."""
    num = len(sizes)
    starts = np.cumsum(sizes, 1) - sizes
    out = []
    for receiver in range(num):
        queue = []
        for expert in range(receiver * E // num, (receiver + 1) * E // num):
            for sender in range(num):
                first = sender * ROWS + starts[sender, expert]
                queue += list(rows[first : first + sizes[sender, expert]])
        out.append(np.array(queue).reshape(-1, D)[number * capacity : (number + 1) * capacity])
    return out


@pytest.mark.parametrize("capacity", [5, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_land_sorted_and_come_back(case, kind, capacity):
    mesh, axes, num = case
    copies = mesh.size // num
    sizes = sizes_of(kind, num)
    e = Exchange(axes, ragged=False, capacity=capacity, block=ROWS, worst_load=num * ROWS)
    rows, tiled = spread(sizes, copies)

    def local(rows, sizes):
        table = gather_sizes(sizes[0], e)
        outs = []
        for number in (0, 1):
            plan = plan_round(table, number, e)
            landed = dispatch(rows, plan, e)
            outs.append((landed, plan.group_sizes, collect(landed, plan, rows.shape[0], e)))
        return outs, rounds_needed(table, e)[None], queue_lengths(table)[None]

    split = P(("fsdp", *axes))
    with jax.set_mesh(mesh):
        run = jax.jit(on_mesh(mesh, local, (split, split), split))
        outs, rounds, queues = jax.tree.map(np.asarray, run(rows, tiled))
    lengths = sizes.reshape(num, num, -1).sum((0, 2))
    assert np.all(rounds == -(-lengths.max() // capacity))
    np.testing.assert_array_equal(queues.reshape(-1, num), np.tile(lengths, (mesh.size, 1)))
    for number, (landed, group_sizes, back) in enumerate(outs):
        for copy in range(copies):
            mine = rows[copy * num * ROWS : (copy + 1) * num * ROWS]
            expected = received(mine, sizes, capacity, number)
            sent = {tuple(row) for device in expected for row in device}
            for i in range(num):
                at = copy * num + i
                buffer = landed[at * capacity : (at + 1) * capacity]
                np.testing.assert_array_equal(buffer[: len(expected[i])], expected[i])
                assert not buffer[len(expected[i]) :].any()
                assert group_sizes.reshape(mesh.size, -1)[at].sum() == len(expected[i])
                returned = back[at * ROWS : (at + 1) * ROWS]
                original = mine[i * ROWS : (i + 1) * ROWS]
                np.testing.assert_array_equal(
                    returned, [row if tuple(row) in sent else np.zeros(D) for row in original]
                )


def test_each_way_is_the_backward_of_the_other():
    mesh = mesh_of(expert=4)
    sizes = sizes_of("random", 4)
    e = Exchange(("expert",), ragged=False, capacity=11, block=ROWS, worst_load=4 * ROWS)
    rows, _ = spread(sizes, 1)

    def local(rows, sizes, there, back):
        plan = plan_round(gather_sizes(sizes[0], e), 0, e)
        landed, pull_landed = jax.vjp(lambda r: dispatch(r, plan, e), rows)
        _, pull_back = jax.vjp(lambda r: collect(r, plan, ROWS, e), landed)
        return pull_landed(there)[0], collect(there, plan, ROWS, e), pull_back(back)[0], dispatch(back, plan, e)

    rng = np.random.default_rng(1)
    there, back = (rng.standard_normal((4 * n, D)).astype(np.float32) for n in (e.capacity, ROWS))
    with jax.set_mesh(mesh):
        run = on_mesh(mesh, local, (P("expert"),) * 4, P("expert"))
        a, b, c, d = jax.jit(run)(rows, sizes, there, back)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, d)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_equal_the_worst_case_buffer_in_value_and_gradient(kind):
    mesh = mesh_of(expert=4, tensor=2)
    axes, num = ("expert", "tensor"), 8
    sizes = sizes_of(kind, num)
    rows, _ = spread(sizes, 1)
    rows = rows / rows.max()

    def whole(capacity: int):
        e = Exchange(axes, ragged=False, capacity=capacity, block=ROWS, worst_load=num * ROWS)

        def run(weights, rows, sizes, number):
            plan = plan_round(sizes, number, e)
            landed = dispatch(rows, plan, e)
            scale = jnp.repeat(weights[0], plan.group_sizes, axis=0, total_repeat_length=capacity)
            return collect(jnp.tanh(landed * scale), plan, ROWS, e)

        def local(weights, rows, sizes):
            table = gather_sizes(sizes[0], e)
            out = run((weights,), rows, table, 0)
            return further_rounds(run, ((weights,), (None,)), out, rows, table, rounds_needed(table, e))

        split = P(axes)
        sharded = on_mesh(mesh, local, (split,) * 3, split)
        return lambda w, r: jnp.sum(jnp.sin(sharded(w, r, jnp.asarray(sizes)) * jnp.arange(1, D + 1)))

    weights = np.random.default_rng(2).standard_normal((E, D)).astype(np.float32)
    with jax.set_mesh(mesh):
        reference, small = (
            jax.jit(jax.value_and_grad(whole(c), argnums=(0, 1)))(weights, rows) for c in (num * ROWS, 7)
        )
    for ours, theirs in zip(jax.tree.leaves(small), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
