"""The numbers that define a DeepSeek-V4 model. Pure data: no JAX, so configs validate without it."""

import math
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # OmegaConf's mark for a value that some file has to give


def documented(text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A dataclass field with its doc, which `trainer.config.schema` reads; `metadata` is kept beside it."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": text, **metadata})
    return field(default=default, metadata={"doc": text, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the model, named as MaxText names them.

    Sizes have no default: a model file (`configs/models/*.yml`) gives them. The number of decoder
    layers is the length of `compress_ratios`.
    """

    vocab_size: int = documented("Rows of the embedding table and of the output head (V).")
    emb_dim: int = documented("Width of one residual stream (D).")
    compress_ratios: list[int] = documented(
        "One number per decoder layer: 0 attends to the sliding window only, `csa_compress_ratio` adds "
        "compressed-sparse attention (overlapping windows, top-k by the indexer), any other ratio adds "
        "heavily-compressed attention (every visible entry)."
    )
    num_query_heads: int = documented("Query heads (H). Keys and values have one shared head.")
    head_dim: int = documented("Channels per head, for queries, keys and values (C).")
    qk_rope_head_dim: int = documented("Last channels of each head that rotate (R).")
    q_lora_rank: int = documented("Rank of the query's low-rank projection.")
    o_groups: int = documented("Groups of heads in the output projection.")
    o_lora_rank: int = documented("Rank of the output projection, per group.")
    num_experts: int = documented("Routed experts per layer (E).")
    num_experts_per_tok: int = documented("Routed experts each token visits (K).")
    moe_mlp_dim: int = documented("Hidden width of one routed expert and of the shared expert (F).")
    indexer_n_heads: int = documented("Heads of the lightning indexer.")
    indexer_head_dim: int = documented("Channels per indexer head.")
    indexer_topk: int = documented("Compressed entries each query of a compressed-sparse layer keeps.")
    csa_compress_ratio: int = documented("The ratio in `compress_ratios` that means compressed-sparse attention.", 4)
    sliding_window_size: int = documented("Raw keys a query sees, itself included.", 128)
    first_num_hash_layers: int = documented("First layers, whose experts are chosen by token id.", 3)
    shared_experts: int = documented("Shared experts, as one expert of `shared_experts` times the width.", 1)
    routed_scaling_factor: float = documented("Scale of the routed experts' weights.", 1.5)
    mlp_activations_limit: float = documented("Clamp of the SwiGLU's gate (above) and linear part (both sides).", 10.0)
    mhc_expansion_rate: int = documented("Residual streams of the hyper-connections (N).", 4)
    sinkhorn_iterations: int = documented("Rounds of row and column normalisation of the stream mixing matrix.", 20)
    mhc_epsilon: float = documented("Epsilon of the hyper-connections' normalisations.", 1e-6)
    normalization_layer_epsilon: float = documented("Epsilon of every RMSNorm.", 1e-6)
    rope_max_timescale: float = documented("RoPE base of the sliding-only layers.", 10_000.0)
    compressed_rope_max_timescale: float = documented("RoPE base of the compressed layers.", 160_000.0)
    yarn_factor: float = documented("YaRN factor of the compressed layers; 1 switches YaRN off.", 16.0)
    yarn_beta_fast: float = documented("YaRN: rotations above which a channel pair keeps its frequency.", 32.0)
    yarn_beta_slow: float = documented("YaRN: rotations below which a channel pair is divided by the factor.", 1.0)
    yarn_original_max_position: int = documented("YaRN: length the model was trained at before scaling.", 65_536)

    @property
    def num_layers(self) -> int:
        return len(self.compress_ratios)

    @property
    def compress_multiple(self) -> int:
        """Sequence lengths must be a multiple of this, so that every compress window is whole."""
        return math.lcm(*(r for r in self.compress_ratios if r)) if any(self.compress_ratios) else 1


# What can be adapted, by path within a layer: the letters of the weight, of A and of B, r being the rank. `routed` has
# one adapter per expert (e). `wo_a` has an A for the heads of one group (j), shared by all groups, and a B for each
# group (g): the product has the rows of the published matrix [G O, (H / G) C].
ADAPTER_LETTERS = {
    "attention/wq_a": ("dq", "dr", "rq"),
    "attention/wq_b": ("qhc", "qr", "rhc"),
    "attention/wkv": ("dc", "dr", "rc"),
    "attention/wo_a": ("hco", "jcr", "gro"),
    "attention/wo_b": ("id", "ir", "rd"),
    "attention/compressor/wkv": ("dm", "dr", "rm"),
    "attention/compressor/wgate": ("dm", "dr", "rm"),
    "moe/shared/gate": ("df", "dr", "rf"),
    "moe/shared/up": ("df", "dr", "rf"),
    "moe/shared/down": ("fd", "fr", "rd"),
    "moe/routed/gate": ("edf", "edr", "erf"),
    "moe/routed/up": ("edf", "edr", "erf"),
    "moe/routed/down": ("efd", "efr", "erd"),
}


def adaptable(c: ModelConfig) -> list[str]:
    """The weights of this model that can have an adapter, by path within a layer."""
    return [name for name in ADAPTER_LETTERS if any(c.compress_ratios) or "/compressor/" not in name]
