"""The verdict of `trl-padfix stats`: counts are those of layouts, and the advice follows the data."""

import numpy as np
import pytest
import torch

from trl_padfix import prefix_sharing_layout
from trl_padfix.tools.bench import equal_length_pairs, pairs_of_lengths, parse_tree, tree_pairs, tree_rows
from trl_padfix.tools.verdict import judge, prefix_tree, verdict_lines


def scored(rows):
    def count(row):
        if "labels" in row:
            return sum(label != -100 for label in row["labels"])
        return len(row["chosen_ids"]) + len(row["rejected_ids"])

    return [{k: v for k, v in row.items() if k != "labels"} | {"scored": count(row)} for row in rows]


TREE = parse_tree("tree:4x4/200/20")
KINDS = {
    # shares, groups, and the speed-up by tokens that is left when nothing is measured but them
    "pairs": (lambda: scored(pairs_of_lengths(64, 100, 20)), True, False),
    "a tree of rows": (lambda: scored(tree_rows(TREE, 16 * 16)), True, True),
    "a tree of pairs": (lambda: scored(tree_pairs(TREE, 16 * 16)), True, True),
    "equal lengths": (lambda: scored(equal_length_pairs(64)), False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_follows_the_data(kind):
    build, shares, groups = KINDS[kind]
    found = judge(build(), batch_size=8, budget=4096)
    assert (found.shares, found.groups) == (shares, groups)
    assert found.grouped <= 1.01 * found.auto <= 1.01 * found.real
    assert found.real <= found.padded
    text = "\n".join(verdict_lines(found, "data.jsonl"))
    assert len(text.splitlines()) <= 8
    assert ('prefix_sharing="auto"' in text) is shares
    assert ("group_by_prefix=True" in text) is groups
    assert f"{found.by_tokens:.1f}x" in text
    if kind == "equal lengths":
        assert found.speed == pytest.approx(1, abs=0.02)


def test_one_batch_costs_what_its_layout_has():
    rows = scored(tree_rows(TREE, 16))
    found = judge(rows, batch_size=16, budget=4096)
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (torch.arange(longest) < torch.tensor([[len(row["input_ids"])] for row in rows])).long()
    layout = prefix_sharing_layout(ids, mask)
    assert (found.padded, found.real, found.auto) == (mask.numel(), layout.real_tokens, layout.packed_tokens)
    tree = prefix_tree(rows)
    assert tree.lengths.sum() - tree.common.sum() == layout.packed_tokens
    assert np.all(tree.common < tree.lengths + 1)
