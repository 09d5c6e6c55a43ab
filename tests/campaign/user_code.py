"""What users write in the trainings of `campaign.users`: classes before the trainer's, patches, hooks, collators."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from kit.trainer_runs import build_tokenizer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding, DataCollatorForSeq2Seq, TrainerCallback


KINDS = ["SFT", "SFT", "DPO", "Reward", "KTO", "trainer", "trainer", "callback"]
PLAIN = ("trainer", "callback")
PAD = 39


def scored(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


# -- what users write: classes are put in front of the trainer's, functions get the trainer


@dataclass(frozen=True)
class Code:
    """
    A piece of a user's code, the kinds of trainers it suits, whether it goes by the position of tokens in a batch, and
    whether it depends on the side of padding.
    """

    what: Any
    kinds: tuple[str, ...] = tuple(KINDS)
    by_position: bool = False
    by_column: bool = False


WITH_LABELS = ("SFT", *PLAIN)


def tokens_of(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs["input_ids"], inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


def scaled(result: Any, scale: Any) -> Any:
    """What `compute_loss` returned, with its loss times `scale`."""
    return (result[0] * scale, *result[1:]) if isinstance(result, tuple) else result * scale


def longest(inputs: Any) -> torch.Tensor:
    return tokens_of(inputs)[1].sum(1).max() / 10


class Scaled:
    """A loss that compares rows: the longest of the batch scales it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        scale = longest(inputs)
        return scaled(super().compute_loss(model, inputs, *args, **kwargs), scale)


class OwnLoss:
    """A loss of the logits of the model, in one of several ways to call it."""

    @staticmethod
    def logits(model, ids, mask):
        return model(input_ids=ids, attention_mask=mask)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = tokens_of(inputs)
        output = self.logits(model, ids, mask)
        logits = output["logits"] if not isinstance(output, torch.Tensor) else output
        loss = scored(logits, ids.masked_fill(mask.cumsum(1) * mask <= 1, -100))  # what padding predicts is left out
        return (loss, {"logits": logits}) if return_outputs else loss


class ByPosition(OwnLoss):
    @staticmethod
    def logits(model, ids, mask):
        return model(ids, mask)


class Checkpointed(OwnLoss):
    @staticmethod
    def logits(model, ids, mask):
        return checkpoint(lambda i, m: model(input_ids=i, attention_mask=m)["logits"], ids, mask, use_reentrant=False)


class Twice(OwnLoss):
    """Calls the model on the batch, and on its rows in another order."""

    @staticmethod
    def logits(model, ids, mask):
        first = model(input_ids=ids, attention_mask=mask)["logits"]
        return first + model(input_ids=ids.flip(0), attention_mask=mask.flip(0))["logits"].flip(0)


class HiddenStates(OwnLoss):
    @staticmethod
    def logits(model, ids, mask):
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return output.logits + output.hidden_states[-1].mean() * 0.1


class OfDecoder(OwnLoss):
    @staticmethod
    def logits(model, ids, mask):
        return model.lm_head(model.get_decoder()(input_ids=ids, attention_mask=mask)[0])


class Embedded(OwnLoss):
    @staticmethod
    def logits(model, ids, mask):
        return model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)


class EditingLoss:
    """Drops some labels, in a new dictionary."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs["labels"].clone()
        labels[:, :5] = -100
        return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)


class WritingLoss:
    """Drops some labels, by a write."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"][:, :5] = -100
        return super().compute_loss(model, inputs, *args, **kwargs)


class ReadingStep:
    def training_step(self, model, inputs, *args, **kwargs):
        assert all(len(inputs[k]) == len(v) for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim())
        return super().training_step(model, inputs, *args, **kwargs)


class CopyingStep:
    def training_step(self, model, inputs, *args, **kwargs):
        inputs = {k: v.to(self.args.device) if hasattr(v, "to") else v for k, v in inputs.items()}
        return super().training_step(model, inputs, *args, **kwargs)


class WritingStep:
    """Writes a mask into the batch that is equal to the one before."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["attention_mask"][:, :] = inputs["attention_mask"] * 1
        return super().training_step(model, inputs, *args, **kwargs)


class OwnStep:
    def training_step(self, model, inputs, *args, **kwargs):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class ModelStep:
    """A step with the loss of the model, which never calls `compute_loss`."""

    def training_step(self, model, inputs, *args, **kwargs):
        model.train()
        inputs = self._prepare_inputs(inputs)
        ids, mask = tokens_of(inputs)
        loss = model(input_ids=ids, attention_mask=mask, labels=inputs["labels"])["loss"]
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class Teacher:
    """A loss with a copy of the model, made in the first step."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if not hasattr(self, "own_teacher"):
            self.own_teacher = copy.deepcopy(self.accelerator.unwrap_model(model)).eval()
        ids, mask = tokens_of(inputs)
        with torch.no_grad():
            expected = self.own_teacher(input_ids=ids, attention_mask=mask)["logits"]
        difference = (model(input_ids=ids, attention_mask=mask)["logits"] - expected).square().mean(-1)
        away = ((difference * mask).sum(1) / mask.sum(1)).mean() * 100
        result = super().compute_loss(model, inputs, *args, **kwargs)
        return (result[0] + away, *result[1:]) if isinstance(result, tuple) else result + away


