"""Layouts: what is packed where, checked against literal tensors and against prefixes in Python tuples."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.cells import MATRIX, by_turns
from kit.observe import entered_tokens
from kit.tolerance import assert_close, assert_gradients_close
from zoo.families import build as build_family
from zoo.family_outcomes import alone, batched, gradients_of, stable_topk, weighted
from zoo.model_numbers import merge_segments, numbers, padded_numbers
from zoo.models import COLUMNS, ROWS, batch, build, drawn_batches

from trl_padfix import Layout, PaddingStats, pack, padding_free_layout, prefix_sharing_layout, remove_padding, unpack
from trl_padfix.core.layout.build import sort_by_keys


_ = 0  # padding, where a literal shows ids

# 1-2-3-4 and 1-2-5 are a pair; 1-6 shares one token with them, 1-2 is a prefix of them, and 1-2-5 comes twice.
IDS = torch.tensor(
    [
        [1, 2, 3, 4],
        [1, 2, 5, _],
        [_, 1, 6, _],
        [1, 2, _, _],
        [_, 1, 2, 5],
        [7, 2, _, _],
    ]
)
MASK = IDS.ne(_).long()


def keys_of_segments(layout: Layout) -> list[list[int]]:
    return [keys.tolist() for keys in layout.key_index.split(layout.keys.lengths)]


def test_prefix_sharing_layout_is_a_prefix_tree():
    layout = prefix_sharing_layout(IDS, MASK)

    assert pack(IDS, layout).tolist() == [[1, 2, 3, 4, 5, 6, 7, 2]]
    assert layout.packed_index.tolist() == [12, 13, 2, 3, 6, 10, 20, 21]  # the first row in sorted order computes it
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 1, 0, 1]
    assert layout.real_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10, 12, 13, 17, 18, 19, 20, 21]
    assert layout.source.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 5, 0, 1, 0, 1, 4, 6, 7]
    # Segments 1-2, then 3-4, 5 and 6, each after what it shares, then 7-2. The prefix row and the twin have none.
    assert layout.queries.lengths == (2, 2, 1, 1, 2)
    assert layout.keys.lengths == layout.spans == (2, 4, 3, 2, 2)
    assert keys_of_segments(layout) == [[0, 1], [0, 1, 2, 3], [0, 1, 4], [0, 5], [6, 7]]
    assert layout.queries.cu_seqlens.tolist() == [0, 2, 4, 5, 6, 8]
    assert layout.keys.cu_seqlens.tolist() == [0, 2, 6, 9, 11, 13]
    assert (layout.padded_tokens, layout.real_tokens, layout.packed_tokens) == (24, 16, 8)
    assert (layout.queries.longest, layout.keys.longest) == (2, 4)


REFUSED_MASKS = [
    ([[1, 1]], "`attention_mask` must be a `Tensor`, got `list`"),
    (torch.ones(3), r"shape \(3,\).*needs `\(B, L\)`"),
    (torch.ones(1, 1, 3, 3), r"shape \(1, 1, 3, 3\).*needs `\(B, L\)`"),
    (torch.tensor([[1, 0.5]]), r"holds \[0.5, 1.0\].*Additive and weighted masks"),
    (torch.tensor([[0, -torch.inf]]), r"holds \[-inf, 0.0\]"),
    (torch.tensor([[1.0, torch.nan]]), r"holds \[1.0, nan\]"),
    (torch.tensor([[1, 2]]), r"holds \[1, 2\]"),
    (torch.tensor([[1, 1], [0, 0], [1, 0], [0, 0]]), r"Rows \[1, 3\].*no real token"),
    (torch.ones(0, 4), r"shape \(0, 4\)"),
    (torch.ones(2, 0), r"shape \(2, 0\)"),
]
REFUSED_VALUES = [  # function, arguments, message
    (prefix_sharing_layout, (torch.ones(2, 3), torch.ones(2, 4)), r"\(2, 3\) on cpu under .* mask of shape \(2, 4\)"),
    (prefix_sharing_layout, (torch.ones(2, 3, device="meta"), torch.ones(2, 3)), r"on meta .* on cpu"),
    (pack, (torch.zeros(6, 5), padding_free_layout(MASK)), r"shape \(6, 5\) with a layout of \(6, 4\)"),
    (pack, (torch.zeros(24), padding_free_layout(MASK)), r"shape \(24,\)"),
    (unpack, (torch.zeros(1, 15), padding_free_layout(MASK)), r"shape \(1, 15\) with a layout of 16 packed tokens"),
    (unpack, (torch.zeros(16), padding_free_layout(MASK)), r"shape \(16,\)"),
    *((f, (padding_free_layout(MASK), MASK), "`x` must be a `Tensor`, got `Layout`") for f in (pack, unpack)),
]


def test_masks_that_do_not_say_which_tokens_are_real_are_refused():
    for mask, message in REFUSED_MASKS:
        with pytest.raises(TypeError if isinstance(mask, list) else ValueError, match=message):
            padding_free_layout(mask)
    with pytest.raises(TypeError, match="`input_ids` must be a `Tensor`, got `list`"):
        prefix_sharing_layout([[1, 1]], torch.ones(1, 2))


def test_what_does_not_fit_together_is_refused():
    for function, values, message in REFUSED_VALUES:
        with pytest.raises((TypeError, ValueError), match=message):
            function(*values)


# -- against prefixes in Python tuples


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


@given(st.booleans(), drawn_batches())
def test_each_distinct_prefix_or_real_token_is_computed_once_and_sees_itself(sharing, batch):
    ids, mask = batch
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
    tokens = list(zip(layout.positions.tolist(), pack(ids, layout)[0].tolist(), strict=True))
    seen = [tuple(sorted(tokens[k] for k in row.nonzero().flatten().tolist())) for row in layout.dense_mask()]
    assert seen == computed


# -- the prefix tree: rows in sorted order, and the tokens that each shares with the row before


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


# -- `packed_multiple_of`: packed rows of few lengths, with the numbers of rows of any length


@given(drawn_batches(), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_filler_is_behind_the_row_and_in_no_output(drawn, multiple, sharing):
    ids, mask = drawn
    layout = prefix_sharing_layout(ids, mask) if sharing else padding_free_layout(mask)
    filled = layout.filled(multiple)
    T = layout.packed_tokens
    assert filled.packed_tokens == len(filled.positions) == sum(filled.queries.lengths) >= T
    assert filled.packed_tokens % multiple == 0
    assert filled.packed_tokens - T == filled.filler < multiple
    assert (filled.computed_tokens, filled.real_tokens) == (T, layout.real_tokens)
    visible = filled.dense_mask()
    assert torch.equal(visible[:T, :T], layout.dense_mask())
    assert not visible[:T, T:].any()
    assert not visible[T:, :T].any()
    assert visible.diagonal().all()  # a query without a key would be NaN
    # Each token of the filler has the position of the real token that it repeats.
    assert torch.equal(filled.positions, pack(unpack(layout.positions[None], layout), filled)[0])
    assert torch.equal(unpack(pack(ids, filled), filled) * mask, ids * mask)
    assert layout.filled(multiple) is filled  # built once for all forwards of a batch


def test_filler_in_a_segment_with_the_rows_gives_other_numbers(monkeypatch):
    """The control: one segment of all rows and the filler."""
    model, (ids, mask) = build("qwen2"), batch("left")
    want = padded_numbers("qwen2", model, ids, mask)
    with_filler = Layout._with_filler
    monkeypatch.setattr(Layout, "_with_filler", lambda layout, filler: merge_segments(with_filler(layout, filler)))
    with remove_padding(model, packed_multiple_of=16):
        got = numbers(model, ids, mask)
    assert (got[0] - want[0]).abs().max() > 1e-2


def test_experts_are_balanced_over_the_tokens_of_the_batch():
    model = build("qwen3_moe").train()
    ids, mask = batch("right")

    def balance(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).aux_loss.detach()

    want = balance(ids, mask)
    with remove_padding(model, packed_multiple_of=64) as handle:
        assert_close(balance(ids, mask), want, terms=int(mask.sum()), depth=4)
        # The control: the tokens of the filler, as a row of the batch, move the balance.
        again = torch.cat([ids, ids[3:4]]), torch.cat([mask, mask[3:4]])
        assert abs(balance(*again) - want) > 1e-4
    assert handle.stats.filler_tokens > 0
    assert repr(handle.stats).endswith(f", filler_tokens={handle.stats.filler_tokens})")
    assert repr(PaddingStats()).endswith("padded_forwards=0)")


# Linear attention, state-space scans (with gradients of states and without), convolutions; rows with ALiBi and an
# indexer; layers that do not hand keyword arguments down.
FAMILIES = ["qwen3_5_text", "mamba2", "lfm2", "bloom"]
OTHERS = ["zamba2", "glm_moe_dsa"]


@pytest.mark.parametrize(
    ("family", "sharing"), [*by_turns(FAMILIES, [True, False]), *(pytest.param(f, True, marks=MATRIX) for f in OTHERS)]
)
def test_filler_touches_no_state_of_a_row(family, sharing):
    with stable_topk():
        logps, gradients = alone(build_family(family))
        with remove_padding(model := build_family(family), prefix_sharing=sharing, packed_multiple_of=32) as handle:
            got = batched(model, "left")
            assert_close(got.detach(), logps, terms=64, depth=24)
            assert_gradients_close(gradients_of(model, weighted(got)), gradients, terms=64, depth=48)
        assert 0 < handle.stats.filler_tokens < 32


def test_rows_have_the_smallest_of_several_lengths():
    """Beyond the largest, a multiple of that; with the numbers of rows of any length."""
    lengths, model, plain = [16, 64], build("qwen2"), build("qwen2")
    with remove_padding(model, packed_multiple_of=lengths), entered_tokens(model) as entered:
        for rows in (1, 2, 12):
            ids = torch.tensor([[n, *ROWS[3][1:]] for n in range(1, rows + 1)])
            got = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            want = plain(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            assert_close(got, want, terms=64, depth=24)
    assert entered == [16, 64, -(-12 * COLUMNS // 64) * 64]


def test_other_values_are_errors():
    for value in (0, -64, 64.0, True, "64", [], [64, 0], [128, 64], [64, 64], [64, "128"]):
        with pytest.raises(ValueError, match=r"`packed_multiple_of` is a number of tokens.* lengths in ascending"):
            remove_padding(build("qwen2"), packed_multiple_of=value)
