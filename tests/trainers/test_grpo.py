"""What GRPO has of its own: groups, and what is computed of a prompt. `test_every_method.py` has the trajectories."""

import pytest
import torch
import trl
from kit.online_runs import load_policy, save_policy
from kit.rows import build_prompts
from kit.trainer_runs import MODES
from packaging.version import Version

from trl_padfix import GRPOTrainer
from trl_padfix.trainers.methods.online import group_prompts


@pytest.fixture(scope="module")
def make(makers):
    return makers("GRPO")


def test_rows_stay_where_their_micro_batch_counts(make):
    for case in ("weights by micro-batch", "quantiles by micro-batch", "entropy bonus by micro-batch"):
        settings, _ = make.method.cases[case]
        assert not make(config=settings | MODES["prefix sharing"]).padding.task.may_regroup()


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


def test_eight_completions_of_a_long_prompt_compute_it_once(make, tmp_path):
    long = save_policy(tmp_path, ends=[1], max_position_embeddings=1024)
    settings = {"num_generations": 8, "max_completion_length": 64, "max_steps": 2}

    def entered(trainer_class, **config):
        data = build_prompts(4, low=500, high=524)
        given = {"model": load_policy(long), "train_dataset": data, "eval_dataset": None}
        done = make.train("plain", trainer_class, given, **settings, **config)
        lengths = [len(completion) for completion in done.completions]
        assert 16 < sum(lengths) / len(lengths) <= 64
        return done.entered

    padded, packed = entered(trl.GRPOTrainer), entered(GRPOTrainer, **MODES["prefix sharing"])
    assert padded >= 3 * packed


@pytest.mark.skipif(Version(trl.__version__) < Version("1.10"), reason="TRL has a fused head from 1.10 on")
def test_the_language_model_head_scores_completions_only(make, monkeypatch):
    scored = []
    original = trl.trainer.utils._ChunkedLogProbFunction.forward

    def watched(ctx, hidden, *args):
        scored.append(len(hidden))
        return original(ctx, hidden, *args)

    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "forward", staticmethod(watched))
    done = make.train("no reference", given={"eval_dataset": None}, **MODES["prefix sharing"], max_steps=2)
    assert sum(scored) == sum(map(len, done.completions))
