"""
The mixers of a decoder, and the mode in which each runs in a packed forward.

A layer consists of modules that compute each token by itself, and of *mixers*: modules in which tokens see each other
(attention, recurrence, convolution). Each mixer runs in one of three modes:

- `direct`: attention through transformers' attention interface, which receives the layout (`attention/`);
- `forked`: linear attention, state-space scans, short convolutions, run per segment or node from the state of its
  prefix (`primitives.py`, `node_tree.py`);
- `rows`: all other causal mixers, on buckets of rows (`row_buckets.py`).

The mode follows from the code of the module's class, not from the name of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention.attention import ViewPatch, names_attention, uses_attention_interface
from ..call.calls import LayerPatch
from ..model.inspection import counts_columns, forward_of, hands_arguments_on, parameters_of, variables_in
from ..model.patching import Attachment, ForwardPatch, is_patched_only
from .primitives import PrimitivesPatch, chunk_of, primitives_of
from .row_buckets import RowsPatch


__all__ = ["DIRECT", "FORKED", "ROWS", "Mixer", "Mixers", "hidden_mixing", "marks_cross_attention", "mixes"]

DIRECT, FORKED, ROWS = "direct", "forked", "rows"

_MIXING = {
    "alibi", "attention_mask", "attn_mask", "cache", "cache_params", "cache_position", "conv_mask", "layer_past",
    "mask", "past_key_value", "past_key_values", "position_bias", "position_embeddings", "state",
}  # fmt: skip
"""Names of arguments that mark a module as a mixer; another sign is a function that `primitives.py` knows."""

_TOWERS = ("vision", "visual", "image", "audio", "embed_tokens_extend")
"""Parts of module names: such modules compute features of images or audio, and are not layers of the decoder."""


@dataclass(frozen=True, eq=False)
class Mixer:
    """
    A module in which tokens see each other.

    Attributes:
        name (`str`): Its name in the decoder.
        module (`torch.nn.Module`): The module.
        mode (`str`): `direct`, `forked` or `rows`.
        why (`str`): Why the module cannot run on a packed row; empty in direct mode.
    """

    name: str
    module: nn.Module
    mode: str
    why: str = ""


@dataclass(frozen=True, eq=False)
class Mixers:
    """The layers of a decoder, by name, and their mixers in the order of the layers."""

    decoder: nn.Module
    layers: dict[str, nn.Module] = field(default_factory=dict)
    mixers: tuple[Mixer, ...] = ()

    @classmethod
    def of(cls, decoder: nn.Module) -> Mixers:
        """The mixers of `decoder`, each with its mode."""
        layers = dict(_layers(decoder))
        mixers: dict[nn.Module, Mixer] = {}  # by module, because some layers share one
        for name, layer in layers.items():
            for inner, module in _mixers(layer):
                mixers.setdefault(module, Mixer(f"{name}.{inner}" if inner else name, module, *_mode_of(module)))
        return cls(decoder, layers, tuple(mixers.values()))

    def in_mode(self, mode: str) -> list[Mixer]:
        """The mixers that run in `mode`."""
        return [mixer for mixer in self.mixers if mixer.mode == mode]

    @property
    def chunk(self) -> int:
        """Largest chunk of the recurrences of forked mixers, in tokens; 0 if there is none."""
        return max((chunk_of(mixer.module) for mixer in self.in_mode(FORKED)), default=0)

    def patches(self, handle: Attachment) -> Iterator[ForwardPatch]:
        """The patches that make each mixer run in its mode."""
        on_rows = [m.module for m in self.in_mode(ROWS)]
        # Attention inside a module on rows attends to rows, with the model's own function and masks.
        inside = {part for module in on_rows for part in module.modules()}
        for module in self.decoder.modules():
            if module is not self.decoder and module not in inside and names_attention(module):
                yield ViewPatch(module, handle)
        yield from (PrimitivesPatch(m.module, handle) for m in self.in_mode(FORKED))
        for module in on_rows:
            # `indices` are columns that an earlier mixer selected: their number is the same only in one bucket.
            yield RowsPatch(module, handle, any("indices" in name for name in _parameters(module)))
        reached = [self.decoder, *self.layers.values(), *(m.module for m in self.in_mode(DIRECT))]
        if len(self.in_mode(DIRECT)) == len(self.mixers) and all(map(hands_arguments_on, reached)):
            return  # the layout reaches each mixer in the keyword arguments of its layer
        layers = dict.fromkeys(self.layers.values())  # without duplicates: some models use a layer in several places
        yield from (LayerPatch(layer, handle) for layer in layers)
        parts = dict.fromkeys(part for layer in layers for part in layer.modules() if part not in layers)
        checkpointed = (part for part in parts if isinstance(part, GradientCheckpointingLayer))
        yield from (LayerPatch(part, handle, is_layer=False) for part in checkpointed)


def _layers(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a decoder, by name: the elements of its module lists that are or contain mixers."""
    inside: list[str] = []  # prefixes of the lists of layers: a list within a layer (experts) holds no layers
    for name, blocks in decoder.named_modules():
        if not isinstance(blocks, nn.ModuleList) or any(name.startswith(prefix) for prefix in inside):
            continue
        if not any(word in name for word in _TOWERS) and any(mixes(b) or any(_outermost(b)) for b in blocks):
            inside.append(f"{name}.")
            yield from ((f"{name}.{i}", _unwrapped(block)) for i, block in enumerate(blocks))


