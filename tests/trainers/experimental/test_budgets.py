"""A token budget splits the forwards of TRL's experimental trainers, and leaves all that they compute and log."""

import pytest
import trl
from kit.cells import by_turns, slow_but
from kit.trainer_runs import MODES, assert_same, break_mode, figures
from packaging.version import Version


if Version(trl.__version__) < Version("1.16"):
    pytest.skip("other experiments than those of TRL 1.16", allow_module_level=True)

from kit.experimental_runs import EXPERIMENTS, build, train


NAMES = list(EXPERIMENTS)
METRICS = {name: () for name in NAMES if name != "GKD"}
METRICS |= {"ORPO": ("logits/",), "CPO": ("logits/",), "OnlineDPO": ("objective/",)}
"""Metrics that are means over padding, too, in TRL, of all trainers with metrics."""

CELLS = by_turns(NAMES, ["padding-free", "prefix sharing"])


def longest_row(run):
    """The least budget: tokens of the longest row of all forwards."""
    return max(int(mask.sum(1).max()) for _, mask in run.batches)


@pytest.mark.parametrize(("name", "mode"), slow_but([("ORPO", "padding-free"), ("GMPO", "prefix sharing")], CELLS))
def test_the_steps_and_the_log_are_trls(name, mode, trls, policy, tmp_path, monkeypatch):
    theirs = trls(name)
    config = {"max_tokens_per_batch": longest_row(theirs), "parity_check": False}
    ours = train(name, "trl_padfix", tmp_path, policy, **config, **MODES[mode])
    assert_same(ours.trajectory(), theirs.trajectory(), rtol=1e-5, atol=1e-5)
    if name in METRICS:
        assert_same(figures(ours.logs, METRICS[name]), figures(theirs.logs, METRICS[name]), atol=1e-4)
    assert_same(ours.weights(), theirs.weights(), atol=1e-5)
    # Generation leaves no trace here, and TRL's forwards have padding.
    assert max(ours.forwards) < max(theirs.forwards)
    assert max(ours.forwards) <= config["max_tokens_per_batch"]
    assert len(ours.forwards) > len(theirs.forwards)
    wrong = train(name, "trl_padfix", tmp_path, policy, **config, **break_mode(monkeypatch, mode))
    with pytest.raises(AssertionError):
        assert_same(wrong.trajectory(), theirs.trajectory(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["GKD", "OnlineDPO"])
def test_completions_longer_than_the_budget_are_an_error(name, policy, tmp_path):
    with pytest.raises(ValueError, match=r"`max_new_tokens=12` tokens, more than `max_tokens_per_batch=10`"):
        build(name, "trl_padfix", tmp_path, policy, padding_free=True, max_tokens_per_batch=10)
