"""The prefix tree: rows in sorted order, and the tokens that each shares with the row before."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_padfix.core.layout.prefix_tree import sort_by_keys


def common(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 300, 2**31 - 1]), min_size=1, max_size=6), min_size=1, max_size=9))
def test_rows_are_sorted_and_share_what_they_begin_with(rows):
    for offset in (0, 2**40, -5):  # numbers of 32 bits, of 64 bits, and negative ones
        ids = torch.tensor([offset + token for row in rows for token in row])
        order, shared = sort_by_keys([ids], [len(row) for row in rows])
        in_order = [rows[row] for row in order]
        assert sorted(order) == list(range(len(rows)))
        assert shared == [0, *(common(a, b) for a, b in pairwise(in_order))]
        # No row before it has more in common with a row than the one just before.
        for i, row in enumerate(in_order[1:], 1):
            assert shared[i] == max(common(before, row) for before in in_order[:i])


def test_several_keys_tell_tokens_apart():
    ids, places = torch.tensor([1, 2, 1, 2]), torch.tensor([0, 1, 0, 2])
    assert sort_by_keys([ids], [2, 2]).shared == [0, 2]
    assert sort_by_keys([places, ids], [2, 2]).shared == [0, 1]
