"""
What is refused, and why.

Rules are about what a layer does, not about names of models. What no rule knows is caught by the parity check.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .attention.attention import refuse_implementation
from .call.layers import takes_any_argument
from .generation import evaluating
from .layout.layout import Layout
from .mixers.mixers import PACKED, ROWS, WHOLE, Mixers
from .mixers.row_buckets import needs_whole_rows
from .model.find import find_multimodal
from .model.positions import position_embeddings
from .model.sharded import gathers_in_parts


__all__ = ["refusal", "refuse_batch", "refuse_devices", "refuse_sharing"]

logger = logging.getLogger(__name__)

TOKENS = 4
"""Tokens of the rows by which a decoder is tried."""


def refusal(
    wrapper: nn.Module, model: PreTrainedModel, decoder: nn.Module, mixers: Mixers | None = None
) -> str | None:
    """
    Why a decoder cannot be packed with exact results: the layer or setting, and the reason; `None` if it can.

    `wrapper` is what the user attached to: `model` itself, or a PEFT or other wrapper around it.
    """
    config = getattr(decoder, "config", model.config)
    for peft_config in _peft_configs(wrapper):
        if reason := _not_by_token(peft_config):
            return f"{type(peft_config).__name__} {reason}"
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
        place = inspect.signature(inspect.unwrap(type(mixer.module).forward)).parameters.get("cache_position")
        if mixer.how != PACKED and place is not None and place.default is inspect.Parameter.empty:
            return (
                f"layer `{mixer.name}` ({type(mixer.module).__name__}) keeps its state by places in a cache, which "
                "rows that are computed together do not have; newer versions of transformers may have mended that"
            )
    if not _is_given_masks(model, decoder) and (seen := _why_not_causal(decoder, config, mixers)):
        return f"{seen}{_setting(decoder, config)}, and a packed batch is attended causally"
    return refuse_implementation(str(config._attn_implementation))


def _why_not_causal(decoder: nn.Module, config: Any, mixers: Mixers) -> str | None:
    """What shows that tokens of a decoder see later ones; `None` if they do not."""
    for mixer in mixers.mixers:
        parts = (m for m in mixer.module.modules() if not getattr(m, "is_cross_attention", False))
        if not all(getattr(m, "is_causal", True) for m in parts):
            what = f"layer `{mixer.name}` ({type(mixer.module).__name__})"
            return f"{what} attends in both directions or to another sequence"
    names = inspect.unwrap(type(decoder).forward).__code__.co_names
    asked = getattr(config, "use_bidirectional_attention", None)
    # "vision": image tokens see each other; a call with images brings a mask that says so.
    set_so = asked not in (None, False, "vision") or getattr(config, "causal", True) is False
    if set_so or ("is_decoder" in names and not getattr(config, "is_decoder", True)):
        return "its tokens see later ones"
    if "create_causal_mask" in names and "create_bidirectional_mask" not in names:
        return None
    if change := change_of_earlier_states(decoder):
        return f"its tokens see later ones: another last token moves the states before it by {change:.0e}"
    return None


def change_of_earlier_states(decoder: Any) -> float:
    """
    How much the states of a few tokens change when the token after them is another one, relative to how much its own
    does: one forward in evaluation mode, with the random state left as it is.

    0 if it is no more than rounding, as in a causal decoder, and where the decoder cannot be run: its weights are not
    here (on the meta device, offloaded, or in shards of several processes), or it takes more than token ids.
    """
    if not _is_here(decoder):
        return 0.0
    device = next(decoder.parameters()).device
    try:
        rows = decoder.get_input_embeddings().weight.shape[0]
        ids = (rows // 2 + torch.arange(TOKENS, device=device).repeat(2, 1)) % rows
        ids[1, -1] = (ids[0, -1] + 1) % rows
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True}
        parameters = inspect.signature(decoder.forward).parameters
        if not takes_any_argument(decoder):
            given = {k: v for k, v in given.items() if k in parameters}
        if "is_decoder" in parameters:  # BLIP's, whose model says so in every call
            given["is_decoder"] = decoder.config.is_decoder
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), evaluating(decoder), torch.random.fork_rng(devices):
            states = decoder(**given)[0]
    except Exception as error:
        logger.info(f"Whether {type(decoder).__name__} is causal was not tried ({type(error).__name__}: {error}).")
        return 0.0
    if states.shape[:2] != ids.shape:
        return 0.0
    change = (states[0] - states[1]).abs().float().flatten(1).amax(1)
    relative = (change[:-1].max() / change[-1]).item()
    # What is masked has no weight at all, so causal decoders change by nothing, or by the order of some sum.
    return relative if relative > min(64 * torch.finfo(states.dtype).eps, 0.02) else 0.0


def _is_here(decoder: nn.Module) -> bool:
    """Whether all weights of a decoder are whole and on one device of this process."""
    parameters = list(decoder.parameters())
    whole = not any(p.is_meta or isinstance(p, DTensor) for p in parameters) and not gathers_in_parts(decoder)
    return whole and len({p.device for p in parameters}) == 1


def _setting(decoder: nn.Module, config: Any) -> str:
    """The field of a configuration by which a decoder is not causal, if it has one and looks at it."""
    source = inspect.getsource(inspect.getmodule(type(decoder)) or type(decoder))
    for name, causal in {"causal": True, "is_decoder": True, "use_bidirectional_attention": False}.items():
        own = getattr(config, name, causal)
        if own not in (causal, None, "vision") and name in source:
            return f" (`config.{name}={own!r}`; a causal model has {causal!r} there)"
    return ""


_VIRTUAL_TOKENS = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"}
"""Kinds of prompt learning that hand a model embeddings and a mask that is as long, virtual tokens included."""


def refuse_sharing(wrapper: nn.Module, decoder: nn.Module) -> str | None:
    """Why prefixes cannot be shared in a model whose padding can be removed; `None` if they can."""
    if why := needs_whole_rows(decoder):
        return (
            f"{type(decoder).__name__} {why}, so it is given whole rows and has no tokens that several rows could "
            "share"
        )
    given = next((type(config).__name__ for config in _peft_configs(wrapper) if config.is_prompt_learning), None)
    return given and (
        f"{given} hands the model embeddings, its virtual tokens among them, and prefixes are compared by token ids"
    )


def _peft_configs(wrapper: nn.Module) -> list[Any]:
    return [c for m in wrapper.modules() for c in (getattr(m, "peft_config", None) or {}).values()]


def _not_by_token(config: Any) -> str | None:
    """What an adapter of PEFT looks at beside each token, for which packing would change its numbers, if anything."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning and kind not in _VIRTUAL_TOKENS:
        return (
            "puts a cache before every row, or other things that the attention mask of the batch does not show; use "
            "LoRA, prompt tuning or p-tuning"
        )
    if getattr(config, "alora_invocation_tokens", None):
        return "with `alora_invocation_tokens` acts from a place on that is counted from the end of a padded row"
    return "weights its experts by the mean over all tokens of a batch, padding included" if kind == "LILY" else None


