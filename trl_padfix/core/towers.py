"""
Models that make inputs of their decoder from images and other things beside text.

Their text decoder alone is packed. What lies around it (a vision tower, a projector, the code that puts image features
among the embeddings) computes what it always did, but nothing twice: [`TowerPatch`] runs a tower once for a batch that
repeats its images, as the chosen and the rejected rows of preference data do. [`MultimodalPatch`] stands at the door
of the module around the decoder and keeps what the decoder itself is not told: the ids that its embeddings were made
from, and the two-dimensional mask.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .attention import PaddingRemovalError
from .compat import own_masks
from .patches import SCORED, ForwardPatch, bind, visual_mask


if TYPE_CHECKING:
    from .remove import PaddingRemoval

__all__ = ["MultimodalPatch", "TowerPatch", "find_multimodal", "token_keys", "towers", "with_plain_mask"]


def find_multimodal(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel | None:
    """The module of `model` that makes inputs of `decoder` from more than text, if it has one."""
    around = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    around = [m for m in around if _is_composite(m.config) and any(part is decoder for part in m.modules())]
    return around[-1] if around else None


def towers(multimodal: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The parts of a multimodal module that turn what is not text into features: vision towers, projectors."""
    parts = [m for m in multimodal.children() if not isinstance(m, nn.Embedding) and any(True for _ in m.parameters())]
    head = multimodal.get_output_embeddings()
    return [m for m in parts if m is not head and all(part is not decoder for part in m.modules())]


class MultimodalPatch(ForwardPatch):
    """Keeps the arguments of a call for the decoder within it, and lets it make no cache unless one is asked for."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        scored = kwargs.pop(SCORED, None)  # towers are handed all keyword arguments, and have no use for this one
        call = bind(self.wrapped, args, kwargs)
        cached = call.get("use_cache") is not None or call.get("past_key_values") is not None
        if not cached and _takes_use_cache(self.wrapped):
            call["use_cache"] = False
        with self.attachment.called_with(call):
            output = self.wrapped(**call)
        if scored is not None:
            output["last_hidden_state"] = output.last_hidden_state.flatten(0, 1).index_select(0, scored).unsqueeze(0)
        return output


class TowerPatch(ForwardPatch):
    """
    Runs a tower once for a batch of images that repeats itself, and gives its output to both halves.

    Whether the halves of a tower's output belong to the halves of its input is tried out on the first batch that
    repeats itself: a tower that answers otherwise (in one row for all images, say) is left alone. So is one whose
    weights are sharded (FSDP, ZeRO-3): its processes have to run it equally often.
    """

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.separates_halves: bool | None = None

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if self.separates_halves is False or not _repeats(given) or _draws(self.module) or _is_sharded(self.module):
            return self.wrapped(*args, **kwargs)
        half = [_first_half(v) for v in args], {k: _first_half(v) for k, v in kwargs.items()}
        output = _twice(self.wrapped(*half[0], **half[1]))
        if self.separates_halves is None:
            with torch.no_grad():
                self.separates_halves = _agree(output, self.wrapped(*args, **kwargs))
        return output if self.separates_halves else self.wrapped(*args, **kwargs)


def token_keys(call: dict[str, Any], batch_shape: torch.Size) -> torch.Tensor | None:
    """
    What a decoder is given for each token beside its id, as numbers: tokens with the same numbers are given the same.

    Args:
        call (`dict`):
            Arguments of the decoder, padded.
        batch_shape (`torch.Size`):
            `(B, L)`.

    Returns:
        `torch.Tensor` of shape `(keys, B, L)` and dtype int64, *optional*: positions and (bool or integer) values as
        they are, embeddings and features as 64 bits of their content.
    """
    keys: list[torch.Tensor] = []
    mask_BL = visual_mask(call, batch_shape)
    for name, value in call.items():
        if name in ("attention_mask", "input_ids", "labels", "cache_position"):
            continue
        if name == "position_ids" and value is not None:
            keys += value.expand(*value.shape[:-2], *batch_shape).reshape(-1, *batch_shape)
            continue
        for tensor in _tensors(value):
            if tensor.shape[:2] == batch_shape:
                keys.append(tensor if tensor.dim() == 2 and not tensor.is_floating_point() else _content(tensor))
            elif mask_BL is not None and tensor.dim() == 2:  # a feature for each visual token
                content = _content(tensor.unsqueeze(0))[0]
                keys.append(torch.zeros(batch_shape, dtype=torch.int64, device=tensor.device))
                keys[-1][mask_BL] = content
    return torch.stack([key.to(torch.int64) for key in keys]) if keys else None


def with_plain_mask(call: dict[str, Any], around: dict[str, Any], decoder: nn.Module) -> dict[str, Any]:
    """
    A decoder call with the two-dimensional mask that prepared masks were made of.

    Args:
        call (`dict`):
            Arguments of the decoder.
        around (`dict`):
            Arguments of the module around it.
        decoder (`torch.nn.Module`):
            The decoder.

    Raises:
        PaddingRemovalError: If they are other masks than the decoder would make itself.
    """
    prepared, mask, embeds = call.get("attention_mask"), around.get("attention_mask"), call.get("inputs_embeds")
    cached = call.get("past_key_values") is not None or call.get("use_cache") is True
    is_prepared = isinstance(prepared, dict) or (isinstance(prepared, torch.Tensor) and prepared.dim() == 4)
    if cached or not is_prepared or embeds is None:
        return call
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return call
    own = own_masks(decoder.config, embeds, mask)
    pairs = [(prepared, own)]
    if isinstance(prepared, dict) and isinstance(own, dict):
        pairs = [(prepared[kind], own.get(kind)) for kind in prepared]
    if any(isinstance(m, dict) for m in pairs[0]) or not all(_same_mask(*pair, mask) for pair in pairs):
        raise PaddingRemovalError(
            f"{type(decoder).__name__} was given a mask that is more than causal: tokens of an image see each other, "
            "and a packed batch is attended causally. Use `padding_free=False`; batches without images can be packed."
        )
    return call | {"attention_mask": mask}


def _same_mask(prepared: torch.Tensor | None, own: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether two masks agree on the rows of real tokens. No mask is a causal one of a batch without padding."""
    if prepared is None or own is None:
        if prepared is own:
            return True
        other = prepared if own is None else own
        own = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
        own = own.expand(len(mask), 1, -1, -1)
        prepared = other if other.dtype == torch.bool else other == 0
    if prepared.shape != own.shape:
        return False
    if prepared.dim() == 2:
        return torch.equal(prepared.bool(), own.bool())
    real = mask.bool()[:, None, :, None]
    return bool(((prepared == own) | ~real).all())


