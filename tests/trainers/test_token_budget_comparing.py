"""Losses that compare rows compare those of TRL's micro-batches, whatever a token budget splits."""

import pytest
import torch
from kit.budget_runs import BUDGET, build_branching, make
from kit.cells import slow_but
from kit.observe import entered_tokens
from kit.trainer_runs import assert_same, figures, trajectory


CASES = {
    "sft": ("dpo", {"loss_type": ["sft"]}),
    "RPO": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.8]}),
    "MPO": ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "aot": ("dpo", {"loss_type": ["aot"]}),
    "aot_unpaired": ("dpo", {"loss_type": ["aot_unpaired"]}),
    "kto": ("kto", {}),
    "kto, precomputed": ("kto", {"precompute_ref_log_probs": True}),
}
SHAPES = {
    "one": {},
    "two of four": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "four of two": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "a last micro-batch of one row": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "rows": 13},
}
# KTO takes rows in their order, of which every eighth begins alike.
WITHOUT_COMMON_PREFIXES = {(kto, shape) for kto in ("kto", "kto, precomputed") for shape in SHAPES}
LR = {"learning_rate": 1e-2, "max_steps": 3}


def train(folder, case, ours, shape, **more):
    name, given = CASES[case]
    given = LR | given | SHAPES[shape] | more
    data = build_branching(name)
    given["train_dataset"] = data.select(range(given.pop("rows", len(data))))
    trainer = make(name, folder, ours=ours, **given)
    forwards = entered_tokens(trainer.model)
    trainer.train()
    return trainer, forwards


CELLS = [(case, shape, sharing) for case in CASES for shape in SHAPES for sharing in (False, True)]
FAST = [("RPO", "two of four", False), ("aot", "a last micro-batch of one row", True), ("kto", "two of four", True)]
FAST += [("RPO", "one", True), ("kto", "one", True)]


@pytest.mark.parametrize(("case", "shape", "sharing"), slow_but(FAST, CELLS))
def test_the_micro_batches_of_trl_are_compared(case, shape, sharing, tmp_path):
    theirs, padded = train(tmp_path / "theirs", case, False, shape)
    ours, computed = train(tmp_path / "ours", case, True, shape, prefix_sharing=sharing, parity_check=False)
    assert_same(trajectory(ours), trajectory(theirs), rtol=1e-5, atol=1e-5)
    assert_same(figures(ours.state.log_history), figures(theirs.state.log_history), rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        # Adam divides by gradients near 0; a loss over whole steps moves weights by 1e-2.
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-3, atol=5e-4)
    # More forwards than micro-batches of TRL, and none with padding or beyond the budget.
    assert len(computed) > len(padded)
    assert max(computed) <= BUDGET[CASES[case][0]]
    stats = ours.padding.stats
    assert stats.packed_tokens < stats.padded_tokens
    assert stats.packed_tokens < stats.real_tokens or not sharing or (case, shape) in WITHOUT_COMMON_PREFIXES


def test_micro_batches_of_one_row_have_no_kl_term(tmp_path):
    with pytest.raises(ValueError, match="`per_device_train_batch_size=1` leaves no other completion"):
        make("kto", tmp_path, ours=True, per_device_train_batch_size=1, gradient_accumulation_steps=8)


@pytest.mark.parametrize("case", ["RPO", "kto"])
def test_whole_steps_are_another_loss(case, tmp_path):
    """The negative control: what the budget computed before, the step as one micro-batch."""
    theirs, _ = train(tmp_path / "theirs", case, False, "two of four")
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    ours, _ = train(tmp_path / "ours", case, True, "two of four", **given)
    with pytest.raises(AssertionError):
        assert_same(trajectory(ours), trajectory(theirs), rtol=1e-5, atol=1e-5)
