"""The config: every key with its type, default and doc, and how files and arguments become one `Config`.

Free of JAX, so that a mistake shows in the first second. What spans several keys is in `trainer.validate`.
"""

import dataclasses
import os
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import yaml
from omegaconf import OmegaConf

from trainer.config_files import read_file
from trainer.config_values import Given, Paths, absolute, flatten, nearest, parse_overrides, read
from trainer.errors import ConfigError
from trainer.models.config import MISSING, ModelConfig, documented

DEFAULT = "default"
BYTE_TOKENIZER = "byte"

_COMMENT_COLUMN = 72  # longer lines (43 layers) don't push everybody's origin to the right


@dataclass(frozen=True)
class Config:
    """One run. The keys keep the names that MaxText users type; the model's numbers sit under `model`.

    Keys whose metadata has `path_unless` name input files: relative ones start at the folder of the YAML file that
    names them, on the command line at the current folder, and are absolute once loaded. The texts listed are not paths.
    """

    # The run.
    run_name: str = documented("Name of the run; it writes to `base_output_directory/run_name`.", "")
    base_output_directory: str = documented("Where runs are written, relative to the current folder.", "runs")
    hardware: Literal["tpu", "gpu", "cpu"] = documented("The devices to use; never another kind in their place.", "tpu")
    num_cpu_devices: int = documented("CPU devices to pretend to have, with `hardware=cpu` only.", 1)
    seed: int = documented("Seed of the parameters and of the data order.", 0)
    steps: int = documented("Optimizer steps of the whole run, resumed ones included.", 1_000)
    log_period: int = documented("Steps from one console and TensorBoard line to the next.", 1)
    enable_tensorboard: bool = documented("Write TensorBoard files beside `metrics.jsonl`.", True)

    # The mesh. The product of the four degrees is the number of devices; one of them may be -1, the rest.
    dcn_data_parallelism: int = documented("Copies of the model, one per slice; gradients cross the network.", 1)
    ici_fsdp_parallelism: int = documented("Parts the weights are split into along their width; splits the batch.", 1)
    ici_expert_parallelism: int = documented("Parts the experts are split into; splits the batch too.", 1)
    ici_tensor_parallelism: int = documented("Parts that heads, the vocabulary and sequences are split into.", 1)
    allow_split_physical_axes: bool = documented(
        "Lay several mesh axes on one axis of a TPU slice's torus, for degrees that fit no other way, or to close an "
        "axis's devices into a ring where the torus has none.",
        False,
    )

    # The batch.
    per_device_batch_size: float = documented(
        "Sequences per device and microbatch. May be a fraction: 0.125 on 128 devices is 16 sequences.", 1.0
    )
    max_target_length: int = documented("Tokens per sequence (S).", 2_048)
    gradient_accumulation_steps: int = documented("Microbatches per optimizer step (A).", 1)

    # Arithmetic and memory.
    dtype: Literal["bfloat16", "float32"] = documented("Type of the activations and of matmul inputs.", "bfloat16")
    weight_dtype: Literal["float32", "bfloat16"] = documented("Type of the stored weights.", "float32")
    remat_policy: Literal["none", "minimal", "full"] = documented(
        "What the backward pass recomputes: nothing, all but each block's costly results, or whole blocks.", "full"
    )
    attention: Literal["dot_product", "chunked", "dynamic_splash"] = documented(
        "Implementation of attention: chunks of queries; a TPU kernel on larger chunks (interpreted, and slow, on a "
        "CPU); or, the reference for both, all scores at once.",
        "chunked",
    )
    moe_permute: Literal["gather", "repeat"] = documented(
        "How tokens get into expert order: gathered straight from the activations, or (the baseline to measure "
        "against) copied once per expert and then sorted.",
        "gather",
    )
    moe_capacity_factor: float = documented(
        "Receive buffer of an expert shard, in multiples of the mean load; see `moe_overflow` for what lies over it. "
        "-1 holds the worst case.",
        -1.0,
    )
    moe_overflow: Literal["rounds", "drop"] = documented(
        "Tokens over the receive buffer: sent in further rounds of the exchange, or dropped and counted.", "rounds"
    )
    moe_expert_axes: list[Literal["expert", "tensor"]] = documented(
        "Mesh axes the experts are spread over: [expert, tensor], or [expert] with each expert's width over tensor.",
        ["expert", "tensor"],
    )
    weight_axes: list[Literal["fsdp", "expert"]] = documented(
        "Mesh axes that weights other than the experts' are kept in parts over, to be gathered layer by layer: [fsdp], "
        "or [fsdp, expert], which takes less memory and more communication.",
        ["fsdp"],
    )
    loss_chunk_tokens: int = documented("Tokens whose float32 logits exist at one time.", 1_024)

    # LoRA.
    lora_rank: int = documented("Rank of the adapters; above 0 only they train. 0 trains the whole model.", 0)
    lora_alpha: float = documented("Adapters are scaled by `lora_alpha / lora_rank`.", 32.0)
    lora_dropout: float = documented("Part of an adapter's inputs that is dropped.", 0.0)
    lora_targets: list[str] = documented(
        "Weights with an adapter, by path within a layer; `*` stands for anything, as in `moe/routed/*`.",
        ["attention/w*", "moe/shared/*"],
    )
    lora_weight_dtype: Literal["float32", "bfloat16"] = documented(
        "Type of the stored adapters. In bfloat16 small updates round to nothing.", "float32"
    )

    init_adapter_path: str = documented(
        "PEFT adapter folder to start the adapters from; empty: A random and B zero.", "", path_unless=("",)
    )

    # Balance of the experts.
    load_balance_loss_weight: float = documented(
        "Weight of the balance loss per sequence; DeepSeek-V4 was pre-trained with 1e-4. 0 is off.", 0.0
    )
    routed_bias_update_rate: float = documented(
        "Step of the routing bias towards balance, once per optimizer step. 0 leaves it, and so does LoRA.", 1e-3
    )

    # The optimizer.
    opt_type: Literal["adamw", "sgd"] = documented("The optimizer.", "adamw")
    learning_rate: float = documented("Peak learning rate.", 3e-5)
    warmup_steps_fraction: float = documented("Part of `steps` in which the rate rises from 0 to its peak.", 0.1)
    cosine_learning_rate_final_fraction: float = documented("Rate at the end of the cosine, over the peak.", 0.1)
    adam_b1: float = documented("AdamW: decay of the first moment.", 0.9)
    adam_b2: float = documented("AdamW: decay of the second moment.", 0.95)
    adam_eps: float = documented("AdamW: added to the root of the second moment.", 1e-8)
    adam_weight_decay: float = documented("AdamW: weight decay; norms and biases have none.", 0.1)
    gradient_clipping_threshold: float = documented("Global gradient norm to clip to; 0 is off.", 1.0)

    # The data.
    dataset_type: Literal["synthetic", "text"] = documented("Made-up tokens, or text from files.", "synthetic")
    dataset_path: Paths = documented(
        "Files of `dataset_type=text`: paths or globs of .txt, .jsonl, .parquet and .arrayrecord files and of Hugging "
        "Face datasets saved to disk, here or behind a URL such as gs://. Weights mix them by documents, as in "
        "{a.jsonl: 0.7, b/*.parquet: 0.3}.",
        {},
        path_unless=(),
    )
    train_data_columns: list[str] = documented(
        "Fields of a record: one, with a text or with a list of messages (role, content), or a prompt's and its "
        "completion's.",
        ["text"],
    )
    train_on: Literal["assistant", "all"] = documented(
        "Which tokens of messages, or of prompt and completion, are targets: the assistant's (the completion), or all.",
        "assistant",
    )
    on_bad_record: Literal["error", "skip"] = documented(
        "A record that cannot be read: end the run with its file and line, or leave it out and count it.", "error"
    )
    long_documents: Literal["split", "drop"] = documented(
        "Documents of more than `max_target_length` tokens: cut into rows, or left out and counted.", "split"
    )
    tokenizer_path: str = documented(
        f"A `tokenizer.json` or its folder, with a chat template beside it; or `{BYTE_TOKENIZER}`: one token per UTF-8 "
        "byte.",
        BYTE_TOKENIZER,
        path_unless=(BYTE_TOKENIZER,),
    )
    enable_data_shuffling: bool = documented("Read the documents in a new order every epoch.", True)

    # Evaluation.
    eval_interval: int = documented("Steps from one evaluation on held-out data to the next; 0 is never.", 0)
    eval_steps: int = documented("Most batches of one evaluation, each of one microbatch's size.", 10)
    eval_dataset_path: Paths = documented(
        "Held-out files, as `dataset_path`. Synthetic data needs none: it is drawn from the next seed.",
        {},
        path_unless=(),
    )

    # Checkpoints.
    enable_checkpointing: bool = documented("Save checkpoints, and resume from the last one.", True)
    checkpoint_period: int = documented("Steps from one checkpoint to the next; the last step is saved as well.", 100)
    max_num_checkpoints_to_keep: int = documented("Newest checkpoints to keep.", 3)
    async_checkpointing: bool = documented("Write checkpoints while training goes on.", True)
    load_parameters_path: str = documented(
        "Hugging Face DeepSeek-V4 folder to take the first weights from; empty: random weights.", "", path_unless=("",)
    )

    # The compiler.
    compile_topology: str = documented(
        "What `compile` compiles for: a TPU slice such as v6e-128, dcn_data_parallelism of them, or `cpu`. With "
        "hardware=tpu a run on other devices is refused.",
        "",
    )
    libtpu_init_args: str = documented(
        "Flags of the TPU compiler and runtime, such as `--xla_tpu_scoped_vmem_limit_kib=98304`, with spaces between "
        "them. Empty: those of LIBTPU_INIT_ARGS in the environment.",
        "",
    )

    model: ModelConfig = field(default_factory=ModelConfig, metadata={"doc": "The model; see `configs/models`."})


