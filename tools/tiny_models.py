"""Tiny configs of every causal LM that transformers knows: its own config class, with sizes cut down.

Generic, by the names of config fields; what a family needs besides is in `HINTS`. Building the models is not done here
but in `hoist.scheduler.models`, trying them in `sweep_models.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 99
NUM_LAYERS = 4
HIDDEN = 32
#: Tokens of the longest window that a tiny model takes.
MAX_TOKENS = 64

#: What config fields of these names become, in whatever config, where their own value is larger.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE
    ),
    **dict.fromkeys(
        (
            "hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embed_dim", "word_embed_proj_dim",
            "embedding_size", "attention_hidden_size", "input_embedding_size", "output_embedding_size", "lru_width",
            "input_size", "out_hidden_size", "hidden_size_global", "backbone_hidden_size", "dim_model",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner", "ffn_hidden_size", "dff",
            "dim_ff", "d_inner", "d_ff", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size",
            "expert_ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim",
            "shared_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers",
            "num_blocks",
        ),
        NUM_LAYERS,
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "depth", "num_global_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads",
            "attention_heads", "num_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
            "swa_num_attention_heads", "index_n_heads", "linear_num_heads", "linear_num_value_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads", "n_mamba_heads",
            "num_query_groups", "kv_n_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
            "rotary_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim",
            "attention_head_dim",
            "attention_head_size", "d_head", "dim_head", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "d_kv",
            "global_head_dim",
        ),
        8,
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "hc_lowrank", "adapter_rank"), 16),
    **dict.fromkeys(
        (
            "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "index_topk_blocks"), 2
    ),
    **dict.fromkeys(("topk_group", "n_group", "num_expert_group"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"), 1
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "context_length",
            "model_max_length", "original_max_position_embeddings",
        ),
        MAX_TOKENS,
    ),
    **dict.fromkeys(
        (
            "sliding_window", "attention_window_size", "window_size", "sliding_window_size", "index_topk",
            "keep_window_size", "local_attention", "local_attention_window_len", "attention_chunk_size",
        ),
        5,
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_kv_shared_layers",), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "index_block_size"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
}  # fmt: skip

#: Fields that hold one entry a layer: cut to as many as there are layers, one of each kind where they fit.
PER_LAYER = (
    "layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "attention_layers", "no_rope_layers",
    "activation_sparsity_pattern", "num_attention_heads_per_layer", "layer_rope_theta",
)  # fmt: skip

_GEMMA = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_ZAMBA = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"]
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "ngram_vocab_size_base": 40, "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
}  # fmt: skip

#: What a family needs besides, by model type; names of nested configs are keys of nested tables.
HINTS: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {
        "num_hidden_layers": 5, "num_kv_shared_layers": 2, "layer_types": _GEMMA,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0], "intermediate_size": 48,
    },
    "gemma4_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "layer_types": _GEMMA},
    "gemma4_unified_text": {"num_hidden_layers": 5, "layer_types": _GEMMA},
    "gemma4": {"text_config": {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "layer_types": _GEMMA}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_unified": {"text_config": {"num_hidden_layers": 5, "layer_types": _GEMMA}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "attn_layers": ["local", "lsh", "local", "lsh"], "num_buckets": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _ZAMBA, "num_hidden_layers": 6},
}  # fmt: skip


def causal_lm_types() -> list[str]:
    """Model types of ``MODEL_FOR_CAUSAL_LM_MAPPING``, in its order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of ``model_type`` with a few thousand parameters. Raises whatever its class does on sizes it refuses."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return kind(**_overrides(kind, HINTS.get(model_type, {})))


def _overrides(kind: type[PreTrainedConfig], hints: Mapping[str, Any]) -> dict[str, Any]:
    default = _default(kind)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = field.name
        value = _plain(field)
        if value is None and (name in PER_LAYER or name in kind.sub_configs):
            value = vars(default).get(name) if default is not None else None
        if name in kind.sub_configs:
            inner: Any = type(value) if isinstance(value, PreTrainedConfig) else kind.sub_configs[name]
            if isinstance(inner, type) and issubclass(inner, PreTrainedConfig):
                nested = hints.get(name, {})
                if not isinstance(nested, Mapping):
                    chosen[name] = nested
                    continue
                chosen[name] = _overrides(inner, nested) | {"model_type": inner.model_type}
        elif name in ("is_decoder", "causal"):
            chosen[name] = True  # encoders see the labels that they are to learn
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            chosen[name] = min(value, SIZES[name]) if value > 0 else value
        elif name in PER_LAYER and isinstance(value, list | tuple):
            chosen[name] = _sample(list(value), NUM_LAYERS)
        elif name == "head_dim" and value is None:
            chosen[name] = SIZES[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            chosen[name] = value if value < VOCAB_SIZE else 2
        elif name.endswith("_token_id") and isinstance(value, list | tuple):
            chosen[name] = [2]
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        # multi-head latent attention: every head has keys of its own, rotated and not
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
        if "qk_head_dim" in chosen:
            chosen["qk_head_dim"] = SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]
    return chosen | {name: value for name, value in hints.items() if name not in kind.sub_configs}


def _sample(values: list[Any], count: int) -> list[Any]:
    """``count`` of the values in their order, with one of each kind as far as they go."""
    picked: list[int] = []
    for index, value in enumerate(values):
        if value not in [values[other] for other in picked]:
            picked.append(index)
    rest = [index for index in range(len(values)) if index not in picked]
    return [values[index] for index in sorted((picked + rest)[:count])]


def _default(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return copy.deepcopy(kind())
    except Exception:  # a class that has no valid defaults
        return None


def _plain(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
