"""
Packed against padded, on the model and a batch of the user.

The trainers run [`check_parity`] on the first batch of training and of evaluation. A few short snippets of its rows go
through the model packed and padded. The log-probabilities of their tokens must agree; in training their gradient as
well. The check finds errors that no rule foresees: an unknown architecture, a patched layer, or a kernel that aligns
its mask differently or has a wrong backward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..context import within
from ..errors import PaddingRemovalError
from ..generation import evaluating
from ..handle import PaddingRemoval
from ..layout.build import padding_free_layout
from ..model.older import supports
from ..model.pipelines import by_name, pipeline_in
from ..model.sharded import reset_gather_order, reshard_parameters
from ..refusals import batch_obstacle
from ..remove import attachment_of, remove_padding
from .gradients import TIMES_ROUNDING, gradient_obstacle, gradient_tolerance, relative_difference, with_gradient
from .report import ParityReport
from .scores import logits_of, logits_of_packed, scores_of, select_columns, unpack_batch, with_padding
from .snippets import short_snippets


__all__ = ["check_parity"]

TOLERANCES = {torch.float64: (1e-8, 1e-7), torch.float32: (1e-4, 1e-3)}
"""
Largest mean and largest single difference of a log-probability, by dtype. Rounding stays well below: differences in
float32 on CPU are near 1e-6.

In half precision rounding depends on the depth, the weights and the vocabulary of a model. The tolerance is measured
there: see [`check_parity`].
"""

LONG_ROW_TOKENS = 4096
"""With context parallelism, tokens of the longest row that are compared with a forward on one process."""


def check_parity(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    prefix_sharing: bool | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
) -> ParityReport:
    """
    Compare packed forward and backward of a model with the padded ones, on up to four short snippets of a batch.

    If the decoder has scans that compute chunks of tokens at once, two of the snippets are long enough to cross from
    one chunk to the next, provided that rows of the batch are.

    With context parallelism ([`split_rows`]), up to `LONG_ROW_TOKENS` tokens of the longest row run through the packed
    model twice more: distributed over the processes, and whole on each of them.

    A batch with images of a multimodal model cannot be cut into snippets. All its rows run through the model twice,
    and the scores of up to `MAX_COLUMNS` columns are compared.

    In float64 and float32 the differences have a fixed limit. In half precision (also under autocast, and in TF32) the
    same rows run through the padded model once more, with another attention function (`eager` for `sdpa`). Packed and
    padded may differ by 3 times the difference of these two padded forwards. A fixed limit would not do: rounding
    depends on depth and weights, so it would accept a token that attends to another row in one model, and reject
    correct results of another.

    The compared gradient is that of the sum of the scores with respect to the embeddings, summed for each token id: it
    has passed the backward of every layer. It costs a backward for each forward, and the memory of the activations;
    `.grad` is left as it was. Gradients are left out, and the report says why, for batches with images, under FSDP and
    DeepSpeed, and if a layer has no backward.

    Dropout is off. A model without padding removal is attached for the comparison.

    Args:
        model (`torch.nn.Module`):
            Causal language model, reward model or embedding model, or a wrapper around one. If the wrapper needs more
            arguments than ids, mask and labels, the model inside of it is compared.
        batch (`dict`):
            `input_ids` and `attention_mask`, both of shape `(B, L)`; for a packed batch `input_ids` and `position_ids`
            (and `cu_seq_lens_q`, if the batch has it). Other entries are used by multimodal models only.
        prefix_sharing (`bool`, *optional*):
            Mode for a model without padding removal. A model with padding removal is compared in its own mode.
        dtype (`torch.dtype`, *optional*):
            Precision that determines the tolerance. By default the autocast dtype, else the decoder's dtype.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to compare the gradient as well.

    Returns:
        [`ParityReport`]: its `raise_if_failed()` raises an error if a difference is too large.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model.
        ValueError: If the mask of the batch cannot be read, or a row has no real token.

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
    with contextlib.ExitStack() as stack:
        stack.callback(reshard_parameters, model)
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        handle = attachment_of(model)
        if handle is None:
            handle = stack.enter_context(remove_padding(model, prefix_sharing=bool(prefix_sharing)))
        model = _called_module(model, batch, handle)
        sample = _prepare(model, batch, handle)
        stack.enter_context(handle.separate_stats())  # the comparison must not count among the user's forwards
        stack.enter_context(handle.reenabled())
        # A reason why short rows cannot be packed holds in every step. Hooks are no reason: the comparison tests them.
        stack.enter_context(handle.strictly())
        handle.accept_hooks()
        if handle.anatomy.pools_by_token_id:
            sample = stack.enter_context(_pooling_last_column(sample, handle.anatomy.pretrained))
        dtype = dtype or _precision(handle.decoder, sample.ids.device)
        other_attention = None if dtype in TOLERANCES else _other_attention(handle)
        outcome = _compute(model, sample, handle, other_attention, gradients)
        reset_gather_order(handle.anatomy.pretrained, sample.ids)
        has_long_row = handle.context_parallel is not None and not sample.is_packed
        long_row = _compare_long_row(model, batch, handle) if has_long_row else None
        return _judge(outcome, long_row, sample, handle, dtype)


