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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ...core.call.batch_cache import BatchVersion, PlannedLayout, cache_of_call
from ...core.call.prefix_states import ForwardStates, PrefixStates, detached_leaf
from ...core.context import within
from ...core.handle import PaddingRemoval
from ...core.layout.shared_prefixes import PrefixedLayout, PrefixPlan
from ...core.mixers.mixers import DIRECT, FORKED
from ...core.mixers.primitives import can_export_state
from ..messages import say


__all__ = ["PrefixSchedule", "can_read_prefixes", "reading_prefixes", "recomputed", "shares_across_parts"]


class PrefixSchedule:
    """
    One pass of a model over the parts of a batch, in their order.

    Args:
        plan ([`PrefixPlan`]):
            Layouts of the parts and of the prefixes that they share.
        detaches (`bool`):
            Whether each part has a backward before the next one. Otherwise parts read the states as they were
            recorded, and a backward recomputes them, as it does the parts.
    """

    def __init__(self, plan: PrefixPlan, detaches: bool):
        self.plan, self.detaches, self.index = plan, detaches, -1
        self.states: dict[int, ForwardStates] = {}  # as parts read them: leaves, if it detaches
        self.graph_states: dict[int, ForwardStates] = {}  # if it detaches: the originals of the leaves
        self._rng_states: dict[int, Any] = {}  # of prefixes that will be recomputed

    def next_part(self, forward: Callable[..., Any], call: dict[str, Any], **head_arguments: Any) -> PrefixedLayout:
        """
        Advance to the next part: run the prefix forwards that it needs, and return its layout with the prefix states.
        The states of prefixes that no later part needs are freed.

        Args:
            forward (`Callable`):
                A decoder, which computes the prefixes; with `head_arguments` its model.
            call (`dict`):
                Keyword arguments of the model for the part: ids, mask, and the requested outputs.
            **head_arguments:
                `logits_to_keep`, where the head must run too.
        """
        self.index += 1
        run = partial(_run_prefix_forward, forward, head_arguments)
        for n, prefix in self.plan.prefixes.items():
            if prefix.last_user < self.index:
                self.graph_states.pop(n, None)
                self.states.pop(n, None)
            if prefix.first_user == self.index:
                self._run_first(n, run, call)
            if prefix.last_user == self.index and prefix.recompute and self.detaches:
                self._run_again(n, run, call)
        layout = self.plan.layouts[self.index]
        states = [self._states_for(n, self.index) for n in layout.prefixes]
        return replace(layout, prefix_states=PrefixStates(states, None, self._pending_backward()))

    def _run_first(self, n: int, run: Callable[..., ForwardStates], call: dict[str, Any]) -> None:
        if not self.detaches:
            # `call` names the devices, whose random states the recomputation needs.
            states = recomputed(run, call, *self._prefix(n))
            # The gradients of all parts are added up in these tensors, so they are float32.
            self.states[n] = states.map(torch.Tensor.float) if torch.is_grad_enabled() else states
            return
        if (prefix := self.plan.prefixes[n]).recompute:
            # `real_index` names the device.
            self._rng_states[n] = torch.get_rng_state(), get_device_states(prefix.layouts[self.index].real_index)
            with torch.no_grad():
                states = run(call, *self._prefix(n))
            torch.clear_autocast_cache()  # else the part gets weights that were cast without a graph (pytorch#112583)
        else:
            states = self.graph_states[n] = run(call, *self._prefix(n))
        self.states[n] = states.map(detached_leaf)

    def _run_again(self, n: int, run: Callable[..., ForwardStates], call: dict[str, Any]) -> None:
        """Compute a prefix with its graph, which the first forward did not keep, and with the dropout of the first."""
        on_host, on_device = self._rng_states.pop(n)
        with torch.random.fork_rng(devices=on_device[0]):
            torch.set_rng_state(on_host)
            set_device_states(*on_device)
            self.graph_states[n] = run(call, *self._prefix(n))

    def _prefix(self, n: int) -> tuple[PrefixedLayout, list[ForwardStates]]:
        """The layout of a prefix in the running part, and the states of the prefixes that it continues."""
        prefix = self.plan.prefixes[n]
        layout = prefix.layouts[self.index]
        return layout, [self._states_for(m, prefix.last_user) for m in layout.prefixes]

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


def recomputed(run: Callable[..., Any], *args: Any) -> Any:
    """The result of `run`, which a backward computes again; without gradients there is none."""
    return checkpoint(run, *args, use_reentrant=False) if torch.is_grad_enabled() else run(*args)


def can_read_prefixes(model: torch.nn.Module, call: dict[str, Any]) -> bool:
    """Whether a call of a model can read prefix states: it is packed, and its ids identify its tokens."""
    # A plan compares ids only, but positions distinguish tokens, too.
    handle = PaddingRemoval.of(model)
    return call.get("position_ids") is None and handle is not None and handle.enabled and not handle.has_changed


def _run_prefix_forward(
    forward: Callable[..., Any],
    head_arguments: dict[str, Any],
    call: dict[str, Any],
    layout: PrefixedLayout,
    reads: list[ForwardStates],
) -> ForwardStates:
    """The states of a shared prefix, with this layout after the prefixes that it `reads`, for later forwards."""
    ids, mask = call["input_ids"], call["attention_mask"]
    outputs = {k: v for k, v in call.items() if k in ("output_router_logits", "output_hidden_states")}
    records = ForwardStates()
    records.tokens, records.fork_tokens = layout.computed_tokens, layout.fork_tokens
    # The decoder may have a runner patch, and checkpointing recomputes this forward in a backward: so no runner here.
    # A checkpoint around the decoder alone is that of `recomputed`.
    planned = PlannedLayout(BatchVersion.of(ids, mask), replace(layout, prefix_states=PrefixStates(reads, records)))
    with within(model=None, runner=None, planned=planned, own_checkpoint=not head_arguments):
        output = forward(input_ids=ids, attention_mask=mask, use_cache=False, **outputs, **head_arguments)
    if head_arguments:
        records["head",] = (output.logits,)  # backward must begin with the head, as FSDP2 expects
    return records


@contextlib.contextmanager
def reading_prefixes(call: dict[str, Any], layout: PrefixedLayout | None) -> Iterator[None]:
    """Until the block ends, a forward with the arguments `call` has this `layout`, if any, and reads its states."""
    if layout is None:
        yield
        return
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
    mixers = handle.anatomy.mixers.mixers
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
    return reason if any(is_reentrant) and handle.decoder.training else None  # evaluation keeps no graph
