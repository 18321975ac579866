"""A Hugging Face DeepSeek-V4 folder's config.json as values of the `model.` keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from trainer.errors import ConfigError


def model_values(folder: Path | epath.Path) -> dict[str, Any]:
    """config.json -> values for the `model.` keys. Reads the published spelling and the one `transformers` saves."""
    path = folder / "config.json"
    try:
        hf = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face folder holds config.json and *.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    _refuse_unknown_architecture(path, hf)
    names = {
        "vocab_size": "vocab_size",
        "emb_dim": "hidden_size",
        "num_query_heads": "num_attention_heads",
        "head_dim": "head_dim",
        "q_lora_rank": "q_lora_rank",
        "o_groups": "o_groups",
        "o_lora_rank": "o_lora_rank",
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_mlp_dim": "moe_intermediate_size",
        "indexer_n_heads": "index_n_heads",
        "indexer_head_dim": "index_head_dim",
        "indexer_topk": "index_topk",
        "sliding_window_size": "sliding_window",
        "shared_experts": "n_shared_experts",
        "routed_scaling_factor": "routed_scaling_factor",
        "mlp_activations_limit": "swiglu_limit",
        "mhc_expansion_rate": "hc_mult",
        "sinkhorn_iterations": "hc_sinkhorn_iters",
        "mhc_epsilon": "hc_eps",
        "normalization_layer_epsilon": "rms_norm_eps",
    }
    missing = [hf_name for hf_name in names.values() if hf.get(hf_name) is None]
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(missing)}")
    values = {ours: hf[theirs] for ours, theirs in names.items()}
    rope_dim = hf.get("qk_rope_head_dim") or round(hf["head_dim"] * hf.get("partial_rotary_factor", 0.125))
    return values | {"qk_rope_head_dim": rope_dim} | _layer_values(path, hf) | _rope_values(path, hf)


def _refuse_unknown_architecture(path: Any, hf: Mapping[str, Any]) -> None:
    if not isinstance(hf, dict) or hf.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ConfigError(f"{path}: not a DeepSeek-V4 config (model_type is not deepseek_v4)")
    only = {
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ConfigError(f"{path}: {key}={hf[key]!r} is not supported, only {value!r}")


def _layer_values(path: Any, hf: Mapping[str, Any]) -> dict[str, Any]:
    """compress_ratios and the number of hash layers."""
    layers = hf.get("num_hidden_layers")
    if hf.get("layer_types") is not None:
        rates = {"sliding_attention": 0} | hf.get("compress_rates", {})
        unknown = set(hf["layer_types"]) - set(rates)
        if unknown:
            raise ConfigError(f"{path}: layer_types holds {sorted(unknown)}, for which compress_rates has no rate")
        ratios = [rates[kind] for kind in hf["layer_types"]]
        sparse = rates.get("compressed_sparse_attention", 4)
        if sparse == rates.get("heavily_compressed_attention"):
            raise ConfigError(f"{path}: both kinds of compressed attention have rate {sparse}; not supported")
    elif hf.get("compress_ratios") is not None:
        if "compress_rate_csa" in hf or "compress_rate_hca" in hf:
            raise ConfigError(f"{path}: compress_rate_csa and compress_rate_hca are not read; use compress_rates")
        ratios, sparse = hf["compress_ratios"][:layers], 4
    else:
        # `transformers` falls back to another model's pattern here; a wrong model that trains is worse than none.
        raise ConfigError(f"{path}: has neither compress_ratios nor layer_types, so the layers' kinds are unknown")
    if hf.get("mlp_layer_types") is not None:
        hashed = [kind == "hash_moe" for kind in hf["mlp_layer_types"]]
        num_hash = sum(hashed)
        if not all(hashed[:num_hash]):
            raise ConfigError(f"{path}: mlp_layer_types must have its hash_moe layers first")
    elif hf.get("num_hash_layers") is not None:
        num_hash = min(hf["num_hash_layers"], len(ratios))
    else:
        raise ConfigError(f"{path}: has neither num_hash_layers nor mlp_layer_types")
    return {"compress_ratios": ratios, "csa_compress_ratio": sparse, "first_num_hash_layers": num_hash}


def _rope_values(path: Any, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Bases and YaRN. Without rope_scaling YaRN is off, as in `transformers`."""
    nested = hf.get("rope_parameters") or {}
    yarn = nested.get("compress") or hf.get("rope_scaling") or {}
    values = {
        "rope_max_timescale": (nested.get("main") or {}).get("rope_theta", hf.get("rope_theta")),
        "compressed_rope_max_timescale": yarn.get("rope_theta", hf.get("compress_rope_theta")),
    }
    if None in values.values():
        raise ConfigError(f"{path}: rope_theta or compress_rope_theta is missing")
    kind = yarn.get("rope_type", yarn.get("type", "default"))
    if kind == "default":
        return values | {"yarn_factor": 1.0}
    if kind != "yarn" or yarn.get("attention_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{path}: compressed layers take rope type yarn with attention_factor 1, or default; not {yarn}"
        )
    if not {"factor", "original_max_position_embeddings"} <= set(yarn):
        raise ConfigError(f"{path}: yarn needs factor and original_max_position_embeddings")
    return values | {
        "yarn_factor": yarn["factor"],
        "yarn_beta_fast": yarn.get("beta_fast", 32),
        "yarn_beta_slow": yarn.get("beta_slow", 1),
        "yarn_original_max_position": yarn["original_max_position_embeddings"],
    }