def _is_composite(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # more than one text config
        return True


def _takes_use_cache(forward: Any) -> bool:
    parameters = inspect.signature(forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, those within lists and dictionaries included."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for v in values for tensor in _tensors(v)]


def _content(values: torch.Tensor) -> torch.Tensor:
    """64 bits of the content of `(B, L, ...)`, `(B, L)`: other values give others, but for one pair in 2**64 or so."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits_BLH = values.detach().contiguous().view(bits).flatten(2)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, bits_BLH.shape[2:], generator=generator) * 2 + 1
    factors = factors.to(values.device)
    return torch.stack([(row.to(torch.int64) * factors).sum(1) for row in bits_BLH])


def _repeats(given: list[Any]) -> bool:
    """Whether every tensor among the arguments is the same twice, one half after the other."""
    if any(isinstance(v, list | tuple | dict) and _tensors(v) for v in given):
        return False
    tensors = [v for v in given if isinstance(v, torch.Tensor) and v.dim() > 0]
    if not tensors or any(v.shape[0] == 0 or v.shape[0] % 2 for v in tensors):
        return False
    return all(torch.equal(*v.detach().chunk(2)) for v in tensors)


def _first_half(value: Any) -> Any:
    return value.chunk(2)[0] if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _twice(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return torch.cat([output, output])
    if isinstance(output, ModelOutput):
        for name, value in output.items():
            output[name] = _twice(value)
        return output
    if isinstance(output, list | tuple):
        return type(output)(_twice(v) for v in output)
    return output


def _agree(a: Any, b: Any) -> bool:
    """Whether two outputs have the same shapes, and the same values to rounding."""
    values = a.values() if isinstance(a, ModelOutput) else [a]
    others = b.values() if isinstance(b, ModelOutput) else [b]
    pairs = list(zip(_tensors(list(values)), _tensors(list(others)), strict=False))
    tolerance = 1e-3 if all(x.dtype == torch.float32 for x, _ in pairs) else 0.05
    return len(pairs) > 0 and all(
        x.shape == y.shape and bool(((x - y).abs().max() <= tolerance * y.abs().max()).item()) for x, y in pairs
    )


def _is_sharded(module: nn.Module) -> bool:
    return any(p.numel() == 0 or hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in module.parameters())


def _draws(module: nn.Module) -> bool:
    """Whether a second run of `module` would differ from the first: dropout, or statistics of the batch."""
    for part in module.modules():
        if not part.training:
            continue
        rates = [v for k, v in vars(part).items() if "drop" in k and isinstance(v, float)]
        if isinstance(part, nn.modules.dropout._DropoutNd):
            rates.append(part.p)
        if any(rates) or isinstance(part, nn.modules.batchnorm._BatchNorm):
            return True
    return False
