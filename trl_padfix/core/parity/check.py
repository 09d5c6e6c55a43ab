"""
Packed against padded, on the user's own model and batch.

The trainers run [`check_parity`] on the first batch of training and of evaluation: a few short slices of its rows go
through the model twice, once packed and once padded, and the log-probabilities of their tokens must agree, in training
also their gradient. It catches what no rule foresees: an unknown architecture, a patched layer, a kernel that aligns
its mask otherwise, or is right forward and wrong backward.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..context import within
from ..errors import PaddingRemovalError
from ..generation import evaluating
from ..handle import PaddingRemoval, PaddingStats
from ..layout.build import packed_layout, padding_free_layout
from ..model.find import find_decoder, find_multimodal, find_pretrained, pools_by_token_id
from ..model.older import supports
from ..model.sharded import forget_order_of_calls, gather_anew
from ..remove import attachment_of, remove_padding
from .gradients import TIMES_ROUNDING, differing, gradient_tolerance, obstacle_to_gradients, with_gradient
from .report import ParityReport
from .snippets import short_slices


__all__ = ["check_parity"]

TOLERANCES = {torch.float64: (1e-8, 1e-7), torch.float32: (1e-4, 1e-3)}
"""
Largest mean and largest single difference of a log-probability, by dtype. Rounding stays well below: float32 on CPU
comes out near 1e-6.

