"""
What an adapter of a stack is: how that stack collates rows, calls the model and computes the loss.

Only `step` has to be written. Everything else is a capability that a stack may have; without it a case is "not run".
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from conformance.arbiter import Pair, Row, Step, gradients


class NotRun(Exception):  # noqa: N818 - an outcome, not an error
    """A stack has no way to compute a case; the message says why."""


class Adapter:
    """A stack with one setting of it."""

    name: str
    """As on the command line: `trl-packing-bfd`."""
    setting: str = ""
    """What a user writes to get it, for the report: `SFTConfig(packing=True)`."""
    packages: tuple[str, ...] = ("torch", "transformers")
    attention: str | None = None
    """The attention implementation that models are built with; by default the one that transformers chooses."""

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        """
        Compute one optimizer step on rows that are packed, or collated in the stack's way.

        Args:
            model (`PreTrainedModel`):
                In training mode, without gradients.
            batches (`list[list[Row]]`):
                Micro-batches, accumulated before the optimizer moves. Most cases have one. A stack that has no
                accumulation raises [`NotRun`] for more.

        Returns:
            `Step`: The loss as a mean over the labels of all micro-batches (plus `router_aux_loss_coef` times the
            load-balancing loss where `config.output_router_logits` is set), and its gradients.
        """
        raise NotRun("This way trains on pairs only.")

    def padded_step(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> Step:
        """The same of a padded batch `(B, L)` with `labels`, whose mask has zeros on any side, or in the middle."""
        raise NotRun("It takes rows, not padded batches.")

    def preference_step(
        self, model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], beta: float
    ) -> Step:
        """The loss of DPO and its gradients."""
        raise NotRun("It has no way to train on pairs.")

    def evaluate(self, model: PreTrainedModel, rows: list[Row]) -> float:
        """The mean loss over all labels of rows that are evaluated in one batch."""
        raise NotRun("It evaluates as transformers does.")

    def versions(self) -> dict[str, str]:
        return {package: metadata.version(package) for package in self.packages}


def one_at_a_time(batches: list[list[Row]]) -> list[Row]:
    """The only micro-batch, for a stack that has no accumulation of its own."""
    if len(batches) > 1:
        raise NotRun("It has no accumulation of its own.")
    return batches[0]


def backward(model: torch.nn.Module, loss: torch.Tensor) -> Step:
    loss.backward()
    return Step(float(loss.detach()), gradients(model))


def flash_stand_in(model: PreTrainedModel) -> AbstractContextManager:
    """A `flash_attn` package in which transformers' own code for it finds functions that compute the same on a CPU."""
    tests = Path(__file__).parents[1] / "tests"
    if not (tests / "simulated_gpu").is_dir():
        raise NotRun("The functions that stand in for flash-attn are not beside this folder.")
    if model.config.model_type in ("gpt2", "gpt_oss"):
        raise NotRun("Not on the functions that stand in for flash-attn: half precision only, or other kernels.")
    if str(tests) not in sys.path:
        sys.path.insert(1, str(tests))
    from simulated_gpu.flash_stand_in import flash_attention_stand_in

    return flash_attention_stand_in()


class Recorder(transformers.TrainerCallback):
    """Record the gradients of the first step of a `transformers.Trainer`, and the loss that it logs."""

    step = Step(float("nan"), {})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = self.step._replace(gradients=gradients(kwargs["model"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.step = self.step._replace(loss=float(logs.get("loss", self.step.loss)))


def arguments(batches: list[list[Any]], **more: Any) -> dict[str, Any]:
    """Arguments of one step of a `transformers.Trainer` in which no gradient is clipped."""
    return dict(
        output_dir=tempfile.gettempdir(), max_steps=1, per_device_train_batch_size=len(batches[0]), logging_steps=1,
        gradient_accumulation_steps=len(batches), max_grad_norm=0.0, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, optim="sgd", **more,
    )  # fmt: skip


def trained(build: Callable[[Recorder], transformers.Trainer]) -> Step:
    """Make one step of the trainer that `build` makes with a recorder among its callbacks."""
    recorder = Recorder()
    build(recorder).train()
    return recorder.step
