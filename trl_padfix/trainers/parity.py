"""The part of a trainer that compares packed with padded on the first batch of training and of evaluation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from tqdm.auto import tqdm

from ..core.handle import PaddingRemoval
from ..core.model.find import find_pretrained
from ..core.parity.check import check_parity
from ..core.parity.report import ParityReport
from .distributed import models_of, named_models_of
from .parts import Part, Step


__all__ = ["Parity", "called_module", "compare", "packs", "say", "tensors_of_call"]

logger = get_logger(__name__)

TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q")
"""Arguments of a model that the layout of its tokens is read from."""


class Parity(Part):
    """
    `parity_check`: before the first forwards of each mode, each model computes some of their rows packed and padded;
    of the one that is trained the gradient is compared too.

    Where the names of a batch do not say what is computed, the check runs on what the model was first called with in
    the step, after its forwards and before the weights are changed.
    """

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        padding = self.trainer.padding
        if step.mode in padding.parity or not (padding.handles and self.settings.parity_check):
            yield
            return
        for batch in step.batches:
            if padding.handle.layout_of(batch) is not None:
                images = padding.task.parity_inputs(step.inputs, batch)
                self.compare(step, batch | _multimodal(padding.handle.multimodal, images))
        if step.batches:
            self.say(step)
            yield
            return
        with _first_call(step.model) as call:
            yield
        if call and packs(padding.handle, call):
            self.compare(step, call)
            self.say(step)

    def compare(self, step: Step, inputs: dict[str, Any]) -> None:
        """
        Raises:
            ParityError: If packed and padded differ.
        """
        trainer = self.trainer
        reports = trainer.padding.parity.setdefault(step.mode, [])
        trains = step.mode == "train" and self.settings.parity_check is True
        compare(trainer, [step.model, *models_of(trainer)[1:]], inputs, reports, gradients=trains)

    def say(self, step: Step) -> None:
        """Print what was found in training, gradients included; what was found in evaluation only without training."""
        trainer, parity = self.trainer, self.trainer.padding.parity
        if step.mode in parity and (step.mode == "train" or not (trainer.is_in_train or "train" in parity)):
            say(trainer, parity[step.mode])


def compare(
    trainer: Any, models: list[Any], inputs: dict[str, Any], reports: list[ParityReport], *, gradients: bool
) -> None:
    """
    Compare packed with padded, for each model of a trainer on the same inputs, and add what was found to `reports`.

    With `gradients` those of the first model are compared, too.

    Raises:
        ParityError: If packed and padded differ.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
    for model in models:
        trains, unwrapped = gradients and model is models[0], trainer.accelerator.unwrap_model
        report = check_parity(model if sharded else unwrapped(model), inputs, dtype=dtype, gradients=trains)
        reports.append(report)
        report.raise_if_failed()
        if not report.compared:
            logger.warning(str(report))


def packs(handle: PaddingRemoval, call: dict[str, Any]) -> bool:
    """Whether the decoder packs what a model is called with; images become embeddings before they reach it."""
    return handle.layout_of({name: call[name] for name in TOKENS if name in call}) is not None


def say(trainer: Any, reports: list[ParityReport]) -> None:
    """
    Print a line for each model of the trainer, below which a progress bar goes on: its name, and the comparison with
    the largest difference. `reports` are those of [`compare`], of one batch or several.
    """
    models = named_models_of(trainer)
    for i, (role, model) in enumerate(models.items()):
        compared = [report for report in reports[i :: len(models)] if report.compared]
        if compared and trainer.accelerator.is_local_main_process:
            found = find_pretrained(model)
            name = Path(getattr(found.config, "name_or_path", None) or "").name or type(found).__name__
            tqdm.write(f"{name} ({role}): {max(compared, key=lambda report: report.maximum)}")


def called_module(model: Any) -> torch.nn.Module:
    """
    What a training calls with the arguments of the transformers model in `model`, and thus with its own hooks: that
    model, or adapters around it, of which those of PEFT before 0.21 call nothing but its forward.
    """
    modules = (m for m in model.modules() if hasattr(m, "get_base_model"))
    return next(modules, None) or find_pretrained(model)


def tensors_of_call(module: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, beside labels, that a forward hook of `module` sees it called with, by name."""
    given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    return {k: v.detach() for k, v in given.items() if isinstance(v, torch.Tensor) and k != "labels"}


def _multimodal(multimodal: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Arguments of a multimodal model's forward beside ids, mask and labels: pixels, grids, token types."""
    if multimodal is None:
        return {}
    known = inspect.signature(multimodal.forward).parameters.keys() - {"input_ids", "attention_mask", "labels"}
    return {name: value for name, value in inputs.items() if name in known}


@contextlib.contextmanager
def _first_call(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """The tensors, beside labels, that the model in `model` is first called with by name within the block."""
    call: dict[str, Any] = {}

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not call:
            call.update(tensors_of_call(module, args, kwargs))

    hook = called_module(model).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield call
    finally:
        hook.remove()