def _unwrapped(block: nn.Module) -> nn.Module:
    """The layer inside of a module that passes all arguments on to it: a checkpoint wrapper, a compiled module."""
    children = [*block.children()]
    passes_on = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters_of(block).values())
    return _unwrapped(children[0]) if passes_on and len(children) == 1 else block


def _mixers(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The mixers of a layer, by their names in it, without cross attention: a decoder alone does not run it."""
    mixers = [(name, m) for name, m in _outermost(layer) if not _is_cross_attention(name, m)]
    if not mixers and mixes(layer) and any(isinstance(child, nn.Linear) for child in layer.children()):
        return [("", layer)]  # a bare attention in a list (XLM)
    return mixers


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost mixers inside `module`, by name."""
    for name, child in module.named_children():
        # Zamba has whole layers inside of a layer: look for mixers inside of these, too.
        is_layer = type(child).__name__.endswith(("DecoderLayer", "EncoderLayer"))
        if mixes(child) and not (is_layer and any(_outermost(child))):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def mixes(module: nn.Module) -> bool:
    """Whether tokens see each other in a module, by the arguments of its forward and the functions that it calls."""
    return bool(_parameters(module) & _MIXING or primitives_of(module))


def hidden_mixing(module: nn.Module) -> str | None:
    """Why a module hides that it mixes tokens: its forward names no argument by which a superclass does."""
    own, *bases = (cls for cls in type(module).__mro__ if "forward" in vars(cls))
    found = [(base.__name__, x) for base in bases for x in parameters_of(vars(base)["forward"]) if x in _MIXING]
    if mixes(module) or not found:
        return None
    base, name = min(found, key=lambda pair: pair[1] != "attention_mask")
    return f"`{own.__name__}.forward` does not name the parameter `{name}` of `{base}.forward`. Name the parameter"


def _parameters(module: nn.Module) -> set[str]:
    try:
        return set(parameters_of(forward_of(module)))
    except (TypeError, ValueError):
        return set()


def marks_cross_attention(module: nn.Module) -> bool:
    """Whether a module says that it attends to another sequence."""
    return bool(getattr(module, "is_cross_attention", False))


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    is_named = any(word in name for word in ("encoder_attn", "cross_attn", "crossattention"))
    return is_named or "cross" in type(module).__name__.lower() or marks_cross_attention(module)


def _mode_of(module: nn.Module) -> tuple[str, str]:
    """The mode of a mixer, and why it cannot run on a packed row (empty in direct mode)."""
    reason = _packing_obstacle(module)
    if not reason:
        return DIRECT, ""
    # A forward that another library replaced may call other functions than the class's code. Patches of a removed
    # handle do not count: they stay until gradient checkpointing has recomputed its forwards.
    return FORKED if primitives_of(module) and is_patched_only(module) else ROWS, reason


def _packing_obstacle(module: nn.Module) -> str:
    """Why a mixer cannot run as packed attention; empty if it can."""
    modules = list(module.modules())
    attentions = [m for m in modules if uses_attention_interface(m)]
    if any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in modules):
        return "convolution over the sequence"
    if not attentions:
        names = set().union(*map(_parameters, modules))
        if names & {"alibi", "position_bias"}:
            return "attention written out, with a bias built from columns of the batch"
        return "attention written out" if "attention_mask" in names else "recurrence"
    if any(hasattr(m, "indexer") for m in modules):
        return "indexer that selects keys among those of the batch"
    if any(getattr(m, "compressor", None) is not None for m in modules):
        return "keys that stand for several tokens"
    # Without positions such a module numbers the columns of its input, and these numbers differ in a packed row.
    for attention in filter(counts_columns, attentions):
        # Llama 4 tunes the temperature only in layers without rotary embeddings.
        if getattr(attention, "attn_temperature_tuning", True) and not getattr(attention, "use_rope", False):
            return "temperature by the column of the batch"
    if {"position_bias", "relative_states"} & {*variables_in(type(module).forward)}:
        return "attention with a bias of its own"
    return ""
