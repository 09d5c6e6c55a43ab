"""
What in a decoder mixes tokens, and how a packed forward runs it.

A layer is made of parts that compute each token by itself, and of *mixers*: modules that look at other tokens. Each
mixer runs in one of three ways:

- `packed`: attention through transformers' interface, which is handed the layout;
- `forked`: linear attention, state-space scans and short convolutions, whose functions are led past the seams;
- `rows`: everything else that is causal, on blocks of rows.

A decoder that is more than a stack of such layers is given whole rows (`whole_rows.py`).

Rules are about what a module does, read from its class, not about names of models.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention.attention import ViewPatch, counts_columns, names_attention, uses_attention_interface
from ..call.layers import LayerPatch, hands_arguments_on
from ..model.patching import ForwardPatch, beneath_patches
from .primitives import PrimitivesPatch, chunk_of, primitives_of
from .row_buckets import RowsPatch, needs_whole_rows


__all__ = ["FORKED", "PACKED", "ROWS", "WHOLE", "Mixer", "Mixers"]

PACKED, FORKED, ROWS, WHOLE = "packed", "forked", "rows", "whole rows"

_MIXING = {
    "alibi",
    "attention_mask",
    "attn_mask",
    "cache_params",
    "cache_position",
    "conv_mask",
    "layer_past",
    "mask",
    "past_key_value",
    "past_key_values",
    "position_bias",
    "position_embeddings",
    "state",
}
"""Arguments by which a module is known to look at other tokens."""

_TOWERS = ("vision", "visual", "image", "audio", "embed_tokens_extend")
"""Names of parts that compute features of what is not text, and so are not layers of the decoder."""


@dataclass(frozen=True, eq=False)
class Mixer:
    """
    A module that looks at other tokens.

    Attributes:
        how (`str`): `packed`, `forked` or `rows`; `whole rows` if it is the decoder.
        why (`str`): What it is that a packed row cannot serve; empty for packed ones.
    """

    name: str
    module: nn.Module
    how: str
    why: str = ""


@dataclass(frozen=True, eq=False)
class Mixers:
    """The layers of a decoder, by name, and what mixes tokens in them, in their order."""

    decoder: nn.Module
    layers: dict[str, nn.Module] = field(default_factory=dict)
    mixers: tuple[Mixer, ...] = ()

    @classmethod
    def of(cls, decoder: nn.Module) -> Mixers:
        """The mixers of `decoder`, each with the way in which it runs."""
        if reason := needs_whole_rows(decoder):
            return cls(decoder, {}, (Mixer("", decoder, WHOLE, reason),))
        layers = dict(_layers(decoder))
        found: dict[nn.Module, Mixer] = {}
        for name, layer in layers.items():
            for inner, module in _mixers(layer):
                if module not in found:
                    found[module] = Mixer(f"{name}.{inner}" if inner else name, module, *_choice(module))
        return cls(decoder, layers, tuple(found.values()))

    def counts(self) -> Counter[str]:
        """How many mixers run in each way."""
        return Counter(mixer.how for mixer in self.mixers)

    def that_are(self, how: str) -> list[Mixer]:
        """The mixers that run in a way."""
        return [mixer for mixer in self.mixers if mixer.how == how]

    @property
    def chunk(self) -> int:
        """Most tokens that a scan of a forked mixer computes at once; 0 if there is none."""
        return max((chunk_of(mixer.module) for mixer in self.that_are(FORKED)), default=0)

    @property
    def caveat(self) -> str:
        """Why transformers itself gives a token other numbers in other batches; empty if it does not."""
        for mixer in self.mixers:
            parts = list(mixer.module.modules())
            if any(hasattr(part, "indexer") for part in parts):
                what = "among keys with equal scores its indexer selects others where a row has other padding"
            elif any(hasattr(part, "chunkwise_kernel_fn") and hasattr(part, "sequence_kernel_fn") for part in parts):
                what = "one kernel computes the whole chunks of a row, and another, not quite the same, what is left"
            else:
                continue
            return (
                f"In transformers itself the numbers of `{mixer.name}` ({type(mixer.module).__name__}) depend on the "
                f"batch: {what} (docs/families.md)"
            )
        return ""

    def patches(self, handle: Any) -> Iterator[ForwardPatch]:
        """What makes each mixer run in its way."""
        if self.that_are(WHOLE):
            return
        on_rows = [m.module for m in self.that_are(ROWS)]
        inside = {part for module in on_rows for part in module.modules()}
        for module in self.decoder.modules():
            if module is not self.decoder and module not in inside and names_attention(module):
                yield ViewPatch(module, handle)
        yield from (PrimitivesPatch(m.module, handle) for m in self.that_are(FORKED))
        for module in on_rows:
            # What takes places in a row from a mixer before it needs all rows in one block.
            yield RowsPatch(module, handle, any("indices" in name for name in _parameters(module)))
        if not self._needs_layers():
            return
        layers = dict.fromkeys(self.layers.values())  # some are shared by several places
        yield from (LayerPatch(layer, handle) for layer in layers)
        parts = dict.fromkeys(part for layer in layers for part in layer.modules() if part not in layers)
        checkpointed = (part for part in parts if isinstance(part, GradientCheckpointingLayer))
        yield from (LayerPatch(part, handle, is_layer=False) for part in checkpointed)

    def _needs_layers(self) -> bool:
        """Whether some module cannot be reached by the keyword arguments of its layer."""
        reached = [self.decoder, *self.layers.values(), *(m.module for m in self.that_are(PACKED))]
        return len(self.that_are(PACKED)) < len(self.mixers) or not all(map(hands_arguments_on, reached))


def _layers(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a decoder, by name: elements of its module lists that are mixers or have some."""
    inside: list[str] = []
    for name, blocks in decoder.named_modules():
        if not isinstance(blocks, nn.ModuleList) or any(name.startswith(prefix) for prefix in inside):
            continue
        if not any(part in name for part in _TOWERS) and any(_mixes(b) or any(_outermost(b)) for b in blocks):
            inside.append(f"{name}.")
            yield from ((f"{name}.{i}", block) for i, block in enumerate(blocks))


