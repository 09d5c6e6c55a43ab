"""Find the parts of a model: the transformers model in a wrapper, its decoder, the multimodal module around it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .older import decoder_of


__all__ = [
    "find_decoder", "find_multimodal", "find_peft", "find_pretrained", "is_peft", "outermost_pretrained",
    "peft_configs_in",
]  # fmt: skip


def find_decoder(model: PreTrainedModel) -> Any:
    """The text decoder of a model: the module between the embeddings and the head."""
    decoder = decoder_of(model)
    if isinstance(decoder, PreTrainedModel) and decoder is not model and decoder.get_output_embeddings() is not None:
        return find_decoder(decoder)  # a language model with a head of its own (BLIP-2's)
    if not isinstance(decoder, PreTrainedModel) or decoder.get_output_embeddings() is not None:
        # `get_decoder` returns no decoder: some models call their output layer `decoder`, some return themselves.
        inner = [module for module in model.children() if isinstance(module, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    return decoder


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """
    The one transformers model in `model`, a wrapper or the model itself.

    Raises:
        TypeError: If there is none, or more than one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`remove_padding` takes a model, got `{type(model).__name__}`.")
    outermost = outermost_pretrained(model)
    if len(outermost) != 1:
        names = ", ".join(type(m).__name__ for m in outermost) or "none"
        raise TypeError(
            f"`remove_padding` takes a transformers model or a wrapper around one, and `{type(model).__name__}` "
            f"contains {names}. If there are several, attach to each, or to the decoder that they share."
        )
    return outermost[0]


def outermost_pretrained(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in `model`, without those that others contain (a decoder)."""
    if isinstance(model, PreTrainedModel):  # most steps need no walk over all modules
        return [model]
    found = list(dict.fromkeys(m for child in model.children() for m in outermost_pretrained(child)))
    inside = {inner for m in found for inner in m.modules() if inner is not m} if len(found) > 1 else set()
    return [m for m in found if m not in inside]


def is_peft(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around a transformers model."""
    return hasattr(module, "get_base_model")


def find_peft(model: nn.Module) -> nn.Module | None:
    """PEFT's wrapper in `model`, or `model` itself; `None` without adapters of PEFT's own."""
    return next(filter(is_peft, model.modules()), None)


def peft_configs_in(model: nn.Module) -> tuple[Any, ...]:
    """PEFT's configurations of all adapters of `model`, which PEFT keeps on its wrapper, by the adapter's name."""
    return tuple(c for m in model.modules() for c in (getattr(m, "peft_config", None) or {}).values())


def find_multimodal(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel | None:
    """The module of `model` that turns images and other inputs into embeddings for `decoder`, if it has one."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    around = [m for m in models if _is_composite(m.config) and any(inner is decoder for inner in m.modules())]
    return around[-1] if around else None  # the innermost: `modules()` lists outer ones first


def _is_composite(config: PretrainedConfig) -> bool:
    """Whether a config has a sub-config for its text decoder."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # more than one text config
        return True
