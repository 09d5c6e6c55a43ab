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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
    "ChunkRunner", "PrefixSchedule", "can_read_prefixes", "run_prefix_forward", "shares_across_parts",
    "sharing_obstacle", "with_prefix_states",
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
        self.states: dict[int, ForwardStates] = {}  # as parts read them: leaves, if it detaches
        self.graph_states: dict[int, ForwardStates] = {}  # if it detaches: the originals of the leaves
        self._rng_states: dict[int, Any] = {}  # of prefixes that will be recomputed

    def next_part(self, run: RunPrefix) -> PrefixedLayout:
        """
        Advance to the next part: `run` the prefix forwards that it needs, and return its layout with the prefix
        states. The states of prefixes that no later part needs are freed.
        """
        self.index += 1
        for n, prefix in self.plan.prefixes.items():
            if prefix.last_user < self.index:
                self.graph_states.pop(n, None)
                self.states.pop(n, None)
            if prefix.first_user == self.index:
                self._run_first(n, run)
            if prefix.last_user == self.index and prefix.recompute and self.detaches:
                self._run_again(n, run)
        layout = self.plan.layouts[self.index]
        states = [self._states_for(n, self.index) for n in layout.prefixes]
        return replace(layout, prefix_states=PrefixStates(states, None, self._pending_backward()))

    def _run_first(self, n: int, run: RunPrefix) -> None:
        if not self.detaches:
            self.states[n] = self._run_prefix(n, run)
            return
        if (prefix := self.plan.prefixes[n]).recompute:
            # `real_index` names the device.
            self._rng_states[n] = torch.get_rng_state(), get_device_states(prefix.layouts[self.index].real_index)
            with torch.no_grad():
                states = self._run_prefix(n, run)
            torch.clear_autocast_cache()  # else the part gets weights that were cast without a graph (pytorch#112583)
        else:
            states = self.graph_states[n] = self._run_prefix(n, run)
        self.states[n] = states.map(detached_leaf)

    def _run_again(self, n: int, run: RunPrefix) -> None:
        """Compute a prefix with its graph, which the first forward did not keep, and with the dropout of the first."""
        on_host, on_device = self._rng_states.pop(n)
        with torch.random.fork_rng(devices=on_device[0]):
            torch.set_rng_state(on_host)
            set_device_states(*on_device)
            self.graph_states[n] = self._run_prefix(n, run)

    def _run_prefix(self, n: int, run: RunPrefix) -> ForwardStates:
        prefix = self.plan.prefixes[n]
        layout = prefix.layouts[self.index]
        return run(layout, [self._states_for(m, prefix.last_user) for m in layout.prefixes])

    def _states_for(self, n: int, end: int) -> ForwardStates:
        """States of a prefix, for a forward whose backward runs together with the backward of part `end`."""
        with_graph = n in self.graph_states and self.plan.prefixes[n].last_user == end
        return self.graph_states[n] if with_graph else self.states[n]

    def _pending_backward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        States whose last user is the running part, each with the leaf that has accumulated its gradients: the backward
        of the part continues through the graph of these states.
        """
        return [
            (states, leaf)
            for n, prefix in self.plan.prefixes.items()
            if prefix.last_user == self.index
            for name, tensors in self.graph_states.get(n, {}).items()
            for states, leaf in zip(tensors, self.states[n][name], strict=True)
            if states.requires_grad
        ]


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
        self.schedules: defaultdict[Any, list[PrefixSchedule]] = defaultdict(list)

    def start(self, index: int, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set the running chunk, with its ids and mask."""
        self.index = index
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
        is_chunk = self.inputs.matches(call.get("input_ids"), call.get("attention_mask"))
        if self.plan is None or not is_chunk or not can_read_prefixes(model, call):
            return None
        schedules = self.schedules[model, torch.is_grad_enabled()]
        if self.index == 0:
            schedules.append(PrefixSchedule(self.plan, detaches=torch.is_grad_enabled()))
        schedule = next((schedule for schedule in schedules if schedule.index < self.index), None)
        if schedule is None:
            return None
        if schedule.index != self.index - 1:
            raise _missing_chunk()
        # With a head the whole model, which must call it.
        head_arguments = {"logits_to_keep": 1} if self.with_head else {}
        of_prefix = forward if self.with_head else find_decoder(model)
        return schedule.next_part(partial(run_prefix_forward, of_prefix, call, **head_arguments))

    def check(self) -> None:
        """
        Raises:
            PaddingRemovalError: If a schedule did not reach its last chunk, so that gradients are missing.
        """
        if any(schedule.index != self.count - 1 for schedule in chain(*self.schedules.values())):
            raise _missing_chunk()


def _missing_chunk() -> PaddingRemovalError:
    return PaddingRemovalError(
        "With `max_tokens_per_batch` and `prefix_sharing` the sub-batches of a batch share their common prefixes. The "
        "loss called the model for some sub-batches and not for others, or with tensors that are not from the "
        "batch, so gradients are missing. Leave `max_tokens_per_batch` out, or set `prefix_sharing=False`."
    )


def can_read_prefixes(model: torch.nn.Module, call: dict[str, Any]) -> bool:
    """Whether a call of a model can read prefix states: it is packed, and its ids identify its tokens."""
    # A plan compares ids only, but positions distinguish tokens, too.
    return call.get("position_ids") is None and packs_now(model)


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
    records = ForwardStates()
    records.tokens, records.fork_tokens = layout.computed_tokens, layout.fork_tokens
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
    reason = next(filter(None, (sharing_obstacle(handle, args, is_sharded) for handle in handles)), None)
    if reason is not None and args.should_log:
        said = f"Each sub-batch recomputes the prefixes that it shares with other sub-batches: {reason}."
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
    names = ("activation_checkpointing", "gradient_checkpointing")  # the newer name, and the older one
    name = next((name for name in names if vars(args).get(name) is not None), "gradient_checkpointing")
    is_reentrant.append(vars(args).get(name) and (vars(args).get(f"{name}_kwargs") or {}).get("use_reentrant"))
    reason = "reentrant gradient checkpointing keeps no graph of keys and values (set `use_reentrant=False`)"
    return reason if any(is_reentrant) else None
