"""What a training step has to compute, counted from the config: the model's own arithmetic, without recompute.

A matmul of n rows and p weights is 2 n p FLOP. Its backward costs the same once for the input and once for the weight;
the latter falls away where the weight is frozen. Attention has no weights: its backward is twice its forward.
"""

from dataclasses import dataclass

import numpy as np

from trainer.models.config import ModelConfig

# Dense bfloat16 FLOP/s of one device, by the name JAX gives it.
# Source: the Cloud TPU documentation's page of each generation.
PEAK_FLOPS = {
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v7x": 2307e12,
}


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of one sequence's forward pass."""

    matmul: float  # with the weights a token visits, the output head's among them
    attention: float  # scores and weighted sums over visible keys
    indexer: float  # projections and scores, which have no backward

    def of_training(self, frozen: bool) -> float:
        """Forward and backward; with `frozen` weights (LoRA) none of theirs, and the adapters' own are left out."""
        return (2 if frozen else 3) * self.matmul + 3 * self.attention + self.indexer


def matmul_params(c: ModelConfig) -> int:
    """Weights one token is multiplied with, all layers, the indexer aside."""
    d, q, h, w = c.emb_dim, c.q_lora_rank, c.num_query_heads, c.head_dim
    attention = d * q + q * h * w + d * w + h * w * c.o_lora_rank + c.o_groups * c.o_lora_rank * d
    experts = (c.num_experts_per_tok + c.shared_experts) * 3 * d * c.moe_mlp_dim + d * c.num_experts
    n = c.mhc_expansion_rate
    connections = 2 * (2 + n) * n * n * d
    total = c.num_layers * (attention + experts + connections) + n * n * d + d * c.vocab_size
    for ratio in c.compress_ratios:
        if ratio:
            total += 2 * d * w * (2 if ratio == c.csa_compress_ratio else 1)
    return total


def forward_flops(c: ModelConfig, length: int) -> ForwardFlops:
    """One sequence of `length` tokens, one document."""
    position = np.arange(1, length + 1)
    window = np.minimum(position, c.sliding_window_size)
    attention = indexer = 0.0
    for ratio in c.compress_ratios:
        visible = position // ratio if ratio else np.zeros_like(position)
        seen = np.minimum(visible, c.indexer_topk) if ratio == c.csa_compress_ratio else visible
        attention += 4.0 * c.num_query_heads * c.head_dim * float(np.sum(window + seen))
        if ratio == c.csa_compress_ratio:
            heads, width = c.indexer_n_heads, c.indexer_head_dim
            weights = c.q_lora_rank * heads * width + c.emb_dim * heads + 4 * c.emb_dim * width
            indexer += 2.0 * weights * length + 2.0 * heads * width * float(np.sum(visible))
    return ForwardFlops(2.0 * matmul_params(c) * length, attention, indexer)
