"""
A tiny random model of every causal-LM type that transformers knows, built offline from its config class.

One recipe shrinks any config by the names of its fields: sizes, layers, heads, experts, vocabulary, and windows and
chunks that are shorter than the test sequences. Of the layers it keeps one of each kind. What the recipe cannot know
stands in `OVERRIDES`. Weights are drawn large, so that attention and positions move the log-probabilities by far more
than rounding: a token that leaks from one row into another cannot hide.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


__all__ = ["VARIANTS", "NotBuiltError", "build", "build_type", "families"]

VOCAB, WINDOW, UNUSED_TOKEN = 64, 4, 60

_SIZES = f"""
32 hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size lru_width attention_hidden_size dim emb_dim
32 hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size
48 intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff dff ffn_hidden_size block_ffn_dim
48 dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size shared_intermediate_size
48 mlp_hidden_size
24 moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size
24 moe_shared_expert_intermediate_size
4 num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
4 num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads mamba_n_heads
4 mamba_num_heads linear_num_heads num_experts num_local_experts n_routed_experts moe_num_experts q_lora_rank
4 o_lora_rank
2 num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok
2 num_experts_per_token moe_topk moe_k top_k_experts index_n_heads
8 head_dim kv_channels v_head_dim qk_nope_head_dim qk_rope_head_dim kv_lora_rank dim_head d_kv swa_head_dim
8 swa_v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim global_head_dim mamba_d_state
8 ssm_state_size state_size mamba_head_dim mamba_d_head attention_head_dim rotary_dim d_rel time_step_rank
8 mamba_dt_rank
16 qk_head_dim laurel_rank hidden_size_per_layer_input
{VOCAB} vocab_size vocab_size_per_layer_input decoder_vocab_size n_words max_position_embeddings n_positions n_ctx
{VOCAB} max_seq_len model_max_length max_target_positions max_source_positions original_max_position_embeddings
{WINDOW} sliding_window attention_chunk_size window_size sliding_window_size attention_window_size local_attention
{WINDOW} index_topk chunk_size mamba_chunk_size rel_extent keep_window_size block_size floor_scale index_block_size
1 n_group topk_group n_groups mamba_n_groups num_expert_group n_shared_experts num_nextn_predict_layers
1 num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index
"""
_SIZE_OF = {name: int(size) for size, *names in map(str.split, _SIZES.strip().split("\n")) for name in names}
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers",
)  # fmt: skip
_DROPOUTS = ("dropout", "pdrop", "layerdrop", "jitter_noise", "dropout_p", "dropout_prob")

_SSD = {"mamba_n_heads": 8, "mamba_d_ssm": 64}  # heads * head size = expand * hidden size
_TEMPERATURE = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5} | {
    "original_max_position_embeddings": WINDOW
}
_ATTENTION = ["sliding_attention", "full_attention"]
_SHARED = {"num_hidden_layers": 3, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "bart": {"encoder_layers": 1},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": _ATTENTION,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _ATTENTION},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        "per_layer_config": {
            2: {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 4, "kv_lora_rank": 8}
            | {"head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        }
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
        "layer_types": [*_ATTENTION, _ATTENTION[0]], "initializer_range": 1.0,
    },
    "falcon_h1": _SSD,
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "layer_types": _ATTENTION * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_hidden_layers": 3},
    "luke": {"entity_vocab_size": 64},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"index_topk_blocks": 2},
    "ministral3": {"rope_parameters": _TEMPERATURE},
    "mistral4": {"rope_parameters": _TEMPERATURE},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # two recurrent layers, one of attention
    "xlm": {"causal": True},
    "xlnet": {"d_head": 8},
    "xlstm": {"embedding_dim": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], **_SHARED},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_headdim": 8, "hybrid_layer_ids": [1, 2], **_SHARED,
    },
}  # fmt: skip
"""Fields of configs that the recipe cannot derive, by model type; set before anything is derived from them."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text, attn_temperature_tuning=False": ("llama4_text", {"attn_temperature_tuning": False}),
    "gpt2, scale_attn_by_inverse_layer_idx": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gemma3_text, use_bidirectional_attention": ("gemma3_text", {"use_bidirectional_attention": True}),
    "bert, is_decoder=False": ("bert", {"is_decoder": False}),
    "qwen4_exp_text, n-gram embeddings": (
        "qwen4_exp_text",
        {"eos_token_id": 2, "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2}
        | {"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4},
    ),
    "lfm2, attention only": ("lfm2", {"layer_types": ["full_attention", "full_attention"]}),
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["attention", "attention"]}),
}
"""Settings that change what a layer does: name, model type, and fields of its config."""

NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "It drafts tokens for another model, whose keys and values all its layers read.",
    ),
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"),
        "Four rows of its batch are the codebooks of one sound, so its rows are no sequences of their own.",
    ),
    "reformer": (
        "It hashes tokens at random, so two forwards of one row differ, and it has gradients in training mode only."
    ),
}
"""Types of which no model is built, and why."""


