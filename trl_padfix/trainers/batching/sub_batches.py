"""
A forward in pieces of at most so many tokens, for losses that compare the rows of a forward.

[`SplitForward`] stands at the door of a model: within [`splitting`] it runs the rows of a call in pieces, filled by
the tokens that are computed, and answers with the outputs of all of them. The loss sees one forward. Where gradients
are wanted, the pieces are computed a second time in the backward pass, one after another, and memory holds the
activations of one piece at a time: the gradient is that of the whole forward, to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from ...core.call.batch_metadata import Seen, defer_check
from ...core.call.prefix_states import ForwardStates, PrefixStates
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan, plan_shared_prefixes
from ...core.model.find import find_decoder, find_pretrained
from ...core.model.patching import Attachment, ForwardPatch
from ..data.batch_metadata import image_tensors
from .bin_packing import pack_depth_first, split
from .prefix_groups import sort_by_prefix
from .prefix_schedule import MicroBatchRunner, run_prefix_forward, seeing
from .token_costs import prefix_costs, text_costs


__all__ = [
    "Routed",
    "SplitForward",
    "Splits",
    "attach_splitting",
    "balancing_loss",
    "check_balancing_loss",
    "joins_balancing_losses",
    "routed_of",
    "running_pieces",
    "splitting",
]


@dataclass
class _Known:
    """The pieces of a batch: their rows, and what they have instead of its ids and mask."""

    given: tuple[Seen, Seen]
    rows: list[torch.Tensor]
    pieces: list[tuple[torch.Tensor, torch.Tensor | None]]
    once: PrefixPlan | None = None


@dataclass
class Splits:
    """
    How the forwards of a step are split; forwards on the same tensors are split alike.

    Args:
        budget (`int`):
            Most tokens of a piece.
        sharing (`bool`):
            Whether prefixes that rows have in common count once.
        agree (`Callable[[int], int]`, *optional*):
            The number of pieces that all processes are to have, of the number that this one needs.
        once (`bool`, *optional*, defaults to `False`):
            Whether prefixes that pieces have in common are computed once, and not by each piece.
    """

    budget: int
    sharing: bool
    agree: Callable[[int], int] | None = None
    once: bool = False
    known: list[_Known] = field(default_factory=list)

    def of(self, ids: torch.Tensor, mask: torch.Tensor | None) -> _Known:
        """The pieces of a batch with these ids and this mask."""
        for known in self.known:
            if known.given[0].is_still(ids) and known.given[1].is_still(mask):
                now = [(ids[r], None if mask is None else mask[r]) for r in known.rows]
                pairs = zip(chain(*now), chain(*known.pieces), strict=True)
                wrong = torch.stack([(new != old).any() for new, old in pairs if new is not None and old is not None])
                defer_check("A forward in pieces has the rows that it had when it was split", wrong.any())
                return known
        # One copy to the host for all pieces: the only wait for the device that splitting needs.
        both = torch.stack([ids, torch.ones_like(ids) if mask is None else mask.to(ids.dtype)]).cpu()
        parts = self._parts(*both)
        rows = [torch.tensor(part, device=ids.device) for part in parts]
        once = None
        if self.once and len(parts) > 1 and mask is not None:
            once = plan_shared_prefixes([(both[0, part], both[1, part]) for part in parts], self.budget)
            once = once and FlatIndexMaps.of(once).to(ids.device)
        pieces = [(ids[part], None if mask is None else mask[part]) for part in rows]
        self.known.append(_Known((Seen.of(ids), Seen.of(mask)), rows, pieces, once))
        return self.known[-1]

    def _parts(self, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
        real = mask.numpy().astype(bool)
        each = real.sum(1)
        costs = text_costs(each)
        if self.sharing:
            rows = [row[keep] for row, keep in zip(ids.numpy(), real, strict=True)]
            costs = prefix_costs(each, each, *sort_by_prefix(rows))
        parts = (pack_depth_first if self.once else split)(costs, self.budget)
        wanted = len(parts) if self.agree is None else self.agree(len(parts))
        while len(parts) < wanted:
            largest = max(parts, key=len)
            parts.remove(largest)
            parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        return parts


_splits: ContextVar[Splits | MicroBatchRunner | None] = ContextVar("trl_padfix_splits", default=None)


@contextmanager
def splitting(splits: Splits | MicroBatchRunner | None) -> Iterator[None]:
    """
    Split the forwards of models with [`SplitForward`] until the block ends, or let them be of some micro-batches; not,
    where `splits` is `None`.
    """
    token = _splits.set(splits)
    try:
        yield
    finally:
        _splits.reset(token)


def running_pieces() -> MicroBatchRunner | None:
    """The micro-batches of which one is running, if that is so."""
    running = _splits.get()
    return running if isinstance(running, MicroBatchRunner) else None


class SplitForward(ForwardPatch):
    """Runs the forward of a model in the pieces of [`splitting`]."""

    _checked_experts = False
    """Whether the load-balancing loss of a piece was compared with the model's own."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        splits, ids = _splits.get(), kwargs.get("input_ids")
        cached = kwargs.get("past_key_values") is not None or kwargs.get("use_cache") is True
        if splits is None or args or ids is None or ids.dim() != 2 or cached or not self.attachment.enabled:
            return self.wrapped(*args, **kwargs)
        if isinstance(splits, MicroBatchRunner):
            # A trunk runs through the decoder alone, which may be this very module.
            with splitting(None), splits.piece(self.module, self.wrapped, kwargs):
                return self.wrapped(**kwargs)
        if image_tensors(kwargs):
            raise ValueError(
                "`max_tokens_per_batch` computes this batch in pieces of rows, and its images are not rows of their "
                "own: nobody knows here which belong to which. Leave the budget out."
            )
        known = splits.of(ids, kwargs.get("attention_mask"))
        if len(known.rows) == 1:
            return self.wrapped(**kwargs)
        calls = []
        for rows, (piece_ids, piece_mask) in zip(known.rows, known.pieces, strict=True):
            of_rows = {k: v[rows] for k, v in kwargs.items() if _has_rows(v, len(ids))}
            calls.append(kwargs | of_rows | {"input_ids": piece_ids})
            if piece_mask is not None:
                calls[-1]["attention_mask"] = piece_mask
        seen = self._layouts(known, calls)
        # The last piece is the first that the backward pass comes to: it is not computed twice.
        *twice, last = zip(calls, seen, strict=True)
        if torch.is_grad_enabled():
            pieces = [checkpoint(self._forward, *piece, use_reentrant=False) for piece in twice]
        else:
            pieces = [self._forward(*piece) for piece in twice]
        outputs, routed = zip(*pieces, self._forward(*last), strict=True)
        joined = _joined(outputs, calls, torch.cat(known.rows))
        if outputs[0].get("aux_loss") is not None:
            masks = [call.get("attention_mask") for call in calls]
            if not self._checked_experts:
                check_balancing_loss(self.module, routed[0], masks[0], outputs[0]["aux_loss"])
                self._checked_experts = True
            joined["aux_loss"] = balancing_loss(self.module, routed, masks)
        return joined

    def _layouts(self, known: _Known, calls: list[dict[str, Any]]) -> list[PrefixedLayout | None]:
        """The layouts of pieces, with the states of the prefixes that they have in common; these are computed here."""
        pieces, states = known.once, []
        # Positions tell tokens apart, too, by which prefixes are compared.
        if pieces is None or calls[0].get("position_ids") is not None:
            return [None] * len(calls)
        for prefix in pieces.prefixes.values():
            states.append(self._states(calls[prefix.first], prefix.layouts[prefix.first], states))
        return [replace(x, prefix_states=PrefixStates([states[n] for n in x.outer])) for x in pieces.layouts.values()]

    def _states(self, call: dict[str, Any], layout: PrefixedLayout, states: list[ForwardStates]) -> ForwardStates:
        """What a trunk hands on; as that of a piece, its forward is computed again for its backward."""
        like: list[ForwardStates] = []
        outer, with_graph = [states[n] for n in layout.outer], torch.is_grad_enabled()

        def run() -> tuple[torch.Tensor, ...]:
            notes = ForwardStates()
            with splitting(None):
                run_prefix_forward(
                    find_decoder(self.module),
                    self._asked(call),
                    replace(layout, prefix_states=PrefixStates(outer, notes)),
                )
            like[:] = [notes.changed(lambda x: x[..., :0])]
            # Gradients of many pieces are added up in float32.
            return tuple(x.float() if with_graph else x for values in notes.values() for x in values)

        made = iter(checkpoint(run, use_reentrant=False) if with_graph else run())
        return like.pop().changed(lambda x: next(made))

    def _asked(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call that says whether its router logits are wanted."""
        wanted = call.get("output_router_logits")
        if wanted is None:
            wanted = getattr(self.module.config.get_text_config(), "output_router_logits", False)
        return call | {"output_router_logits": True} if wanted else call

    def _forward(self, call: dict[str, Any], layout: PrefixedLayout | None) -> tuple[Any, Routed]:
        """The output of a piece, and its router logits, of a model with experts."""
        with seeing(call, layout) if layout is not None else nullcontext():
            if not self._asked(call).get("output_router_logits"):
                return self.wrapped(**call), None
            with routed_of(self.module) as found:
                output = self.wrapped(**call)
            return output, found[0] if len(found) == 1 else None


def attach_splitting(model: torch.nn.Module) -> Attachment:
    """Let the forward of `model` be split within [`splitting`]; what an earlier trainer attached for it goes."""
    pretrained = find_pretrained(model)
    patch = vars(pretrained).get("forward")
    while isinstance(patch, ForwardPatch):
        if isinstance(patch, SplitForward):
            patch.attachment.remove()
        patch = patch.below
    attachment = Attachment()
    return attachment.attach([SplitForward(pretrained, attachment)])


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _joined(outputs: Sequence[Any], calls: list[dict[str, Any]], rows: torch.Tensor) -> Any:
    """
    The output of the whole call, but for the load-balancing loss of experts.

    Raises:
        ValueError: If the model answers with something that cannot be put together from its pieces.
    """
    back, joined = rows.argsort(), outputs[0]
    balanced = joined.get("aux_loss") is not None
    for name, value in list(joined.items()):
        values = [output[name] for output in outputs]
        if all(_has_rows(v, len(call["input_ids"])) for v, call in zip(values, calls, strict=True)):
            joined[name] = torch.cat(values).index_select(0, back)
        elif name == "aux_loss":
            continue
        elif name == "loss" and balanced:
            joined[name] = None  # a piece's has its own balancing loss in it; TRL takes neither from there
        elif name == "router_logits":
            joined[name] = tuple(_tokens_of_rows(layer, calls, back) for layer in zip(*values, strict=True))
        elif name == "loss" and value is not None and value.dim() == 0 and "labels" in calls[0]:
            joined[name] = _joined_loss(values, calls)
        elif value is not None:
            raise ValueError(
                f"`max_tokens_per_batch` computes a batch in {len(calls)} pieces, and `{name}` of the "
                f"{type(joined).__name__} is a {type(value).__name__} that has no row for each row of its piece. "
                "Leave the budget out, or ask the model for less."
            )
    return joined


def _tokens_of_rows(values: tuple[torch.Tensor, ...], calls: list[dict[str, Any]], back: torch.Tensor) -> torch.Tensor:
    """Values of the tokens of pieces, `(b * L, ...)` each, in the order of the whole batch."""
    by_rows = [v.unflatten(0, call["input_ids"].shape) for v, call in zip(values, calls, strict=True)]
    return torch.cat(by_rows).index_select(0, back).flatten(0, 1)


def _joined_loss(losses: list[torch.Tensor], calls: list[dict[str, Any]]) -> torch.Tensor:
    """A model's own loss is a mean over its labels, or a sum divided by a number that it is given."""
    if calls[0].get("num_items_in_batch") is not None:
        return torch.stack(losses).sum()
    counts = torch.stack([(call["labels"][:, 1:] != -100).sum() for call in calls])
    return (torch.stack(losses) * counts).sum() / counts.sum().clamp(min=1)


Routed = tuple[torch.Tensor, ...] | None
"""Router logits of a forward, layer by layer, `(B * L, experts)` each."""


def joins_balancing_losses() -> bool:
    """Whether TRL takes the loss apart from that of the language model, which it does with its fused LM head."""
    return hasattr(trl_utils, "add_fused_lm_head")


@contextmanager
def routed_of(model: PreTrainedModel) -> Iterator[list[Routed]]:
    """A list that grows by the router logits of each call of the model's decoder within the block."""
    found: list[Routed] = []

    def keep(decoder: Any, args: Any, output: Any) -> None:
        found.append(getattr(output, "router_logits", None))

    hook = find_decoder(model).register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def balancing_loss(model: PreTrainedModel, routed: Sequence[Routed], masks: Sequence[torch.Tensor | None]) -> Any:
    """
    The loss of all pieces, as transformers takes it of one forward.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model with experts.
        routed (`Sequence[tuple[torch.Tensor, ...]]`):
            Router logits of the pieces.
        masks (`Sequence[torch.Tensor]`):
            Their attention masks, of shape `(b, L)`; `None` for pieces without padding.
    """
    layers = tuple(map(torch.cat, zip(*(piece for piece in routed if piece is not None), strict=True)))
    mask = None if any(m is None for m in masks) else torch.cat([m for m in masks if m is not None])
    loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    loss = loss or modeling_mixtral.load_balancing_loss_func
    return loss(layers, layers[0].shape[-1], model.config.get_text_config().num_experts_per_tok, mask)


@torch.no_grad()
def check_balancing_loss(model: PreTrainedModel, routed: Routed, mask: torch.Tensor | None, own: torch.Tensor) -> None:
    """
    Raises:
        ValueError: If the loss of a piece is not the model's own.
    """
    found = balancing_loss(model, [routed], [mask]) if routed else own.new_tensor(float("nan"))
    if not torch.allclose(found.to(own.dtype), own, rtol=1e-3):
        raise ValueError(
            f"The load-balancing loss of {type(model).__name__} is {own.item():.6f} for the first rows of the batch, "
            f"and {found.item():.6f} by their router logits: `max_tokens_per_batch` cannot put it together from "
            "pieces. Leave the budget out, or set `router_aux_loss_coef=0`."
        )
