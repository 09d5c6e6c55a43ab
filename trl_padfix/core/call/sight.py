"""
What a forward sees of tokens that other forwards have computed: keys and values of each attention, the states of
recurrences and convolutions where prefixes end, and final hidden states.

A [`Sight`] belongs to one forward. A plain class on purpose: FSDP2 looks through dataclasses among the arguments of a
layer for tensors with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput


__all__ = ["Sight", "States", "leaf_of"]


class States(dict[Any, tuple[torch.Tensor, ...]]):
    """
    Of the tokens of a forward: keys and values by attention module, by name what its decoder returned, and by calls of
    their functions the states `(forks, ...)` of other mixers behind the tokens at which others go on.

    `kind` is the class of what it returned, `ids` are those of the tokens, `(t,)`, and `forks` the places among them.
    """

    kind: Any = ModelOutput
    ids: Any = None
    forks: tuple[int, ...] = ()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
        """The same with each tensor changed."""
        found = States({name: tuple(map(change, values)) for name, values in self.items()})
        found.kind, found.ids, found.forks = self.kind, self.ids, self.forks
        return found


class Sight:
    """
    States that a forward sees, and that it notes down for others.

    Args:
        outer (`list` of `States`):
            Of the forwards whose tokens lead its own.
        notes (`States`, *optional*):
            Where its own go, if others need them.
        closes (`list` of `tuple[torch.Tensor, torch.Tensor]`, *optional*):
            States of other forwards whose backward comes with that of this one, and the leaves in which the gradients
            of earlier ones were added up.
    """

    def __init__(
        self,
        outer: list[States],
        notes: States | None = None,
        closes: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.outer, self.notes, self.closes = outer, notes, closes or []

    def extend(self, module: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(1, K, T, D)` of an attention module behind those of the outer tokens."""
        if self.notes is not None:
            self.notes[module] = (key, value)
        if not self.outer:
            return key, value
        seen = [*(states[module] for states in self.outer), (key, value)]
        keys, values = zip(*seen, strict=True)
        return torch.cat([x.to(key.dtype) for x in keys], dim=2), torch.cat([x.to(value.dtype) for x in values], dim=2)

    def states(self, key: Any) -> torch.Tensor:
        """The states of a recurrence, or a convolution, at all forks of the outer forwards."""
        return torch.cat([states[key][0] for states in self.outer])

    def note(self, key: Any, states: torch.Tensor) -> None:
        """Note down those at the own forks."""
        if self.notes is not None:
            self.notes[key] = (states,)

    def join(self, output: Any, tokens: int) -> Any:
        """The output of a decoder for its `tokens`, behind what the outer forwards returned."""
        fields: dict[str, Any] = dict(output.items()) if isinstance(output, ModelOutput) else {"": output}
        for name, value in fields.items():
            fields[name] = _by_token(name, value, tokens, self._join)
        if self.notes is not None:
            self.notes.kind = type(output)
        self.notes = None  # what gradient checkpointing computes again is known
        if not isinstance(output, ModelOutput):
            return fields[""]
        for name, value in fields.items():
            output[name] = value
        return output

    def without_own(self) -> Any:
        """The output where a forward has no token of its own."""
        names = [name for name in self.outer[0] if isinstance(name, str)]
        found: dict[str, Any] = {}
        for name in names:
            joined = self._join(name, None)
            field, _, index = name.partition("/")
            found[field] = (*found.get(field, ()), joined) if index else joined
        kind = self.outer[0].kind
        return kind(**found) if issubclass(kind, ModelOutput) else tuple(found.values())

    def _join(self, name: str, own: torch.Tensor | None) -> torch.Tensor:
        if self.notes is not None and own is not None:
            self.notes[name] = (own,)
        parts = [states[name][0] for states in self.outer] + ([] if own is None else [own])
        dim = 1 if parts[0].dim() > 2 else 0
        joined = torch.cat([x.to(parts[-1].dtype) for x in parts], dim=dim) if len(parts) > 1 else parts[0]
        if self.closes and torch.is_grad_enabled() and name.startswith(("last_hidden_state", "0")):
            joined = _Close.apply(joined, [leaf for _, leaf in self.closes], *(made for made, _ in self.closes))
        return joined


def _by_token(name: str, value: Any, tokens: int, join: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A part of an output with what it has for each token joined: `(1, T, ...)`, or `(T, experts)` of routers."""
    if isinstance(value, tuple | list):
        name = f"{name}/" if name else ""
        return type(value)(_by_token(f"{name}{i}", v, tokens, join) for i, v in enumerate(value))
    if not isinstance(value, torch.Tensor):
        return value
    is_state = value.dim() > 2 and tuple(value.shape[:2]) == (1, tokens)
    return join(name, value) if is_state or (value.dim() == 2 and len(value) == tokens) else value


class _Close(torch.autograd.Function):
    """
    Hands states through; its backward adds what gradients earlier forwards have left in leaves.

    So the loss stays a scalar whose backward anybody may call, and each weight gets its gradient in one pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, leaves: list[torch.Tensor], *made: torch.Tensor) -> torch.Tensor:
        ctx.leaves, ctx.dtypes = leaves, [x.dtype for x in made]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Of zeros where nobody has left any: FSDP2 waits for gradients of all that a forward has made.
        added = (
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(dtype)
            for leaf, dtype in zip(ctx.leaves, ctx.dtypes, strict=True)
        )
        return grads[0], None, *added


def leaf_of(x: torch.Tensor) -> torch.Tensor:
    """
    `x` without its graph: gradients of forwards that see it add up in it.

    In float32, also where many of them are in half precision: what sees it casts it to its own.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return (x.detach().float() if half else x.detach()).requires_grad_()