class TwoSteps:
    """An adversarial step: a backward on the batch, and one more on the batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        return (loss + super().training_step(model, inputs, *args, **kwargs)) / 2


class Predicting:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return (loss * tokens_of(inputs)[1].sum() / 100, *rest)


class OwnPrediction:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            ids, mask = tokens_of(inputs)
            logits = model(input_ids=ids, attention_mask=mask)["logits"]
        return scored(logits, ids.masked_fill(mask.cumsum(1) * mask <= 1, -100)), None, None


class Sampling:
    """Counts the tokens of a step itself."""

    def get_batch_samples(self, iterator, count, device):
        batches, number = super().get_batch_samples(iterator, count, device)
        total = sum(int(tokens_of(batch)[1].sum()) for batch in batches)
        return batches, number if number is None else torch.tensor(total)


def first_columns(batch: Any, width: int) -> dict[str, Any]:
    return {k: v[:, :width] if isinstance(v, torch.Tensor) and v.dim() > 1 else v for k, v in batch.items()}


class Truncating:
    """Cuts the columns of a batch."""

    def _prepare_inputs(self, inputs):
        return first_columns(super()._prepare_inputs(inputs), 12)


class Shortest:
    """Cuts rows to the length of the shortest one: it looks at the whole batch."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        return first_columns(inputs, max(6, int(tokens_of(inputs)[1].sum(1).min())))


class Masking:
    """Hides tokens within rows from attention."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        ids, mask = tokens_of(inputs)
        return type(inputs)({**inputs, "attention_mask": mask * (ids != 7)}) if "attention_mask" in inputs else inputs


class Shuffling:
    """Other rows in place of those of the batch, written into it."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        for name in [k for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() > 1]:
            inputs[name] = inputs[name].flip(0)
        return inputs


def on_class(trainer: Any, undo: list) -> None:
    owner = next(c for c in type(trainer).__mro__ if c.__module__.startswith(("trl.", "transformers.")))
    theirs = owner.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        scale = longest(inputs)
        return scaled(theirs(self, model, inputs, *args, **kwargs), scale)

    owner.compute_loss = compute_loss
    undo.append(lambda: setattr(owner, "compute_loss", theirs))


def on_object(trainer: Any, undo: list) -> None:
    theirs = trainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        return scaled(theirs(model, inputs, *args, **kwargs), 2)

    trainer.compute_loss = MethodType(compute_loss, trainer)


def loss_function(trainer: Any, undo: list) -> None:
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return scored(outputs["logits"], labels)

    trainer.compute_loss_func = compute_loss_func


def layers_of(trainer: Any) -> Any:
    return next(m for m in trainer.model.modules() if isinstance(m, nn.ModuleList))


def hooked(where: str, change: Callable[[torch.Tensor], torch.Tensor], late: bool) -> Callable[[Any, list], None]:
    """A hook in the decoder that changes states, registered before or in the training."""

    def hook(module, args, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        return (change(first), *rest) if isinstance(output, tuple) else change(first)

    def pre_hook(module, args):
        return (change(args[0]), *args[1:])

    def register(trainer: Any) -> None:
        if where == "before the layer":
            layers_of(trainer)[1].register_forward_pre_hook(pre_hook)
            return
        embedding = next(m for m in trainer.model.modules() if isinstance(m, nn.Embedding))
        (layers_of(trainer)[1] if where == "layer" else embedding).register_forward_hook(hook)

    class Late(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                register(self.trainer)

    def put(trainer: Any, undo: list) -> None:
        if not late:
            return register(trainer)
        callback = Late()
        callback.trainer = trainer
        trainer.add_callback(callback)

    return put


def by_token(states: torch.Tensor) -> torch.Tensor:
    return states * 1.1


def by_column(states: torch.Tensor) -> torch.Tensor:
    return states * (1 + 0.02 * torch.arange(states.shape[-2]))[:, None]


def by_mean(states: torch.Tensor) -> torch.Tensor:
    return states + states.mean(-2, keepdim=True)


def watching(trainer: Any, undo: list) -> None:
    trainer.model.register_forward_hook(lambda module, args, output: None)


class Probing(TrainerCallback):
    """Computes a batch of its own between steps, and writes its loss into the log."""

    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 10, PAD, PAD]])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            output = model(input_ids=self.ids, attention_mask=(self.ids != PAD).long())["logits"]
        found = scored(output, self.ids.masked_fill(self.ids == PAD, -100))
        for parameter in model.parameters():  # so that a wrong probe moves what is compared
            parameter.data *= 1 - 1e-3 * found.item()