class NotBuiltError(Exception):
    """A model of this type cannot be built here; the message says why."""


def families() -> list[str]:
    """Every model type with a causal language model in transformers' auto mapping, and the variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def build(family: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """A tiny random model of a family (a model type, or one of `VARIANTS`), in evaluation mode."""
    return build_type(*VARIANTS.get(family, (family, {})), attn_implementation)


def build_type(
    model_type: str, given: dict[str, Any], attn_implementation: str | None = None, auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """As [`build`], with fields of the config that are `given`, and as the model that an auto class makes."""
    if model_type in NOT_BUILT:
        raise NotBuiltError(NOT_BUILT[model_type])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = tiny_config(CONFIG_MAPPING[model_type], {**OVERRIDES.get(model_type, {}), **given})
            if model_type == "gemma3n":
                _replace_tower(config)
            torch.manual_seed(0)
            model = auto.from_config(config, attn_implementation=attn_implementation)
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    _redraw(model)
    return model.float().eval()


def _replace_tower(config: PretrainedConfig) -> None:
    """Give a model another vision tower, since its own needs timm; rows of text never reach one."""
    own, tower = config.vision_config, tiny_config(CONFIG_MAPPING["siglip_vision_model"], {})
    for name in ("rms_norm_eps", "vocab_offset", "vocab_size"):
        setattr(tower, name, getattr(own, name))
    config.__dict__["vision_config"] = tower  # past the check of its type


def tiny_config(cls: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """The smallest config of `cls` that still has every kind of layer."""
    given = {**_shrunk(cls().to_dict()), **overrides}
    return cls(**copy.deepcopy(given))  # configs write into what they are given


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    kept = _kept_layers(fields)
    small = {name: _small(name, value, fields, kept) for name, value in fields.items() if name not in _DERIVED}
    if "is_decoder" in fields:
        small["is_decoder"] = True
    if "kv_lora_rank" in fields and small.get("num_key_value_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]  # latent attention expands keys to every head
    if small.get("use_sliding_window") is False:
        small["use_sliding_window"] = True
        small["max_window_layers"] = 1
        if set(fields.get("layer_types") or []) == {"full_attention"}:
            small["layer_types"] = ["full_attention", "sliding_attention"]
    return small


def _small(name: str, value: Any, fields: dict[str, Any], kept: list[int]) -> Any:
    if isinstance(value, dict) and "model_type" in value:
        return {**_shrunk(value), **OVERRIDES.get(value["model_type"], {})}
    if isinstance(value, dict) and name.startswith("rope_"):
        return _small_rope(value)
    if name == "per_layer_config":
        given = {int(i): layer for i, layer in (value or {}).items()}
        return {new: {k: _resize(k, v) for k, v in given[old].items()} for new, old in enumerate(kept) if old in given}
    if value is None or (name == "sliding_window" and value == 0):
        return {"sliding_window": WINDOW, "head_dim": 8, "num_key_value_heads": 4}.get(name)
    if isinstance(value, bool):
        return value
    if name in _LAYERS and isinstance(value, int):
        return len(kept)
    if isinstance(value, int | float) and (name.endswith(_DROPOUTS) or name.startswith("dropout")):
        return type(value)(0)
    if isinstance(value, list) and len(value) == _layer_count(fields) and len(value) > 1:
        return [_resize(name, value[i]) for i in kept]
    if name.endswith(("token_id", "token_index")):
        return _TOKENS.get(name, UNUSED_TOKEN)
    return _resize(name, value)


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
_DERIVED = {"id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states", "problem_type"}
_DERIVED |= {"transformers_version", "model_type", "architectures", "_name_or_path", "dtype"}


def _resize(name: str, value: Any) -> Any:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return min(value, _SIZE_OF.get(name, value)) if is_size else value


def _layer_count(fields: dict[str, Any]) -> int:
    return next((fields[n] for n in _LAYERS if isinstance(fields.get(n), int)), 0)


def _kept_layers(fields: dict[str, Any]) -> list[int]:
    """The first layer of each kind, and two at least; kinds are what the per-layer lists say."""
    count = _layer_count(fields)
    lists = [v for v in fields.values() if isinstance(v, list) and len(v) == count and count > 1]
    layers = {int(i): layer for i, layer in (fields.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists] + [layers.get(i)]), i)
    kept = sorted(kinds.values())[:6]
    return kept if len(kept) > 1 else list(range(min(2, count)))


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(v, dict) for v in rope.values()):
        return {k: _small_rope(v) if isinstance(v, dict) else v for k, v in rope.items()}
    return {k: (VOCAB if k == "original_max_position_embeddings" else v) for k, v in rope.items()}


def _redraw(model: nn.Module) -> None:
    """Large random weights; what is a vector or a scalar (norms, biases, sinks, decays) is only shaken."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.4 / min(parameter.shape[-2:]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
