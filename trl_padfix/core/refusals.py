"""
Why a model cannot be packed with exact results. [`check_call`] has the reasons of single calls.

The rules read the code of a layer; they do not look at names of models. The parity check covers cases that no rule
foresees. A function `*_obstacle` returns the reason, or `None` if there is none.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .anatomy import Anatomy
from .attention.attention import attends_within_tokens, implementation_obstacle, is_causal
from .mixers.mixers import DIRECT, Mixers, hidden_mixing, marks_cross_attention
from .model.inspection import forward_of, names_in, parameters_of
from .model.views import config_of
from .probes import change_of_earlier_states, other_modules


__all__ = ["refusal"]

_VIRTUAL_TOKENS = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"}
"""Kinds of prompt learning that prepend virtual tokens to embeddings and to the mask: ordinary tokens for packing."""

_CAUSAL = {"causal": True, "is_decoder": True, "use_bidirectional_attention": False}
"""Fields of configurations that may make a decoder bidirectional, and their values in a causal model."""


def refusal(anatomy: Anatomy) -> str | None:
    """Why a model cannot be packed with exact results: the layer or setting, and the reason; `None` if it can."""
    model, decoder = anatomy.pretrained, anatomy.decoder
    config, others = config_of(decoder) or model.config, other_modules(decoder)
    for peft_config in anatomy.peft_configs:
        if reason := _adapter_obstacle(peft_config):
            return f"{type(peft_config).__name__} {reason}"
    if reason := _encoder_decoder_obstacle(anatomy) or next(filter(None, map(hidden_mixing, others)), None):
        return reason
    if {"start_positions", "end_positions"} <= parameters_of(type(model).forward).keys():
        return (
            "its loss is a softmax over all columns of a row, padding among them, so it depends on the padding of a "
            "batch; a token classifier with labels at the first and the last token of the answer does not"
        )
    for table in anatomy.position_tables:
        if "padding_idx" in names_in(type(table).forward):
            return f"`{type(table).__name__}` computes positions from the padded batch and accepts none"
    if prompt_length := getattr(decoder, "prompt_length", 0):
        return f"its decoder puts `prompt_length={prompt_length}` tokens of its own before every row"
    if "patch_lengths" in parameters_of(decoder.forward):
        return "its decoder groups the tokens of a row into patches"
    mixers = anatomy.mixers
    if not mixers.mixers:
        return f"we found no layer that mixes tokens in {type(decoder).__name__}"
    for mixer in mixers.mixers:
        cache_position = parameters_of(forward_of(mixer.module)).get("cache_position")
        is_required = cache_position is not None and cache_position.default is cache_position.empty
        if mixer.mode != DIRECT and is_required:
            return (
                f"layer `{mixer.name}` ({type(mixer.module).__name__}) keeps its state by places in a cache, which "
                "rows that are computed together do not have; newer versions of transformers may have fixed that"
            )
    reason = _direction_obstacle(anatomy) or implementation_obstacle(str(config._attn_implementation))
    return reason or _device_obstacle(decoder)


def _encoder_decoder_obstacle(anatomy: Anatomy) -> str | None:
    """Why an encoder-decoder model cannot be packed; `None` for other models."""
    decoder = anatomy.decoder
    around = [m for m in anatomy.pretrained.modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    # The innermost model around the decoder: BLIP-2 takes `decoder_input_ids`, too, and passes them to a T5 only.
    model = next((m for m in reversed(around) if decoder in m.modules()), anatomy.pretrained)
    # The configuration may be wrong about it (T5's, with `is_encoder_decoder=False`), but the forward is not.
    takes_two = "decoder_input_ids" in parameters_of(type(model).forward)
    if not (takes_two or anatomy.pretrained.config.is_encoder_decoder):
        return None
    return "it is an encoder-decoder model, and only decoders that attend to themselves alone are packed"


def _direction_obstacle(anatomy: Anatomy) -> str | None:
    """Why a decoder is not causal, with the setting that makes it so."""
    decoder = anatomy.decoder
    config = config_of(decoder) or anatomy.pretrained.config
    # Where a multimodal module makes the masks, each call is checked instead: its masks show what is not causal.
    if anatomy.multimodal is not None and "create_causal_mask" in names_in(type(anatomy.multimodal).forward):
        return None
    evidence = _why_not_causal(decoder, config, anatomy.mixers)
    return evidence and f"{evidence}, and a packed batch is attended causally"


def _why_not_causal(decoder: nn.Module, config: PretrainedConfig, mixers: Mixers) -> str | None:
    """Evidence that tokens of a decoder attend to later ones; `None` if there is none."""
    for mixer in mixers.mixers:
        # Cross-attention is not causal by nature; it does not run in a decoder without an encoder.
        if not all(is_causal(m) for m in mixer.module.modules() if not marks_cross_attention(m)):
            return f"layer `{mixer.name}` ({type(mixer.module).__name__}) uses bidirectional or cross-attention"
    names = names_in(type(decoder).forward)
    # `is_decoder` is a field of all configurations, and acts in the code that reads it.
    for name, causal in _CAUSAL.items():
        # "vision": only image tokens attend to each other, and a call with images has a mask that shows it.
        value = getattr(config, name, causal)
        if value not in (causal, None, "vision") and (name in names or name != "is_decoder"):
            return f"`config.{name}={value!r}` lets its tokens see later ones"
    makes_causal_masks = "create_causal_mask" in names and "create_bidirectional_mask" not in names
    is_unclear = any(map(attends_within_tokens, decoder.modules())) or other_modules(decoder)
    if makes_causal_masks and not is_unclear:
        return None  # the code is proof enough: the probe below needs the weights
    if change := change_of_earlier_states(decoder):
        return f"its tokens see later ones: another last token moves the states before it by {change:.0e}"
    return None


def _adapter_obstacle(config: Any) -> str | None:
    """Why packing would change the results of a PEFT adapter that reads several tokens at once; `None` if not."""
    kind = config.peft_type  # a string, or an enum of strings
    if config.is_prompt_learning and kind not in _VIRTUAL_TOKENS:
        return (
            "puts a cache before every row, or other things that the attention mask of the batch does not show. Use "
            "LoRA, prompt tuning or p-tuning"
        )
    if getattr(config, "alora_invocation_tokens", None):
        return "with `alora_invocation_tokens` acts from a position that is counted from the end of a padded row"
    return "weights its experts by the mean over all tokens of a batch, padding included" if kind == "LILY" else None


def _device_obstacle(decoder: nn.Module) -> str | None:
    """Why a decoder whose layers are on several devices cannot be packed; `None` if they are on one."""
    # A `dict` is an ordered set here: the message lists the devices in the order of the layers.
    devices = dict.fromkeys(str(p.device) for p in decoder.parameters() if p.device.type != "meta")
    # accelerate's hooks move modules while they run, offloaded weights among them, to `execution_device`.
    targets = (getattr(vars(m).get("_hf_hook"), "execution_device", None) for m in decoder.modules())
    devices |= dict.fromkeys(str(d) for d in targets if d not in (None, "cpu", "disk"))
    names = list(dict.fromkeys(f"cuda:{name}" if name.isdigit() else name for name in devices))
    if len(names) < 2:
        return None
    return (
        f"its layers are on several devices ({', '.join(names)}), and the layout of a packed batch is on one. Load it "
        "without `device_map` and split it over processes (FSDP2, DeepSpeed), or onto one GPU (`device_map={'': 0}`)"
    )
