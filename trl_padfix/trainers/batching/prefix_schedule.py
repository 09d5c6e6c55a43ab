"""
Compute each shared prefix once per batch.

A [`PrefixSchedule`] runs a prefix forward before the first part of a batch that needs the prefix. It records keys,
values and states ([`ForwardStates`]), which later forwards read: their rows begin with tokens of the prefix. If each
part is a chunk with its own backward, chunks attend to the cached keys, values and final states as detached leaves,
which accumulate their gradients. The last chunk that uses a prefix backpropagates through the graph of the prefix
together with its own graph. Each model (policy, reference) has a schedule of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from ...core.anatomy import find_decoder
from ...core.call.batch_cache import BatchVersion, PlannedLayout, cache_of_call
from ...core.call.prefix_states import ForwardStates, PrefixStates, detached_leaf
from ...core.context import within
from ...core.errors import PaddingRemovalError
from ...core.handle import PaddingRemoval
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan
from ...core.mixers.mixers import DIRECT, FORKED
from ...core.mixers.primitives import can_export_state
from ...core.remove import packs_now
from ..messages import say


__all__ = [
    "ChunkRunner", "PrefixSchedule", "run_prefix_forward", "shares_across_parts", "sharing_obstacle",
    "with_prefix_states",
]  # fmt: skip

RunPrefix = Callable[[PrefixedLayout, list[ForwardStates]], ForwardStates]
"""Runs a prefix forward with a layout after given states, on the ids and mask of the running part."""


class PrefixSchedule:
    """
    One pass of a model over the parts of a batch, in their order.

    Args:
        plan ([`PrefixPlan`]):
            Layouts of the parts and of the prefixes that they share.
        detaches (`bool`):
            Whether each part has a backward before the next one. Otherwise parts read the states as they were
            recorded.
    """

    def __init__(self, plan: PrefixPlan, detaches: bool):
        self.plan, self.detaches, self.index = plan, detaches, -1
        self.states: dict[int, ForwardStates] = {}  # leaves, if it detaches
        self.graph_states: dict[int, ForwardStates] = {}  # the originals of the leaves, if it detaches
        self._rng_states: dict[int, Any] = {}

    def next_part(self, run: RunPrefix) -> PrefixedLayout:
        """
        Advance to the next part: `run` the prefix forwards that it needs, and return its layout with the prefix
        states. The states of prefixes that no later part needs are freed.
        """
        self.index += 1
        ending: list[int] = []
        for n, prefix in self.plan.prefixes.items():
            if prefix.last_user < self.index:
                self.graph_states.pop(n, None)
                self.states.pop(n, None)
            if prefix.first_user == self.index:
                is_kept = torch.is_grad_enabled() and not (self.detaches and prefix.recompute)
                self._run_prefix(n, run, with_graph=is_kept)
            if prefix.last_user == self.index and self.detaches:
                ending.append(n)
                if prefix.recompute:
                    self._run_prefix(n, run, with_graph=True)
        layout = self.plan.layouts[self.index]
        states = [self._states_for(n, self.index) for n in layout.prefixes]
        return replace(layout, prefix_states=PrefixStates(states, None, self._pending_backward(ending)))

    def _pending_backward(self, prefixes: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States of prefixes with a graph, each with the leaf that accumulated its gradients."""
        return [
            (states, leaf)
            for n in prefixes
            for name, tensors in self.graph_states[n].items()
            for states, leaf in zip(tensors, self.states[n][name], strict=True)
            if states.requires_grad
        ]

    def _run_prefix(self, n: int, run: RunPrefix, with_graph: bool) -> None:
        prefix = self.plan.prefixes[n]
        layout = prefix.layouts[self.index]
        reads = [self._states_for(m, prefix.last_user) for m in layout.prefixes]
        is_first = n not in self.states
        if is_first and prefix.recompute and self.detaches:
            # Dropout of the recomputed prefix must equal the dropout of the first forward. `real_index` names the
            # device.
            self._rng_states[n] = torch.get_rng_state(), get_device_states(layout.real_index)
        rng = contextlib.nullcontext() if is_first else _with_rng_state(*self._rng_states.pop(n))
        with rng, torch.set_grad_enabled(with_graph):
            states = run(layout, reads)
        if with_graph and self.detaches:
            self.graph_states[n] = states
        if is_first:
            self.states[n] = states.map(detached_leaf) if self.detaches else states

    def _states_for(self, n: int, end: int) -> ForwardStates:
        """States of a prefix, for a forward whose backward runs together with the backward of part `end`."""
        with_graph = n in self.graph_states and self.plan.prefixes[n].last_user == end
        return self.graph_states[n] if with_graph else self.states[n]


