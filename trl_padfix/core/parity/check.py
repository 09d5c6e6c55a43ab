"""
Packed against padded, on the model and a batch of the user.

The trainers run [`check_parity`] on the first batch of training and of evaluation. A few short snippets of its rows go
through the model packed and padded. The log-probabilities of their tokens must agree; in training their gradient as
well. The check finds errors that no rule foresees: an unknown architecture, a patched layer, or a kernel that aligns
its mask differently or has a wrong backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..anatomy import differentiates_in_parts, reset_gather_order, reshard_parameters
from ..context import context, of_this_thread, temporarily_set, within
from ..errors import UnpackableCallError, require
from ..handle import PaddingRemoval, PaddingStats, PrefixSharing
from ..probes import saved_modules
from ..remove import remove_padding
from .forwards import Forwards, Outcome, Scores, relative_difference
from .limits import WIDEST_SCORE, Limits, precision_of
from .report import Distance, ParityReport
from .sample import called_module, pooling_last_column, prepare, prepare_longest


__all__ = ["check_parity"]


def check_parity(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    prefix_sharing: PrefixSharing | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
) -> ParityReport:
    """
    Compare packed and padded results of a model, on up to four short snippets of a batch.

    Scores must agree up to rounding and, with `gradients`, so must the gradient of their sum with respect to the
    embeddings; the longest row is compared with that row alone. If packed and padded differ by more, **each row
    alone decides**: the report is `ok` if packed is right. With images, FSDP
    or DeepSpeed, only packed and padded scores are compared.

    Dropout is off, and `.grad` stays unchanged. A model without padding removal is attached for the comparison.

    Args:
        model (`torch.nn.Module`):
            Causal language model, reward model or embedding model, or a wrapper around one. For a user's wrapper, the
            model inside it is compared; for a model with a user's forward, its decoder.
        batch (`dict`):
            `input_ids` and `attention_mask`, both of shape `(B, L)`; for a pre-packed batch `input_ids` and
            `position_ids` (and `cu_seq_lens_q`, if the batch has it). Other entries are for multimodal models only.
        prefix_sharing (`bool` or `"auto"`, *optional*):
            Mode for a model without padding removal; `None` means `False`. A model with padding removal
            is compared in its own mode.
        dtype (`torch.dtype`, *optional*):
            Precision that determines the tolerance. By default that of autocast (also within the model's forward, as
            after accelerate's `prepare`), else the decoder's dtype.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to compare the gradient and the longest row as well.

    Returns:
        [`ParityReport`]: its `raise_if_failed()` raises an error if a difference is too large.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model.
        ValueError: If the mask does not fit the ids, its values cannot be read, or a row has no real token.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import check_parity

    >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> batch = {"input_ids": torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]]),
    ...          "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    >>> report = check_parity(Qwen2ForCausalLM(config), batch, prefix_sharing=True)
    >>> report.ok, report.padded_tokens, report.packed_tokens
    (True, 16, 5)

    ```
    """
    if not (isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor)):
        raise TypeError(
            "The parity check takes a batch with `input_ids`, as of `tokenizer(..., return_tensors='pt')`."
        )
    require(torch.dtype, dtype=dtype or torch.float32)
    if isinstance(model, DistributedDataParallel):  # each of its forwards waits for other processes
        model = model.module
    handle = PaddingRemoval.of(model)
    with contextlib.ExitStack() as stack:
        stack.callback(reshard_parameters, model)
        stack.enter_context(torch.no_grad())
        stack.enter_context(saved_modules(model.modules()))
        model.eval()
        if handle is None:
            handle = stack.enter_context(remove_padding(model, prefix_sharing=prefix_sharing or False))
        # The comparison must not count among the user's forwards. A reason why short rows cannot be packed holds in
        # every step. Hooks are not such a reason: the comparison tests them.
        enabled = context().disabled - {handle}
        stack.enter_context(within(disabled=enabled, stats=PaddingStats(), strict=True))
        stack.enter_context(temporarily_set(handle, state="attached"))  # of a trainer that computes nothing now
        called = called_module(model, handle)
        with pooling_last_column(prepare(called, batch, handle), handle) as sample:
            handle.accept_hooks()
            forwards = Forwards(called, sample, handle, dtype or precision_of(handle.decoder, sample.ids.device))
            if dtype is None:
                see = of_this_thread(partial(_see_autocast, forwards))
                stack.enter_context(handle.anatomy.pretrained.get_input_embeddings().register_forward_hook(see))
            outcome = forwards.compute(gradients)
            reset_gather_order(handle.anatomy.pretrained, sample.ids)
            report = _judge(outcome, forwards)
            in_parts = differentiates_in_parts(called)
            if not report.ok:
                cut = not (sample.has_images or in_parts)
                report = _ask_rows_alone(report, outcome, forwards) if cut else _judge(outcome, forwards, widest=True)
        # Also after short rows that differ: processes that share rows compute equally many forwards.
        if gradients and not sample.has_images and (handle.context_parallel is not None or not in_parts):
            report = replace(report, longest=_compare_longest(called, batch, handle, report))
        return replace(report, has_mask=sample.is_packed or batch.get("attention_mask") is not None)


def _see_autocast(forwards: Forwards, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """A forward hook: the precision of forwards that enter autocast by themselves."""
    if torch.is_autocast_enabled(output.device.type):
        forwards.dtype = torch.get_autocast_dtype(output.device.type)


def _compare_longest(
    model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval, report: ParityReport
) -> Distance | None:
    """
    Differences of the scores of the longest row of a batch, packed, from that row alone; `None` if it has none.

    Rows of some models depend on one another: those must equal the padded rows. In half precision the limits come from
    the `report` on short rows.
    """
    mean, maximum = report.mean_tolerance, report.maximum_tolerance
    if (widest := WIDEST_SCORE.get(report.dtype)) is not None:
        mean, maximum = widest / 10, widest
    found = []
    with pooling_last_column(prepare_longest(batch, handle), handle) as sample:
        # With context parallelism the row alone is the padded one.
        references = (True, False) if handle.context_parallel is None else (True,)
        for alone in references if sample.ids.shape[1] > 1 else ():
            try:
                difference = Forwards(model, sample, handle, report.dtype).packed_from(alone)
            except UnpackableCallError:  # such rows are computed padded in training, too
                return None
            if difference is not None:
                found.append(Distance(difference.mean().item(), difference.max().item(), mean, maximum))
                if found[-1].ok:
                    return found[-1]
    return found[0] if found else None


def _judge(outcome: Outcome, forwards: Forwards, widest: bool = False) -> ParityReport:
    """Compare packed with padded."""
    handle, padded = forwards.handle, outcome.padded
    distance = _distance(outcome.packed, padded, outcome.others_padded, forwards, widest)
    obstacle = outcome.gradient_obstacle
    if padded.gradient is not None and not padded.gradient.isfinite().all():
        obstacle = "those of the padded forward are not finite"
        distance = replace(distance, gradient=None)
    rounding = next((_differences(other, padded).mean().item() for other in outcome.others_padded), None)
    hook = handle.changes.check() if handle.changes is not None else None
    return ParityReport(
        **vars(distance),
        compared=outcome.packed.values.numel(),
        padded_tokens=forwards.sample.ids.numel(),
        packed_tokens=outcome.packed_tokens,
        dtype=forwards.dtype,
        implementation=handle.decoder.config._attn_implementation,
        prefix_sharing=bool(handle.prefix_sharing),
        finite=bool(padded.values.isfinite().all()),
        rounding=rounding,
        not_compared=obstacle,
        caveat=(hook and f"{hook} gets packed rows; remove it if it mixes tokens or reads columns of the batch") or "",
    )


def _ask_rows_alone(report: ParityReport, outcome: Outcome, forwards: Forwards) -> ParityReport:
    """The report with the differences of packed and of padded from each row alone."""
    alone, others, dtype = forwards.alone(gradients=outcome.padded.gradient is not None)
    if alone.values.shape != outcome.padded.values.shape:  # outputs of a module whose shape depends on the batch
        return _judge(outcome, forwards, widest=True)
    widest = not others  # the model's amplification of rounding was not measured
    return replace(
        report,
        packed_from_alone=_distance(outcome.packed, alone, others, forwards, widest),
        padded_from_alone=_distance(outcome.padded, alone, others, forwards, widest),
        alone_dtype=dtype or report.dtype,
        finite=bool(alone.values.isfinite().all()),
    )


def _distance(scores: Scores, reference: Scores, others: list[Scores], forwards: Forwards, widest: bool) -> Distance:
    """Differences from a reference, and their limits; the `others` differ from the reference by rounding only."""
    others = others or [reference]
    difference = _differences(scores, reference)
    rounding = torch.stack([_differences(other, reference) for other in others]).amax(0)
    handle, dtype = forwards.handle, forwards.dtype
    longest_sum = max((weight.shape[-1] for weight in handle.decoder.parameters() if weight.dim() > 1), default=1)
    gradient, rounded = None, 0.0
    gradients = [other.gradient for other in others if other.gradient is not None]
    if scores.gradient is not None and reference.gradient is not None and gradients:
        gradient = relative_difference(scores.gradient, reference.gradient)
        rounded = max(relative_difference(other, reference.gradient) for other in gradients)
    terms, depth = math.inf if widest else longest_sum, 8 * len(handle.anatomy.mixers.mixers)
    limits = Limits.of_scores(dtype, rounding, rounded, size=forwards.size, terms=terms, depth=depth)
    limit = None if gradient is None else limits.gradient
    return Distance(difference.mean().item(), difference.max().item(), limits.mean, limits.maximum, gradient, limit)


def _differences(scores: Scores, reference: Scores) -> torch.Tensor:
    """Differences of scores; one zero if there are none (rows of one token), so that mean and maximum exist."""
    return (scores.values - reference.values).abs() if len(reference.values) else reference.values.new_zeros(1)
