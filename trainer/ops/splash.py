"""JAX's splash attention kernel for TPU, with a mask that is data (`dynamic`), on one device's shard.

The kernel's `pallas_call`s do not say over which mesh axes their outputs differ, which a type-checked `shard_map` asks
of them, and JAX cannot switch the check off for a part of a program. So the kernel is two primitives here, forward and
backward, whose outputs differ as their inputs do, and what is inside is only traced when they are lowered.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax.core import ShapedArray
from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes, make_splash_mqa_single_device
from jax.extend.core import Primitive
from jax.interpreters import mlir

from trainer.sharding import varying_like

LANES = 128  # queries and keys come in multiples of this
BLOCK_QUERIES = 512
BLOCK_KEYS = 1024


def _rows(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array, *, interpret: bool) -> jax.Array:
    """q [B, H, n, C], scaled; keys [B, m, C]; mask [B, n, m]; sinks [H] -> [B, H, n, C]."""
    block_q, block_kv = min(BLOCK_QUERIES, q.shape[2]), min(BLOCK_KEYS, keys.shape[1])
    sizes = BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv, block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip

    def one_row(q: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
        kernel = make_splash_mqa_single_device(mask[None], block_sizes=sizes, interpret=interpret)
        # The kernel asks this flag in Python, and has made a traced array of it.
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        out: Any = kernel(q, keys, keys, sinks=sinks)
        return out

    return jnp.stack([one_row(q[i], keys[i], mask[i]) for i in range(q.shape[0])])


def _forward(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array, *, interpret: bool) -> list[jax.Array]:
    with jax_config._check_vma(False):
        return [_rows(q, keys, mask, sinks, interpret=interpret)]


def _backward(
    q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array, cotangent: jax.Array, *, interpret: bool
) -> list[jax.Array]:
    """Cotangents of q, keys and sinks; runs the forward again for the softmax' statistics."""
    with jax_config._check_vma(False):
        _, pull = jax.vjp(lambda q, k, s: _rows(q, k, mask, s, interpret=interpret), q, keys, sinks)
        return [d.astype(x.dtype) for d, x in zip(pull(cotangent), (q, keys, sinks), strict=True)]


def _primitive(name: str, fun: Callable[..., list[jax.Array]], like: tuple[int, ...]) -> Primitive:
    """`fun` as a primitive; output i is typed like input `like[i]`."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **_: [avals[i] for i in like])
    lower = mlir.lower_fun(fun, multiple_results=True)

    def lower_untyped(ctx: mlir.LoweringRuleContext, *args: Any, **options: Any) -> Any:
        avals: Any = ctx.avals_in
        plain = [ShapedArray(aval.shape, aval.dtype) for aval in avals]
        return lower(ctx.replace(avals_in=plain), *args, **options)

    mlir.register_lowering(primitive, lower_untyped)
    return primitive


_forward_p = _primitive("splash_forward", _forward, like=(0,))
_backward_p = _primitive("splash_backward", _backward, like=(0, 1, 3))


def splash(interpret: bool) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """See `AttendMasked` in trainer.ops.attend. `interpret` runs the kernel in Pallas' interpreter."""

    @jax.custom_vjp
    def kernel(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array) -> jax.Array:
        return _forward_p.bind(q, keys, mask, sinks, interpret=interpret)[0]

    def forward(*args: jax.Array) -> tuple[jax.Array, Any]:
        return kernel(*args), args

    def backward(args: tuple, cotangent: jax.Array) -> tuple:
        d_q, d_keys, d_sinks = _backward_p.bind(*args, cotangent, interpret=interpret)
        return d_q, d_keys, None, d_sinks

    kernel.defvjp(forward, backward)

    def attend(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array) -> jax.Array:
        num_queries, num_keys = q.shape[1], keys.shape[1]
        pad_q = -num_queries % _block(num_queries, BLOCK_QUERIES)
        pad_k = -num_keys % _block(num_keys, BLOCK_KEYS)
        q = jnp.moveaxis(q * q.shape[-1] ** -0.5, 2, 1)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, pad_q), (0, 0)))
        keys = jnp.pad(keys, ((0, 0), (0, pad_k), (0, 0)))
        mask = jnp.pad(mask, ((0, 0), (0, pad_q), (0, pad_k)))
        together = (q, keys, mask, sinks)  # the sums over devices that make their gradients lie outside the kernel
        out = kernel(*(varying_like(x, *together) for x in together))
        return jnp.moveaxis(out, 1, 2)[:, :num_queries]

    return attend


def _block(length: int, most: int) -> int:
    """What the length is padded to a multiple of: whole blocks, or lanes where one block is enough."""
    return most if length > most else LANES