class ChunkRunner:
    """
    Runs the forwards of the chunks of a batch; the backward of a chunk comes before the next forward.

    Args:
        count (`int`):
            Number of chunks.
        plan ([`PrefixPlan`], *optional*):
            Their shared prefixes; `None` if they share none.
        with_head (`bool`, *optional*, defaults to `False`):
            Whether prefixes run through the whole model, not only its decoder: FSDP2 gathers a head with the last
            norm.
    """

    def __init__(self, count: int, plan: PrefixPlan | None = None, with_head: bool = False):
        self.count, self.plan, self.with_head = count, plan, with_head
        self.index, self.inputs = 0, BatchVersion.of(torch.empty(0), None)
        self.schedules: dict[Any, PrefixSchedule] = {}
        self.calls: Counter[Any] = Counter()

    def start(self, index: int, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set the running chunk, with its ids and mask."""
        self.index = index
        self.calls.clear()
        self.set_inputs(ids, mask)

    def set_inputs(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """
        Set ids and mask of the running chunk; a call of a model with these very tensors runs it.

        A loss may concatenate them again, from prompts and completions, into tensors of the same shape.
        """
        if self.plan is not None and tuple(ids.shape) == self.plan.layouts[self.index].batch_shape:
            self.inputs = BatchVersion.of(ids, mask)

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output of `forward` for the running chunk; it reads the prefix states if it can."""
        layout = self._next_layout(model, forward, call)
        with contextlib.nullcontext() if layout is None else with_prefix_states(call, layout):
            return forward(**call)

    def leave(self, model: torch.nn.Module, call: dict[str, Any], reason: str) -> None:
        """Do nothing: a chunk is within the budget, even if its forward is not packed."""

    def _next_layout(
        self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]
    ) -> PrefixedLayout | None:
        """
        The layout of a call that belongs to a schedule; prefixes are computed here. `None` for other calls.

        In each chunk the first call of a model, with or without gradients, belongs to one schedule, the second call to
        another one.
        """
        # The plan compared ids only, but positions distinguish tokens, too.
        if self.plan is None or call.get("position_ids") is not None or not packs_now(model):
            return None
        if not self.inputs.matches(call.get("input_ids"), call.get("attention_mask")):
            return None
        kind = model, torch.is_grad_enabled()
        key = id(model), torch.is_grad_enabled(), self.calls[kind]
        if self.index == 0:
            self.schedules[key] = PrefixSchedule(self.plan, detaches=torch.is_grad_enabled())
        if (schedule := self.schedules.get(key)) is None:
            return None
        self.calls[kind] += 1
        if schedule.index != self.index - 1:
            raise _missing_chunk()

        def run_prefix(prefix: PrefixedLayout, reads: list[ForwardStates]) -> ForwardStates:
            if self.with_head:  # the whole model, because it must call its head
                return run_prefix_forward(forward, call, prefix, reads, logits_to_keep=1)
            return run_prefix_forward(find_decoder(model), call, prefix, reads)

        return schedule.next_part(run_prefix)

    def check(self) -> None:
        """
        Raises:
            PaddingRemovalError: If a schedule did not reach its last chunk, so that gradients are missing.
        """
        if any(schedule.index != self.count - 1 for schedule in self.schedules.values()):
            raise _missing_chunk()


def _missing_chunk() -> PaddingRemovalError:
    return PaddingRemovalError(
        "With `max_tokens_per_batch` and `prefix_sharing` the sub-batches of a batch share their common prefixes. The "
        "loss called the model for some sub-batches and not for others, or with tensors that are not from the "
        "batch, so gradients are missing. Leave `max_tokens_per_batch` out, or set `prefix_sharing=False`."
    )


@contextlib.contextmanager
def _with_rng_state(on_host: torch.Tensor, on_device: tuple[list[int], list[torch.Tensor]]) -> Iterator[None]:
    """A block with these states of the random number generators; the current ones are restored at its end."""
    with torch.random.fork_rng(devices=on_device[0]):
        torch.set_rng_state(on_host)
        set_device_states(*on_device)
        yield


