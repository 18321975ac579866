"""What a run holds: the train state, and the weights that stay as they are; with values, or abstract.

Abstract trees carry real shardings: they are what the step is compiled for and what a checkpoint is restored into.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.config import Config
from trainer.hf import peft
from trainer.hf.load import load
from trainer.models.deepseek_v4 import Batch, DeepSeekV4
from trainer.models.lora import adapters_of, attach
from trainer.optimizer import as_float32, make_optimizer
from trainer.parallel import BatchShape
from trainer.params import abstract, initialize, split_trainable
from trainer.step import Program, TrainState, make_step


def _init_optimizer(program: Program, optimizer: optax.GradientTransformation, params: Any) -> Any:
    trainable, _ = split_trainable(program.spec, params)
    return optimizer.init(as_float32(trainable))


def _on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Shapes out of `jax.eval_shape`, whose shardings name no devices (and scalars have none), on the mesh."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def abstract_state(program: Program, optimizer: optax.GradientTransformation) -> TrainState:
    """The train state as `jax.ShapeDtypeStruct`s."""
    params, _ = split_state(program, abstract(program.spec, program.layout, program.mesh, program.weight_dtype))
    opt_state = jax.eval_shape(lambda p: _init_optimizer(program, optimizer, p), params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(_on_mesh(step, program.mesh), params, _on_mesh(opt_state, program.mesh))


def abstract_frozen(program: Program) -> Any:
    """`frozen_weights` as `jax.ShapeDtypeStruct`s."""
    return split_state(program, abstract(program.spec, program.layout, program.mesh, program.weight_dtype))[1]


def split_state(program: Program, params: Any) -> tuple[Any, Any]:
    """All parameters -> (what the train state holds, what is frozen: None without LoRA)."""
    return (params, None) if program.options.lora is None else split_trainable(program.spec, params)


def weights(program: Program, config: Config) -> Any:
    """The first weights, without adapters, shard by shard: from `load_parameters_path`, or drawn from `seed`."""
    if config.load_parameters_path:
        return load(config.load_parameters_path, program)
    spec = DeepSeekV4.spec(program.model)
    return initialize(spec, program.layout, program.mesh, program.weight_dtype, config.seed)


def frozen_weights(program: Program, config: Config) -> Any:
    """What the step reads and never changes: LoRA's base model. None where every weight is in the train state."""
    if program.options.lora is None:
        return None
    _, seeds = split_state(program, first_adapters(program, config))
    return attach(program.spec, weights(program, config), seeds)


def first_adapters(program: Program, config: Config) -> Any:
    """Drawn from `seed`, or those of `init_adapter_path`."""
    spec = adapters_of(program.spec)
    drawn = initialize(spec, program.layout, program.mesh, program.weight_dtype, config.seed)
    if not config.init_adapter_path:
        return drawn
    given = peft.load(config.init_adapter_path, config, program.spec)

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in given:  # seeds of dropout
            return x
        values = given[name].astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(leaf, drawn)


def first_state(program: Program, optimizer: optax.GradientTransformation, config: Config) -> TrainState:
    """The state before the first step."""
    if program.options.lora is None:
        params = weights(program, config)
    else:
        params, _ = split_state(program, first_adapters(program, config))
    opt_state = jax.jit(lambda p: _init_optimizer(program, optimizer, p))(params)
    return TrainState(jax.device_put(jnp.int32(0), NamedSharding(program.mesh, P())), params, opt_state)


def optimizer_of(program: Program, config: Config) -> optax.GradientTransformation:
    trainable, _ = split_trainable(program.spec, program.spec)
    return make_optimizer(config, trainable)


def abstract_batch(program: Program, shape: BatchShape) -> Batch:
    """A step's batch [A, B, S] as `jax.ShapeDtypeStruct`s."""
    dims = (shape.accumulation, shape.rows, shape.length)
    leaf = jax.ShapeDtypeStruct(dims, jnp.int32, sharding=batch_sharding(program))
    return Batch(tokens=leaf, targets=leaf, segment_ids=leaf, positions=leaf)


def batch_sharding(program: Program) -> NamedSharding:
    return NamedSharding(program.mesh, program.layout.pspec(None, "batch", "length"))


def trace_step(program: Program, config: Config, shape: BatchShape) -> jax.stages.Traced:
    """The training step, traced for the program's mesh: what `train` runs and what the dry run measures."""
    optimizer = optimizer_of(program, config)
    step = jax.jit(make_step(program, config, optimizer), donate_argnums=0)
    return step.trace(abstract_state(program, optimizer), abstract_frozen(program), abstract_batch(program, shape))


def lower_step(program: Program, config: Config, shape: BatchShape) -> jax.stages.Lowered:
    return trace_step(program, config, shape).lower()
