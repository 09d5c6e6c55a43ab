"""
Forwards that compute shared prefixes, and forwards that read their states.

A prefix forward records keys, values and states ([`ForwardStates`]). Later forwards of the step read them: their rows
begin with tokens of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..context import within
from ..layout.shared_prefixes import PrefixedLayout
from .batch_cache import BatchVersion, PlannedLayout, cache_of_call
from .prefix_states import ForwardStates, PrefixStates


__all__ = ["run_prefix_forward", "with_prefix_states"]


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
    records.ids, records.fork_tokens = ids.flatten()[layout.new.packed_index], layout.fork_tokens
    # The decoder may have a runner patch, and checkpointing recomputes this forward in a backward: so no runner here.
    planned = PlannedLayout(BatchVersion.of(ids, mask), replace(layout, prefix_states=PrefixStates(reads, records)))
    with within(model=None, runner=None, planned=planned):
        output = forward(input_ids=ids, attention_mask=mask, use_cache=False, **outputs, **head_arguments)
    if head_arguments:
        records["head",] = (output.logits,)  # backward must begin with the head, as FSDP2 expects
    return records


@contextmanager
def with_prefix_states(call: dict[str, Any], layout: PrefixedLayout) -> Iterator[None]:
    """Until the block ends, a forward of a model with the arguments `call` has this `layout` and reads its states."""
    planned = PlannedLayout(BatchVersion.of(call["input_ids"], call["attention_mask"]), layout)
    with cache_of_call(), within(planned=planned):
        yield
