"""
Random code of users around trainers of three steps: overrides, patches, hooks, collators, models of their own.

Each draw trains twice, padded and without padding, with the same code. Loss, gradient norm, evaluation and weights are
the same, or an error of ours says in words what cannot be; where nothing was packed, a warning says so.
"""

from __future__ import annotations

import logging
import random
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import trl
from campaign import HELD, REFUSED
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_pairs, build_tokenizer, make_plain_trainer, trained
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding, DataCollatorForSeq2Seq, Trainer, TrainerCallback
from zoo import models

import trl_padfix
from trl_padfix import PaddingRemovalCallback, padding_free_trainer
from trl_padfix.core.layout import shared_prefixes


KINDS = ["SFT", "SFT", "DPO", "Reward", "KTO", "trainer", "trainer", "callback"]
PLAIN = ("trainer", "callback")
PAD = 39


def draw(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(KINDS)
    codes = [name for name, code in CODES.items() if kind in code.kinds]
    hooks = [name for name in codes if name.startswith("a hook by")]  # many, and of one kind
    others = [name for name in codes if name not in hooks] + chance.sample(hooks, 3)
    case = {
        "kind": kind,
        "code": chance.sample(others, chance.choice([1, 1, 2, 3])),
        "seed": chance.randrange(1000),
        "model": chance.choice(["qwen2", "qwen2", "qwen2", "gpt2", "wrapped" if kind in PLAIN else "gemma2"]),
        "made": chance.choice(["model", "model", "model_init", "second trainer"]) if kind in PLAIN else "model",
        "outside": chance.random() < 0.5,
        "sharing": chance.random() < 0.5,
        "ours": {},
        "both": {"per_device_train_batch_size": chance.choice([2, 4, 5])},
    }
    if any(CODES[name].by_column for name in case["code"]) and case["model"] == "gpt2":
        case["model"] = "qwen2"
    if kind not in PLAIN:
        is_sided = any(CODES[name].by_position or CODES[name].by_column for name in case["code"])
        case["ours"]["padding_side"] = "right" if is_sided else chance.choice(["left", "right"])
        # Means over columns depend on the length of a batch, and a budget makes other batches.
        if chance.random() < 0.5 and not any("by_mean" in name for name in case["code"]):
            case["ours"]["max_tokens_per_batch"] = chance.choice([40, 60, 400])
    if chance.random() < 0.3:
        case["both"]["gradient_accumulation_steps"] = 2
    case["both"]["gradient_checkpointing"] = case["model"] != "wrapped" and chance.random() < 0.15
    return case


def attempt(case: dict[str, Any], folder: Path) -> str:
    theirs, *_ = outcome(case, False, folder / "theirs")
    ours, said, packed, steps = outcome(case, True, folder / "ours")
    if isinstance(theirs, Exception):
        return HELD if isinstance(ours, Exception) else compare_errors(theirs)
    by_position = any(CODES[name].by_position for name in case["code"])
    if isinstance(ours, trl_padfix.ParityError) and not by_position:
        raise ours
    refusals = trl_padfix.ParityError | trl_padfix.PaddingRemovalError | NotImplementedError | ValueError
    is_refusal = isinstance(ours, refusals) and is_ours(ours)
    if is_refusal and steps == 0:  # and not in the middle of a run
        return REFUSED
    if isinstance(ours, Exception):
        raise ours
    for mine, trls in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, trls, rtol=2e-3, atol=1e-4, equal_nan=True)
    assert packed or said, "nothing was packed, and nobody said so"
    return HELD


def compare_errors(theirs: Exception) -> str:
    raise AssertionError(f"TRL refuses and we do not: {type(theirs).__name__}: {theirs}")


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised by this package, in words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "trl_padfix/" in trace.tb_frame.f_code.co_filename and len(str(error)) > 40


