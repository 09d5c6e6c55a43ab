"""
The output of a model for all rows of a batch, merged from its outputs for the sub-batches.

[`merge_outputs`] concatenates values that have an entry for each row or token. It computes the loss of all rows from
their logits or, if the model returns no logits, from the losses of the sub-batches and their numbers of labels.
[`LossChecks`] finds the losses that cannot be computed like this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel

from ...core.model.older import CACHES
from .balancing_loss import RouterLogits, balancing_loss, balancing_term, check_balancing_loss


__all__ = ["LossChecks", "SubBatchOutput", "merge_outputs"]

_UNREAD = {*CACHES, "image_hidden_states", "image_outputs", "video_outputs", "audio_outputs"}
"""Outputs that no loss reads: caches, and features of images (`image_hidden_states` until transformers 5.23)."""

_SUMS = {"num_correct_tokens", "entropy_sum", "num_valid_tokens"}
"""Sums over the labels of a call, which TRL 1.10 reads."""


class SubBatchOutput(NamedTuple):
    """The output of a model for a sub-batch, with the arguments of the call and the router logits of its experts."""

    call: dict[str, Any]
    output: Any
    router_logits: RouterLogits


class LossChecks:
    """
    What the first sub-batches of models have shown of their losses; kept for all steps of a trainer.

    Attributes:
        balanced (`WeakSet`): Models whose load-balancing loss was compared with ours.
        unknown (`WeakKeyDictionary`): Models whose loss is not a known function of its logits, with the names of the
            arguments of such calls.
    """

    def __init__(self) -> None:
        self.balanced: WeakSet[Any] = WeakSet()
        self.unknown: WeakKeyDictionary[Any, set[frozenset[str]]] = WeakKeyDictionary()

    def found_unknown(self, model: torch.nn.Module, call: dict[str, Any]) -> bool:
        """Whether a call with the same arguments had an unknown loss before."""
        return _argument_names(call) in self.unknown.get(model, ())

    @torch.no_grad()
    def check(self, model: PreTrainedModel, first: SubBatchOutput, maximum: Callable[[int], int]) -> bool:
        """
        Whether the loss of a first sub-batch follows from its logits: that of all rows then follows from all logits.

        `maximum`: the largest number of the processes that meet in each forward, which must remember the same.

        Raises:
            ValueError: If its load-balancing loss differs from ours.
        """
        call, output, _ = first
        loss, logits, labels = output.get("loss"), output.get("logits"), call.get("labels")
        if loss is not None and logits is not None:
            fits = labels is not None and logits.dim() == 3 and labels.shape == logits.shape[:-1]
            # The same function of the same logits: a larger difference is a term that the model adds.
            rtol = max(torch.finfo(loss.dtype).eps, 3e-6)
            known = fits and torch.allclose(_loss_of_logits(model, output, call).to(loss.dtype), loss, rtol=rtol)
            if maximum(int(not known)):
                # NaN is the mean over no label, which shows nothing of other rows.
                if not maximum(int(loss.isnan().any())):
                    self.unknown.setdefault(model, set()).add(_argument_names(call))
                return False
        if output.get("aux_loss") is not None and model not in self.balanced:
            check_balancing_loss(model, first.router_logits, call.get("attention_mask"), output["aux_loss"])
            self.balanced.add(model)
        return True


def _argument_names(call: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in call.items() if value is not None)


def merge_outputs(
    model: PreTrainedModel, call: dict[str, Any], sub_batches: Sequence[SubBatchOutput], rows: Sequence[torch.Tensor]
) -> Any:
    """
    The output of a model for all rows of a call, from its outputs for sub-batches with these `rows`.

    Raises:
        ValueError: If an output has neither an entry for each row nor its own rule.
    """
    first, merged = sub_batches[0].output, {}
    for name in (name for name in first if name not in ("loss", "aux_loss")):
        values = [sub_batch.output.get(name) for sub_batch in sub_batches]  # without images there are no features
        merged[name] = _merged_value(name, values, sub_batches, rows)
    if first.get("aux_loss") is not None:
        routed = [(sub_batch.router_logits, sub_batch.call.get("attention_mask")) for sub_batch in sub_batches]
        merged["aux_loss"] = balancing_loss(model, routed)
    if first.get("loss") is not None and merged.get("logits") is not None:
        merged["loss"] = _loss_of_logits(model, merged, call)
    elif first.get("loss") is not None:
        losses = [sub_batch.output["loss"] - balancing_term(model, sub_batch.output) for sub_batch in sub_batches]
        merged["loss"] = _merged_value("loss", losses, sub_batches, rows) + balancing_term(model, merged)
    for name, value in merged.items():
        first[name] = value
    return first


def _merged_value(
    name: str, values: list[Any], sub_batches: Sequence[SubBatchOutput], rows: Sequence[torch.Tensor]
) -> Any:
    """The value `name` of an output for all rows, from its `values` for the sub-batches."""
    in_order = _in_order(values, rows, by_token=name == "router_logits")
    if in_order is not None or name in _UNREAD or values[0] is None:
        return in_order
    if name in _SUMS:
        return torch.stack(values).sum(0)
    calls = [sub_batch.call for sub_batch in sub_batches]
    if name == "loss" and values[0].dim() == 0 and _num_labels(calls[0]) is not None:
        return _loss_of_labels(values, calls)
    raise ValueError(
        f"`max_tokens_per_batch` computes a batch in {len(calls)} sub-batches, and `{name}` of the "
        f"{type(sub_batches[0].output).__name__} is a {type(values[0]).__name__} without one entry for each row. "
        "Leave the budget out, or request fewer outputs."
    )


def _in_order(values: Sequence[Any], rows: Sequence[torch.Tensor], by_token: bool) -> Any:
    """
    The values of all rows in the order of the batch; in a tuple, if each sub-batch has a tuple of values.

    A value has an entry for each row of a sub-batch, or `by_token` for each column of each row: `(b * L, ...)`.
    Returns `None` for other values.
    """
    if all(isinstance(value, tuple) for value in values):
        layers = [_in_order(of_layer, rows, by_token) for of_layer in zip(*values, strict=True)]
        return None if any(layer is None for layer in layers) else tuple(layers)
    pairs = list(zip(values, map(len, rows), strict=True))
    if not all(isinstance(x, torch.Tensor) and x.dim() > 0 and (by_token or len(x) == n) for x, n in pairs):
        return None
    by_row = torch.cat([x.unflatten(0, (n, -1)) for x, n in pairs])
    # Inverse permutation: rows are in the order of the sub-batches; this restores the order of the batch.
    return by_row.index_select(0, torch.cat(list(rows)).argsort()).flatten(0, 1)


def _loss_of_labels(losses: list[torch.Tensor], calls: list[dict[str, Any]]) -> torch.Tensor:
    """Without logits (TRL's head, Liger) a loss is a mean over labels, or a sum divided by `num_items_in_batch`."""
    if calls[0].get("num_items_in_batch") is not None:
        return torch.stack(losses).sum()
    counts: Any = torch.stack([_num_labels(call) for call in calls])
    return (torch.stack(losses) * counts).sum() / counts.sum().clamp(min=1)


def _num_labels(call: dict[str, Any]) -> Any:
    """The number of labels of a call that has any; `shift_labels` take the place of `labels`."""
    labels, shifted = call.get("labels"), call.get("shift_labels")
    scored = shifted if shifted is not None else None if labels is None else labels[:, 1:]
    return None if scored is None else (scored != -100).sum()


def _loss_of_logits(model: PreTrainedModel, output: Mapping[str, Any], call: dict[str, Any]) -> torch.Tensor:
    """The loss that transformers' models compute from their logits, and from the balancing loss of their experts."""
    given = {name: call[name] for name in ("num_items_in_batch", "shift_labels") if name in call}
    logits = output["logits"].contiguous()  # a model may return some columns of them
    loss = model.loss_function(logits=logits, labels=call["labels"], vocab_size=logits.shape[-1], **given)
    return loss + balancing_term(model, output)
