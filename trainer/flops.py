"""What a training step has to compute, counted from the config: the model's own arithmetic, without recompute.

A matmul of n rows and p weights is 2 n p FLOP. Its backward costs the same twice, once for the input and once for the
weight: 6 FLOP per weight and token in all (Kaplan et al. 2020, section 2.1; PaLM, appendix B, which also adds
attention's own products, as here), and 4 where the weight is frozen (LoRA; the adapters' own products are left out).
Attention has no weights: its backward is twice its forward. The indexer has no backward. Norms,
softmax, the mixing of streams and other elementwise work are left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.models.config import ModelConfig
from trainer.topology import chip_of


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of one sequence's forward pass."""

    matmul: float  # with the weights a token visits, the output head's among them
    attention: float  # scores and weighted sums over visible keys
    indexer: float  # projections and scores, which have no backward

    def of_training(self, frozen: bool) -> float:
        """Forward and backward, with every weight trained or all of them frozen."""
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


def indexer_params(c: ModelConfig) -> int:
    """Weights of one layer's indexer that a token is multiplied with."""
    heads, width = c.indexer_n_heads, c.indexer_head_dim
    return c.q_lora_rank * heads * width + c.emb_dim * heads + 4 * c.emb_dim * width


def forward_flops(c: ModelConfig, length: int) -> ForwardFlops:
    """One sequence of `length` tokens, one document.

    A query sees the sliding window and, in compressed layers, the entries of every window that has ended; with an
    indexer the best `indexer_topk` of them, all of which the indexer scores (SPEC sections 5 to 7).
    """
    position = np.arange(1, length + 1)
    window = np.minimum(position, c.sliding_window_size)
    attention = indexer = 0.0
    for ratio in c.compress_ratios:
        entries = position // ratio if ratio else np.zeros_like(position)
        seen = np.minimum(entries, c.indexer_topk) if ratio == c.csa_compress_ratio else entries
        attention += 4.0 * c.num_query_heads * c.head_dim * float(np.sum(window + seen))
        if ratio == c.csa_compress_ratio:
            scores = c.indexer_n_heads * c.indexer_head_dim * float(np.sum(entries))
            indexer += 2.0 * (indexer_params(c) * length + scores)
    return ForwardFlops(2.0 * matmul_params(c) * length, attention, indexer)


@dataclass(frozen=True)
class Utilization:
    """Model FLOP/s over the device's peak. None where the peak is not known, and where it would be above 1: then the
    clock or the count is wrong, and `impossible` says so."""

    mfu: float | None
    impossible: bool

    @classmethod
    def of(cls, flops_per_s: float, device: Any) -> "Utilization":
        chip = chip_of(device.device_kind)
        if chip is None:
            return cls(None, False)
        share = flops_per_s / (chip.bf16_flops_per_s / chip.devices)
        return cls(None, True) if share > 1 else cls(share, False)

    def __str__(self) -> str:
        """For a line of the console; empty where nothing is known."""
        if self.impossible:
            return "above the device's peak: not a measurement"
        return "" if self.mfu is None else f"MFU {self.mfu:.1%}"