def probing(trainer: Any, undo: list) -> None:
    trainer.add_callback(Probing())


def on_parameter(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, list], None]:
    def put(trainer: Any, undo: list) -> None:
        for parameter in trainer.model.parameters():
            parameter.register_hook(change)

    return put


def on_module(trainer: Any, undo: list) -> None:
    layers_of(trainer)[0].register_full_backward_hook(
        lambda module, before, after: (before[0] * 0.5, *before[1:]) if before[0] is not None else None
    )


# -- collators


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def collated(change: Callable[[dict[str, Any]], Any], choose: Callable[[list], list] = list) -> Callable:
    """A collator around the trainer's."""

    def put(trainer: Any, undo: list) -> None:
        inner = trainer.data_collator
        trainer.data_collator = lambda examples: change(dict(inner(choose(examples))))

    return put


def length(row: dict[str, Any]) -> int:
    return sum(len(v) for v in row.values() if isinstance(v, list))


def without_mask(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in batch.items() if k != "attention_mask"}


class Mapping(UserDict):
    """A mapping of a user's own."""


def seq2seq(trainer: Any, undo: list) -> None:
    inner = DataCollatorForSeq2Seq(build_tokenizer(padding_side="left"))
    trainer.data_collator = lambda rows: inner(
        [{k: r[k] for k in ("input_ids",)} | {"labels": [-100, *r["input_ids"][1:]]} for r in rows]
    )


CODES: dict[str, Code] = {
    "a loss that compares rows": Code(Scaled),
    "a loss of logits": Code(OwnLoss, WITH_LABELS),
    "a call by position": Code(ByPosition, WITH_LABELS),
    "a checkpoint around the model": Code(Checkpointed, WITH_LABELS),
    "two calls": Code(Twice, WITH_LABELS),
    "hidden states": Code(HiddenStates, ("SFT",)),
    "the decoder alone": Code(OfDecoder, ("SFT",)),
    "embeddings": Code(Embedded, ("SFT",)),
    "a loss that edits": Code(EditingLoss, WITH_LABELS, by_column=True),
    "a loss that writes": Code(WritingLoss, WITH_LABELS, by_column=True),
    "a loss on the class": Code(on_class),
    "a loss on the object": Code(on_object),
    "a loss function": Code(loss_function, WITH_LABELS),
    "a step that reads": Code(ReadingStep),
    "a step that copies": Code(CopyingStep),
    "a step that writes": Code(WritingStep),
    "a step of one's own": Code(OwnStep),
    "a step with the model's loss": Code(ModelStep, WITH_LABELS),
    "two steps": Code(TwoSteps),
    "a teacher": Code(Teacher, WITH_LABELS),
    "a callback that computes": Code(probing, WITH_LABELS),
    "a prediction that is scaled": Code(Predicting),
    "a prediction of one's own": Code(OwnPrediction, WITH_LABELS),
    "samples that are counted": Code(Sampling),
    "columns that are cut": Code(Truncating, WITH_LABELS, by_column=True),
    "rows cut to the shortest": Code(Shortest, WITH_LABELS, by_column=True),
    "tokens that are hidden": Code(Masking),
    "rows in another order": Code(Shuffling, WITH_LABELS),
    **{
        f"a hook {change.__name__}, {where}, {'late' if late else 'early'}": Code(
            hooked(where, change, late), by_position=change is not by_token
        )
        for change in (by_token, by_column, by_mean)
        for where in ("layer", "before the layer", "embedding")
        for late in (False, True)
    },
    "a hook on the model": Code(watching),
    "gradients that are scaled": Code(on_parameter(lambda gradient: gradient * 0.5)),
    "gradients that are clamped": Code(on_parameter(lambda gradient: gradient.clamp(-1e-2, 1e-2))),
    "a backward hook": Code(on_module),
    "a BatchEncoding": Code(collated(BatchEncoding), (*PLAIN, "SFT", "DPO")),
    "a mapping": Code(collated(Mapping), PLAIN),
    "no mask": Code(collated(without_mask), WITH_LABELS, by_column=True),
    "the longest rows": Code(collated(dict, lambda rows: sorted(rows, key=length)[-2:])),
    "rows twice": Code(collated(dict, lambda rows: [*rows, *rows[:1]])),
    "labels of padding": Code(
        collated(lambda batch: batch | {"labels": batch["input_ids"].clone()}), WITH_LABELS, by_column=True
    ),
    "a cut batch": Code(collated(lambda batch: first_columns(batch, 9)), WITH_LABELS, by_column=True),
    "padding on the left": Code(seq2seq, PLAIN, by_column=True),
}  # fmt: skip
