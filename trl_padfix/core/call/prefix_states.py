"""
What a forward sees of tokens that other forwards have computed: keys and values of each attention, the states of
recurrences and convolutions where prefixes end, and final hidden states.

A [`PrefixStates`] belongs to one forward. A plain class on purpose: FSDP2 looks through dataclasses among the arguments of a
layer for tensors with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


__all__ = ["ForwardStates", "PrefixStates", "detached_leaf"]


class ForwardStates(dict[Any, tuple[torch.Tensor, ...]]):
    """
    Of the tokens of a forward: keys and values by attention module, what its decoder returned by place in `spec`, and
    the states `(forks, ...)` of other mixers by calls of their functions.

    `ids` are those of the tokens, `(t,)`, and `forks` the places among them behind which other forwards go on.
    """

    spec: Any = None
    ids: Any = None
    forks: tuple[int, ...] = ()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ForwardStates:
        """The same with each tensor changed."""
        found = ForwardStates({name: tuple(map(change, values)) for name, values in self.items()})
        found.spec, found.ids, found.forks = self.spec, self.ids, self.forks
        return found


class PrefixStates:
    """
    States that a forward sees, of the forwards whose tokens lead its own (`outer`), and its `notes` for others.

    `closes` are states of other forwards whose backward comes with that of this one, each with the leaf in which the
    gradients of earlier ones were added up.
    """

    def __init__(
        self,
        outer: list[ForwardStates],
        notes: ForwardStates | None = None,
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
        leaves, spec = tree_flatten(output)
        joined = [self._join(i, x) if _is_by_token(x, tokens) else x for i, x in enumerate(leaves)]
        if self.notes is not None:
            self.notes.spec = spec
        self.notes = None  # what gradient checkpointing computes again is known
        return tree_unflatten(joined, spec)

    def without_own(self) -> Any:
        """The output where a forward has no token of its own."""
        spec = self.outer[0].spec
        return tree_unflatten([self._join(i) if i in self.outer[0] else None for i in range(spec.num_leaves)], spec)

    def _join(self, place: int, own: torch.Tensor | None = None) -> torch.Tensor:
        if self.notes is not None and own is not None:
            self.notes[place] = (own,)
        parts = [states[place][0] for states in self.outer] + ([] if own is None else [own])
        dim = 1 if parts[0].dim() > 2 else 0
        joined = torch.cat([x.to(parts[-1].dtype) for x in parts], dim=dim) if len(parts) > 1 else parts[0]
        if self.closes and torch.is_grad_enabled() and place == 0:  # the last hidden states
            joined = _BackpropIntoPrefixes.apply(
                joined, [leaf for _, leaf in self.closes], *(made for made, _ in self.closes)
            )
        return joined


def _is_by_token(x: Any, tokens: int) -> bool:
    """Whether a part of an output has values for each token: `(1, T, ...)`, or `(T, experts)` of routers."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return False
    return len(x) == tokens if x.dim() == 2 else tuple(x.shape[:2]) == (1, tokens)


class _BackpropIntoPrefixes(torch.autograd.Function):
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


def detached_leaf(x: torch.Tensor) -> torch.Tensor:
    """
    `x` without its graph: gradients of forwards that see it add up in it.

    In float32, also where many of them are in half precision: what sees it casts it to its own.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return (x.detach().float() if half else x.detach()).requires_grad_()
