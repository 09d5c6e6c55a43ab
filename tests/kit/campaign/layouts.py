"""Random masks and ids; the layout is compared with a trie that is built token by token."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from kit.campaign import HELD

from trl_padfix import pack, padding_free_layout, prefix_sharing_layout, unpack


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
    ids, mask = torch.tensor(case["ids"]), torch.tensor(case["mask"])
    layout = prefix_sharing_layout(ids, mask) if case["sharing"] else padding_free_layout(mask)
    places, prefixes = [], {}
    for i, (row_ids, row_mask) in enumerate(zip(case["ids"], case["mask"], strict=True)):
        first, path = row_mask.index(1), ()
        for c, (token, kept) in enumerate(zip(row_ids, row_mask, strict=True)):
            if kept:
                path = (*path, (token, c - first) if case["sharing"] else (i, c - first))
                prefixes.setdefault(path, len(prefixes))
                places.append((i * len(row_ids) + c, path))
    assert layout.real_index.tolist() == [place for place, _ in places]
    assert layout.packed_tokens == len(prefixes), (layout.packed_tokens, len(prefixes))
    source = layout.source.tolist() if layout.source is not None else list(range(len(places)))
    node_of = {}
    for (_, path), packed in zip(places, source, strict=True):
        assert node_of.setdefault(packed, path) == path, "two prefixes share a token"
    assert len(node_of) == len(prefixes)
    flat = ids.flatten()
    for packed, path in node_of.items():
        assert layout.positions[packed] == path[-1][1]
        if case["sharing"]:
            assert int(flat[layout.packed_index[packed]]) == path[-1][0]
    cu_q = layout.cu_seqlens_q.tolist()
    assert layout.cu_seqlens_k.tolist()[-1] == sum(layout.key_lengths)
    assert [b - a for a, b in pairwise(cu_q)] == list(layout.query_lengths)
    keys = layout.key_index.tolist() if layout.key_index is not None else list(range(layout.packed_tokens))
    begin = 0
    for s, (queries, length) in enumerate(zip(layout.query_lengths, layout.key_lengths, strict=True)):
        seen, begin = keys[begin : begin + length], begin + length
        for n in range(queries):  # causal, aligned to the bottom right: the keys of a query are its whole path
            path = node_of[cu_q[s] + n]
            assert [node_of[k] for k in seen[: length - queries + n + 1]] == [path[: m + 1] for m in range(len(path))]
        places_of = [node_of[k][-1][1] for k in seen]
        assert layout.spans[s] == places_of[-1] - places_of[0] + 1
    values = torch.arange(ids.numel(), dtype=torch.float64).reshape(ids.shape)
    back = unpack(pack(values, layout), layout)
    if not case["sharing"]:
        assert torch.equal(back * mask, values * mask)
    return HELD
