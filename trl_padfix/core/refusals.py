"""
What is refused, and why.

Rules are about what a layer does, not about names of models. What no rule knows is caught by the parity check.
"""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from .attention import refuse_implementation
from .layout import Layout
from .mixers import PACKED, Mixers
from .positions import position_embeddings
from .whole_rows import needs_whole_rows


__all__ = ["refusal", "refuse_holes"]


def refusal(
    wrapper: nn.Module, model: PreTrainedModel, decoder: nn.Module, mixers: Mixers | None = None
) -> str | None:
    """
    Why a decoder cannot be packed with exact results.

    Args:
        wrapper (`torch.nn.Module`):
            What the user attached to: `model` itself, or a PEFT or other wrapper around it.
        model ([`~transformers.PreTrainedModel`]):
            The model.
        decoder (`torch.nn.Module`):
            Its text decoder.
        mixers ([`Mixers`], *optional*):
            What mixes tokens in it, if that was found already.

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
    for table in position_embeddings(decoder):
        if "padding_idx" in inspect.unwrap(type(table).forward).__code__.co_names:
            return f"`{type(table).__name__}` numbers the tokens of a padded batch, and takes no positions instead"
    if needs_whole_rows(decoder):
        return None
    mixers = mixers or Mixers.of(decoder)
    if not mixers.mixers:
        return f"no module that attends or otherwise mixes tokens was found in the layers of {type(decoder).__name__}"
    for mixer in mixers.mixers:
        if not _is_causal(mixer.module):
            return (
                f"layer `{mixer.name}` ({type(mixer.module).__name__}) attends in both directions or to another "
                "sequence, and a packed batch is attended causally"
            )
        if mixer.how != PACKED and _needs_places_in_a_cache(mixer.module):
            return (
                f"layer `{mixer.name}` ({type(mixer.module).__name__}) keeps its state by places in a cache, which "
                "rows that are computed together do not have; newer versions of transformers may have mended that"
            )
    asks = "is_decoder" in inspect.unwrap(type(decoder).forward).__code__.co_names
    if asks and not getattr(config, "is_decoder", True):
        return "`config.is_decoder` is False, so its tokens see later ones, and a packed batch is attended causally"
    # "vision": image tokens see each other; a call with images brings a mask of its own, and is refused for it.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "`use_bidirectional_attention` lets tokens see later ones, and a packed batch is attended causally"
    return refuse_implementation(str(config._attn_implementation))


def refuse_holes(layout: Layout, mixers: Mixers) -> str | None:
    """Why a batch cannot be packed whose rows have masked tokens between real ones; `None` if it can, or has none."""
    others = [mixer for mixer in mixers.mixers if mixer.how != PACKED]
    if not others or layout.spans == layout.key_lengths:
        return None
    return (
        f"A row of the batch has masked tokens between real ones, and `{others[0].name}` "
        f"({type(others[0].module).__name__}: {others[0].why}) runs through what is masked there when it is padded, "
        "so no packed forward gives the same numbers. Leave out the masked tokens, or run this call inside `with "
        "handle.disabled():`."
    )


def _is_causal(module: nn.Module) -> bool:
    parts = [m for m in module.modules() if not getattr(m, "is_cross_attention", False)]
    return all(getattr(m, "is_causal", True) for m in parts)


def _needs_places_in_a_cache(module: nn.Module) -> bool:
    known = inspect.signature(inspect.unwrap(type(module).forward)).parameters.get("cache_position")
    return known is not None and known.default is inspect.Parameter.empty
