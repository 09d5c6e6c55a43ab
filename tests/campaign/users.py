"""
Random code of users around trainers of three steps: overrides, patches, hooks, collators, models of their own.

Each draw trains twice, padded and without padding, with the same code. Loss, gradient norm, evaluation and weights are
the same, or an error of ours says in words what cannot be; where nothing was packed, a warning says so.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from campaign import HELD, REFUSED
from campaign.user_code import CODES, KINDS, PLAIN, collate, on_class, scored
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_pairs, build_tokenizer, make_plain_trainer, rows_for, trained
from torch import nn
from transformers import Trainer
from zoo import models

import trl_padfix
from trl_padfix import PaddingRemovalCallback, padding_free_trainer
from trl_padfix.core.layout import shared_prefixes


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
    # Positions of GPT-2 are columns, here they are numbered from the first token of a row, which may be hidden, too.
    goes_by_columns = any(CODES[name].by_column or name == "tokens that are hidden" for name in case["code"])
    if goes_by_columns and case["model"] == "gpt2":
        case["model"] = "qwen2"
    if case["model"] == "wrapped" and {"tokens that are hidden", "a step with the model's loss"} <= {*case["code"]}:
        case["model"] = "qwen2"  # nobody but the user's module knows that states of hidden tokens are scored
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
        assert isinstance(ours, Exception), f"TRL refuses and we do not: {type(theirs).__name__}: {theirs}"
        return HELD
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
    codes = [CODES[name].what for name in case["code"]]
    # Of two classes of which one is the base of the other, the subclass comes first.
    bases = tuple(sorted((c for c in codes if isinstance(c, type)), key=lambda c: -len(c.__mro__)))
    data = rows_of(case["kind"], 16, case["seed"])
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.05} | case["both"]
    given |= {"train_dataset": data, "eval_dataset": data.select(range(4))}
    if case["kind"] in PLAIN:
        trainer, others = make_plain(case, ours, bases, folder, given)
    else:
        trainer, others = make_of_trl(case, ours, bases, folder, given), []
    # What is patched onto the class first: what was set on the object has the method of before.
    for code in sorted(codes, key=lambda code: code is not on_class):
        if not isinstance(code, type):
            code(trainer, undo)
    return trainer, others


def make_plain(
    case: dict[str, Any], ours: bool, bases: tuple[type, ...], folder: Path, given: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """A `Trainer` of transformers with our mixin or our callback, and a second one on its model."""
    sharing = case["sharing"]
    trainer_class = type("Own", (*bases, Trainer), {})
    if ours and case["kind"] == "trainer":
        removing = partial(padding_free_trainer, prefix_sharing=sharing)
        trainer_class = type("Own", (*bases, removing(Trainer)), {}) if case["outside"] else removing(trainer_class)
    callbacks = [PaddingRemovalCallback(sharing)] if ours and case["kind"] == "callback" else []
    given = given | {"callbacks": callbacks, "data_collator": collate, "remove_unused_columns": False}
    build = partial(model_of, case["model"], case["kind"])
    given |= {"model": None, "model_init": build} if case["made"] == "model_init" else {"model": build()}
    trainer = make_plain_trainer(folder, trainer_class, **given)
    if case["made"] != "second trainer":
        return trainer, []
    return trainer, [make_plain_trainer(folder, trainer_class, **given | {"model": trainer.model, "callbacks": []})]


def make_of_trl(case: dict[str, Any], ours: bool, bases: tuple[type, ...], folder: Path, given: dict[str, Any]) -> Any:
    kind, library = case["kind"], trl_padfix if ours else trl
    if ours:
        given = given | {"padding_free": True, "prefix_sharing": case["sharing"]} | case["ours"]
    given = given | {"model": model_of(case["model"], kind)}
    if kind in ("DPO", "KTO"):
        given["ref_model"] = model_of(case["model"], kind, 1)
    trainer_class = type("Own", (*bases, getattr(library, f"{kind}Trainer")), {})
    return make_trainer(library, kind, folder, trainer_class, max_length=30, **given)


def rows_of(kind: str, count: int, seed: int) -> Any:
    rows = rows_for(kind, build_pairs(count, seed, prompt=(3, 10), answer=(2, 10), common=5))
    if kind not in PLAIN:
        return rows
    tokenizer = build_tokenizer()
    ids = [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in rows]
    return Dataset.from_dict({"input_ids": ids})


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
