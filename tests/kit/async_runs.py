"""Asynchronous GRPO without a server: a worker whose rollouts are there already, and what each training logs."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from kit.rollouts import build_samples, loss_of_sample, sampled_by
from kit.trainer_runs import SETTINGS, Run, build_tokenizer
from transformers import PrinterCallback, TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trl_padfix.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


STEPS, ROWS = 10, 8
ASYNC_SETTINGS = SETTINGS | {
    "max_steps": STEPS,
    "optim": "sgd",
    "max_grad_norm": 1e9,
    "token_budget": 0,
    "per_device_train_batch_size": ROWS,
    "max_staleness": 1000,
}
SHARED = {"padding_free": True, "prefix_sharing": True}


class RecordedWorker:
    """A rollout worker that has generated everything; it never fails, also when its queue is empty."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.versions: list[int] = []
        self.is_stopped = False
        for sample in samples:
            self.rollout_buffer.put(RolloutSample([], [], model_version=0, **sample))

    def start(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)


class CountedTransfer:
    """A weight transfer that only counts the tensors of its last transfer."""

    sent = 0

    def send_weights(self, iterator: Any) -> None:
        self.sent = sum(1 for _ in iterator)

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def build_steps(model: Any, steps: int = STEPS + 1) -> list[dict[str, Any]]:
    """Samples of several steps, by this model: one step more than are trained, because accelerate fetches ahead."""
    samples = []
    for step in range(steps):
        for sample in build_samples(generations=ROWS // 2, seed=step):
            samples.append(sample | {"group_id": sample["group_id"] + 2 * step})
    return sampled_by(model, samples)


def make(
    policy: Path | str, output: Path, samples: list[dict[str, Any]], cls: type = AsyncGRPOTrainer, **given: Any
) -> Any:
    """A trainer on recorded samples; `given` are fields of the configuration, or arguments of the trainer."""
    names = ("peft_config", "rollout_worker", "weight_transfer", "processing_class", "train_dataset", "reward_funcs")
    arguments = {name: given.pop(name) for name in names if name in given}
    defaults = {
        "rollout_worker": RecordedWorker(samples),
        "weight_transfer": CountedTransfer(),
        "train_dataset": Dataset.from_list([{"prompt": "w3"}] * 8),
        "processing_class": build_tokenizer(),
    }
    logs = Logs()
    trainer = cls(
        str(policy),
        args=AsyncGRPOConfig(str(output), **ASYNC_SETTINGS | given),
        callbacks=[logs],
        **defaults | arguments,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.logs_of_test = logs.logs
    return trainer


def train(trainer: Any, **kwargs: Any) -> Run:
    trainer.train(**kwargs)
    return Run(trainer, trainer.logs_of_test, trainer.padding.stats.packed_tokens)


class RowsAlone(AsyncGRPOTrainer):
    """The same steps, where each sample has a forward of its own by the model as it is."""

    rows: list[dict[str, Any]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        super().compute_loss(model, inputs, *args, **kwargs)  # TRL's accounting; the result is not used
        samples, self.rows = self.rows[:ROWS], self.rows[ROWS:]
        with self.padding.handle.disabled():
            loss = sum((loss_of_sample(model, sample) for sample in samples), torch.zeros(()))
        return loss / sum(int(sample["completion_mask"].sum()) for sample in samples)
