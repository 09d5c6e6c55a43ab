"""
What is refused, and why.

Rules are about what a layer does, not about names of models. What no rule knows is caught by the parity check.
"""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from . import compat
from .attention import refuse_implementation, uses_attention_interface


__all__ = ["refusal"]


def refusal(wrapper: nn.Module, model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """
    Why a decoder cannot be packed with exact results.

    Args:
        wrapper (`torch.nn.Module`):
            What the user attached to: `model` itself, or a PEFT or other wrapper around it.
        model ([`~transformers.PreTrainedModel`]):
            The model.
        decoder (`torch.nn.Module`):
            Its text decoder.

    Returns:
        `str`, *optional*: the layer or setting, and the reason; `None` if nothing speaks against it.
    """
    config = getattr(decoder, "config", model.config)
    for peft_config in (c for m in wrapper.modules() for c in (getattr(m, "peft_config", None) or {}).values()):
        if getattr(peft_config, "is_prompt_learning", False):
            return (
                f"{type(peft_config).__name__} puts virtual tokens or a cache before every row, which the attention "
                "mask of the batch does not show; use LoRA"
            )
    if getattr(model.config, "vision_config", None) is not None:
        return "it takes images, and packing what they become in the decoder is not supported yet"
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and only decoders that attend to themselves alone are packed"
    attentions = {m for m in decoder.modules() if uses_attention_interface(m)}
    if not attentions:
        return "its layers do not attend through transformers' attention interface, so they cannot be told the layout"
    for name, blocks in decoder.named_modules():
        if isinstance(blocks, nn.ModuleList) and any(attentions & set(block.modules()) for block in blocks):
            for i, block in enumerate(blocks):
                if reason := _layer_refusal(block, attentions):
                    return f"layer `{name}.{i}` ({type(block).__name__}) {reason}"
    unknown = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if unknown:
        return f"its layers of type {sorted(unknown)} mix tokens in a way that a packed batch does not keep apart"
    if getattr(config, "attention_chunk_size", None):
        return "`attention_chunk_size` makes who sees whom depend on the place in the padded row"
    if getattr(config, "use_bidirectional_attention", None):
        return "`use_bidirectional_attention` lets tokens see later ones, and a packed batch is attended causally"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return f"`{type(decoder).__name__}.forward` takes no `position_ids`, so packed tokens have no place"
    return refuse_implementation(config._attn_implementation) or compat.refusal(decoder, config._attn_implementation)


def _layer_refusal(block: nn.Module, attentions: set[nn.Module]) -> str | None:
    own = [m for m in block.modules() if m in attentions]
    if not own:
        return "has no attention that goes through transformers' attention interface"
    if any(getattr(m, "is_cross_attention", False) for m in own):
        return "has cross-attention, whose keys come from another sequence"
    if any(not getattr(m, "is_causal", True) for m in own):
        return "attends in both directions, and a packed batch is attended causally"
    for module in block.modules():
        if isinstance(module, nn.Conv1d):
            return f"has a convolution over the sequence (`{type(module).__name__}`), which would mix packed rows"
    return None
