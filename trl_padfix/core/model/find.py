"""Where things are in a model: the transformers model in a wrapper, its decoder, and what lies around the decoder."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .older import decoder_of


__all__ = ["find_decoder", "find_multimodal", "find_pretrained", "pools_by_token_id"]


def find_decoder(model: PreTrainedModel) -> Any:
    """The text decoder of a model: the module between the embeddings and the head."""
    decoder = decoder_of(model)
    if isinstance(decoder, PreTrainedModel) and decoder is not model and decoder.get_output_embeddings() is not None:
        return find_decoder(decoder)  # a language model with a head of its own (BLIP-2's)
    if not isinstance(decoder, PreTrainedModel) or decoder.get_output_embeddings() is not None:
        # Some models call their output layer `decoder`, some find themselves.
        inner = [module for module in model.children() if isinstance(module, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    return decoder


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """The one transformers model in `model`; a `TypeError` if there is none, or more than one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`remove_padding` takes a model, got `{type(model).__name__}`.")
    found: list[PreTrainedModel] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            found.append(module)
            inside.update(id(m) for m in module.modules())
    if len(found) != 1:
        names = ", ".join(type(m).__name__ for m in found) or "none"
        raise TypeError(
            f"`remove_padding` takes a transformers model or a wrapper around one, and `{type(model).__name__}` "
            f"contains {names}. Attach to each transformers model on its own."
        )
    return found[0]


def find_multimodal(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel | None:
    """The module of `model` that makes inputs of `decoder` from more than text, if it has one."""
    around = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    around = [m for m in around if _is_composite(m.config) and any(part is decoder for part in m.modules())]
    return around[-1] if around else None


def pools_by_token_id(model: nn.Module) -> bool:
    """Whether the forward of `model` looks for the pad token's id and scores one state of each row."""
    for cls in type(model).__mro__:
        if "forward" in vars(cls):
            code = inspect.unwrap(vars(cls)["forward"]).__code__
            if "pad_token_id" in code.co_names and "pooled_logits" in code.co_varnames:
                return True
            if "__class__" not in code.co_freevars:
                return False  # it does not call `super().forward`
    return False


def _is_composite(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # more than one text config
        return True
