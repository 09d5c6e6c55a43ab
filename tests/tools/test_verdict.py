"""The verdict of `trl-padfix stats`: counts are those of layouts, and the advice follows the data."""

import json
import re

import numpy as np
import pytest
import torch
from kit.commands import trl_padfix_command, write_rollouts

from trl_padfix import prefix_sharing_layout
from trl_padfix.tools.bench import equal_length_pairs, pairs_of_lengths, parse_tree, tree_pairs, tree_rows
from trl_padfix.tools.verdict import advise, prefix_tree, tokenized, verdict_lines


TREE = parse_tree("tree:4x4/200/20")
KINDS = {
    # whether to share, and whether to group
    "pairs": (lambda: tokenized(pairs_of_lengths(64, 100, 20)), True, False),
    "a tree of rows": (lambda: tokenized(tree_rows(TREE, 16 * 16)), True, True),
    "a tree of pairs": (lambda: tokenized(tree_pairs(TREE, 16 * 16)), True, True),
    "equal lengths": (lambda: tokenized(equal_length_pairs(64)), False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_follows_the_data(kind):
    build, shares, groups = KINDS[kind]
    found = advise(build(), batch_size=8, budget=4096)
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


@pytest.mark.parametrize("data", ["tree:2x2/60/8", "lengths:90/9", "equal"])
@pytest.mark.parametrize("trainer", ["dpo", "sft"])
def test_the_speed_is_that_of_the_table_above_it(data, trainer):
    result = trl_padfix_command("stats", data, "--trainer", trainer)
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    rows: list[list[str]] = []
    for name, *figures in cells:  # a name that is long goes on in the next line
        if any(figures):
            rows.append([name, *(figure.replace(",", "") for figure in figures)])
        else:
            rows[-1][0] += f" {name}"
    tokens, head, mask, together, ratio, smaller, speed = rows
    padded, ours = (sum(float(row[side]) for row in (tokens, head, mask)) for side in (1, 2))
    assert [float(figure) for figure in together[1:]] == pytest.approx([padded, ours], abs=2)
    assert float(ratio[2]) == pytest.approx(padded / ours, rel=0.01)
    power = float(re.search(r"to the power of ([\d.]+)", smaller[0])[1])
    assert float(smaller[2]) == pytest.approx((float(tokens[1]) / float(tokens[2])) ** power, rel=0.01)
    assert float(speed[2]) == pytest.approx(float(ratio[2]) * float(smaller[2]), abs=0.1)
    assert f"Speed: about {speed[2]}x" in result.output
    assert f"{float(tokens[1]) / float(tokens[2]):.1f}x by the tokens" in result.output
    share = re.search(r"LM head: ([\d.]+) x", head[0])[1]
    assert float(head[1]) == pytest.approx(float(share) * float(tokens[1]), abs=1)


def test_a_mask_costs_padded_rows_more_in_a_smaller_model():
    how = {"batch_size": 8, "budget": 0}
    large, small = (advise(tokenized(tree_rows(TREE, 64)), **how, hidden_size=size) for size in (512, 128))
    assert large.squares > large.padded
    assert small.speed > large.speed
    assert small.by_tokens == large.by_tokens
    assert advise(tokenized(equal_length_pairs(64)), **how).squares == 0


def test_one_batch_costs_what_its_layout_has():
    rows = tokenized(tree_rows(TREE, 16))
    found = advise(rows, batch_size=16, budget=4096)
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (torch.arange(longest) < torch.tensor([[len(row["input_ids"])] for row in rows])).long()
    layout = prefix_sharing_layout(ids, mask)
    assert (found.padded, found.real, found.auto) == (mask.numel(), layout.real_tokens, layout.packed_tokens)
    tree = prefix_tree(rows)
    assert tree.lengths.sum() - tree.common.sum() == layout.packed_tokens
    assert np.all(tree.common < tree.lengths + 1)


def test_the_command_judges_data_that_is_made_up(tmp_path):
    figures = tmp_path / "verdict.json"
    result = trl_padfix_command("stats", "tree:2x2/60/8", "--trainer", "sft", "--json", str(figures))
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())["verdict"]
    assert found["batch_size"] == 4
    assert found["real"] > 2 * found["grouped"]
    assert "--data tree:2x2/60/8 --pairs 4" in result.output
    assert trl_padfix_command("stats", "tree:2x2").exit_code == 2


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
