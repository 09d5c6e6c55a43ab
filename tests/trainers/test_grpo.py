"""What GRPO has of its own: groups, and what is computed of a prompt. `test_every_method.py` has the trajectories."""

import pytest
import torch
import trl
from accelerate.logging import MultiProcessAdapter
from kit.trainer_runs import MODES, assert_mode_ran, assert_other, assert_same, our_warnings

from trl_padfix.trainers.methods.online import group_prompts, trained_tokens


@pytest.fixture(scope="module")
def make(makers):
    return makers("GRPO")


def test_rows_stay_where_their_micro_batch_counts(make):
    for case in ("weights by micro-batch", "quantiles by micro-batch", "entropy bonus by micro-batch"):
        settings, _ = make.method.cases[case]
        assert not make(config=settings | MODES["prefix sharing"]).padding.task.may_regroup()


class Advantages:
    """An inner method of a user's: advantages in units of the largest of their micro-batch."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs | {"advantages": inputs["advantages"] / inputs["advantages"].max()})


class Clipped:
    """The step of a user: the gradient is clamped after each micro-batch."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        return loss


def clamp(trainer):
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize("of_user", [Advantages, Clipped, clamp], ids=lambda x: x.__name__)
def test_rows_stay_where_code_of_a_user_acts_on_a_micro_batch(makers, method, of_user, monkeypatch, caplog):
    make = makers(method)
    MultiProcessAdapter.warning_once.cache_clear()  # said once, also of trainers of earlier tests

    def train(trainer_class, **config):
        change = {"change": of_user} if of_user is clamp else {}
        trainer_class = trainer_class if change else type("Trainer", (of_user, trainer_class), {})
        return make.train("accumulation", trainer_class, {"eval_dataset": None}, **change, **config)

    theirs, ours = train(make.method.theirs), train(make.method.ours, **MODES["prefix sharing"])
    atol = 8 * torch.finfo(torch.float32).eps  # RLOO's loss is a mean of eight advantages that cancel
    assert_same(ours.trajectory(), theirs.trajectory(), atol)
    assert_mode_ran(ours, "prefix sharing")
    assert any("Rows stay in TRL's micro-batches, because `" in line for line in our_warnings(caplog))
    monkeypatch.setattr(make.method.ours.task_class, "may_regroup", lambda task: True)
    assert_other(train(make.method.ours, **MODES["prefix sharing"]).trajectory(), theirs.trajectory(), atol)


def test_answers_of_tools_are_no_trained_tokens():
    completions = {"completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    assert trained_tokens(completions) == trained_tokens(completions | {"tool_mask": None}) == 5
    assert trained_tokens(completions | {"tool_mask": torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])}) == 3


def test_rows_are_moved_whole():
    rows = torch.tensor([2, 1, 1, 2, 3, 1, 3, 1])
    batches = [
        {"prompt_ids": r[:, None], "mask": r[:, None] * 10, "names": [f"n{i}" for i in r.tolist()], "sum": r.sum()}
        for r in rows.split(2)
    ]
    grouped = group_prompts(batches, window=2)
    assert [b["prompt_ids"].flatten().tolist() for b in grouped] == [[1, 1], [2, 2], [1, 1], [3, 3]]
    assert [b["names"] for b in grouped] == [["n1", "n1"], ["n2", "n2"], ["n1", "n1"], ["n3", "n3"]]
    assert all(torch.equal(b["mask"], b["prompt_ids"] * 10) for b in grouped)
    assert [b["sum"] for b in grouped] == [b["sum"] for b in batches]


@pytest.mark.parametrize(
    "ragged", [torch.arange(5), list(range(5)), {"ids": torch.arange(2)}], ids=["flat", "list", "dict"]
)
def test_a_column_without_a_value_for_each_row_is_not_moved(ragged):
    """Kept token ids, one row behind the other: in which places the tokens of a row stand is unknown."""
    batches = [{"prompt_ids": torch.tensor([[1], [2]]), "kept_ids": ragged} for _ in range(2)]
    with pytest.raises(ValueError, match=r"`kept_ids` .* does not have one value for each of its 2 rows"):
        group_prompts(batches, window=2)


def test_a_budget_cuts_what_is_scored_by_rows_and_refuses_all_else(make, monkeypatch):
    """A later TRL may score with arguments that TRL 1.16 does not have."""
    seen = []

    def score(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **more):
        seen.append((len(input_ids), batch_size, *more.values()))

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", score)
    trainer = make(config={"padding_free": True, "max_tokens_per_batch": 64})
    ids, kept = torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 2)
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, kept_mask=kept, compute_entropy=True)
    assert seen == [(4, 4, kept, True)]
    for flat in (torch.ones(7), [0] * 7):
        with pytest.raises(ValueError, match=r"`kept_ids` .* does not have one value for each of its 4 rows"):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, kept_ids=flat)
    assert len(seen) == 1