In half precision rounding depends on the model: on its depth, its weights and its vocabulary. There the yardstick is
measured: see [`check_parity`].
"""

COLUMNS = 64
"""Columns of a batch with images, or of a long row, whose scores are compared: logits are large."""

LONG = 4096
"""Tokens of a row that are compared with those of one process, where several compute it."""


def check_parity(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    prefix_sharing: bool | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
) -> ParityReport:
    """
    Compare the packed forward and backward of a model with the padded ones on up to four short slices of a batch.

    Where a decoder has scans that compute chunks of tokens at once, two of the slices are long enough to cross from
    chunk to chunk, if rows of the batch are.

    Where several processes compute each row ([`split_rows`]), up to `LONG` tokens of the longest row go through the
    packed model twice more: shared by them, and whole on each of them.

    Of a multimodal model's batch with images nothing can be cut out: all its rows go through the model twice, and the
    scores of up to `COLUMNS` columns are compared.

    In float64 and float32 the differences have a fixed limit. In half precision (also under autocast, and in TF32) the
    same rows go through the padded model once more, with another attention function (`eager` for `sdpa`): packed and
    padded may differ by 3 times what these two do. What a model makes of rounding depends on its depth and weights, so
    a fixed limit would pass a row that sees a token of another row in one model, and refuse another that is right.

    Of the sum of the scores the gradient at the embeddings is compared, summed for each token id: it has come through
    the backward of every layer. That costs a backward pass for each of these forwards, and the memory of their
    activations; nothing is left in `.grad`. Gradients are left out, and the report says why, with images, under FSDP
    and DeepSpeed, and where a layer has no backward.

    Dropout is off. A model that is not attached yet is attached for the comparison.

    Args:
        model (`torch.nn.Module`):
            Causal language model, or a wrapper of one; also one with a reward head.
        batch (`dict`):
            `input_ids` and `attention_mask`, both of shape `(B, L)`; of rows that arrive packed `input_ids` and
            `position_ids` (and `cu_seq_lens_q`, if there are any). Other entries are used by multimodal models only.
        prefix_sharing (`bool`, *optional*):
            Which mode to compare, for a model that is not attached; an attached one is compared as it is.
        dtype (`torch.dtype`, *optional*):
            Precision to take the tolerance of. By default the autocast dtype, else the decoder's.
        gradients (`bool`, *optional*, defaults to `True`):
            Compare the gradient too.

    Returns:
        [`ParityReport`]: call its `raise_if_failed()` to stop on a difference.

    Raises:
        PaddingRemovalError: If the model is not attached, and padding cannot be removed from it.
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
    arrives_packed = "attention_mask" not in batch
    pretrained = find_pretrained(model)
    decoder = find_decoder(pretrained)
    obstacle = obstacle_to_gradients(model)
    with contextlib.ExitStack() as stack:
        stack.callback(gather_anew, model)
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        handle = attachment_of(model)
        if handle is None:
            handle = stack.enter_context(remove_padding(model, prefix_sharing=bool(prefix_sharing)))
        if not arrives_packed and len(batch) > 2 and find_multimodal(pretrained, decoder) is not None:
            inputs, columns = _some_columns(_with_padding(batch), pretrained)
            obstacle = "all rows of a batch with images would have to be kept for them"
        else:
            rows = _unpacked(batch) if arrives_packed else (batch["input_ids"], batch["attention_mask"])
            padding_free_layout(rows[1])  # raises what the forward of the whole batch would
            ids, mask = short_slices(*rows, chunk=handle.mixers.chunk)
            inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            columns = torch.arange(ids.shape[1] - 1, device=ids.device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        stack.callback(setattr, handle, "stats", handle.stats)  # the comparison is not the user's work
        handle.stats = PaddingStats()
        stack.enter_context(handle.reenabled())
        if pools_by_token_id(pretrained):
            # Padded left and with no id that means padding, a classifier pools the last token in any case.
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            inputs = {"position_ids": positions} | inputs
            column = (positions + mask.sum(1, keepdim=True)) % ids.shape[1]
            given = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.shape[-2:] == ids.shape}
            inputs |= {k: v.gather(-1, column.expand_as(v)) for k, v in given.items()}
            config = pretrained.config.get_text_config()
            stack.callback(setattr, config, "pad_token_id", config.pad_token_id)
            config.pad_token_id = -1

        def scores(arrives_packed: bool = False) -> torch.Tensor:
            logits = _logits_of_packed(model, ids, mask) if arrives_packed else _logits(model(**inputs))
            return _scores(logits, ids, mask, columns)

        dtype = dtype or _precision(decoder, ids.device)
        other = None if dtype in TOLERANCES else _other_attention(pretrained, decoder)

        def compute(gradients: bool) -> list[tuple[torch.Tensor, Any]]:
            """Scores and gradient of the packed forward, the padded one, and the one that rounding is measured by."""
            run = partial(with_gradient, pretrained, ids) if gradients else lambda score: (score(), None)
            packed, gradient = run(partial(scores, arrives_packed))
            if gradient is not None and handle.split is not None:
                gradient = handle.split.group.mean(gradient)
            found = [(packed, gradient)]
            with handle.disabled():
                found.append(run(scores))
                with within(attention=other):
                    return [*found, found[1] if other is None else run(scores)]

        computed, obstacle = None, obstacle if gradients else ""
        if obstacle is None:
            try:
                computed = compute(gradients=True)
            except PaddingRemovalError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                obstacle = str(error).partition("\n")[0]
                handle.stats.reset()
        (packed, gradient), (padded, wanted), (again, rounded) = computed or compute(gradients=False)
        packed_tokens = handle.stats.packed_tokens
        forget_order_of_calls(pretrained, ids)
        difference, rounding = ((x - padded).abs() if x.numel() else x.new_zeros(1) for x in (packed, again))
        if handle.split is not None and not arrives_packed:
            difference = torch.cat([difference, _of_long_row(model, batch, handle)])
        mean_tolerance, maximum_tolerance = _tolerances(dtype, rounding)
        off, tolerance = None, None
        if gradient is not None:
            off, tolerance = differing(gradient, wanted), gradient_tolerance(dtype, differing(rounded, wanted))
            if not wanted.isfinite().all():
                off, obstacle = None, "those of the padded forward are not finite"
        return ParityReport(
            mean=difference.mean().item(),
            maximum=difference.max().item(),
            mean_tolerance=mean_tolerance,
            maximum_tolerance=maximum_tolerance,
            compared=packed.numel() and difference.numel(),
            padded_tokens=ids.numel(),
            packed_tokens=packed_tokens,
            dtype=dtype,
            implementation=decoder.config._attn_implementation,
            prefix_sharing=bool(handle.prefix_sharing),
            finite=bool(padded.isfinite().all()),
            rounding=None if other is None else rounding.mean().item(),
            gradient=off,
            gradient_tolerance=tolerance,
            not_compared=obstacle or "",
            caveat=handle.mixers.caveat,
        )


