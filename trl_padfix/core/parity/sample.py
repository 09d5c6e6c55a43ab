"""
The rows of a comparison, and the arguments of the calls that compute them.

A few hundred tokens show whether rows are kept apart and whether prefixes fork at the right token, so short snippets
of the rows are compared. Scans compute chunks of up to 256 tokens at once and pass a state from one chunk to the next.
A decoder with scans therefore also gets a pair of rows that crosses from chunk to chunk, before and after the fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy import differentiates_in_parts, find_peft, pipeline_in
from ..call.layout_of import check_mask
from ..context import temporarily_set
from ..handle import PaddingRemoval
from ..layout.build import packed_layout, padding_free_layout
from ..model.inspection import TRUSTED_MODELS, is_of, pools_by_token_id, takes, takes_any_argument
from ..patches.plan import batch_obstacle


__all__ = [
    "SNIPPET_TOKENS", "Sample", "called_module", "pooling_last_column", "prepare", "prepare_longest", "select_columns",
]  # fmt: skip

MAX_COLUMNS = 64
"""Compared columns of a batch with images, or of a long row: logits of all columns would take too much memory."""

LONG_ROW_TOKENS = 4096
"""With context parallelism, tokens of the longest row that are compared with a forward on one process."""


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
    # They get the whole batch, or a dictionary; or the hooks of the wrapper gather weights.
    if handle.multimodal is not None or pipeline_in(model) is not None or differentiates_in_parts(model):
        return model
    if not is_of(type(pretrained).forward, TRUSTED_MODELS):
        return handle.decoder
    # Adapters may put learned tokens before the rows, which the model inside of them does not.
    return model if is_of(type(model).forward, TRUSTED_MODELS) else find_peft(model) or pretrained


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
    has_holes = batch_obstacle(layout, False, handle.anatomy.mixers) is None
    ids, mask = short_snippets(ids, mask, chunk=handle.anatomy.mixers.chunk, has_holes=has_holes)
    takes_cache = takes_any_argument(model) or takes(model, "use_cache")
    inputs = {"input_ids": ids, "attention_mask": mask} | ({"use_cache": False} if takes_cache else {})
    return Sample(inputs, torch.arange(ids.shape[1] - 1, device=ids.device), _is_packed(given))


def prepare_longest(batch: dict[str, Any], handle: PaddingRemoval) -> Sample:
    """
    The longest row of a batch after another one, and up to `MAX_COLUMNS` columns of them to compare.

    With context parallelism only the longest row: a single row is always split over the processes.
    """
    ids, mask = longest_pair(*padded_batch(batch))
    if handle.context_parallel is not None:
        ids, mask = ids[1:, :LONG_ROW_TOKENS], mask[1:, :LONG_ROW_TOKENS]
    inputs, columns = select_columns({"input_ids": ids, "attention_mask": mask}, handle.anatomy.pretrained)
    return Sample(inputs, columns, _is_packed(batch))


def _is_packed(batch: dict[str, Any]) -> bool:
    return batch.get("attention_mask") is None and ("position_ids" in batch or "cu_seq_lens_q" in batch)


def _with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch that has a mask: ones, if its rows are of one length."""
    has_mask = batch.get("attention_mask") is not None
    return batch if has_mask else batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def padded_batch(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(B, L)` of a batch; the sequences of a pre-packed batch are its rows."""
    if _is_packed(batch):
        ids, positions = batch["input_ids"], batch.get("position_ids")
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if positions is None else positions
        rows = ids.flatten().split(packed_layout(positions, cu_seqlens=batch.get("cu_seq_lens_q")).queries.lengths)
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    ids, mask = batch["input_ids"], _with_mask(batch)["attention_mask"]
    check_mask(mask, ids)
    return ids, mask


@contextlib.contextmanager
def pooling_last_column(sample: Sample, handle: PaddingRemoval) -> Iterator[Sample]:
    """Make a classifier pool the last real token of each row, even if it mistakes that token for padding."""
    if not pools_by_token_id(handle.anatomy.pretrained):
        yield sample
        return
    ids, mask = sample.ids, sample.mask
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inputs = {"position_ids": positions} | sample.inputs
    # Right-padded rows are rotated until they are left-padded; their tokens keep their positions.
    column = (positions + mask.sum(1, keepdim=True)) % ids.shape[1]
    inputs |= {k: v.gather(-1, column.expand_as(v)) for k, v in inputs.items() if _has_shape(v, ids.shape)}
    # An id that no token has: the classifier finds no padding and pools the last column.
    with temporarily_set(handle.anatomy.pretrained.config.get_text_config(), pad_token_id=-1):
        yield replace(sample, inputs=inputs)


def select_columns(inputs: dict[str, Any], model: PreTrainedModel) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a call for the logits of at most `MAX_COLUMNS` columns, and these columns, `(n,)`."""
    columns = torch.arange(inputs["input_ids"].shape[1] - 1, device=inputs["input_ids"].device)
    columns = columns[:: max(1, -(-len(columns) // MAX_COLUMNS))]
    # ms-swift makes reward models with an identity as head, and pools the states of all columns afterwards.
    has_head = not isinstance(model.get_output_embeddings(), nn.Identity)
    takes_columns = has_head and takes(model, "logits_to_keep")
    return {**inputs, "use_cache": False} | ({"logits_to_keep": columns} if takes_columns else {}), columns


def _has_shape(value: Any, shape: torch.Size) -> bool:
    """Whether a value is a tensor `(..., B, L)`."""
    return isinstance(value, torch.Tensor) and value.shape[-2:] == shape


MASKED = -1
"""Marks a masked token within a snippet. Such tokens are kept, since some decoders number tokens by their mask."""

SNIPPET_TOKENS = 192
"""Compared tokens of a row, around the fork from the row with which it has the longest common prefix."""


def short_snippets(
    ids: torch.Tensor, mask: torch.Tensor, chunk: int = 0, has_holes: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Two short rows, each with its partner: the row that has the longest common prefix with it. All are cut to at most
    `SNIPPET_TOKENS` tokens around the fork.

    If rows are longer than `chunk`, the tokens that scans of the decoder compute at once, the second pair crosses from
    chunk to chunk: the longest row and its partner, cut to at most two and a half chunks. Without `has_holes`, masked
    tokens between real ones are left out.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: ids and mask of the snippets, right-padded, always with some padding.
    """
    rows = [_from_first_to_last(row, keep.bool()) for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    rows = rows if has_holes else [row[row != MASKED] for row in rows]
    rows = [row for row in rows if len(row) > 1] or rows  # a row of one token has no score to compare
    shortest = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with_masked = [i for i in shortest if (rows[i] == MASKED).any()][:1]
    # Shortest rows first, and one row with masked tokens among the two. `dict` drops duplicates and keeps the order.
    first = list(dict.fromkeys([shortest[0], *with_masked, *shortest]))[:2]
    cuts = [(*_with_partner(rows, i), SNIPPET_TOKENS // 2) for i in first]
    # A quarter more, so that on either side of the fork a node of the prefix tree is longer than a chunk.
    margin = max(SNIPPET_TOKENS // 2, chunk + chunk // 4)
    if chunk and len(rows[shortest[-1]]) > chunk:
        cuts[1:] = [(*_with_partner(rows, shortest[-1]), margin)]
    snippets = [snippet for cut in cuts for snippet in _cut(rows, *cut)]
    # Snippets of one length have no padding to remove, so the check would compare nothing: shorten the first.
    if len({len(row) for row in snippets}) == 1 and len(snippets[0]) > 2:
        shorter = snippets[0][: -max(1, len(snippets[0]) // 4)]
        snippets[0] = _from_first_to_last(shorter, shorter != MASKED)
    padded = torch.nn.utils.rnn.pad_sequence(snippets, batch_first=True, padding_value=MASKED)
    is_real = padded != MASKED
    return padded.masked_fill(~is_real, 0).to(ids.device), is_real.to(mask.dtype).to(mask.device)


def longest_pair(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The longest row, and before it the row that has the longest common prefix with it.

    The other row is cut to `SNIPPET_TOKENS` tokens after the fork; without another row it is the longest one, cut.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: ids and mask `(2, L)`, right-padded. Masked tokens are left out.
    """
    rows = [row[keep.bool()] for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    i, partner, common = _with_partner(rows, max(range(len(rows)), key=lambda i: len(rows[i])))
    longest, other = rows[i], rows[partner][: common + SNIPPET_TOKENS]
    if len(other) == len(longest):  # the padded batch needs some padding to remove
        other = other[: -max(1, len(other) // 4)]
    padded = torch.nn.utils.rnn.pad_sequence([other, longest], batch_first=True)
    real = torch.arange(len(longest)) < torch.tensor([[len(other)], [len(longest)]])
    return padded.to(ids.device), real.to(mask.dtype).to(mask.device)


def _with_partner(rows: list[torch.Tensor], i: int) -> tuple[int, int, int]:
    """A row, the row with the longest common prefix, and the number of tokens of that prefix."""
    others = [j for j in range(len(rows)) if j != i]
    partner = max(others, key=lambda j: _common_prefix(rows[i], rows[j]), default=i)
    return i, partner, _common_prefix(rows[i], rows[partner])


def _cut(rows: list[torch.Tensor], i: int, partner: int, common: int, margin: int) -> list[torch.Tensor]:
    """Two rows, cut to `margin` tokens before and after their fork."""
    begin = max(0, common - margin)
    snippets = (rows[k][begin : begin + 2 * margin] for k in (i, partner))
    return [_from_first_to_last(snippet, snippet != MASKED) for snippet in snippets if (snippet != MASKED).any()]


def _from_first_to_last(row: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A row without the padding around it; masked tokens within it become [`MASKED`]."""
    index = real.nonzero()
    return row.masked_fill(~real, MASKED)[index.min() : index.max() + 1]


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).long().cumprod(0).sum())  # the product is 1 up to the first difference, then 0
