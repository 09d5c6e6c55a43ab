"""
Each distinct token of a step once, whatever the pieces of the step: prefixes that pieces share are run as trunks.

Where pieces are micro-batches, each with a backward of its own, a [`PrefixSchedule`] runs a trunk before the first piece that
needs it. Pieces see its keys, values and final states as leaves, in which their gradients add up; the last one sees
its graph, so its backward is part of the last one's. Policy and reference walk by themselves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils.checkpoint import get_device_states, set_device_states

from ...core.call.batch_metadata import BatchFacts, Known, Seen, Step, defer_check
from ...core.call.layout_of import LayoutKey
from ...core.call.prefix_states import ForwardStates, PrefixStates, detached_leaf
from ...core.context import context, within
from ...core.errors import PaddingRemovalError
from ...core.handle import PaddingRemoval
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan, plan_shared_prefixes
from ...core.mixers.mixers import FORKED, PACKED
from ...core.mixers.primitives import hands_states_on
from ...core.model.find import find_decoder
from ..data.batch_metadata import pop_metadata


__all__ = [
    "REPLAN",
    "MicroBatchRunner",
    "PrefixSchedule",
    "computes_once",
    "ids_and_masks",
    "reason_to_compute_again",
    "run_prefix_forward",
    "seeing",
]

logger = get_logger(__name__)


REPLAN = "replan"
"""In the place of a plan: other micro-batches than their collator made."""


def ids_and_masks(batches: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and masks of batches."""
    return [(batch["input_ids"], batch["attention_mask"]) for batch in batches]


Run = Callable[[PrefixedLayout, int, torch.Tensor | None], None]
"""Computes a trunk in the batch of a piece; the ids of its tokens, if it was computed before."""


