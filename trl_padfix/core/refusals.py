"""
What is refused, and why.

Rules are about what a layer does, not about names of models. What no rule knows is caught by the parity check.
"""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from .attention import counts_columns, refuse_implementation, uses_attention_interface
from .positions import position_embeddings, takes_positions


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
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and only decoders that attend to themselves alone are packed"
    attentions = {m for m in decoder.modules() if uses_attention_interface(m)}
    for name, blocks in decoder.named_modules():
        if isinstance(blocks, nn.ModuleList) and _are_layers(blocks, attentions):
            for i, block in enumerate(blocks):
                if reason := _layer_refusal(block, attentions):
                    return f"layer `{name}.{i}` ({type(block).__name__}) {reason}"
    unknown = set(getattr(config, "layer_types", None) or []) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if unknown:
        return f"its layers of type {sorted(unknown)} mix tokens in a way that a packed batch does not keep apart"
    # "vision": image tokens see each other; a call with images brings a mask of its own, and is refused for it.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "`use_bidirectional_attention` lets tokens see later ones, and a packed batch is attended causally"
    if not takes_positions(decoder) and not position_embeddings(decoder):
        return f"`{type(decoder).__name__}.forward` takes no `position_ids`, so packed tokens have no place"
    return refuse_implementation(str(config._attn_implementation))


def _are_layers(blocks: nn.ModuleList, attentions: set[nn.Module]) -> bool:
    """Whether `blocks` are the layers of a decoder: some attend, or where none does, each has parts of its own."""
    if attentions:
        return any(attentions & set(block.modules()) for block in blocks)
    return len(blocks) > 0 and all(any(True for _ in block.children()) for block in blocks)


def _layer_refusal(block: nn.Module, attentions: set[nn.Module]) -> str | None:
    own = [m for m in block.modules() if m in attentions]
    convolution = next((m for m in block.modules() if isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1), None)
    if not own:
        return f"has no attention that goes through transformers' attention interface: {_own_way(block, convolution)}"
    if convolution is not None:
        return f"has a convolution over the sequence (`{type(convolution).__name__}`), which would mix packed rows"
    if any(hasattr(module, "indexer") for module in block.modules()):
        return "selects the keys of a token with an indexer, among those of all packed rows"
    # Cross-attention is not run, unless a call brings the states of an encoder; that call is refused.
    if all(getattr(m, "is_cross_attention", False) or not getattr(m, "is_causal", True) for m in own):
        return "attends in both directions or to another sequence, and a packed batch is attended causally"
    for module in own:
        if counts_columns(module) and getattr(module, "attn_temperature_tuning", True):
            return (
                f"numbers its tokens by their place in the packed row (`{type(module).__name__}`, for the temperature "
                "of its attention); set `attn_temperature_tuning=False` if the model was trained without it"
            )
    return None


def _own_way(block: nn.Module, convolution: nn.Module | None) -> str:
    """How a layer without interface attention mixes tokens, as far as its parts tell."""
    forwards = [inspect.signature(module.forward).parameters for module in block.modules()]
    if any({"alibi", "position_bias"} & parameters.keys() for parameters in forwards):
        return "it writes its attention out, with a bias built from the places in the padded batch (ALiBi or its kin)"
    if convolution is not None:
        return "it mixes tokens with a convolution over the sequence, and packed rows with them"
    if any("attention_mask" in parameters for parameters in forwards):
        return "it writes its attention out, and cannot be told where packed rows begin"
    return "it mixes tokens in a recurrence or in another way of its own, and cannot be told where packed rows begin"
