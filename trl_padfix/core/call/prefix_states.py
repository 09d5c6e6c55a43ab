"""
States of shared prefixes, which later forwards of the same step read: cached keys and values of each attention module,
states of recurrences and convolutions, and outputs of the decoder.

A [`PrefixStates`] belongs to one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


__all__ = ["ForwardStates", "PrefixStates", "detached_leaf"]


class ForwardStates(dict[Hashable, tuple[torch.Tensor, ...]]):
    """
    States that one prefix forward has recorded for its `t` tokens.

    The values are `(keys, values)` by attention module, `(output,)` by index of the output in `output_spec`, and
    `(states,)` by call of a recurrence or convolution, with one state per fork token: `(forks, ...)`.

    Attributes:
        output_spec (`TreeSpec`, *optional*): Structure of the decoder's output.
        tokens (`int`): Number of tokens, without filler; set before the forward.
        fork_tokens (`tuple[int, ...]`): Indices of the tokens that paths of other forwards continue from.
    """

    output_spec: TreeSpec | None = None
    tokens: int = 0
    fork_tokens: tuple[int, ...] = ()

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ForwardStates:
        """The same states with each tensor changed."""
        states = copy(self)  # with its attributes
        states.update({name: tuple(map(change, values)) for name, values in self.items()})
        return states


class PrefixStates:
    """
    States that a forward reads from prefix forwards, and states that it records for later ones.

    A plain class, not a dataclass: FSDP2 searches dataclasses among the arguments of a layer for tensors with
    gradients.

    Args:
        reads (`list` of [`ForwardStates`]):
            States of the shared prefixes whose tokens come before the new ones of this forward, in the order of the
            packed tokens.
        records ([`ForwardStates`], *optional*):
            States of this forward, which fills them if it is a prefix forward.
        pending_backward (`list[tuple[torch.Tensor, torch.Tensor]]`, *optional*):
            Pairs of a state of a shared prefix and its detached leaf. The backward of this forward also backpropagates
            the gradient that has accumulated in each leaf through its state.
    """

    def __init__(
        self,
        reads: list[ForwardStates],
        records: ForwardStates | None = None,
        pending_backward: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.reads, self.records, self.pending_backward = reads, records, pending_backward or []

    def prepend_kv(
        self, module: Hashable, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefixes, followed by these, all `(1, K, tokens, D)`; `module` is the attention."""
        if self.records is not None:
            t = self.records.tokens
            self.records[module] = (key[:, :, :t], value[:, :, :t])
        if not self.reads:
            return key, value
        keys, values = zip(*(states[module] for states in self.reads), (key, value), strict=True)
        # Leaves are in float32, see `detached_leaf`.
        return torch.cat([x.to(key.dtype) for x in keys], dim=2), torch.cat([x.to(value.dtype) for x in values], dim=2)

    def initial_states(self, key: Hashable) -> torch.Tensor:
        """States of a recurrence or convolution at all fork tokens of the prefixes, `(states, ...)`."""
        return torch.cat([states[key][0] for states in self.reads])

    def record(self, key: Hashable, states: torch.Tensor) -> None:
        """Record the states of a recurrence or convolution at the fork tokens of this forward."""
        if self.records is not None:
            self.records[key] = (states,)

    def prepend_outputs(self, output: Any, tokens: int) -> Any:
        """The decoder's output for this forward's `tokens`, with the outputs of the prefixes in front of it."""
        leaves, spec = tree_flatten(output)
        joined = [self._prepend_output(i, x) if _is_by_token(x, tokens) else x for i, x in enumerate(leaves)]
        if self.records is not None:
            self.records.output_spec = spec
        # Gradient checkpointing may run layers again later: they must not replace the recorded states.
        self.records = None
        return tree_unflatten(joined, spec)

    def prefix_outputs(self) -> Any:
        """The output of a forward that computes no token: only the outputs of the prefixes."""
        spec = self.reads[0].output_spec
        assert spec is not None
        leaves = [self._prepend_output(i) if i in self.reads[0] else None for i in range(spec.num_leaves)]
        return tree_unflatten(leaves, spec)

    def _prepend_output(self, index: int, new: torch.Tensor | None = None) -> torch.Tensor:
        """One output of the prefixes, followed by the output of the `new` tokens, if any."""
        if self.records is not None and new is not None:
            t = self.records.tokens
            self.records[index] = (new[:, :t] if new.dim() > 2 else new[:t],)
        outputs = [states[index][0] for states in self.reads] + ([] if new is None else [new])
        dim = 1 if outputs[0].dim() > 2 else 0  # `(1, T, ...)`, or `(T, experts)` of routers
        joined = torch.cat([x.to(outputs[-1].dtype) for x in outputs], dim=dim) if len(outputs) > 1 else outputs[0]
        # Output 0 is the last hidden states: their gradient is the first that backward computes in the decoder.
        if self.pending_backward and torch.is_grad_enabled() and index == 0:
            states, leaves = zip(*self.pending_backward, strict=True)
            joined = _BackpropIntoPrefixes.apply(joined, leaves, *states)
        return joined


def _is_by_token(x: Any, tokens: int) -> bool:
    """Whether an output has a value for each token: `(1, T, ...)`, or `(T, experts)` of routers."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return False
    return len(x) == tokens if x.dim() == 2 else tuple(x.shape[:2]) == (1, tokens)


class _BackpropIntoPrefixes(torch.autograd.Function):
    """
    Identity in forward. Backward returns, for each prefix state, the gradient accumulated in its detached leaf.

    The loss stays a scalar with one backward, for any caller, and each weight gets its gradient in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, leaves: tuple[torch.Tensor, ...], *states: torch.Tensor
    ) -> torch.Tensor:
        ctx.leaves, ctx.dtypes = leaves, [x.dtype for x in states]
        return hidden.view_as(hidden)  # a new tensor, whose `grad_fn` is this function

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Zeros for a leaf without a gradient: FSDP2 waits for the gradients of all outputs of a forward.
        of_states = (
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(dtype)
            for leaf, dtype in zip(ctx.leaves, ctx.dtypes, strict=True)
        )
        return grads[0], None, *of_states


def detached_leaf(x: torch.Tensor) -> torch.Tensor:
    """
    A copy of `x` without its graph, in which the gradients of the forwards that read it accumulate.

    In float32 if `x` is in half precision, because many gradients are added; a forward casts it to its own dtype.
    """
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return (x.detach().float() if is_half else x.detach()).requires_grad_()
