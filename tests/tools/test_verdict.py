"""The verdict of `trl-padfix stats`: counts are those of layouts, and the advice follows the data."""

import json

import numpy as np
import pytest
import torch
from bench import pairs_of_lengths, parse_tree, synthetic_rows, tree_pairs, tree_rows
from kit.commands import trl_padfix_command, write_rollouts

from trl_padfix import prefix_sharing_layout
from trl_padfix.tools.stats import Lengths, prefix_tree
from trl_padfix.tools.token_rows import sequences_of
from trl_padfix.tools.verdict import advise


TREE = parse_tree("tree:4x4/200/20")
KINDS = {
    # whether to share, and whether to group
    "pairs": (lambda: pairs_of_lengths(64, 100, 20), True, False),
    "a tree of rows": (lambda: tree_rows(TREE, 16 * 16), True, True),
    "a tree of pairs": (lambda: tree_pairs(TREE, 16 * 16), True, True),
    "equal lengths": (lambda: synthetic_rows("equal", "dpo", 64), False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_follows_the_data(kind):
    build, shares, groups = KINDS[kind]
    found = advise(Lengths.of(build()), trainer="dpo", batch_size=8)
    assert (found.shares, found.groups) == (shares, groups)
    assert found.grouped <= 1.01 * found.auto <= 1.01 * found.real
    assert found.real <= found.bucket_by_length <= found.padded
    text = "\n".join(found.lines("data.jsonl"))
    assert len(text.splitlines()) <= 8
    assert ('prefix_sharing="auto"' in text) is shares
    assert ("group_by_prefix=True" in text) is groups
    assert f"{found.by_tokens:.1f}x" in text
    if kind == "equal lengths":
        assert found.by_tokens == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("build", [tree_rows, tree_pairs])
def test_one_batch_costs_what_its_layout_has(build):
    rows = list(build(TREE, 16))
    lengths = Lengths.of(rows)
    found = advise(lengths, trainer="sft", batch_size=16)
    sequences = [torch.tensor(ids) for row in rows for ids in sequences_of(row)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in sequences], batch_first=True)
    layout = prefix_sharing_layout(ids, mask)
    assert (found.padded, found.real) == (mask.numel(), layout.real_tokens)
    # Answers that are rejected may begin like others by chance, which is not looked for.
    assert found.auto == pytest.approx(layout.packed_tokens, rel=0 if build is tree_rows else 0.01)
    tree = prefix_tree(lengths)
    assert tree.lengths.sum() - tree.shared.sum() == found.auto
    assert np.all(tree.shared < tree.lengths + 1)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_command_takes_rollouts_by_their_turns(tmp_path):
    data, figures = write_rollouts(tmp_path / "rollouts.jsonl"), tmp_path / "figures.json"
    command = ["stats", data, "--train-tokenizer", "320", "--batch-size", "4", "--json", str(figures)]
    found = {}
    for flags in ([], ["--expand-turns"]):
        result = trl_padfix_command(*command, *flags)
        assert result.exit_code == 0, result.output
        found[len(flags)] = json.loads(figures.read_text())["verdict"]
        measure = next(line for line in result.output.splitlines() if line.startswith("Measure it"))
        assert ("--expand-turns" in measure) == bool(flags)
    assert (found[0]["rows"], found[1]["rows"]) == (12, 24)
    assert found[1]["groups"]
    assert found[1]["grouped"] < 0.8 * found[1]["auto"]
