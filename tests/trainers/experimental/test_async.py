"""TRL's asynchronous distillation, which packs its rows itself, under `remove_padding`: without a server, on a CPU."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from kit.online_runs import save_policy
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer
from packaging.version import Version

from trl_padfix import PaddingRemovalError, remove_padding


if Version(trl.__version__) < Version("1.16"):
    pytest.skip("another asynchronous distillation than that of TRL 1.16", allow_module_level=True)

pytestmark = pytest.mark.slow


def samples(count: int, candidates: int = 3) -> list[dict]:
    """What a rollout worker hands over: ids, which of them are scored, and what the teacher says of each."""
    draw = np.random.default_rng(0)
    found = []
    for i, length in enumerate(draw.integers(6, 20, count)):
        ids = draw.integers(2, 39, length)
        topk = np.concatenate([ids[:, None], draw.integers(2, 39, (length, candidates - 1))], axis=1)
        logps = np.log(draw.dirichlet(np.ones(candidates + 1), length)[:, :candidates])
        scored = (np.arange(length) >= 4).astype(int)
        row = {"input_ids": ids, "completion_mask": scored, "teacher_topk_ids": topk, "teacher_topk_logprobs": logps}
        found.append(row | {"prompt_id": i, "teacher_id": "default", "metrics": {}})
    return found


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer

    asks_for_cuda = "trl.experimental.async_distillation.async_distillation_trainer.get_peak_flops_per_device"
    monkeypatch.setattr(asks_for_cuda, lambda *args: 1.0)
    nothing = SimpleNamespace(rollout_buffer=queue.Queue(), check_health=lambda stale_after_s: None)
    return AsyncDistillationTrainer(
        save_policy(tmp_path / "policy"),
        args=AsyncDistillationConfig(
            str(tmp_path / "run"), **SETTINGS, model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"}
        ),
        train_dataset=Dataset.from_list([{"prompt": "w3"}] * 8),
        processing_class=build_tokenizer(),
        rollout_worker=nothing,
        weight_transfer=nothing,
    )


def loss_and_gradient(trainer, rows):
    """Of rows that are packed into one, weighted by their scored tokens."""
    from trl.experimental.async_distillation.async_distillation_trainer import DataCollatorForRollout

    trainer.current_gradient_accumulation_steps = 1
    batch = DataCollatorForRollout(pad_token_id=39)([[rows]])
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    count = sum(int(row["completion_mask"].sum()) for row in rows)
    return count, loss.detach() * count, [p.grad.clone() * count for p in trainer.model.parameters()]


def test_the_tries_of_asynchronous_grpo_are_refused():
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    model = build_model()
    model.config._attn_implementation_internal = TREE_ATTENTION
    ids, positions = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    refused = pytest.raises(PaddingRemovalError, match=f"{TREE_ATTENTION}.*is not known to attend over")
    with refused, remove_padding(model):
        model(input_ids=ids, position_ids=positions)


def test_packed_rows_have_the_loss_of_each_row_alone(trainer):
    rows = samples(5)
    alone = [loss_and_gradient(trainer, [row]) for row in rows]
    with remove_padding(trainer.model) as handle:
        count, loss, gradient = loss_and_gradient(trainer, rows)
        assert handle.stats.packed_tokens == sum(len(row["input_ids"]) for row in rows)
    assert count == sum(found[0] for found in alone)
    torch.testing.assert_close(loss, sum(found[1] for found in alone), rtol=1e-5, atol=1e-5)
    for ours, *theirs in zip(gradient, *(found[2] for found in alone), strict=True):
        torch.testing.assert_close(ours, sum(theirs), rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_kept_apart_have_another_loss(trainer):
    rows = samples(5)
    alone = sum(loss_and_gradient(trainer, [row])[1] for row in rows)
    one = {k: np.concatenate([row[k] for row in rows]) if isinstance(v, np.ndarray) else v for k, v in rows[0].items()}
    with remove_padding(trainer.model), pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(loss_and_gradient(trainer, [one])[1], alone, rtol=1e-5, atol=1e-5)