class Said(logging.Handler):
    """Whether the package has said that something is computed padded."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def outcome(case: dict[str, Any], ours: bool, folder: Path) -> tuple[Any, list[str], int, int]:
    """Trajectory and weights, or the error that ended the training; what was said; packed tokens; steps."""
    trainer: Any = None
    said, logger = Said(), logging.getLogger("trl_padfix")
    logger.addHandler(said)
    undo: list[Callable[[], Any]] = [lambda: setattr(shared_prefixes, "MIN_SAVED_TOKENS", least)]
    least, shared_prefixes.MIN_SAVED_TOKENS = shared_prefixes.MIN_SAVED_TOKENS, 1
    try:
        trainer, others = make(case, ours, folder, undo)
        torch.manual_seed(case["seed"])
        figures = trained(trainer)
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        stats = [h.stats for t in (trainer, *others) for h in handles_of(t)]
        packed = sum(s.packed_tokens + s.padded_forwards for s in stats)
        return (figures, weights.double()), said.messages, packed, trainer.state.global_step
    except Exception as error:
        return error, said.messages, 0, trainer.state.global_step if trainer is not None else 0
    finally:
        logger.removeHandler(said)
        for function in reversed(undo):
            function()


def handles_of(trainer: Any) -> list[Any]:
    callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, PaddingRemovalCallback)), None)
    return trainer.padding.handles if hasattr(trainer, "padding") else callback.handles if callback else []


def make(case: dict[str, Any], ours: bool, folder: Path, undo: list) -> tuple[Any, list[Any]]:
    """The trainer of a draw with the code of its user, and others that were made beside it."""
    kind, seed, codes = case["kind"], case["seed"], [CODES[name] for name in case["code"]]
    bases = tuple(sorted((c.what for c in codes if isinstance(c.what, type)), key=lambda c: -len(c.__mro__)))
    settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.05} | case["both"]
    settings |= {"prefix_sharing": case["sharing"]} | case["ours"] if ours else {}
    data = rows_of(kind, 16, seed)
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data.select(range(4))}
    if kind in PLAIN:
        settings.pop("prefix_sharing", None)
        sharing, packs = {"prefix_sharing": case["sharing"]}, ours and kind == "trainer"
        own: Any = Trainer
        if packs and case["outside"]:
            own = type("Own", (*bases, padding_free_trainer(Trainer, **sharing)), {})
        else:
            own = type("Own", (*bases, Trainer), {})
            own = padding_free_trainer(own, **sharing) if packs else own
        given["callbacks"] = [PaddingRemovalCallback(case["sharing"])] if ours and kind == "callback" else []
        given |= {"data_collator": collate, "remove_unused_columns": False}
        build = partial(model_of, case["model"], kind)
        given |= {"model": None, "model_init": build} if case["made"] == "model_init" else {"model": build()}
        trainer = make_plain_trainer(folder, own, **settings, **given)
        if case["made"] == "second trainer":
            others = [make_plain_trainer(folder, own, **settings, **given | {"model": trainer.model, "callbacks": []})]
        else:
            others = []
    else:
        library = trl_padfix if ours else trl
        own = type("Own", (*bases, getattr(library, f"{kind}Trainer")), {})
        given["model"] = model_of(case["model"], kind)
        if kind in ("DPO", "KTO"):
            given["ref_model"] = model_of(case["model"], kind, 1)
        settings |= {"padding_free": True} if ours else {}
        trainer, others = make_trainer(library, kind, folder, own, max_length=30, **settings, **given), []
    # What is patched onto the class first: what was set on the object has the method of before.
    for code in sorted(codes, key=lambda code: code.what is not on_class):
        if not isinstance(code.what, type):
            code.what(trainer, undo)
    return trainer, others


def rows_of(kind: str, count: int, seed: int) -> Any:
    pairs = build_pairs(count, seed, prompt=(3, 10), answer=(2, 10), common=5)
    if kind in ("DPO", "Reward"):
        return pairs
    single = pairs.rename_column("chosen", "completion").remove_columns("rejected")
    if kind == "KTO":
        return single.add_column("label", [i % 2 == 0 for i in range(count)])
    if kind == "SFT":
        return single
    tokenizer = build_tokenizer()
    return single.map(
        lambda row: {"input_ids": tokenizer(row["prompt"] + row["completion"])["input_ids"]},
        remove_columns=single.column_names,
    )


class Wrapped(nn.Module):
    """A module of a user's around a decoder."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return {"loss": scored(output.logits, labels), "logits": output.logits}