@dataclass(frozen=True, eq=False)
class _Sample:
    """The rows of a comparison, always padded; `is_packed` if the user's batch, and so the packed call, is packed."""

    inputs: dict[str, Any]  # arguments of the padded call
    columns: torch.Tensor  # `(n,)`: columns whose next token is scored
    is_packed: bool = False
    gradient_obstacle: str | None = None

    @property
    def ids(self) -> torch.Tensor:
        return self.inputs["input_ids"]

    @property
    def mask(self) -> torch.Tensor:
        return self.inputs["attention_mask"]


class Scores(NamedTuple):
    """The scores `(n,)` of a forward, and their gradient `(distinct ids, H)`, if it was computed."""

    values: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Outcome:
    """The packed and the padded forward, and a padded one with another attention function: it differs by rounding."""

    packed: Scores
    padded: Scores
    other_padded: Scores | None  # `None` where the tolerance is fixed
    packed_tokens: int
    gradient_obstacle: str = ""  # empty if gradients were compared, or not requested


def _called_module(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> nn.Module:
    """
    The module whose forwards are compared: `model`, or the transformers model inside of it.

    The forward of a user's module may need more arguments than snippets of a batch have, such as the positions that
    its score head reads. Then the model inside of it is compared.
    """
    if handle.multimodal is not None or pipeline_in(model) is not None:  # they get the whole batch, or a dictionary
        return model
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    labels = batch.get("labels")
    has_token_labels = labels is None or labels.shape == batch["input_ids"].shape
    available = {"input_ids", "attention_mask"} | ({"labels"} if has_token_labels else set())
    if all(p.name in available for p in named if p.default is p.empty):
        return model
    # Adapters may put learned tokens before the rows, which the model inside of them does not.
    return next((m for m in model.modules() if hasattr(m, "get_base_model")), handle.anatomy.pretrained)


def _prepare(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> _Sample:
    """Choose the rows and columns to compare."""
    pretrained, has_mask = handle.anatomy.pretrained, batch.get("attention_mask") is not None
    labels, batch = batch.get("labels"), {name: value for name, value in batch.items() if name != "labels"}
    is_packed = not has_mask and ("position_ids" in batch or "cu_seq_lens_q" in batch)
    if not has_mask and not is_packed:  # rows of one length
        batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    if not is_packed and len(batch) > 2 and handle.multimodal is not None:
        inputs, columns = select_columns(with_padding(batch), pretrained)
        obstacle = "all rows of a batch with images would have to be kept for them"
        return _Sample(inputs, columns, gradient_obstacle=obstacle)
    ids, mask = unpack_batch(batch) if is_packed else (batch["input_ids"], batch["attention_mask"])
    layout = padding_free_layout(mask)  # raises the errors that a forward of the whole batch would raise
    # Rows with masked tokens that no packed forward of this model serves are computed padded: compared without these.
    has_holes = batch_obstacle(layout, False, handle.mixers) is None
    ids, mask = short_snippets(ids, mask, chunk=handle.mixers.chunk, has_holes=has_holes)
    # A user's module around the model may need its labels, even if their default is `None`.
    is_user_module = not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model")
    has_labels = is_user_module and isinstance(labels, torch.Tensor) and labels.shape == batch["input_ids"].shape
    inputs = {"input_ids": ids, "attention_mask": mask} | _other_arguments(model, ids, mask, has_labels)
    return _Sample(inputs, torch.arange(ids.shape[1] - 1, device=ids.device), is_packed)


def _other_arguments(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, has_labels: bool) -> dict[str, Any]:
    """`use_cache=False` if the forward of a model takes it, and labels if it `has_labels` or needs them."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any] = {"use_cache": False} if takes_any or "use_cache" in parameters else {}
    if "labels" in parameters and (has_labels or parameters["labels"].default is inspect.Parameter.empty):
        follows_real = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool()
        arguments["labels"] = ids.masked_fill(~(follows_real & mask.bool()), -100)
    return arguments


@contextlib.contextmanager
def _pooling_last_column(sample: _Sample, model: PreTrainedModel) -> Iterator[_Sample]:
    """Let a classifier, which may take a real token for padding, pool the last real token of each row in any case."""
    ids, mask = sample.ids, sample.mask
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inputs = {"position_ids": positions} | sample.inputs
    # Right-padded rows are rotated until they are left-padded; their tokens keep their positions.
    column = (positions + mask.sum(1, keepdim=True)) % ids.shape[1]
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.shape[-2:] == ids.shape}
    inputs |= {k: v.gather(-1, column.expand_as(v)) for k, v in tensors.items()}
    config = model.config.get_text_config()
    pad_token_id = config.pad_token_id
    # An id that no token has: the classifier finds no padding and pools the last column.
    config.pad_token_id = -1
    try:
        yield replace(sample, inputs=inputs)
    finally:
        config.pad_token_id = pad_token_id


def _compute(
    model: nn.Module, sample: _Sample, handle: PaddingRemoval, other_attention: str | None, gradients: bool
) -> Outcome:
    """Run the forwards, with their gradients if these are requested and can be computed."""
    obstacle = sample.gradient_obstacle or gradient_obstacle(model)
    if gradients and obstacle is None:
        try:
            return _run(model, sample, handle, other_attention, gradients=True)
        except PaddingRemovalError:
            raise
        except (RuntimeError, NotImplementedError) as error:  # a layer without a backward
            obstacle = str(error).partition("\n")[0]
            handle.stats.reset()
    outcome = _run(model, sample, handle, other_attention, gradients=False)
    return replace(outcome, gradient_obstacle=(obstacle or "") if gradients else "")


def _run(
    model: nn.Module, sample: _Sample, handle: PaddingRemoval, other_attention: str | None, gradients: bool
) -> Outcome:
    ids = sample.ids

    def forward(is_packed: bool = False) -> torch.Tensor:
        logits = logits_of_packed(model, ids, sample.mask) if is_packed else logits_of(by_name(model)(**sample.inputs))
        return scores_of(logits, ids, sample.mask, sample.columns)

    def run(score: Callable[[], torch.Tensor]) -> Scores:
        return Scores(*with_gradient(handle.anatomy.pretrained, ids, score)) if gradients else Scores(score(), None)

    packed, other_padded = run(partial(forward, sample.is_packed)), None
    if packed.gradient is not None and handle.context_parallel is not None:
        # Each process has the gradient of its local tokens, times the group size: their mean is the whole one.
        packed = packed._replace(gradient=handle.context_parallel.all_reduce_mean(packed.gradient))
    with handle.disabled():
        padded = run(forward)
        if other_attention is not None:
            with within(attention=other_attention):
                other_padded = run(forward)
    return Outcome(packed, padded, other_padded, handle.stats.packed_tokens)


def _judge(
    outcome: Outcome, long_row: torch.Tensor | None, sample: _Sample, handle: PaddingRemoval, dtype: torch.dtype
) -> ParityReport:
    """Compare the forwards of an outcome, and the differences `(n,)` of a long row, with the tolerances of `dtype`."""
    (packed, packed_gradient), (padded, padded_gradient) = outcome.packed, outcome.padded
    other, other_gradient = outcome.other_padded or outcome.padded
    obstacle = outcome.gradient_obstacle
    # A sample without scores (rows of one token) gives one zero: its mean and maximum must exist.
    difference = (packed - padded).abs() if padded.numel() else padded.new_zeros(1)
    rounding = (other - padded).abs() if padded.numel() else padded.new_zeros(1)
    if long_row is not None:
        difference = torch.cat([difference, long_row])
    mean_tolerance, maximum_tolerance = _tolerances(dtype, rounding)
    gradient_difference, tolerance = None, None
    if packed_gradient is not None and padded_gradient is not None and other_gradient is not None:
        tolerance = gradient_tolerance(dtype, relative_difference(other_gradient, padded_gradient))
        if padded_gradient.isfinite().all():
            gradient_difference = relative_difference(packed_gradient, padded_gradient)
        else:
            obstacle = "those of the padded forward are not finite"
    return ParityReport(
        mean=difference.mean().item(),
        maximum=difference.max().item(),
        mean_tolerance=mean_tolerance,
        maximum_tolerance=maximum_tolerance,
        compared=packed.numel() and difference.numel(),  # 0 without scores: the zero above is no score
        padded_tokens=sample.ids.numel(),
        packed_tokens=outcome.packed_tokens,
        dtype=dtype,
        implementation=handle.decoder.config._attn_implementation,
        prefix_sharing=bool(handle.prefix_sharing),
        finite=bool(padded.isfinite().all()),
        rounding=None if outcome.other_padded is None else rounding.mean().item(),
        gradient=gradient_difference,
        gradient_tolerance=tolerance,
        not_compared=obstacle,
        caveat=handle.mixers.caveat,
    )


def _compare_long_row(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> torch.Tensor:
    """Differences `(n,)` of the scores of the longest row: distributed over the processes, and whole on each."""
    padding_mask = batch.get("attention_mask")
    padding_mask = torch.ones_like(batch["input_ids"]) if padding_mask is None else padding_mask
    longest = padding_mask.sum(1).argmax()
    row = batch["input_ids"][longest, padding_mask[longest].bool()][None, :LONG_ROW_TOKENS]
    if row.shape[1] < 2:
        return row.new_zeros(0, dtype=torch.float32)
    mask = torch.ones_like(row)
    inputs, columns = select_columns({"input_ids": row, "attention_mask": mask}, handle.anatomy.pretrained)

    def scores() -> torch.Tensor:
        return scores_of(logits_of(by_name(model)(**inputs)), row, mask, columns)

    distributed = scores()
    with handle.without_context_parallel():
        return (distributed - scores()).abs()


def _other_attention(handle: PaddingRemoval) -> str | None:
    """Another attention function with the same results as the decoder's, if there is one."""
    if handle.decoder.config._attn_implementation != "eager":
        return "eager"
    return "sdpa" if supports(type(handle.anatomy.pretrained), "sdpa") else None


def _tolerances(dtype: torch.dtype, rounding: torch.Tensor) -> tuple[float, float]:
    """Largest mean and largest single difference allowed, if padded forwards differ by `rounding`, `(n,)`."""
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    # Wider for few scores, since the measured rounding is itself an estimate: twice as wide for 8, 5 percent for 160.
    times = TIMES_ROUNDING * (1 + 8 / rounding.numel())
    # A shallow model may round equally in both padded forwards, so that no rounding is measured: hence a floor.
    epsilon = torch.finfo(dtype).eps
    return max(times * rounding.mean().item(), epsilon / 2), max(2 * times * rounding.max().item(), 16 * epsilon)


def _precision(decoder: nn.Module, device: torch.device) -> torch.dtype:
    """The precision of a forward: autocast dtype, else that of the weights; float16 for TF32."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    dtype = next((p.dtype for p in decoder.parameters() if p.is_floating_point()), torch.float32)
    in_tf32 = device.type == "cuda" and dtype == torch.float32 and multiplies_in_tf32()
    return torch.float16 if in_tf32 else dtype  # TF32 and float16 both have 10 bits of mantissa


def multiplies_in_tf32() -> bool:
    """Whether GPUs multiply float32 matrices in TF32."""
    matmul = torch.backends.cuda.matmul
    # torch 2.9 has two settings. Reading the older one raises an error if the newer one was set, which transformers
    # does for `tf32=True`.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
