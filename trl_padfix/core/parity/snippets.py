"""
Short slices of the rows of a batch, for the parity check.

A few hundred tokens show whether rows are kept apart and whether prefixes part where they should. Scans compute chunks
of up to 256 tokens at once and hand a state from one to the next, so a decoder that has some is also given a pair of
rows that crosses from chunk to chunk, before and behind the place where they part.
"""

from __future__ import annotations

import torch


__all__ = ["SLICE", "short_slices"]

HOLE = -1
"""Stands for a masked token within a slice: holes are kept, since some decoders number tokens by their mask."""

SLICE = 192
"""Tokens of a row that are compared, around the place where it parts from the row it shares most with."""

CANDIDATES = 8
"""Rows that are looked at for a pair that crosses chunks: each is compared with all others."""


def short_slices(ids: torch.Tensor, mask: torch.Tensor, chunk: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Two short rows and the row that each shares most with, cut to at most `SLICE` tokens around where they part.

    If rows are longer than the `chunk` of tokens that scans of the decoder compute at once, the second pair are rows
    that cross from chunk to chunk, cut to at most two and a half chunks.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: ids and mask of the slices, right-padded, with some padding always.
    """
    rows = [_from_first_to_last(row, keep.bool()) for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    rows = [row for row in rows if len(row) > 1] or rows  # a single token has nothing to be compared
    shortest = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with_holes = [i for i in shortest if (rows[i] == HOLE).any()][:1]
    first = list(dict.fromkeys([shortest[0], *with_holes, *shortest]))[:2]
    cuts = [(*_with_partner(rows, i), SLICE // 2) for i in first]
    # A quarter more, so that a node of the tree is longer than a chunk on either side of the fork.
    around = max(SLICE // 2, chunk + chunk // 4)
    if chunk and (crossing := _crossing(rows, shortest, chunk, around)):
        cuts[1:] = [(*crossing, around)]
    chosen = [piece for cut in cuts for piece in _cut(rows, *cut)]
    # Slices of one length would leave nothing to remove, and so nothing to compare.
    if len({len(row) for row in chosen}) == 1 and len(chosen[0]) > 2:
        shorter = chosen[0][: -max(1, len(chosen[0]) // 4)]
        chosen[0] = _from_first_to_last(shorter, shorter != HOLE)
    sliced = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=HOLE)
    kept = sliced != HOLE
    return sliced.masked_fill(~kept, 0).to(ids.device), kept.to(mask.dtype).to(mask.device)


def _with_partner(rows: list[torch.Tensor], i: int) -> tuple[int, int, int]:
    """A row, the row that it shares most with, and how many tokens these are."""
    others = [j for j in range(len(rows)) if j != i]
    partner = max(others, key=lambda j: _common_prefix(rows[i], rows[j]), default=i)
    return i, partner, _common_prefix(rows[i], rows[partner])


def _cut(rows: list[torch.Tensor], i: int, partner: int, common: int, around: int) -> list[torch.Tensor]:
    """Two rows, cut to `around` tokens before and behind the place where they part."""
    begin = max(0, common - around)
    pieces = (rows[k][begin : begin + 2 * around] for k in (i, partner))
    return [_from_first_to_last(piece, piece != HOLE) for piece in pieces if (piece != HOLE).any()]


def _crossing(rows: list[torch.Tensor], shortest: list[int], chunk: int, around: int) -> tuple[int, int, int] | None:
    """A pair of rows whose slices cross from chunk to chunk: before the place where they part, behind it, or both."""
    long = [i for i in shortest if len(rows[i]) > chunk][:CANDIDATES]
    pairs = [_with_partner(rows, i) for i in long]

    def crossed(pair: tuple[int, int, int]) -> int:
        i, partner, common = pair
        behind = max(len(rows[i]), len(rows[partner])) - common
        return (min(common, around) > chunk) + (min(behind, 2 * around - min(common, around)) > chunk)

    best = max(pairs, key=crossed, default=None)  # the first of the best ones is the shortest
    return best if best is not None and crossed(best) else None


def _from_first_to_last(row: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A row without the padding around it; what is masked within it becomes [`HOLE`]."""
    places = real.nonzero()
    return row.masked_fill(~real, HOLE)[places.min() : places.max() + 1]


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).long().cumprod(0).sum())
