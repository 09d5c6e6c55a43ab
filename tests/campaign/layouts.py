"""Random masks and ids; the layout is compared with prefixes in Python tuples."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from campaign import HELD

from trl_padfix import Layout, pack, padding_free_layout, prefix_sharing_layout, unpack


def draw(chance: random.Random) -> dict[str, Any]:
    rows, columns = chance.randint(1, 9), chance.randint(1, 14)
    alphabet = chance.choice([[0, 1], list(range(5)), [0, 2**31 - 1, 2**31, 2**40], list(range(100))])
    ids = [[chance.choice(alphabet) for _ in range(columns)] for _ in range(rows)]
    kind = chance.choice(["right", "left", "both", "holes", "any", "full", "one"])
    mask = []
    for _ in range(rows):
        length = chance.randint(1, columns)
        begin = {"right": 0, "left": columns - length}.get(kind, chance.randint(0, columns - length))
        row = [int(begin <= c < begin + length) for c in range(columns)]
        if kind in ("holes", "any"):
            row = [x * chance.choice([0, 1, 1, 1]) if kind == "holes" else chance.choice([0, 1]) for x in row]
        if kind == "full":
            row = [1] * columns
        if kind == "one":
            row = [int(c == begin) for c in range(columns)]
        mask.append(row if any(row) else [1, *row[1:]])
    for i in range(1, rows):  # duplicates and nested prefixes
        if chance.random() < 0.4:
            j, keep = chance.randrange(i), chance.randint(0, columns)
            ids[i] = ids[j][:keep] + ids[i][keep:]
            if chance.random() < 0.7:
                row = mask[j][:keep] + mask[i][keep:]
                mask[i] = row if any(row) else mask[i]
    return {"ids": ids, "mask": mask, "sharing": chance.random() < 0.7}


def attempt(case: dict[str, Any], folder: Path) -> str:
    check(torch.tensor(case["ids"]), torch.tensor(case["mask"]), case["sharing"])
    return HELD


def check(ids: torch.Tensor, mask: torch.Tensor, sharing: bool) -> None:
    """Raise unless each distinct prefix (or each real token) of a batch is computed once, and sees itself."""
    layout = prefix_sharing_layout(ids, mask) if sharing else padding_free_layout(mask)
    expected, computed = paths(ids, mask), attended(layout, ids)
    assert layout.real_tokens == len(expected)
    assert layout.packed_tokens == (len(set(expected)) if sharing else len(expected))
    source = range(layout.packed_tokens) if layout.source is None else layout.source.tolist()
    assert [computed[token] for token in source] == expected
    assert layout.queries.lengths == tuple(layout.queries.cu_seqlens.diff().tolist())
    assert layout.keys.lengths == tuple(layout.keys.cu_seqlens.diff().tolist())
    assert layout.spans == tuple(computed[end - 1][-1][0] + 1 for end in layout.queries.cu_seqlens[1:].tolist())
    assert torch.equal(unpack(pack(ids, layout), layout), ids * mask)


def paths(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[tuple[int, int], ...]]:
    """For each real token, row after row: the `(column since the first, id)` of its row up to and including it."""
    found = []
    for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        first, path = kept.index(1), ()
        for column, token in enumerate(row):
            if kept[column]:
                path += ((column - first, token),)
                found.append(path)
    return found


def attended(layout: Layout, ids: torch.Tensor) -> list[tuple[tuple[int, int], ...]]:
    """For each packed token, in order: the `(position, id)` of the keys that bottom-right causal attention shows."""
    tokens = list(zip(layout.positions.tolist(), pack(ids, layout)[0].tolist(), strict=True))
    keys = range(len(tokens)) if layout.key_index is None else layout.key_index.tolist()
    found = []
    for (begin, end), (first, last) in zip(
        pairwise(layout.queries.cu_seqlens.tolist()), pairwise(layout.keys.cu_seqlens.tolist()), strict=True
    ):
        for query in range(begin, end):
            assert keys[last - end + query] == query, "the last keys of a segment are its own queries"
            found.append(tuple(tokens[key] for key in keys[first : last - end + query + 1]))
    return found
