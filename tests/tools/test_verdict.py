"""The verdict of `trl-padfix stats`: counts are those of layouts, and the advice follows the data."""

import random

import pytest
import torch

from trl_padfix import prefix_sharing_layout
from trl_padfix.tools.stats import Lengths
from trl_padfix.tools.token_rows import sequences_of
from trl_padfix.tools.verdict import advise


def pairs(count, low, high, prompt=100):
    """Pairs with a prompt of their own, of about `prompt` tokens."""
    draw = random.Random(0)
    ids = lambda length: [draw.randrange(10**6) for _ in range(length)]  # noqa: E731
    return [
        {
            "prompt_ids": ids(prompt and draw.randint(prompt // 2, 2 * prompt)),
            "chosen_ids": ids(draw.randint(low, high)),
            "rejected_ids": ids(draw.randint(low, high)),
        }
        for _ in range(count)
    ]


def tree(trees, turns=4, system=200, turn=20):
    """Rows of rollouts: each row goes on where the row before it ends, and all of a tree share a system prompt."""
    draw = random.Random(0)
    rows = []
    for _ in range(trees):
        begin = [draw.randrange(10**6) for _ in range(system)]
        for _ in range(4):
            row = list(begin)
            for _ in range(turns):
                row = row + [draw.randrange(10**6) for _ in range(turn)]
                rows.append({"input_ids": row})
    return rows


KINDS = {  # whether to share, and whether to group
    "pairs": (lambda: pairs(64, 5, 60), True, False),
    "a tree of rows": (lambda: tree(16), True, True),
    "equal lengths, nothing in common": (lambda: pairs(64, 30, 30, prompt=0), False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_follows_the_data(kind):
    build, shares, groups = KINDS[kind]
    found = advise(Lengths.of(build()), trainer="dpo", batch_size=8)
    assert (found.shares, found.groups) == (shares, groups)
    assert found.grouped <= 1.01 * found.auto <= 1.01 * found.real
    assert found.real <= found.bucket_by_length <= found.padded
    text = "\n".join(found.lines())
    assert ('prefix_sharing="auto"' in text) is shares
    assert ("group_by_prefix=True" in text) is groups
    assert f"{found.by_tokens:.1f}x ({found.padded:,.0f} tokens" in text
    if kind.startswith("equal"):
        assert found.by_tokens == pytest.approx(1, abs=0.02)


def test_one_batch_costs_what_its_layout_has():
    rows = tree(1)
    lengths = Lengths.of(rows)
    found = advise(lengths, trainer="sft", batch_size=16)
    sequences = [torch.tensor(ids) for row in rows for ids in sequences_of(row)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in sequences], batch_first=True)
    layout = prefix_sharing_layout(ids, mask)
    assert (found.padded, found.real, found.auto) == (mask.numel(), layout.real_tokens, layout.packed_tokens)