class PrefixSchedule:
    """
    One pass of a model over the pieces of a step, in their order.

    Args:
        pieces ([`PrefixPlan`]):
            How they are computed.
        with_graph (`bool`):
            Whether each piece has a backward before the next one. Without, trunks are plain keys and values.
    """

    def __init__(self, pieces: PrefixPlan, with_graph: bool):
        self.pieces, self.with_graph, self.at = pieces, with_graph, -1
        self.is_over = False
        self.made: dict[int, ForwardStates] = {}
        self.leaves: dict[int, ForwardStates] = {}
        self._random: dict[int, Any] = {}

    def enter(self, run: Run) -> PrefixedLayout:
        """
        The layout of the next piece with what it sees; `run` computes the trunks that it needs.

        Trunks whose last piece was before have had their backward, and are let go.
        """
        self.at += 1
        ending: list[int] = []
        for n, prefix in self.pieces.prefixes.items():
            if prefix.last < self.at:
                self.made.pop(n, None)
                self.leaves.pop(n, None)
            if prefix.first == self.at:
                self._compute(n, self.at, run, with_graph=self.with_graph and not prefix.again)
            if prefix.last == self.at and self.with_graph:
                ending.append(n)
                if prefix.again:
                    self._compute(n, self.at, run, with_graph=True)
        layout = self.pieces.layouts[self.at]
        seen = [self._seen(n, self.at) for n in layout.outer]
        return replace(layout, prefix_states=PrefixStates(seen, None, self._closes(ending)))

    def abandon(self, run: Run) -> None:
        """End before the next piece, and give the trunks that later ones would have seen their backward now."""
        self.is_over = True
        ends = {
            n: prefix.last for n, prefix in self.pieces.prefixes.items() if n in self.leaves and prefix.last > self.at
        }
        for last in sorted(set(ends.values())) if self.with_graph else ():
            ending = [n for n, end in ends.items() if end == last]
            for n in ending:
                if self.pieces.prefixes[n].again:
                    self._compute(n, last, run, with_graph=True)
            closes = [(made, leaf.grad.to(made)) for made, leaf in self._closes(ending) if leaf.grad is not None]
            if closes:
                with torch.autocast(closes[0][0].device.type, enabled=False):
                    torch.autograd.backward(*map(list, zip(*closes, strict=True)))
        self.made, self.leaves = {}, {}

    def _closes(self, prefixes: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States of trunks, and the leaves that stood for them."""
        return [
            (made, leaf)
            for n in prefixes
            for name, states in self.made[n].items()
            for made, leaf in zip(states, self.leaves[n][name], strict=True)
            if made.requires_grad
        ]

    def _compute(self, n: int, at: int, run: Run, with_graph: bool) -> None:
        prefix, notes = self.pieces.prefixes[n], ForwardStates()
        layout = prefix.layouts[at]
        prefix_states = PrefixStates([self._seen(m, prefix.last) for m in layout.outer], notes)
        is_first = n not in self.leaves
        if is_first and prefix.again and self.with_graph:
            self._random[n] = torch.get_rng_state(), get_device_states(layout.real_index)
        drawn = contextlib.nullcontext() if is_first else _random_numbers(*self._random.pop(n))
        with drawn, torch.set_grad_enabled(with_graph):
            run(replace(layout, prefix_states=prefix_states), at, None if is_first else self.leaves[n].ids)
        if with_graph:
            self.made[n] = notes
        if is_first:
            self.leaves[n] = notes.changed(lambda x: detached_leaf(x) if self.with_graph else x)

    def _seen(self, n: int, end: int) -> ForwardStates:
        """A trunk as a forward sees it whose backward comes with that of piece `end`."""
        with_graph = n in self.made and self.pieces.prefixes[n].last == end
        return self.made[n] if with_graph else self.leaves[n]


class MicroBatchRunner:
    """
    The micro-batches of a step, to be run one after another, each with its backward.

    Args:
        count (`int`):
            How many they are.
        planned ([`PrefixPlan`], *optional*):
            How they are computed; `None` if they have nothing in common.
        batches (`Sequence[tuple[torch.Tensor, torch.Tensor]]`):
            Ids and mask of each: calls of a model with these very tensors are pieces of a walk. Where somebody has
            written to them, the walk ends, and the rest of the step computes its prefixes anew.
        with_head (`bool`, *optional*, defaults to `False`):
            Whether trunks run through the model and not only its decoder: FSDP2 gathers a head with the last norm.
    """

    def __init__(
        self,
        count: int,
        planned: PrefixPlan | None = None,
        batches: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        with_head: bool = False,
    ):
        self.count, self.planned, self.with_head = count, planned, with_head
        self.batches = [(Seen.of(ids), Seen.of(mask)) for ids, mask in batches]
        self.at, self.are_written = 0, False
        self.schedules: dict[Any, PrefixSchedule] = {}
        self.calls: Counter[Any] = Counter()

    @classmethod
    def of(
        cls, batches: Sequence[dict[str, Any]], planned: Any, budget: int, gather: Callable[[list], list] | None = None
    ) -> MicroBatchRunner:
        """
        Micro-batches as they were `planned` by their collator, if nobody has written to them since.

        `planned` are [`PrefixPlan`], perhaps not on their device yet, `None` if they have nothing in common, or `REPLAN`.
        Planning anew costs a copy of each to the host; with `gather` all processes do (see [`plan_shared_prefixes`]).
        """
        given = ids_and_masks(batches)
        batch_metadata = [(batch, pop_metadata(batch)[1]) for batch in batches]
        kept = all(
            x is not None and x.are_unwritten(batch, "input_ids", "attention_mask") for batch, x in batch_metadata
        )
        if gather is not None or planned is REPLAN or (planned is not None and not kept):
            planned = plan_shared_prefixes([(ids.cpu(), mask.cpu()) for ids, mask in given], budget, gather)
            planned = planned and FlatIndexMaps.of(planned)
        if isinstance(planned, FlatIndexMaps):
            planned = planned.to(given[0][0].device)
        return cls(len(batches), planned, given, with_head=gather is not None)

    def begin(self, i: int) -> None:
        """Micro-batch `i` is the next one."""
        self.at = i
        self.calls.clear()

    def joined(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """These tensors, which a loss has put together, are the running micro-batch, if they are as large."""
        if self.planned is not None and tuple(ids.shape) == self.planned.layouts[self.at].batch_shape:
            self.batches[self.at] = Seen.of(ids), Seen.of(mask)

    @contextlib.contextmanager
    def piece(self, model: Any, forward: Any, call: dict[str, Any]) -> Iterator[None]:
        """
        A block in which a call of `model` is a piece of a walk, if it can be.

        The first call of a model in each micro-batch, with gradients or without, is one walk, the second another one.
        """
        if self.planned is None:
            yield
            return
        ids, mask, seen = call.get("input_ids"), call.get("attention_mask"), self.batches[self.at]
        unwritten = seen[0].is_still(ids) and seen[1].is_still(mask)
        is_own = unwritten or (ids is seen[0].tensor and mask is seen[1].tensor)
        self.are_written |= is_own and not unwritten
        serves = is_own and call.get("position_ids") is None
        key = id(model), torch.is_grad_enabled(), self.calls[model, torch.is_grad_enabled()]
        if serves and unwritten and self.at == 0:
            self.schedules[key] = PrefixSchedule(self.planned, torch.is_grad_enabled())
        schedule = self.schedules.get(key)
        if not serves or schedule is None or schedule.is_over:
            yield
            return
        self.calls[model, torch.is_grad_enabled()] += 1
        if schedule.at != self.at - 1:
            raise _left_out()

        def run(prefix: PrefixedLayout, at: int, tokens: torch.Tensor | None) -> None:
            own, of = (x.tensor for x in self.batches[at])
            if not unwritten and tokens is not None and own is not None:
                own = own.flatten().index_copy(0, prefix.own.packed_index, tokens).view_as(own)
            given = call if unwritten else call | {"input_ids": own, "attention_mask": of}
            if self.with_head:
                run_prefix_forward(forward, given, prefix, logits_to_keep=1)
            else:
                run_prefix_forward(find_decoder(model), given, prefix)

        if not unwritten:
            schedule.abandon(run)
            yield
            return
        layout = schedule.enter(run)
        own = [] if layout.own is None else [ids.flatten()[layout.own.packed_index]]
        computed = torch.cat([*(states.ids for states in layout.prefix_states.outer), *own])
        wrong = (ids.flatten()[layout.real_index] != computed[layout.source]).any()
        real = torch.zeros_like(mask.flatten(), dtype=torch.bool).index_fill(0, layout.real_index, True)
        wrong = wrong | ((mask.flatten() != 0) != real).any()
        defer_check("Micro-batches have the rows that they had when their step was planned", wrong)
        with seeing(call, layout):
            yield

    def check(self) -> None:
        """
        Raises:
            PaddingRemovalError: If a walk did not come to its end, so that gradients of prefixes are missing.
        """
        if any(not schedule.is_over and schedule.at != self.count - 1 for schedule in self.schedules.values()):
            raise _left_out()


def _left_out() -> PaddingRemovalError:
    return PaddingRemovalError(
        "With `max_tokens_per_batch` and `prefix_sharing` the micro-batches of a step share the prefixes that they "
        "have in common, and the loss called the model in some of them and not in others, or with tensors that are "
        "not the batch's, so gradients are missing. "
        "Leave `max_tokens_per_batch` out, or set `prefix_sharing=False`."
    )


def run_prefix_forward(forward: Any, call: dict[str, Any], layout: PrefixedLayout, **more: Any) -> None:
    """
    Run a decoder over a trunk, in the batch of a `call` of its model; its states go to the notes of the layout.

    With `logits_to_keep` it is run with its head, which backward then comes to first.
    """
    asked = {k: v for k, v in call.items() if k in ("output_router_logits", "output_hidden_states")}
    given = {"input_ids": call["input_ids"], "attention_mask": call["attention_mask"], "use_cache": False}
    notes = layout.prefix_states.notes
    notes.ids, notes.forks = call["input_ids"].flatten()[layout.own.packed_index], layout.forks
    with within(model=None, step=Step([_known(call, BatchFacts(layout))])):
        output = forward(**given, **asked, **more)
    if more:
        notes["head",] = (output.logits,)


@contextlib.contextmanager
def seeing(call: dict[str, Any], layout: PrefixedLayout) -> Iterator[None]:
    """The forward of a `call` of a model is that of `layout`."""
    step = context().step or Step()
    facts = step.facts(call["input_ids"], call["attention_mask"])
    known = _known(call, BatchFacts(layout) if facts is None else replace(facts, layout=layout))
    with within(step=replace(step, known=[known, *step.known])):
        yield


def _known(call: dict[str, Any], facts: BatchFacts) -> Known:
    return Known.of(LayoutKey(call["input_ids"], call["attention_mask"], shares=True), facts)


@contextlib.contextmanager
def _random_numbers(on_host: torch.Tensor, on_device: tuple[list[int], list[torch.Tensor]]) -> Iterator[None]:
    """Random numbers are drawn again as from these states on, until the block ends."""
    with torch.random.fork_rng(devices=on_device[0]):
        torch.set_rng_state(on_host)
        set_device_states(*on_device)
        yield


def computes_once(handles: Sequence[PaddingRemoval], args: Any, is_sharded: bool) -> bool:
    """Whether models with these handles can, and are to; where they cannot, the log says why."""
    if not handles or not all(handle.prefix_sharing for handle in handles):
        return False
    reasons = (reason_to_compute_again(handle, args, is_sharded) for handle in handles)
    if reason := next(filter(None, reasons), None):
        logger.info(f"Each piece of a step computes the prefixes that it shares with others anew: {reason}.")
    return reason is None


def reason_to_compute_again(handle: PaddingRemoval, args: Any, is_sharded: bool) -> str | None:
    """Why pieces of a step cannot see the states of others, so that each computes its prefixes again; `None` if so."""
    if handle.multimodal is not None:
        return "images are not compared before a forward"
    mixers = handle.mixers.mixers
    unserved = (m for m in mixers if m.how != PACKED and not (m.how == FORKED and hands_states_on(m.module)))
    if other := next(unserved, None):
        return f"`{other.name}` ({type(other.module).__name__}: {other.why}) hands no state on to other forwards"
    layers = getattr(handle.decoder.config, "num_hidden_layers", None)
    if len(mixers) != layers:
        return f"{type(handle.decoder).__name__} has {layers} layers and {len(mixers)} mixers in them"
    if getattr(args, "torch_compile", False):
        return "compiled layers take no states from outside"
    if handle.split is not None:
        return "several processes compute one row (context parallelism)"
    if is_sharded:
        return "processes that shard a model have to run equally many forwards"
    kinds = [getattr(m, "_gradient_checkpointing_func", None) for m in handle.decoder.modules()]
    asked = [(getattr(kind, "keywords", None) or {}).get("use_reentrant", True) for kind in kinds if kind is not None]
    if getattr(args, "gradient_checkpointing", False):
        asked.append((args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    if any(asked):
        return "reentrant gradient checkpointing keeps no graph of keys and values (set `use_reentrant=False`)"
    return None
