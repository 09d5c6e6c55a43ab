"""
Compute each shared prefix once per optimizer step.

Micro-batches have a backward each. A [`PrefixSchedule`] runs a prefix forward before the first micro-batch that needs
the prefix. Micro-batches attend to its cached keys, values and final states as detached leaves, which accumulate their
gradients. The last user of a prefix backpropagates through the graph of the prefix, together with its own. Each model
(policy, reference) has a schedule of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ...core.call.batch_cache import BatchVersion
from ...core.call.prefix_forward import run_prefix_forward, with_prefix_states
from ...core.call.prefix_states import ForwardStates, PrefixStates, detached_leaf
from ...core.context import ForwardRunner, within
from ...core.errors import PaddingRemovalError
from ...core.handle import PaddingRemoval
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan, plan_shared_prefixes
from ...core.mixers.mixers import FORKED, PACKED
from ...core.mixers.primitives import can_export_state
from ...core.model.find import find_decoder
from ...core.remove import packs_now
from ..activation_checkpointing import checkpointing_kwargs


__all__ = [
    "STALE_PLAN",
    "MicroBatchRunner",
    "PrefixSchedule",
    "can_share_across_micro_batches",
    "ids_and_masks",
    "plan_on_host",
    "sharing_obstacle",
]

logger = get_logger(__name__)


STALE_PLAN = "stale plan"
"""In place of a plan: the micro-batches are not those of their collator any more, so plan again."""


def ids_and_masks(batches: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and masks of batches; none if one has no mask, without which a batch is not packed."""
    if any("attention_mask" not in batch for batch in batches):
        return []
    return [(batch["input_ids"], batch["attention_mask"]) for batch in batches]


def plan_on_host(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], budget: int, gather: Callable[[list], list] | None = None
) -> FlatIndexMaps | None:
    """[`plan_shared_prefixes`] in one block of memory, which moves to a device in one copy."""
    plan = plan_shared_prefixes(batches, budget, gather)
    return plan and FlatIndexMaps.of(plan)


RunPrefix = Callable[[PrefixedLayout, int, torch.Tensor | None], None]
"""
Runs a prefix forward: its layout, the number of the micro-batch whose ids and mask it takes, and the ids of its tokens
in the first forward if it is recomputed.
"""


