"""
Short snippets of the rows of a batch, for the parity check.

A few hundred tokens show whether rows are kept apart and whether prefixes fork at the right token. Scans compute
chunks of up to 256 tokens at once and pass a state from one chunk to the next. A decoder with scans therefore also
gets a pair of rows that crosses from chunk to chunk, before and after the fork.
"""

from __future__ import annotations

import torch


__all__ = ["SNIPPET_TOKENS", "longest_pair", "short_snippets"]

MASKED = -1
"""Marks a masked token within a snippet. Such tokens are kept, since some decoders number tokens by their mask."""

SNIPPET_TOKENS = 192
"""Compared tokens of a row, around the fork from the row with which it has the longest common prefix."""

CANDIDATES = 8
"""Number of rows that are tried for a pair that crosses chunks: each is compared with all others."""


def short_snippets(
    ids: torch.Tensor, mask: torch.Tensor, chunk: int = 0, has_holes: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Two short rows, each with its partner: the row that has the longest common prefix with it. All are cut to at most
    `SNIPPET_TOKENS` tokens around the fork.

    If rows are longer than `chunk`, the tokens that scans of the decoder compute at once, the second pair crosses from
    chunk to chunk. These rows are cut to at most two and a half chunks. Without `has_holes`, masked tokens between
    real ones are left out.

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
    if chunk and (crossing := _crossing_pair(rows, shortest, chunk, margin)):
        cuts[1:] = [(*crossing, margin)]
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


def _crossing_pair(
    rows: list[torch.Tensor], shortest: list[int], chunk: int, margin: int
) -> tuple[int, int, int] | None:
    """A pair of rows whose snippets cross from chunk to chunk: before the fork, after it, or both."""
    long = [i for i in shortest if len(rows[i]) > chunk][:CANDIDATES]
    pairs = [_with_partner(rows, i) for i in long]

    def crossings(pair: tuple[int, int, int]) -> int:
        i, partner, common = pair
        before = min(common, margin)
        after = max(len(rows[i]), len(rows[partner])) - common
        return (before > chunk) + (min(after, 2 * margin - before) > chunk)

    best = max(pairs, key=crossings, default=None)  # of equal pairs `max` takes the first, which is the shortest
    return best if best is not None and crossings(best) else None


def _from_first_to_last(row: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A row without the padding around it; masked tokens within it become [`MASKED`]."""
    index = real.nonzero()
    return row.masked_fill(~real, MASKED)[index.min() : index.max() + 1]


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).long().cumprod(0).sum())  # the product is 1 up to the first difference, then 0