def model_of(name: str, kind: str, seed: int = 0) -> Any:
    if name in ("qwen2", "wrapped") or kind == "Reward":
        model = build_model("reward" if kind == "Reward" else "causal", seed)
        return Wrapped(model) if name == "wrapped" else model
    return models.build(name, seed=seed).train()


def scored(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


# -- what users write: classes are put in front of the trainer's, functions get the trainer


class Code:
    """
    A piece of a user's code, the kinds of trainers it suits, whether it goes by the position of tokens in a batch, and
    whether it depends on the side of padding.
    """

    def __init__(
        self, what: Any, kinds: tuple[str, ...] = tuple(KINDS), by_position: bool = False, by_column: bool = False
    ):
        self.what, self.kinds, self.by_position, self.by_column = what, kinds, by_position, by_column


WITH_LABELS = ("SFT", *PLAIN)


def tokens_of(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs["input_ids"], inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


class Scaled:
    """A loss that compares rows: the longest of the batch scales it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        scale = tokens_of(inputs)[1].sum(1).max() / 10
        result = super().compute_loss(model, inputs, *args, **kwargs)
        return (result[0] * scale, *result[1:]) if isinstance(result, tuple) else result * scale


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
    """Drops some labels in the batch, by a write or in a new dictionary."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs["labels"].clone()
        labels[:, :5] = -100
        return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)


class WritingLoss:
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


class HalfStep:
    """Trains on the longest rows."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["attention_mask"][:, :] = inputs["attention_mask"] * 1  # a write
        return super().training_step(model, inputs, *args, **kwargs) * 1.0


class OwnStep:
    def training_step(self, model, inputs, *args, **kwargs):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


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


class Truncating:
    """Cuts the columns of a batch."""

    def _prepare_inputs(self, inputs):
        inputs, width = super()._prepare_inputs(inputs), 12
        cut = lambda x: x[:, :width] if isinstance(x, torch.Tensor) and x.dim() > 1 else x  # noqa: E731
        return {k: cut(v) for k, v in inputs.items()}


class Shortest:
    """Cuts rows to the length of the shortest one: it looks at the whole batch."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        width = max(6, int(tokens_of(inputs)[1].sum(1).min()))
        cut = lambda x: x[:, :width] if isinstance(x, torch.Tensor) and x.dim() > 1 else x  # noqa: E731
        return {k: cut(v) for k, v in inputs.items()}


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
        scale = tokens_of(inputs)[1].sum(1).max() / 10
        result = theirs(self, model, inputs, *args, **kwargs)
        return (result[0] * scale, *result[1:]) if isinstance(result, tuple) else result * scale

    owner.compute_loss = compute_loss
    undo.append(lambda: setattr(owner, "compute_loss", theirs))


def on_object(trainer: Any, undo: list) -> None:
    theirs = trainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        result = theirs(model, inputs, *args, **kwargs)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

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
        layer = layers_of(trainer)[1]
        if where == "layer":
            layer.register_forward_hook(hook)
        elif where == "before the layer":
            layer.register_forward_pre_hook(pre_hook)
        else:
            next(m for m in trainer.model.modules() if isinstance(m, nn.Embedding)).register_forward_hook(hook)

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


def with_labels_of_padding(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"labels": batch["input_ids"].clone()}


def without_mask(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in batch.items() if k != "attention_mask"}


def cut(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v[:, :9] if v.dim() > 1 else v for k, v in batch.items()}


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
    "a step that writes": Code(HalfStep),
    "a step of one's own": Code(OwnStep),
    "two steps": Code(TwoSteps),
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
    "labels of padding": Code(collated(with_labels_of_padding), WITH_LABELS, by_column=True),
    "a cut batch": Code(collated(cut), WITH_LABELS, by_column=True),
    "padding on the left": Code(seq2seq, PLAIN, by_column=True),
}  # fmt: skip
