"""The rows of a comparison, and the arguments of the calls that compute them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..handle import PaddingRemoval
from ..layout.build import packed_layout, padding_free_layout
from ..model.find import find_peft
from ..model.inspection import is_of, parameters_of, takes_any_argument
from ..model.pipelines import pipeline_in
from ..model.sharded import differentiates_in_parts
from ..refusals import batch_obstacle
from .scores import select_columns
from .snippets import longest_pair, short_snippets


__all__ = [
    "Sample", "called_module", "longest_row", "padded_batch", "pooling_last_column", "prepare", "prepare_longest",
]  # fmt: skip


_LIBRARIES = {
    "accelerate", "deepspeed", "liger_kernel", "peft", "sentence_transformers", "torch", "transformers",
    "transformers_modules", "trl", "trl_padfix", "unsloth",
}  # fmt: skip
"""Packages whose forwards take ids and mask alone."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The rows of a comparison, always padded; `is_packed` if the user's batch, and so the packed call, is packed."""

    inputs: dict[str, Any]  # arguments of the padded call
    columns: torch.Tensor  # `(n,)`: columns whose next token is scored
    is_packed: bool = False
    has_images: bool = False  # then its rows cannot be taken apart

    @property
    def ids(self) -> torch.Tensor:
        return self.inputs["input_ids"]

    @property
    def mask(self) -> torch.Tensor:
        return self.inputs["attention_mask"]

    def rows(self) -> Iterator[Sample]:
        """Each row by itself, without the padding around it."""
        shape, inputs = self.ids.shape, self.inputs
        for i, real in enumerate(self.mask.bool()):
            first, last = real.nonzero()[[0, -1], 0].tolist()
            columns = self.columns[(self.columns >= first) & (self.columns < last)] - first
            of_row = {name: x[..., i : i + 1, first : last + 1] for name, x in inputs.items() if _has_shape(x, shape)}
            of_row |= {"logits_to_keep": columns} if "logits_to_keep" in inputs else {}
            yield replace(self, inputs=inputs | of_row, columns=columns, is_packed=False)


def called_module(model: nn.Module, handle: PaddingRemoval) -> nn.Module:
    """
    The module whose forwards are compared: `model`, or a part of it if its forward is a user's.

    A user's forward may need more than a few short rows: their labels, the positions that its head reads.
    """
    pretrained = handle.anatomy.pretrained
    if handle.multimodal is not None or pipeline_in(model) is not None:  # they get the whole batch, or a dictionary
        return model
    if differentiates_in_parts(model):  # weights are gathered by the hooks of the wrapper
        return model
    if not is_of(type(pretrained).forward, _LIBRARIES):
        return handle.decoder
    # Adapters may put learned tokens before the rows, which the model inside of them does not.
    return model if is_of(type(model).forward, _LIBRARIES) else find_peft(model) or pretrained


def prepare(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> Sample:
    """Choose the rows and columns to compare."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    if not _is_packed(given) and len(given) > 2 and handle.multimodal is not None:
        # One more column of padding, so that there is something to remove.
        shape = batch["input_ids"].shape
        padded = {k: torch.nn.functional.pad(v, (0, 1)) for k, v in _with_mask(given).items() if _has_shape(v, shape)}
        inputs, columns = select_columns(given | padded, handle.anatomy.pretrained)
        return Sample(inputs, columns, has_images=True)
    ids, mask = padded_batch(given)
    layout = padding_free_layout(mask)  # raises the errors that a forward of the whole batch would raise
    # If no packed forward of this model supports rows with masked tokens, compare them without these tokens.
    has_holes = batch_obstacle(layout, False, handle.mixers) is None
    ids, mask = short_snippets(ids, mask, chunk=handle.mixers.chunk, has_holes=has_holes)
    inputs = {"input_ids": ids, "attention_mask": mask} | _cache_off(model)
    return Sample(inputs, torch.arange(ids.shape[1] - 1, device=ids.device), _is_packed(given))


def prepare_longest(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> Sample:
    """The longest row of a batch after another one, and up to `MAX_COLUMNS` columns of them to compare."""
    ids, mask = longest_pair(*padded_batch(batch))
    inputs = {"input_ids": ids, "attention_mask": mask} | _cache_off(model)
    selected, columns = select_columns(inputs, handle.anatomy.pretrained)
    return Sample(selected, columns, _is_packed(batch))


def longest_row(batch: dict[str, Any]) -> int:
    """Number of tokens of the longest row of a batch, packed or padded. The host waits for it."""
    if (mask := batch.get("attention_mask")) is not None:
        return int(mask.sum(1).max())
    positions = batch.get("position_ids")
    return batch["input_ids"].shape[1] if positions is None else int(positions.max()) + 1


def _is_packed(batch: dict[str, Any]) -> bool:
    return batch.get("attention_mask") is None and ("position_ids" in batch or "cu_seq_lens_q" in batch)


def _with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch that has a mask: ones, if its rows are of one length."""
    has_mask = batch.get("attention_mask") is not None
    return batch if has_mask else batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def padded_batch(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(B, L)` of a batch; the sequences of a packed batch are its rows."""
    if _is_packed(batch):
        layout = packed_layout(batch["position_ids"], cu_seqlens=batch.get("cu_seq_lens_q"))
        rows = batch["input_ids"].flatten().split(layout.queries.lengths)
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    return batch["input_ids"], _with_mask(batch)["attention_mask"]


def _cache_off(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False` if the forward of a model takes it."""
    return {"use_cache": False} if takes_any_argument(model) or "use_cache" in parameters_of(model.forward) else {}


@contextlib.contextmanager
def pooling_last_column(sample: Sample, model: PreTrainedModel) -> Iterator[Sample]:
    """Make a classifier pool the last real token of each row, even if it mistakes that token for padding."""
    ids, mask = sample.ids, sample.mask
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inputs = {"position_ids": positions} | sample.inputs
    # Right-padded rows are rotated until they are left-padded; their tokens keep their positions.
    column = (positions + mask.sum(1, keepdim=True)) % ids.shape[1]
    inputs |= {k: v.gather(-1, column.expand_as(v)) for k, v in inputs.items() if _has_shape(v, ids.shape)}
    config = model.config.get_text_config()
    pad_token_id = config.pad_token_id
    # An id that no token has: the classifier finds no padding and pools the last column.
    config.pad_token_id = -1
    try:
        yield replace(sample, inputs=inputs)
    finally:
        config.pad_token_id = pad_token_id


def _has_shape(value: Any, shape: torch.Size) -> bool:
    """Whether a value is a tensor `(..., B, L)`."""
    return isinstance(value, torch.Tensor) and value.shape[-2:] == shape