class PrefixSchedule:
    """
    One pass of a model over the micro-batches of a step, in their order.

    Args:
        plan ([`PrefixPlan`]):
            Layouts of the micro-batches and of the prefixes that they share.
        with_graph (`bool`):
            Whether each micro-batch has a backward before the next one. Otherwise prefix states are plain tensors.
    """

    def __init__(self, plan: PrefixPlan, with_graph: bool):
        self.plan, self.with_graph, self.index = plan, with_graph, -1
        self.finished = False
        self.graph_states: dict[int, ForwardStates] = {}
        self.detached_states: dict[int, ForwardStates] = {}
        self._rng_states: dict[int, Any] = {}

    def next_batch(self, run: RunPrefix) -> PrefixedLayout:
        """
        Advance to the next micro-batch: `run` the prefix forwards that it needs, and return its layout with the prefix
        states. Prefixes whose last user came before have had their backward, so their states are freed.
        """
        self.index += 1
        ending: list[int] = []
        for n, prefix in self.plan.prefixes.items():
            if prefix.last_user < self.index:
                self.graph_states.pop(n, None)
                self.detached_states.pop(n, None)
            if prefix.first_user == self.index:
                self._run_prefix(n, self.index, run, with_graph=self.with_graph and not prefix.recompute)
            if prefix.last_user == self.index and self.with_graph:
                ending.append(n)
                if prefix.recompute:
                    self._run_prefix(n, self.index, run, with_graph=True)
        layout = self.plan.layouts[self.index]
        states = [self._states_for(n, self.index) for n in layout.prefixes]
        return replace(layout, prefix_states=PrefixStates(states, None, self._pending_backward(ending)))

    def finish_early(self, run: RunPrefix) -> None:
        """
        Stop before the next micro-batch, which was modified: backpropagate now through all prefixes that later
        micro-batches would have read.
        """
        self.finished = True
        last_users = {
            n: prefix.last_user
            for n, prefix in self.plan.prefixes.items()
            if n in self.detached_states and prefix.last_user > self.index
        }
        for last in sorted(set(last_users.values())) if self.with_graph else ():
            ending = [n for n, end in last_users.items() if end == last]
            for n in ending:
                if self.plan.prefixes[n].recompute:
                    self._run_prefix(n, last, run, with_graph=True)
            pending = [(states, leaf.grad) for states, leaf in self._pending_backward(ending) if leaf.grad is not None]
            if pending:
                # One backward for all prefixes that end together: a prefix may read the graph of another one.
                tensors = [states for states, _ in pending]
                grads = [grad.to(states) for states, grad in pending]
                with torch.autocast(tensors[0].device.type, enabled=False):
                    torch.autograd.backward(tensors, grads)
        self.graph_states, self.detached_states = {}, {}

    def _pending_backward(self, prefixes: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States of prefixes with a graph, each with the leaf that accumulated its gradients."""
        return [
            (states, leaf)
            for n in prefixes
            for name, tensors in self.graph_states[n].items()
            for states, leaf in zip(tensors, self.detached_states[n][name], strict=True)
            if states.requires_grad
        ]

    def _run_prefix(self, n: int, index: int, run: RunPrefix, with_graph: bool) -> None:
        prefix, records = self.plan.prefixes[n], ForwardStates()
        layout = prefix.layouts[index]
        prefix_states = PrefixStates([self._states_for(m, prefix.last_user) for m in layout.prefixes], records)
        is_first = n not in self.detached_states
        if is_first and prefix.recompute and self.with_graph:
            # Dropout of the recomputed prefix must equal that of the first forward. `real_index` names the device.
            self._rng_states[n] = torch.get_rng_state(), get_device_states(layout.real_index)
        rng = contextlib.nullcontext() if is_first else _with_rng_state(*self._rng_states.pop(n))
        with rng, torch.set_grad_enabled(with_graph):
            run(replace(layout, prefix_states=prefix_states), index, None if is_first else self.detached_states[n].ids)
        if with_graph:
            self.graph_states[n] = records
        if is_first:
            self.detached_states[n] = records.map(lambda x: detached_leaf(x) if self.with_graph else x)

    def _states_for(self, n: int, end: int) -> ForwardStates:
        """States of a prefix, for a forward that has its backward with that of micro-batch `end`."""
        with_graph = n in self.graph_states and self.plan.prefixes[n].last_user == end
        return self.graph_states[n] if with_graph else self.detached_states[n]


class MicroBatchRunner:
    """
    Runs the forwards of the micro-batches of a step, each of which has a backward before the next one.

    Args:
        count (`int`):
            Number of micro-batches.
        plan ([`PrefixPlan`], *optional*):
            Their shared prefixes; `None` if they share none.
        batches (`Sequence[tuple[torch.Tensor, torch.Tensor]]`):
            Ids and mask of each. A call of a model with these very tensors runs that micro-batch. If they were
            modified, the schedule ends: each later micro-batch of the step computes its prefixes itself.
        with_head (`bool`, *optional*, defaults to `False`):
            Whether prefixes run through the model and not only its decoder: FSDP2 gathers a head with the last norm.
    """

    def __init__(
        self,
        count: int,
        plan: PrefixPlan | None = None,
        batches: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        with_head: bool = False,
    ):
        self.count, self.plan, self.with_head = count, plan, with_head
        self.batches = [BatchVersion.of(ids, mask) for ids, mask in batches]
        self.index, self.modified = 0, False
        self.embeddings: ForwardRunner | None = None  # runs forwards of embeddings: they share none of the prefixes
        self.schedules: dict[Any, PrefixSchedule] = {}
        self.calls: Counter[Any] = Counter()

    @classmethod
    def of(
        cls, batches: Sequence[dict[str, Any]], plan: Any, budget: int, gather: Callable[[list], list] | None = None
    ) -> MicroBatchRunner:
        """
        Run `batches` by the `plan` of their collator, if they are unmodified since.

        Args:
            batches (`Sequence[dict]`):
                The micro-batches, on their device.
            plan ([`PrefixPlan`] or [`FlatIndexMaps`], *optional*):
                The plan, perhaps still on the host; `None` if they share no prefix, [`STALE_PLAN`] to plan again.
            budget (`int`):
                Most tokens of a micro-batch.
            gather (`Callable`, *optional*):
                Joins lists of all processes, which then plan again in each step (see [`plan_shared_prefixes`]).
        """
        if not (inputs := ids_and_masks(batches)):
            return cls(len(batches))
        if gather is not None or plan is not None:
            plan = plan_on_host([(ids.cpu(), mask.cpu()) for ids, mask in inputs], budget, gather)
        if isinstance(plan, FlatIndexMaps):
            plan = plan.to(inputs[0][0].device)
        return cls(len(batches), plan, inputs, with_head=gather is not None)

    def start(self, index: int) -> None:
        """Make this micro-batch the running one."""
        self.index = index
        self.calls.clear()

    def set_inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """
        Replace ids and mask of the running micro-batch by tensors of the same shape, which the loss has concatenated
        again from prompts and completions.
        """
        if self.plan is not None and tuple(ids.shape) == self.plan.layouts[self.index].batch_shape:
            self.batches[self.index] = BatchVersion.of(ids, mask)

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """The output of `forward` for the running micro-batch; it reads the prefix states if it can."""
        if self.embeddings is not None and call.get("input_ids") is None:
            return self.embeddings.run(model, forward, call)
        layout = self._next_layout(model, forward, call)
        with contextlib.nullcontext() if layout is None else with_prefix_states(call, layout):
            return forward(**call)

    def leave(self, model: torch.nn.Module, call: dict[str, Any], reason: str) -> None:
        """Does nothing: a micro-batch is within the budget, also if it is no packed forward."""

    def recomputes(self, call: dict[str, Any]) -> bool:
        # A micro-batch of ids is one forward without a checkpoint; only forwards of embeddings are recomputed.
        return self.embeddings is not None and call.get("input_ids") is None and self.embeddings.recomputes(call)

    def _next_layout(
        self, model: torch.nn.Module, forward: Callable[..., Any], call: dict[str, Any]
    ) -> PrefixedLayout | None:
        """
        The layout of a call that belongs to a schedule; prefixes are computed here. `None` for other calls.

        In each micro-batch the first call of a model, with or without gradients, belongs to one schedule, the second
        call to another one.
        """
        if self.plan is None:
            return None
        ids, mask, batch = call.get("input_ids"), call.get("attention_mask"), self.batches[self.index]
        # A micro-batch that is computed padded reads no prefix: it ends the schedule like one that was modified.
        is_unmodified = batch.matches(ids, mask) and packs_now(model)
        is_micro_batch = is_unmodified or (ids is batch.ids.tensor and mask is batch.mask.tensor)
        self.modified |= is_micro_batch and not is_unmodified
        # Positions distinguish tokens as well; the plan compared ids only. A checkpoint of a user around the model
        # would compute the micro-batch again without the states of its prefixes.
        belongs = is_micro_batch and call.get("position_ids") is None and not _is_checkpointed()
        kind = model, torch.is_grad_enabled()
        key = id(model), torch.is_grad_enabled(), self.calls[kind]
        if belongs and is_unmodified and self.index == 0:
            self.schedules[key] = PrefixSchedule(self.plan, torch.is_grad_enabled())
        schedule = self.schedules.get(key)
        if not belongs or schedule is None or schedule.finished:
            return None
        self.calls[kind] += 1
        if schedule.index != self.index - 1:
            raise _missing_micro_batch()

        def run_prefix(prefix: PrefixedLayout, index: int, tokens: torch.Tensor | None) -> None:
            # A modified call has other ids than the prefix.
            inputs = {} if is_unmodified else self._inputs_of_prefix(prefix, index, tokens)
            self._run_prefix(model, forward, call | inputs, prefix)

        if not is_unmodified:
            schedule.finish_early(run_prefix)
            return None
        return schedule.next_batch(run_prefix)

    def _inputs_of_prefix(self, prefix: PrefixedLayout, index: int, tokens: torch.Tensor | None) -> dict[str, Any]:
        """Ids and mask of micro-batch `index`, with the `tokens` of the first forward of a recomputed prefix."""
        ids, mask = self.batches[index].ids.tensor, self.batches[index].mask.tensor
        if tokens is not None and ids is not None and prefix.new is not None:
            ids = ids.flatten().index_copy(0, prefix.new.packed_index, tokens).view_as(ids)
        return {"input_ids": ids, "attention_mask": mask}

    def _run_prefix(
        self, model: torch.nn.Module, forward: Callable[..., Any], inputs: dict[str, Any], prefix: PrefixedLayout
    ) -> None:
        """Compute a prefix, through the whole model if it must call its head."""
        with within(disabled=frozenset()):
            if self.with_head:
                run_prefix_forward(forward, inputs, prefix, logits_to_keep=1)
            else:
                run_prefix_forward(find_decoder(model), inputs, prefix)

    def check(self) -> None:
        """
        Raises:
            PaddingRemovalError: If a schedule did not reach its last micro-batch, so that gradients are missing.
        """
        if any(not schedule.finished and schedule.index != self.count - 1 for schedule in self.schedules.values()):
            raise _missing_micro_batch()


def _is_checkpointed() -> bool:
    """Whether this thread is within a checkpoint of torch, which recomputes its forward in backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


def _missing_micro_batch() -> PaddingRemovalError:
    return PaddingRemovalError(
        "With `max_tokens_per_batch` and `prefix_sharing` the micro-batches of a step share the prefixes that they "
        "have in common. The loss called the model in some of them and not in others, or with tensors that are not "
        "the batch's, so gradients are missing. "
        "Leave `max_tokens_per_batch` out, or set `prefix_sharing=False`."
    )


@contextlib.contextmanager
def _with_rng_state(on_host: torch.Tensor, on_device: tuple[list[int], list[torch.Tensor]]) -> Iterator[None]:
    """A block with these states of the random number generators; the current ones are restored at its end."""
    with torch.random.fork_rng(devices=on_device[0]):
        torch.set_rng_state(on_host)
        set_device_states(*on_device)
        yield


def can_share_across_micro_batches(handles: Sequence[PaddingRemoval], args: Any, is_sharded: bool) -> bool:
    """Whether the models share prefixes across micro-batches; logs the reason if they cannot."""
    if not handles or not all(handle.prefix_sharing for handle in handles):
        return False
    obstacles = (sharing_obstacle(handle, args, is_sharded) for handle in handles)
    if reason := next(filter(None, obstacles), None):
        logger.info(f"Each micro-batch of a step computes the prefixes that it shares with others again: {reason}.")
    return reason is None


def sharing_obstacle(handle: PaddingRemoval, args: Any, is_sharded: bool) -> str | None:
    """Why micro-batches cannot read prefix states of other forwards, or `None` if they can."""
    if handle.multimodal is not None:
        return "images are not compared before a forward"
    if handle.anatomy.has_virtual_tokens:
        return "virtual tokens (prompt tuning, p-tuning) are not among the rows of a batch"
    mixers = handle.mixers.mixers
    unserved = (m for m in mixers if m.mode != PACKED and not (m.mode == FORKED and can_export_state(m.module)))
    if other := next(unserved, None):
        return f"`{other.name}` ({type(other.module).__name__}: {other.why}) hands no state on to other forwards"
    layers = getattr(handle.decoder.config, "num_hidden_layers", None)
    if len(mixers) != layers:
        return f"{type(handle.decoder).__name__} has {layers} layers and {len(mixers)} mixers in them"
    if getattr(args, "torch_compile", False):
        return "compiled layers take no states from outside"
    if is_sharded:
        return "processes that shard a model have to run equally many forwards"
    # Checkpointing that is on in the model (reentrant by default), and checkpointing that Trainer will switch on.
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in handle.decoder.modules()]
    is_reentrant = [
        (getattr(f, "keywords", None) or {}).get("use_reentrant", True) for f in functions if f is not None
    ]
    if (kwargs := checkpointing_kwargs(args)) is not None:
        is_reentrant.append(kwargs.get("use_reentrant"))
    if any(is_reentrant):
        return "reentrant gradient checkpointing keeps no graph of keys and values (set `use_reentrant=False`)"
    return None