def _mixers(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The mixers of a layer, by their names in it. Attention to another sequence is not run, and left out."""
    found = [(name, m) for name, m in _outermost(layer) if not _is_cross_attention(name, m)]
    if not found and _mixes(layer) and any(isinstance(child, nn.Linear) for child in layer.children()):
        return [("", layer)]  # a bare attention in a list (XLM)
    return found


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside `module` that look at other tokens."""
    for name, child in module.named_children():
        is_layer = type(child).__name__.endswith(("DecoderLayer", "EncoderLayer"))  # a layer in a layer (Zamba's)
        if _mixes(child) and not (is_layer and any(_outermost(child))):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _mixes(module: nn.Module) -> bool:
    return bool(_parameters(module) & _MIXING)


def _parameters(module: nn.Module) -> set[str]:
    try:
        return set(inspect.signature(inspect.unwrap(type(module).forward)).parameters)
    except (TypeError, ValueError):
        return set()


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    named = any(part in name for part in ("encoder_attn", "cross_attn", "crossattention"))
    return named or "cross" in type(module).__name__.lower() or bool(getattr(module, "is_cross_attention", False))


def _choice(module: nn.Module) -> tuple[str, str]:
    """How a mixer runs, and what it is that a packed row cannot serve."""
    reason = _against_packing(module)
    if not reason:
        return PACKED, ""
    # Patches of a handle that was removed stay while gradient checkpointing has yet to recompute its forwards.
    is_own = beneath_patches(vars(module).get("forward")) is None
    return FORKED if primitives_of(module) and is_own else ROWS, reason


def _against_packing(module: nn.Module) -> str:
    """Why packed attention does not serve a mixer; empty if it does."""
    parts = list(module.modules())
    attentions = [m for m in parts if uses_attention_interface(m)]
    if any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in parts):
        return "convolution over the sequence"
    if not attentions:
        names = set().union(*map(_parameters, parts))
        if names & {"alibi", "position_bias"}:
            return "attention written out, with a bias built from places in the batch"
        return "attention written out" if "attention_mask" in names else "recurrence"
    if any(hasattr(m, "indexer") for m in parts):
        return "indexer that selects keys among those of the batch"
    if any(getattr(m, "compressor", None) is not None for m in parts):
        return "keys that stand for several tokens"
    for attention in filter(counts_columns, attentions):
        # Llama 4 has no temperature where it rotates.
        if getattr(attention, "attn_temperature_tuning", True) and not getattr(attention, "use_rope", False):
            return "temperature by the place in the batch"
    if {"position_bias", "relative_states"} & set(inspect.unwrap(type(module).forward).__code__.co_varnames):
        return "attention with a bias of its own"
    return ""