def refuse_batch(layout: Layout, is_given_masks: bool, mixers: Mixers) -> str | None:
    """
    Why a batch cannot be packed, with masked tokens between real ones for instance; `None` if it can. `is_given_masks`
    says whether the decoder is given masks in which tokens of an image see each other.
    """
    others = [mixer for mixer in mixers.mixers if mixer.how != PACKED]
    on_rows = mixers.that_are(ROWS) + mixers.that_are(WHOLE)
    if is_given_masks and on_rows:
        return (
            f"Tokens of an image see each other in this batch, and `{on_rows[0].name}` "
            f"({type(on_rows[0].module).__name__}: {on_rows[0].why}) runs on rows, for which its decoder makes causal "
            "masks. Train this model on images with `padding_free=False`; batches without images can be packed."
        )
    if not others or layout.spans == layout.key_lengths:
        return None
    return (
        f"A row of the batch has masked tokens between real ones, and `{others[0].name}` "
        f"({type(others[0].module).__name__}: {others[0].why}) runs through what is masked there when it is padded, "
        "so no packed forward gives the same numbers. Leave out the masked tokens, or run this call inside `with "
        "handle.disabled():`."
    )


def _is_given_masks(model: PreTrainedModel, decoder: nn.Module) -> bool:
    """Whether the module around a decoder makes masks for it, in which what is not causal can be read."""
    multimodal = find_multimodal(model, decoder)
    code = inspect.unwrap(type(multimodal).forward).__code__ if multimodal is not None else None
    return code is not None and "create_causal_mask" in code.co_names


def refuse_devices(decoder: nn.Module) -> str | None:
    """Why a decoder whose layers are on several devices cannot be packed, or `None` if they are on one."""
    found = dict.fromkeys(str(p.device) for p in decoder.parameters() if p.device.type != "meta")
    # Where accelerate sends the parts of a decoder while it runs, offloaded weights among them.
    sent = (getattr(getattr(m, "_hf_hook", None), "execution_device", None) for m in decoder.modules())
    found |= dict.fromkeys(str(d) for d in sent if d not in (None, "cpu", "disk"))
    names = list(dict.fromkeys(f"cuda:{name}" if name.isdigit() else name for name in found))
    if len(names) < 2:
        return None
    return (
        f"its layers are on several devices ({', '.join(names)}), and the layout of a packed batch is on one. Load it "
        "without `device_map` and split it over processes (FSDP2, DeepSpeed), or onto one GPU (`device_map={'': 0}`)"
    )
