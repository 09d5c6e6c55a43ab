"""
Tiny random models, built from configs, one for each mechanism that a packed row can get wrong.

Weights are drawn large, so that attention is sharp: a token that sees one token too many moves the loss by far more
than rounding. Embeddings are not tied to the head, so that their gradient says which tokens a loss depends on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel


VOCABULARY, WINDOW, IMAGE = 96, 4, 90

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    head_dim=8, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.0, output_router_logits=False
)
_DELTA: dict[str, Any] = dict(
    head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_ROPE = {"rope_theta": 10000.0}
_VISION = dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=8),
    "gpt2": dict(  # positions are absolute
        n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "phi3": dict(  # other frequencies for rows of more than eight tokens
        num_key_value_heads=4, original_max_position_embeddings=8,
        rope_parameters=_ROPE | dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0],
        original_max_position_embeddings=8),
    ),
    "llama": dict(  # frequencies depend on the length
        max_position_embeddings=8, rope_parameters=_ROPE | dict(rope_type="dynamic", factor=4.0),
    ),
    "mistral": dict(sliding_window=WINDOW),
    "gemma2": dict(head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=None),
    "llama4_text": dict(
        head_dim=8, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0], attn_temperature_tuning=False,
    ),
    "gpt_oss": dict(  # gates that amplify rounding
        _EXPERTS, num_local_experts=4, sliding_window=WINDOW, initializer_range=0.1,
        rope_parameters=_ROPE | dict(rope_type="default"),
    ),
    "qwen3_moe": _EXPERTS | dict(num_experts=4, output_router_logits=True, router_aux_loss_coef=0.5),
    "qwen3_next": dict(_EXPERTS, **_DELTA, num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_5_text": _DELTA,
    "mamba2": dict(
        num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=4, conv_kernel=4, residual_in_fp32=False,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
    "qwen2_5_vl": dict(
        text_config=_SIZES | {"rope_parameters": _ROPE | dict(rope_type="default", mrope_section=[1, 1, 2])},
        vision_config=_VISION | dict(fullatt_block_indexes=[1]), image_token_id=IMAGE, video_token_id=91,
        vision_start_token_id=92, vision_end_token_id=93, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Model types of transformers, and what their tiny config has beyond the common sizes."""

WITHOUT = {"gemma2": ("sdpa",), "gpt_oss": ("sdpa",), "mamba2": ("sdpa", "eager")}
"""Attention implementations that a family does not have."""


def load(folder: str, attention: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model of a folder, with a head of its own where it was tied; another `seed` moves its weights a little."""
    given = {"dtype": torch.float32} | ({"attn_implementation": attention} if attention else {})
    model = AutoModelForCausalLM.from_pretrained(folder, **given, **changes)
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.get_output_embeddings().weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters() if seed else ():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return model.train()


def build(family: str, attention: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model, or the model of a folder: in float32, in training mode, without dropout but for `changes`."""
    if family not in FAMILIES:
        return load(family, attention, seed, **changes)
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **changes})
    auto = AutoModelForImageTextToText if family == "qwen2_5_vl" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms, biases, sinks, decays: none is exactly its default
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().train()