@dataclass(frozen=True)
class Resolved:
    """A config and, by dotted key, where each value comes from: "default", "FILE:LINE" or "command line"."""

    config: Config
    origins: dict[str, str]


class Key(NamedTuple):
    """One key of the schema. `default` is MISSING where a file has to give the value."""

    kind: Any
    default: Any
    doc: str
    path_unless: tuple[str, ...] | None


@cache
def schema() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the dataclasses."""
    return dict(_keys(Config, ""))


def _keys(block: type, prefix: str) -> Iterator[tuple[str, Key]]:
    kinds = typing.get_type_hints(block)
    for item in dataclasses.fields(block):
        if dataclasses.is_dataclass(kinds[item.name]):
            yield from _keys(kinds[item.name], f"{prefix}{item.name}.")
            continue
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        path_unless = item.metadata["path_unless"] if "path_unless" in item.metadata else None
        yield prefix + item.name, Key(kinds[item.name], default, item.metadata["doc"], path_unless)


def documentation() -> Iterator[tuple[str, str, str, str, str]]:
    """(key, type, default, allowed values, doc) of every key, as text; what has no such part is empty."""
    for name, key in schema().items():
        is_list = get_origin(key.kind) is list
        kind = get_args(key.kind)[0] if is_list else key.kind
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        kind_name = ("list of " if is_list else "") + ("str" if choices else kind.__name__)
        if kind == Paths:
            kind_name = "list of paths, or paths with weights"
        default = "" if key.default is MISSING else _as_yaml(key.default)
        yield name, kind_name, default, ", ".join(choices), key.doc


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Resolved:
    """The config in a YAML file and its bases, with `key=value` overrides on top."""
    return _resolve(read_file(os.fspath(path)) | parse_overrides(overrides), os.fspath(path))


def from_values(values: Mapping[str, Any], overrides: Iterable[str], source: str) -> Resolved:
    """The config of a nested dict instead of a file. `source` names the dict in messages and origins."""
    return _resolve(flatten(values, source) | parse_overrides(overrides), source)


def _resolve(given: dict[str, Given], source: str) -> Resolved:
    keys = schema()
    tree: dict[str, Any] = {}
    for name, item in given.items():
        if name not in keys:
            raise ConfigError(f"{item.where}: {_not_a_key(name, keys)}")
        *blocks, leaf = name.split(".")
        place = tree
        for block in blocks:
            place = place.setdefault(block, {})
        place[leaf] = _read(item, keys[name])
    merged = OmegaConf.merge(OmegaConf.structured(Config), tree)
    missing = OmegaConf.missing_keys(merged)
    if missing:
        names = ", ".join(name for name in keys if name in missing)
        raise ConfigError(
            f"{source}: nothing gives {names}; build on a model file, with a line such as "
            "`base: models/deepseek_v4_tiny.yml` (see configs/models/*.yml)"
        )
    origins = {name: given[name].origin if name in given else DEFAULT for name in keys}
    return Resolved(cast(Config, OmegaConf.to_object(merged)), origins)


def _read(given: Given, key: Key) -> Any:
    value = read(given, key.kind)
    if key.path_unless is None:
        return value
    if key.kind == Paths:
        return {absolute(path, given.folder): weight for path, weight in value.items()}
    return value if value in key.path_unless else absolute(value, given.folder)


def _not_a_key(name: str, keys: Mapping[str, Key]) -> str:
    """Why `name` is not a key, and which one may be meant."""
    inside = next((key for key in keys if key.startswith(name + ".")), None)
    if inside:
        return f"{name} is a block of keys such as {inside}, not a value"
    above = name.rpartition(".")[0]
    while above and above not in keys:
        above = above.rpartition(".")[0]
    if above:
        is_list = get_origin(keys[above].kind) is list
        hint = f"; give the whole list, {above}=[...]" if is_list else f"; write {above}=..."
        return f"unknown key {name!r}: {above} holds {'a list' if is_list else 'one value'}{hint}"
    last = name.rpartition(".")[2]
    by_last = {key.rpartition(".")[2]: key for key in keys}
    near = nearest(name, keys, cutoff=0.8) or by_last.get(last) or by_last.get(nearest(last, by_last) or "")
    return f"unknown key {name!r}; " + (f"did you mean {near!r}?" if near else "no key has a similar name")


def to_yaml(config: Config) -> str:
    """The whole config as YAML: one line per key, no bases; loading it gives an equal config."""
    return "".join(f"{line}\n" for line, _ in _lines(config))


def describe(resolved: Resolved) -> str:
    """The whole config as YAML, with each value's origin as a comment beside it."""
    lines = [(line, resolved.origins[key] if key else "") for line, key in _lines(resolved.config)]
    width = max(len(line) for line, _ in lines if len(line) <= _COMMENT_COLUMN)
    return "\n".join(f"{line:<{width}}  # {origin}" if origin else line for line, origin in lines)


def _lines(config: Config) -> Iterator[tuple[str, str]]:
    """(YAML line, dotted key); the key is empty on a line that opens a block."""
    opened: list[str] = []
    for key in schema():
        *blocks, leaf = key.split(".")
        if blocks != opened:
            opened = blocks
            yield f"{'  ' * (len(blocks) - 1)}{blocks[-1]}:", ""
        yield f"{'  ' * len(blocks)}{leaf}: {_as_yaml(value_of(config, key))}", key


def _as_yaml(value: Any) -> str:
    """A value or list on one line of YAML."""
    options: dict[str, Any] = {"default_flow_style": True, "width": float("inf"), "allow_unicode": True}
    if isinstance(value, dict) and all(weight is None for weight in value.values()):
        value = list(value)  # `Paths` without weights
    text = yaml.safe_dump(value, **options).removesuffix("\n").removesuffix("\n...")
    if not text.isprintable():  # line breaks of any kind: only double quotes keep them on one line
        text = yaml.safe_dump(value, default_style='"', **options).strip()
    return text
