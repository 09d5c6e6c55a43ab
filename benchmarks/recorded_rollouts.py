"""
Recorded rollouts through asynchronous GRPO, against TRL's padded GRPO loss on the same rows and weights.

    python benchmarks/recorded_rollouts.py
    python benchmarks/recorded_rollouts.py --rollouts rollouts.jsonl --tasks 4 --length 8192 --steps 5

A worker replays the rollouts that ship in `recipes/data`; `AsyncGRPOTrainer` trains on them. Before or behind each of
its steps, in turns, TRL's `GRPOTrainer` computes loss and gradients of the same rows, padded, with the same weights.
If losses or gradients differ, the command fails. Generation, optimizer and weight transfer are not timed.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset, load_dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trl_padfix import AsyncGRPOConfig, AsyncGRPOTrainer, RecordedRollouts, __version__, build_tiny


RECORDED = Path(__file__).parents[1] / "recipes/data/airline/rollouts.jsonl.gz"
SETTINGS = dict(
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True
)


class Replay:
    """A rollout worker whose rollouts are there already."""

    def __init__(self, samples: list[dict[str, Any]]):
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(RolloutSample([], [], model_version=0, metrics={}, **sample))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...


class NoTransfer:
    """No server, so no weights are sent."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def recorded_samples(path: str, tokenizer: Any, length: int) -> list[list[dict[str, Any]]]:
    """The trials of each task as samples, cut after `length` tokens, with noise for [`add_log_probs`]."""
    recorded = RecordedRollouts(load_dataset("json", data_files=path, split="train"), tokenizer)
    generator, groups = torch.Generator().manual_seed(0), []
    for group, name in enumerate(recorded.prompts["prompt"][:]):
        trials = recorded([name] * recorded.trials, None)
        rewards = np.array(trials["recorded"])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        samples = []
        for prompt, completion, mask, advantage in zip(
            trials["prompt_ids"], trials["completion_ids"], trials["env_mask"], advantages, strict=True
        ):
            ids = torch.tensor(prompt + completion)[:length]
            trained = torch.tensor([0] * len(prompt) + mask)[:length]
            noise = 0.1 * torch.randn(len(ids), generator=generator)
            samples.append(
                {"input_ids": ids.numpy(), "completion_mask": trained.numpy(), "advantage": float(advantage)}
                | {"old_log_probs": noise.numpy(), "group_id": group}
            )
        if all(sample["completion_mask"].any() for sample in samples):
            groups.append(samples)
    return groups


@torch.no_grad()
def add_log_probs(samples: list[dict[str, Any]], model: Any) -> None:
    """
    Add the model's log-probabilities to the noise of the samples.

    The policy that sampled them is not known. The probabilities of the model that is trained stand for its own, with
    some noise, so that ratios are near 1 and some are clipped.
    """
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        log_probs = torch.nn.functional.pad(log_probs.gather(1, ids[1:, None])[:, 0], (1, 0)).numpy()
        sample["old_log_probs"] = (sample["old_log_probs"] + log_probs) * sample["completion_mask"]


def padded(samples: list[dict[str, Any]], pad: int) -> dict[str, torch.Tensor]:
    """The inputs of TRL's GRPO loss: prompts up to the first trained token, padded left, and completions, right."""
    starts = [int(sample["completion_mask"].argmax()) for sample in samples]
    pairs = list(zip(samples, starts, strict=True))

    def columns(name: str) -> list[torch.Tensor]:
        return [torch.tensor(sample[name])[start:] for sample, start in pairs]

    prompts = [torch.tensor(sample["input_ids"])[:start] for sample, start in pairs]
    completions = columns("input_ids")

    def left(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")

    def right(rows: list[torch.Tensor], value: float = 0) -> torch.Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value)

    return {
        "prompt_ids": left(prompts, pad),
        "prompt_mask": left([torch.ones_like(row) for row in prompts], 0),
        "completion_ids": right(completions, pad),
        "completion_mask": right([torch.ones_like(row) for row in completions]),
        "tool_mask": right(columns("completion_mask")),
        "old_per_token_logps": right(columns("old_log_probs")).float(),
        "advantages": torch.tensor([sample["advantage"] for sample in samples]),
    }


