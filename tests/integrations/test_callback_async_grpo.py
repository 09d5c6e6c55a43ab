"""TRL's own asynchronous GRPO on a CPU: its trees on the attention that a user names, without its server."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from kit.rollouts import build_samples, distinct_tokens, loss_of_rows, sampled_by
from kit.trainer_runs import SETTINGS, build_tokenizer
from packaging.version import Version
from zoo.models import build

from trl_padfix import PaddingRemovalCallback


if not Version("1.16") <= Version(trl.__version__) < Version("1.18"):
    pytest.skip("another asynchronous GRPO than that of TRL 1.16", allow_module_level=True)

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION


ROWS, STEPS, RATE = 8, 4, 0.05


def nothing(*args, **kwargs) -> None: ...


def make(policy: str, folder, samples: list[dict], **given) -> AsyncGRPOTrainer:
    """TRL's trainer, with a worker whose rollouts are there already."""
    worker = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue())
    for name in ("start", "stop", "check_health", "update_model_version"):
        setattr(worker, name, nothing)
    transfer = SimpleNamespace(send_weights=lambda tensors: [*tensors])
    for name in ("init_weight_transfer", "pause", "resume", "destroy"):
        setattr(transfer, name, nothing)
    for sample in samples:
        worker.rollout_buffer.put(RolloutSample([], [], model_version=0, **sample))
    steps = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "token_budget": 0, "max_staleness": 1000}
    descent = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
    return AsyncGRPOTrainer(
        policy,
        args=AsyncGRPOConfig(str(folder), **SETTINGS | steps | descent),
        train_dataset=Dataset.from_list([{"prompt": "w3"}] * ROWS),
        processing_class=build_tokenizer(),
        rollout_worker=worker,
        weight_transfer=transfer,
        **given,
    )


def train_rows_alone(samples: list[dict]) -> torch.Tensor:
    """The weights after the same steps, where each sample has a forward of its own."""
    model = build("qwen2").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        rows = samples[step * ROWS : (step + 1) * ROWS]
        optimizer.zero_grad()
        (loss_of_rows(model, rows) / sum(int(row["completion_mask"].sum()) for row in rows)).backward()
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trls_trees_train_as_each_sample_alone(tmp_path, monkeypatch):
    # On a CPU TRL's `__init__` stops at the name of the GPU, which it reads for a metric of utilization.
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *args: None)
    model = build("qwen2")
    model.save_pretrained(tmp_path / "policy")
    steps = [build_samples(generations=ROWS // 2, seed=step) for step in range(STEPS + 1)]  # TRL fetches one ahead
    samples = sampled_by(model, [sample for step in steps for sample in step])
    callback = PaddingRemovalCallback(prefix_sharing=True, attn_implementation="sdpa")
    trainer = make(str(tmp_path / "policy"), tmp_path / "run", samples, callbacks=[callback])
    trainer.train()
    assert callback.reports[0].compared
    assert callback.stats.packed_tokens == sum(map(distinct_tokens, steps[:STEPS]))
    assert trainer.model.config._attn_implementation == TREE_ATTENTION  # as TRL has loaded it

    alone = train_rows_alone(samples)
    changes, expected = flat(trainer.model) - flat(model), alone - flat(model)
    assert (changes - expected).norm() < 1e-4 * expected.norm()
    samples[3]["advantage"] *= 1.5
    assert (changes - (train_rows_alone(samples) - flat(model))).norm() > 1e-2 * expected.norm()
