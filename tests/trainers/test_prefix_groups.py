"""Rows that begin alike come into one step: every row once, the same for all processes, in seconds."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_padfix.trainers.batching.prefix_groups import group_rows, shared_prefix_lengths, sort_by_prefix
from trl_padfix.trainers.batching.token_costs import prefix_costs


def costs_of(rows):
    each = np.array([len(row) for row in rows])
    return prefix_costs(each, each, *sort_by_prefix(rows))


def drawn_rows(most):
    """Rows of few tokens, so that many begin alike."""
    return st.lists(st.lists(st.integers(0, 2**17), min_size=0, max_size=7), min_size=1, max_size=most).map(
        lambda rows: [np.array(row, dtype=np.int64) % 3 * 2**16 for row in rows]
    )


@settings(max_examples=50)
@given(drawn_rows(40))
def test_rows_are_sorted_as_lists_are(rows):
    order, common = sort_by_prefix(rows)
    lists = [rows[row].tolist() for row in order]
    assert lists == sorted(row.tolist() for row in rows)
    pairs = [
        next((i for i, (a, b) in enumerate(zip(*two, strict=False)) if a != b), min(map(len, two)))
        for two in pairwise(lists)
    ]
    assert common.tolist() == [0, *pairs]
    assert shared_prefix_lengths(rows[:-1], rows[1:]).shape == (len(rows) - 1,)


@settings(max_examples=50)
@given(drawn_rows(40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_grouped_epoch_has_every_row_once_whoever_asks(rows, step, draw):
    costs = costs_of(rows)
    order = draw.sample(range(len(rows)), len(rows))
    grouped = group_rows(order, costs, step)
    assert sorted(grouped.tolist()) == list(range(len(rows)))
    assert group_rows(order, costs, step).tolist() == grouped.tolist()


def test_groups_are_in_one_step_and_their_steps_in_the_order_of_the_epoch():
    draw = np.random.default_rng(0)
    rows = [np.array([group, 7, 7, 7, row]) for group in range(40) for row in range(4)]
    costs, order = costs_of(rows), draw.permutation(160)
    grouped = group_rows(order, costs, 8)
    steps = grouped.reshape(20, 8) // 4
    assert all(len(set(step)) == 2 for step in steps.tolist())
    assert sum(costs.total(step) for step in grouped.reshape(20, 8)) == 40 * 8
    assert sum(costs.total(step) for step in order.reshape(20, 8)) > 40 * 14  # what it would be without grouping
    firsts = [min(np.flatnonzero(np.isin(order, step))) for step in grouped.reshape(20, 8)]
    assert firsts == sorted(firsts)
    other = group_rows(draw.permutation(160), costs, 8).reshape(20, 8) // 4
    pairs, others = ({tuple(sorted(set(step))) for step in found.tolist()} for found in (steps, other))
    assert len(pairs & others) < 5  # which groups meet is drawn again


def test_a_group_larger_than_a_step_fills_steps_of_its_own():
    rows = [np.array([0, 1, 1, 1, row]) for row in range(16)] + [np.array([0, 2 + i, 3, 3, 3]) for i in range(8)]
    costs = costs_of(rows)
    grouped = group_rows(np.random.default_rng(0).permutation(24), costs, 8).reshape(3, 8)
    assert sorted(int((step < 16).sum()) for step in grouped) == [0, 8, 8]
    # Its prefix counts for more than what every row begins with.
    assert costs.shared_by_all == 1
    assert costs.same_group.sum() == 15