def run_prefix_forward(
    forward: Callable[..., Any],
    call: dict[str, Any],
    layout: PrefixedLayout,
    reads: list[ForwardStates],
    **head_arguments: Any,
) -> ForwardStates:
    """
    Compute a shared prefix.

    Args:
        forward (`Callable`):
            A decoder; with `head_arguments` its model.
        call (`dict`):
            Keyword arguments of the model for the batch in which the prefix is computed: ids, mask, and the requested
            outputs.
        layout ([`PrefixedLayout`]):
            The layout of the prefix in that batch.
        reads (`list` of [`ForwardStates`]):
            States of the prefixes that it continues.
        **head_arguments:
            `logits_to_keep`, where the head must run too.

    Returns:
        [`ForwardStates`]: States that later forwards read.
    """
    ids, mask = call["input_ids"], call["attention_mask"]
    outputs = {k: v for k, v in call.items() if k in ("output_router_logits", "output_hidden_states")}
    assert layout.new is not None
    records = ForwardStates()
    records.tokens, records.fork_tokens = layout.new.packed_tokens, layout.fork_tokens
    # The decoder may have a runner patch, and checkpointing recomputes this forward in a backward: so no runner here.
    planned = PlannedLayout(BatchVersion.of(ids, mask), replace(layout, prefix_states=PrefixStates(reads, records)))
    with within(model=None, runner=None, planned=planned):
        output = forward(input_ids=ids, attention_mask=mask, use_cache=False, **outputs, **head_arguments)
    if head_arguments:
        records["head",] = (output.logits,)  # backward must begin with the head, as FSDP2 expects
    return records


@contextlib.contextmanager
def with_prefix_states(call: dict[str, Any], layout: PrefixedLayout) -> Iterator[None]:
    """Until the block ends, a forward of a model with the arguments `call` has this `layout` and reads its states."""
    planned = PlannedLayout(BatchVersion.of(call["input_ids"], call["attention_mask"]), layout)
    with cache_of_call(), within(planned=planned):
        yield


def shares_across_parts(handles: Sequence[PaddingRemoval], args: Any, is_sharded: bool) -> bool:
    """Whether the models share prefixes across the parts of a batch; says why, once, if they cannot."""
    if not handles or not all(handle.prefix_sharing for handle in handles):
        return False
    obstacles = (sharing_obstacle(handle, args, is_sharded) for handle in handles)
    if reason := next(filter(None, obstacles), None):
        said = f"Each sub-batch recomputes the prefixes that it shares with other sub-batches: {reason}."
        if args.should_log:
            handles[0].say_once(said, tell=say)
    return reason is None


def sharing_obstacle(handle: PaddingRemoval, args: Any, is_sharded: bool) -> str | None:
    """Why parts of a batch cannot read prefix states of other forwards, or `None` if they can."""
    if handle.multimodal is not None:
        return "images are not compared before a forward"
    if handle.anatomy.has_virtual_tokens:
        return "virtual tokens (prompt tuning, p-tuning) are not among the rows of a batch"
    mixers = handle.mixers.mixers
    unserved = (m for m in mixers if m.mode != DIRECT and not (m.mode == FORKED and can_export_state(m.module)))
    if other := next(unserved, None):
        return f"`{other.name}` ({type(other.module).__name__}: {other.why}) passes no state to other forwards"
    layers = getattr(handle.decoder.config, "num_hidden_layers", None)
    if len(mixers) != layers:
        return f"{type(handle.decoder).__name__} has {layers} layers and {len(mixers)} mixers in them"
    if handle.context_parallel is not None:
        return "context parallelism divides each sub-batch among the processes"
    if args.torch_compile:
        return "compiled layers take no states from outside"
    if is_sharded:
        return "processes that shard a model have to run equally many forwards"
    # Checkpointing that is on in the model (reentrant by default), and checkpointing that Trainer will switch on.
    # TRL switches it off where it computes without gradients, and leaves the modules a function without settings.
    checkpointed = (m for m in map(vars, handle.decoder.modules()) if m.get("gradient_checkpointing"))
    functions = filter(None, (m.get("_gradient_checkpointing_func") for m in checkpointed))
    is_reentrant = [not isinstance(f, partial) or f.keywords.get("use_reentrant", True) for f in functions]
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the newer name, and the older one
        if (is_on := vars(args).get(name)) is not None:
            is_reentrant.append(is_on and (vars(args).get(f"{name}_kwargs") or {}).get("use_reentrant"))
            break
    if any(is_reentrant):
        return "reentrant gradient checkpointing keeps no graph of keys and values (set `use_reentrant=False`)"
    return None
