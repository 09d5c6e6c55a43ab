"""The rows of a comparison, and the arguments of the calls that compute them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..handle import PaddingRemoval
from ..layout.build import packed_layout, padding_free_layout
from ..model.find import find_peft, is_peft
from ..model.pipelines import pipeline_in
from ..refusals import batch_obstacle
from .scores import select_columns
from .snippets import longest_pair, short_snippets


__all__ = [
    "Sample", "called_module", "longest_row", "padded_batch", "pooling_last_column", "prepare", "prepare_longest",
]  # fmt: skip


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


def called_module(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> nn.Module:
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
    return find_peft(model) or handle.anatomy.pretrained


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
    # Rows with masked tokens that no packed forward of this model serves are computed padded: compared without these.
    has_holes = batch_obstacle(layout, False, handle.mixers) is None
    ids, mask = short_snippets(ids, mask, chunk=handle.mixers.chunk, has_holes=has_holes)
    inputs = {"input_ids": ids, "attention_mask": mask} | _other_arguments(model, batch, ids, mask)
    return Sample(inputs, torch.arange(ids.shape[1] - 1, device=ids.device), _is_packed(given))


def prepare_longest(model: nn.Module, batch: dict[str, Any], handle: PaddingRemoval) -> Sample:
    """The longest row of a batch behind another one, and up to `MAX_COLUMNS` columns of them to compare."""
    ids, mask = longest_pair(*padded_batch(batch))
    inputs = {"input_ids": ids, "attention_mask": mask} | _other_arguments(model, batch, ids, mask)
    selected, columns = select_columns(inputs, handle.anatomy.pretrained)
    return Sample(inputs if _is_users(model) else selected, columns, _is_packed(batch))


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


def _is_users(model: nn.Module) -> bool:
    """Whether a model is a module of the user's around that of transformers, or of PEFT."""
    return not isinstance(model, PreTrainedModel) and not is_peft(model)


def _other_arguments(model: nn.Module, batch: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """`use_cache=False` if the forward of a model takes it, and labels if it needs them."""
    parameters, labels = inspect.signature(model.forward).parameters, batch.get("labels")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any] = {"use_cache": False} if takes_any or "use_cache" in parameters else {}
    # A user's module around the model may need the labels of its batch, even if their default is `None`.
    has_labels = _is_users(model) and isinstance(labels, torch.Tensor) and labels.shape == batch["input_ids"].shape
    if "labels" in parameters and (has_labels or parameters["labels"].default is inspect.Parameter.empty):
        follows_real = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool()
        arguments["labels"] = ids.masked_fill(~(follows_real & mask.bool()), -100)
    return arguments


@contextlib.contextmanager
def pooling_last_column(sample: Sample, model: PreTrainedModel) -> Iterator[Sample]:
    """Let a classifier, which may take a real token for padding, pool the last real token of each row in any case."""
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