def _of_long_row(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> torch.Tensor:
    """Differences of the scores of the longest row, `(n,)`: shared by several processes, and whole on each of them."""
    longest = batch["attention_mask"].sum(1).argmax()
    row = batch["input_ids"][longest, batch["attention_mask"][longest].bool()][None, :LONG]
    if row.shape[1] < 2:
        return row.new_zeros(0, dtype=torch.float32)
    mask = torch.ones_like(row)
    inputs, columns = _some_columns({"input_ids": row, "attention_mask": mask}, find_pretrained(model))

    def scores() -> torch.Tensor:
        return _scores(_logits(model(**inputs)), row, mask, columns)

    shared, split = scores(), handle.split
    try:
        handle.split = None
        return (shared - scores()).abs()
    finally:
        handle.split = split


def _other_attention(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """Another attention function that computes the same as the decoder's, if there is one."""
    config: Any = decoder.config
    if config._attn_implementation != "eager":
        return "eager"
    return "sdpa" if supports(type(model), "sdpa") else None


def _tolerances(dtype: torch.dtype, rounding: torch.Tensor) -> tuple[float, float]:
    """Largest mean and largest single difference, where padded forwards differ by `rounding`."""
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    # A mean of few differences says little, and a model so shallow that nothing is rounded differently says nothing.
    times = TIMES_ROUNDING * (1 + 8 / rounding.numel())
    least = torch.finfo(dtype).eps
    return max(times * rounding.mean().item(), least / 2), max(2 * times * rounding.max().item(), 16 * least)


def _unpacked(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of rows that arrive packed, as padded ids and mask."""
    layout = packed_layout(batch["position_ids"], cu_seqlens=batch.get("cu_seq_lens_q"))
    rows = batch["input_ids"].flatten().split(layout.query_lengths)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)


def _logits_of_packed(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits of the rows of a batch that are handed over packed, `(B, L, V)`."""
    keep = mask.bool()
    positions = (mask.cumsum(1) - 1)[keep][None]
    logits = _logits(model(input_ids=ids[keep][None], position_ids=positions, use_cache=False))
    padded = logits.new_zeros(*ids.shape, logits.shape[-1])
    padded[keep] = logits[0]
    return padded


def _logits(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


def _with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """All of a batch with images, with a column of padding more."""
    shape = batch["input_ids"].shape
    given = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape[-2:] == shape}
    return {**batch, **{k: torch.nn.functional.pad(v, (0, 1)) for k, v in given.items()}}


def _some_columns(inputs: dict[str, Any], model: PreTrainedModel) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a call that asks for logits of some columns only, where the model can be asked, and the columns."""
    columns = torch.arange(inputs["input_ids"].shape[1] - 1, device=inputs["input_ids"].device)
    columns = columns[:: max(1, -(-len(columns) // COLUMNS))]
    # Nothing in the place of the head: a reward model as ms-swift makes it, which pools the states of all columns.
    scores = isinstance(model.get_output_embeddings(), nn.Identity)
    takes_columns = "logits_to_keep" in inspect.signature(model.forward).parameters and not scores
    return {**inputs, "use_cache": False} | ({"logits_to_keep": columns} if takes_columns else {}), columns


def _scores(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the real tokens after `columns`, or what a head on pooled states returned."""
    logits = logits.float()
    if logits.dim() == 3 and len(logits) == len(ids) and logits.shape[1] > ids.shape[1]:
        logits = logits[:, -ids.shape[1] :]  # virtual tokens stand before every row
    if logits.dim() == 3 and logits.shape[:2] == ids.shape:
        logits = logits[:, columns]
    if logits.dim() == 2 or logits.shape[:2] != (len(ids), len(columns)):
        return logits.flatten()
    real = (mask[:, columns] * mask[:, columns + 1]).bool()  # nothing is predicted from a hole
    ids = ids[:, columns + 1].clamp(max=logits.shape[-1] - 1)  # an image token may lie beyond the vocabulary
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)[real]


def _precision(decoder: nn.Module, device: torch.device) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    dtype = next((p.dtype for p in decoder.parameters() if p.is_floating_point()), torch.float32)
    in_tf32 = device.type == "cuda" and dtype == torch.float32 and multiplies_in_tf32()
    return torch.float16 if in_tf32 else dtype  # as many bits of mantissa


def multiplies_in_tf32() -> bool:
    """Whether float32 matrices are multiplied in TF32 on a GPU."""
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 there are two settings, and reading the older one raises where the newer one was set, as
    # transformers does for `tf32=True`.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