class Compared(AsyncGRPOTrainer):
    """Each step also by TRL's padded loss, on a copy of the weights."""

    theirs: trl.GRPOTrainer
    steps: list[list[dict[str, Any]]]
    times: list[tuple[float, float]]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        step = self.state.global_step
        self.theirs.model.load_state_dict(self.model.state_dict())
        batch = padded(self.steps[step], self.processing_class.pad_token_id)

        def ours() -> torch.Tensor:
            return super(Compared, self).training_step(model, inputs, num_items_in_batch)

        def theirs() -> torch.Tensor:
            self.theirs.model.zero_grad()
            loss = self.theirs.compute_loss(self.theirs.model, batch)
            loss.backward()
            return loss.detach()

        order = (ours, theirs) if step % 2 else (theirs, ours)
        found = {}
        for compute in order:
            begin = time.perf_counter()
            loss = compute()
            found[compute] = (time.perf_counter() - begin, loss)
        self.times.append((found[theirs][0], found[ours][0]))
        gradients = [
            torch.cat([p.grad.flatten() for p in trained.parameters()]) for trained in (self.theirs.model, self.model)
        ]
        off = ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
        losses = found[theirs][1].item(), found[ours][1].item()
        tokens = sum(len(sample["input_ids"]) for sample in self.steps[step])
        print(
            f"step {step + 1}: padded {batch['prompt_ids'].size(0) * self.width(batch)}, real {tokens} tokens; TRL "
            f"{self.times[-1][0]:.2f} s, trees {self.times[-1][1]:.2f} s; losses {losses[0]:.6f} {losses[1]:.6f}, "
            f"gradients {off:.0e} apart",
            flush=True,
        )
        assert abs(losses[0] - losses[1]) < 1e-5 * max(1, abs(losses[0])), losses
        assert off < 1e-4, off
        return found[ours][1]

    @staticmethod
    def width(batch: dict[str, torch.Tensor]) -> int:
        return batch["prompt_ids"].size(1) + batch["completion_ids"].size(1)


def build_steps(given: argparse.Namespace, policy: str) -> list[list[dict[str, Any]]]:
    """The samples of each step: those of `given.tasks` tasks, which come again if there are too few."""
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    groups = recorded_samples(given.rollouts, tokenizer, given.length)
    if not groups:
        raise SystemExit(f"no task has a turn of the assistant in the first {given.length} tokens: raise --length")
    steps = []
    for step in range(given.steps + 2):  # accelerate fetches one step ahead
        numbers = range(step * given.tasks, (step + 1) * given.tasks)
        samples = [sample | {"group_id": i} for i in numbers for sample in groups[i % len(groups)]]
        add_log_probs(samples, model)
        steps.append(samples)
    return steps


def build_theirs(policy: str, folder: str, count: int) -> trl.GRPOTrainer:
    args = trl.GRPOConfig(
        folder, per_device_train_batch_size=count, num_generations=count, loss_type="bnpo", beta=0.0, **SETTINGS
    )
    rewards = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    data = Dataset.from_dict({"prompt": ["unused"]})
    theirs = trl.GRPOTrainer(policy, reward_funcs=rewards, args=args, train_dataset=data)
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    return theirs


def build_ours(policy: str, folder: str, steps: list[list[dict[str, Any]]], timed: int) -> Compared:
    count = len(steps[0])
    args = AsyncGRPOConfig(
        folder, padding_free=True, prefix_sharing=True, per_device_train_batch_size=count, token_budget=0,
        max_steps=timed + 1, max_staleness=10**6, learning_rate=1e-4, logging_steps=10**6, **SETTINGS,
    )  # fmt: skip
    return Compared(
        policy,
        args=args,
        reward_funcs=[],
        train_dataset=Dataset.from_dict({"prompt": ["unused"] * count}),
        rollout_worker=Replay([*chain(*steps)]),
        weight_transfer=NoTransfer(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", default=str(RECORDED), help="JSON lines with `messages`, `task` and `reward`")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of a step, with all their trials")
    parser.add_argument("--length", type=int, default=4096, help="rollouts are cut after so many tokens")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, after one that is not")
    parser.add_argument("--shape", default="tiny", help="of the model that is built for the data")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = load_dataset("json", data_files=given.rollouts, split="train")
        policy = build_tiny(given.shape, rows, Path(folder) / "policy")
        steps = build_steps(given, policy)
        count = len(steps[0])
        trainer = build_ours(policy, folder, steps, given.steps)
        trainer.theirs, trainer.steps, trainer.times = build_theirs(policy, folder, count), steps, []
        trainer.train()
    times = trainer.times[1:]
    ratios = [padded / trees for padded, trees in times]
    trained = steps[: given.steps + 1]
    real = sum(len(sample["input_ids"]) for samples in trained for sample in samples)
    wide = sum(len(samples) * max(len(sample["input_ids"]) for sample in samples) for samples in trained)
    computed = trainer.padding.stats.packed_tokens
    trl_s, trees_s = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{len(trained)} steps of {count} rollouts: {wide} tokens padded, {real} real, {computed} computed "
        f"(1 / {real / wide:.2f} / {computed / wide:.2f})\nmedians of {given.steps}: TRL's padded loss {trl_s:.2f} s "
        f"a step, trees {trees_s:.2f} s, {statistics.median(ratios):.1f}x as fast ({min(ratios):.1f} to "
        f"{max(ratios):.1f})\ntrl_padfix {__version__}, TRL {trl.__version__}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
