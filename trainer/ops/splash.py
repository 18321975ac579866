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
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes, make_splash_mqa_single_device
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import _splash_attention_bwd
from jax.extend.core import Primitive
from jax.interpreters import mlir

from trainer.sharding import varying_like

ATTENDED = "attended"  # what the kernel leaves for its backward, for policies of rematerialization
LANES = 128  # queries and keys come in multiples of this
BLOCK_QUERIES = 512
BLOCK_KEYS = 1024


def _kernel(q: jax.Array, keys: jax.Array, mask: jax.Array, interpret: bool) -> Any:
    """For one row: q [H, n, C], keys [m, C], mask [n, m]."""
    block_q, block_kv = min(BLOCK_QUERIES, q.shape[1]), min(BLOCK_KEYS, keys.shape[0])
    sizes = BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv, block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip
    kernel = make_splash_mqa_single_device(mask[None], block_sizes=sizes, save_residuals=True, interpret=interpret)
    # The kernel asks this flag in Python, and has made a traced array of it.
    kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
    return kernel


def _blocks_in_a_line(mask: Any) -> Any:
    """The blocks of a dynamic mask [heads, q blocks, kv blocks, ...] as the kernels index them."""
    return mask._replace(partial_mask_blocks=mask.partial_mask_blocks.reshape(-1, *mask.partial_mask_blocks.shape[3:]))


def _forward(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array, *, interpret: bool) -> list[jax.Array]:
    """q [B, H, n, C], scaled; keys [B, m, C]; mask [B, n, m]; sinks [H] -> attention [B, H, n, C] and the logarithm of
    the softmax' denominators [B, H, n] float32."""

    def one_row(q: jax.Array, keys: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (denominators,) = _kernel(q, keys, mask, interpret)(q, keys, keys, sinks=sinks)
        return out, denominators

    with jax_config._check_vma(False):
        rows = [one_row(q[i], keys[i], mask[i]) for i in range(q.shape[0])]
        return [jnp.stack(some) for some in zip(*rows, strict=True)]


def _backward(*arrays: jax.Array, interpret: bool) -> list[jax.Array]:
    """The forward's inputs and outputs, and the output's cotangent -> cotangents of q, keys and sinks.

    The kernel's own derivative would run the forward again for what is given here.
    """
    q, keys, mask, sinks, out, denominators, cotangent = arrays

    def one_row(i: int) -> list[Any]:
        kernel = _kernel(q[i], keys[i], mask[i], interpret)
        options = {k: v for k, v in kernel.kwargs.items() if k not in ("save_residuals", "residual_checkpoint_name")}
        masks = (_blocks_in_a_line(kernel.dq_mask_info), _blocks_in_a_line(kernel.dkv_mask_info))
        left = (q[i], keys[i], keys[i], None, sinks, out[i], denominators[i], *masks)
        *_, d_q, d_k, d_v, _, d_sinks = _splash_attention_bwd(
            save_residuals=False, residual_checkpoint_name=None, **options, res=left, do=cotangent[i]
        )
        return [d_q, d_k + d_v, d_sinks]

    with jax_config._check_vma(False):
        d_q, d_keys, d_sinks = (jnp.stack(some) for some in zip(*map(one_row, range(q.shape[0])), strict=True))
        together = (d_q, d_keys, jnp.sum(d_sinks, axis=0))
        return [d.astype(x.dtype) for d, x in zip(together, (q, keys, sinks), strict=True)]


def _primitive(name: str, fun: Callable[..., list[jax.Array]], outputs: Callable[..., list[Any]]) -> Primitive:
    """`fun` as a primitive whose outputs have the types that `outputs` makes of those of the inputs."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **_: outputs(*avals))
    lower = mlir.lower_fun(fun, multiple_results=True)

    def lower_untyped(ctx: mlir.LoweringRuleContext, *args: Any, **options: Any) -> Any:
        avals: Any = ctx.avals_in
        plain = [ShapedArray(aval.shape, aval.dtype) for aval in avals]
        return lower(ctx.replace(avals_in=plain), *args, **options)

    mlir.register_lowering(primitive, lower_untyped)
    return primitive


def _forward_types(q: Any, *_: Any) -> list[Any]:
    return [q, q.update(shape=q.shape[:3], dtype=jnp.dtype("float32"))]


_forward_p = _primitive("splash_forward", _forward, _forward_types)
_backward_p = _primitive("splash_backward", _backward, lambda q, keys, mask, sinks, *_: [q, keys, sinks])


def splash(interpret: bool) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """See `AttendMasked` in trainer.ops.attend. `interpret` runs the kernel in Pallas' interpreter."""

    @jax.custom_vjp
    def kernel(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array) -> jax.Array:
        return _forward_p.bind(q, keys, mask, sinks, interpret=interpret)[0]

    def forward(*args: jax.Array) -> tuple[jax.Array, Any]:
        left = [checkpoint_name(x, ATTENDED) for x in _forward_p.bind(*args, interpret=interpret)]
        return left[0], (*args, *left)

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
