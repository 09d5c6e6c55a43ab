"""Micro-batches under a token budget and processes with even work: every row once, whatever the lengths."""

import numpy as np
import pytest
from accelerate import PartialState
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trl_padfix.core.layout.shared_prefixes import KV_MEMORY_FRACTION
from trl_padfix.trainers.batching.bin_packing import (
    RowCosts,
    RowSplitter,
    dataset_costs,
    pack_rows,
    prefix_costs,
    sort_by_prefix,
    text_costs,
)


@st.composite
def drawn_rows(draw, most=24):
    """Rows of few tokens, so that many begin alike."""
    rows = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7), min_size=1, max_size=most))
    return [np.array(row) for row in rows]


def costs_of(rows):
    each = np.array([len(row) for row in rows])
    return prefix_costs(each, each, *sort_by_prefix(rows))


PAIRS = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))


def drawn_costs(most=24):
    """Costs of such rows, or of rows that share nothing."""
    apart = st.lists(st.integers(2, 12), min_size=1, max_size=most).map(text_costs)
    return st.one_of(drawn_rows(most).map(costs_of), apart)


def counted(rows, part):
    """Tokens of a batch, common prefixes once, row by row."""
    return len({tuple(rows[r][: i + 1]) for r in part for i in range(len(rows[r]))})


@given(drawn_rows(), st.data())
def test_costs_are_the_distinct_prefixes_of_any_rows(rows, data):
    costs = costs_of(rows)
    distinct = st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True)
    part = data.draw(distinct)
    assert costs.total(part) == counted(rows, part)
    within = data.draw(st.lists(st.integers(0, len(part) - 1), min_size=1, unique=True))
    assert costs[part].total(within) == counted(rows, [part[i] for i in within])
    everywhere = min(len(row) for row in rows) if len(rows) > 1 else 0
    while everywhere and len({tuple(row[:everywhere]) for row in rows}) > 1:
        everywhere -= 1
    assert costs.shared_by_all == everywhere


@given(drawn_costs(), st.integers(1, 60))
@example(RowCosts(np.array([1, 3, 3, 5, 1]), np.array([0, 3, 1, 2, 4]), np.array([0, 1, 2, 1, 0])), 4)
@example(RowCosts(np.array([1, 2, 2]), np.arange(3), np.arange(3)), 1)
def test_a_split_has_every_row_once_within_the_budget(costs, budget):
    parts = pack_rows(costs, budget, across=False)
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))
    for part in parts:
        assert costs.total(part) <= budget or len(part) == 1
    sizes = [costs.total(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=50)
@given(st.data())
def test_pairs_cost_at_least_what_is_computed(data):
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from trl_padfix import padding_free_layout, prefix_sharing_layout

    # Completions begin with ids of their own, so that pairs have nothing but prompts in common.
    prompts = data.draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=4))
    lengths = st.tuples(st.integers(1, 6), st.integers(1, 6))
    pairs = [
        {"prompt_ids": p, "chosen_ids": [10 + 2 * i] * c, "rejected_ids": [11 + 2 * i] * r}
        for i, p in enumerate(prompts)
        for c, r in [data.draw(lengths)]
    ]
    settings = {
        "max_length": data.draw(st.sampled_from([None, 7])),
        "truncation_mode": data.draw(st.sampled_from(["keep_start", "keep_end"])),
    }
    batch = DataCollatorForPreference(pad_token_id=0, **settings)(pairs)
    rows = Dataset.from_list(pairs)
    assert dataset_costs(rows, PAIRS, **settings).total() == padding_free_layout(batch["attention_mask"]).packed_tokens
    shared = prefix_sharing_layout(batch["input_ids"], batch["attention_mask"]).packed_tokens
    costs = dataset_costs(rows, PAIRS, sharing=True, **settings)
    assert costs.total() >= shared
    for i, pair in enumerate(pairs):
        alone = DataCollatorForPreference(pad_token_id=0, **settings)([pair])
        tokens = prefix_sharing_layout(alone["input_ids"], alone["attention_mask"]).packed_tokens
        assert costs.tokens[i] >= tokens
        assert costs.tokens[i] == tokens or settings["truncation_mode"] == "keep_end"


@pytest.mark.parametrize("seed", range(2))
def test_parts_that_share_prefixes_stay_within_the_budget(seed):
    """Prefixes that later parts need too count by their keys and values, if keeping more of them would cost parts."""
    draw = np.random.default_rng(seed)
    rows = [np.arange(int(draw.integers(1, 300)))]
    for _ in range(60):
        begin = rows[draw.integers(len(rows))]
        begin = begin[: draw.integers(1, len(begin) + 1)]
        rows.append(np.concatenate([begin, draw.integers(1000, 2000, draw.integers(1, 60))]))
    each = np.array([len(row) for row in rows])
    costs = prefix_costs(each, each, *sort_by_prefix(rows))
    budget = int(each.max() + draw.integers(0, 200))
    parts = pack_rows(costs, budget, across=True)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for i, part in enumerate(parts):
        later = [row for other in parts[i + 1 :] for row in other]
        needed_later = costs.total(part) + costs.total(later) - costs.total(part + later) if later else 0
        assert len(part) == 1 or costs.total(part) - (1 - KV_MEMORY_FRACTION) * needed_later <= budget
    assert len(parts) <= len(pack_rows(costs, budget, across=False)) + 2


def test_rows_of_one_long_prefix_need_fewer_parts_than_where_each_holds_it():
    each = np.full(32, 1152)
    costs = prefix_costs(each, each, np.arange(32), np.array([0] + [1024] * 31))
    assert [len(part) for part in pack_rows(costs, 1280, across=False)] == [2] * 16
    parts = pack_rows(costs, 1280, across=True)
    assert len(parts) == 5
    assert len(parts[-1]) <= 2  # with its prefix in full, since that is computed again for it
    assert [len(part) for part in pack_rows(costs, 5120, across=True)] == [32]
    for tokens, shared, found in (([880, 780, 780], 300, [[1, 2], [0]]), ([920, 880, 1220], 700, [[0, 2], [1]])):
        costs = prefix_costs(np.array(tokens), np.array(tokens), np.arange(3), np.array([0, shared, shared]))
        assert pack_rows(costs, 1000, across=True) == found  # the smaller part last


def test_processes_have_equally_many_parts_also_if_one_has_fewer_rows_than_another_has_parts():
    PartialState(cpu=True)  # for the log

    def split(rows: int, fewest: int) -> list[list[int]]:
        splitter = RowSplitter(200, sharing=False, sync_count=lambda count: 5 if count > 0 else -fewest)
        return splitter.pack(text_costs([90] * rows))

    assert sorted(split(5, fewest=5)) == [[0], [1], [2], [3], [4]]
    assert [split(5, fewest=2), split(2, fewest=2)] == [[[0, 1, 2, 3, 4]], [[0, 1]]]
