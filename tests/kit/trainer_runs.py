"""
Tiny trainings, TRL's and ours, and their comparison.

A trajectory is what a trainer logs at every step and in the evaluation after the last. The weights of the models are
large, so that attention is sharp: a token that sees one token too many bends every curve.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from kit.observe import accept_hooks, has_cache
from kit.tolerance import CONTROL, tolerance
from peft import LoraConfig
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from zoo import models

from trl_padfix import (
    PaddingRemovalCallback,
    ParityError,
    check_parity,
    padding_free_layout,
    padding_free_trainer,
    prefix_sharing_layout,
)
from trl_padfix.trainers.checks import user_code
from trl_padfix.trainers.parts.step_parity import check_step


# Watchers leave values as they are: under a token budget any other function in place of the loss is a user's.
user_code.TRUSTED += (__name__,)


SPECIAL = {"<bos>": 0, "<eos>": 1, "<pad>": 39}
WORDS = [f"w{i}" for i in range(2, 39)]

MODES = {
    "padded": {},
    "padding-free": {"padding_free": True},
    "prefix sharing": {"padding_free": True, "prefix_sharing": True},
}
SIDED_MODES = {
    f"{name}, {side}": mode | {"padding_side": side} for name, mode in MODES.items() for side in ("left", "right")
}
"""Modes of the trainers with a collator."""
TWO_MODES = ["padding-free, left", "prefix sharing, right"]

SETTINGS = dict(
    max_steps=5, learning_rate=1e-3, gradient_checkpointing=False, bf16=False, use_cpu=True, logging_steps=1,
    save_strategy="no", report_to=[], log_level="error", disable_tqdm=True,
)  # fmt: skip


def build_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per word."""
    vocabulary = SPECIAL | {word: i + 2 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w2"))  # TRL tries templates with words of its own
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special | settings)


def words(draw: random.Random, low: int, high: int) -> str:
    return "".join(f"{word} " for word in draw.choices(WORDS, k=draw.randint(low, high)))


def build_pairs(
    count: int, seed: int = 0, prompt: tuple = (2, 18), answer: tuple = (1, 12), common: int | None = 0, end: str = ""
) -> Dataset:
    """
    Ragged pairs, the words of their prompts and answers in these bounds; the prompts are among `common` ones, with
    `None` half as many as pairs, or each is one of its own.
    """
    draw = random.Random(seed)
    prompts = [words(draw, *prompt) for _ in range(max(1, count // 2) if common is None else common)]
    return Dataset.from_list(
        [
            {"prompt": draw.choice(prompts) if prompts else words(draw, *prompt)}
            | {part: words(draw, *answer) + end for part in ("chosen", "rejected")}
            for _ in range(count)
        ]
    )


def rows_for(kind: str, pairs: Dataset) -> Dataset:
    """Pairs as the rows of a trainer: for SFT and KTO their chosen completions, half of them good ones for KTO."""
    if kind in ("DPO", "Reward"):
        return pairs
    single = pairs.rename_column("chosen", "completion").remove_columns("rejected")
    return single.add_column("label", [i % 2 == 0 for i in range(len(pairs))]) if kind == "KTO" else single


def build_model(
    kind: str = "causal", seed: int = 0, attn_implementation: str | None = None, **more: Any
) -> PreTrainedModel:
    """A random Qwen2 with a language-modelling head (`"causal"`) or a reward head (`"reward"`)."""
    of_kind = {"num_labels": 1, "auto": AutoModelForSequenceClassification} if kind == "reward" else {}
    given = {"num_hidden_layers": 2, "max_position_embeddings": 32768} | of_kind | more
    return models.build("qwen2", attn_implementation, seed, **given).train()


def lora(**settings: Any) -> LoraConfig:
    """Adapters that change the model from the first step on."""
    return LoraConfig(r=4, init_lora_weights=False, lora_dropout=0.0, **settings)


@dataclass
class Run:
    """A finished training: what was logged, and what entered the decoder of the policy."""

    trainer: Any
    logs: list[dict[str, float]]
    entered: int
    """Tokens that entered the first layer of the policy, without a cache and outside the parity check."""
    batches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Ids and mask of every forward that scored them."""
    completions: list[list[int]] = field(default_factory=list)
    """All generated completions, as ids."""
    forwards: list[int] = field(default_factory=list)
    """The tokens of each of those forwards."""

    def trajectory(self, *names: str) -> torch.Tensor:
        """Loss, gradient norm (0 in evaluation) and the metrics `names`, of each step and of the evaluation."""
        assert all(any(name in log for log in self.logs) for name in names)
        steps = [[log.get(n, 0.0) for n in ("loss", "grad_norm", *names)] for log in self.logs if "loss" in log]
        ends = [[log["eval_loss"], 0.0, *(log[f"eval_{n}"] for n in names)] for log in self.logs if "eval_loss" in log]
        return torch.tensor(steps + ends, dtype=torch.float64)

    def weights(self) -> torch.Tensor:
        """The trained weights, `(n,)`."""
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters() if p.requires_grad])

    def counts(self) -> dict[str, int]:
        """Tokens that enter the decoder in each mode, counted row by row and without the package."""
        counts = dict.fromkeys(MODES, 0)
        for ids, mask in self.batches:
            rows = [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, mask, strict=True)]
            counts["padded"] += mask.numel()
            counts["padding-free"] += sum(map(len, rows))
            counts["prefix sharing"] += _shared(rows)
        return counts


def _shared(rows: list[tuple[int, ...]]) -> int:
    """Tokens of a batch with prefix sharing: each distinct prefix once, unless gathering keys costs more than that."""
    seen: set[tuple[int, ...]] = set()
    gathered = 0
    for row in sorted(rows):
        before = len(seen)
        seen |= {row[: i + 1] for i in range(len(row))}
        gathered += len(row) if len(seen) > before else 0
    saved = sum(map(len, rows)) - len(seen)
    return len(seen) if saved * 64 >= gathered or gathered == len(seen) else len(seen) + saved


def run(trainer: Any, watch: Callable[[Any, list], None] | None = None, **how: Any) -> Run:
    """
    Train, and evaluate where there is something to evaluate on. `watch(trainer, batches)` lets the trainer append ids
    and mask of each of its forwards; `how` is given to `train`.
    """
    entered, batches, counting = [], [], [True]

    def count(layer, args, kwargs):
        if counting[0] and not has_cache(kwargs):
            entered.append(args[0].shape[:2].numel())

    def uncounted(check):
        def run(*args, **kwargs):
            counting[0], before = False, len(batches)
            report = check(*args, **kwargs)
            counting[0] = True
            del batches[before:]
            return report

        return run

    layer = next(m for m in trainer.model.modules() if isinstance(m, nn.ModuleList))[0]
    hook = layer.register_forward_pre_hook(count, with_kwargs=True)
    accept_hooks(trainer.model)
    if watch is not None:
        watch(trainer, batches)
    trainer.remove_callback(PrinterCallback)
    checks = [
        patch(f"trl_padfix.trainers.parts.parity.{f.__name__}", uncounted(f)) for f in (check_parity, check_step)
    ]
    with checks[0], checks[1]:
        trainer.train(**how)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    hook.remove()
    return Run(trainer, trainer.state.log_history, sum(entered), batches, forwards=entered)


def build_ids(count: int, seed: int = 0, begin: str = "") -> Dataset:
    """Ragged rows of ids for a `transformers.Trainer`, which begin with the words `begin`; labels are the ids."""
    draw, tokenizer = random.Random(seed), build_tokenizer()
    ids = [tokenizer(begin + words(draw, 1, 14))["input_ids"] for _ in range(count)]
    return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids])


def make_plain_trainer(folder: Any, trainer_class: type[Trainer], **given: Any) -> Trainer:
    """A `transformers.Trainer` on rows of ids, with arguments of it and of its configuration."""
    settings = SETTINGS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4} | given
    config = {k: v for k, v in settings.items() if k in TrainingArguments.__dataclass_fields__}
    own = {"data_collator": DataCollatorForSeq2Seq(build_tokenizer())}
    own |= {k: v for k, v in given.items() if k not in config}
    model = own.pop("model") if "model" in own else build_model()
    made = trainer_class(model, TrainingArguments(str(folder), **config), **own)
    made.remove_callback(PrinterCallback)
    return made


def trajectory(trainer: Any, *names: str) -> torch.Tensor:
    """The trajectory of a trainer that has trained, as [`Run.trajectory`] gives it."""
    return Run(trainer, trainer.state.log_history, 0).trajectory(*names)


def trained(trainer: Any, *names: str) -> torch.Tensor:
    """Train, and evaluate where there is something to evaluate on: its trajectory."""
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    return trajectory(trainer, *names)


ELSEWHERE = ("perf/", "padfix/", "total_flos", "train_", "runtime", "_time", "_per_second", "epoch", "step")
"""Parts of names of what depends on the clock or on the padding."""


def figures(history: list[dict[str, float]], but: Sequence[str] = ()) -> torch.Tensor:
    """All else that is logged of steps and evaluations, `(logs, figures)`, but for what is named in `but`."""
    logs = [log for log in history if "loss" in log or "eval_loss" in log]
    names = sorted({n for log in logs for n in log if not any(part in n for part in (*ELSEWHERE, *but))})
    assert {"loss", "grad_norm"} <= set(names)
    assert len(names) > 4
    return torch.tensor([[log.get(name, 0.0) for name in names] for log in logs], dtype=torch.float64)


def to_the_bit(logs: list[dict[str, float]]) -> list[dict[str, float]]:
    """All that is logged, but for what depends on the clock, our own metrics, and NaN: means over nothing."""
    left_out = ("perf/", "padfix/", "profiling/", "runtime", "_per_second", "step_time", "total_flos")
    return [{k: v for k, v in log.items() if v == v and not any(part in k for part in left_out)} for log in logs]


def assert_other(wrong: torch.Tensor, right: torch.Tensor, atol: float = 0.0) -> None:
    """Assert that a trajectory that is wrong on purpose is off by ten tolerances of [`assert_same`]."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same(wrong, right, CONTROL * (atol + _rounding(right)), CONTROL * 1e-4)


def _rounding(figures: torch.Tensor) -> float:
    return tolerance(float(figures[figures.isfinite()].abs().max()), terms=1, depth=2 * 8 * 2)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 0.0, rtol: float = 1e-4) -> None:
    """Assert that two trajectories are the same. Some figures are differences of others (margins, rewards)."""
    assert ours.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol + _rounding(theirs))


def assert_mode_ran(run: Run, mode: str) -> None:
    """The tokens that entered the decoder are those of the mode, and no other mode would have computed as many."""
    counts = run.counts()
    assert counts["prefix sharing"] < counts["padding-free"] < counts["padded"]
    assert run.entered == counts[mode.split(",")[0]]


def leaking_layout(attention_mask):
    """All rows of the batch as one: each sees those before it."""
    return replace(padding_free_layout(attention_mask.reshape(1, -1)), batch_shape=tuple(attention_mask.shape))


def confusing_layout(input_ids, attention_mask, position_ids=None):
    """A token is taken for every other one at its place."""
    return prefix_sharing_layout(torch.zeros_like(input_ids), attention_mask, position_ids)


BROKEN = {
    "padding-free": ("padding_free_layout", leaking_layout),
    "prefix sharing": ("prefix_sharing_layout", confusing_layout),
}


def break_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> dict[str, bool]:
    """Let the layouts of `mode` leak; returns its configuration."""
    name, broken = BROKEN[mode]
    monkeypatch.setattr(f"trl_padfix.core.call.layout_of.{name}", broken)
    return MODES[mode]


def train_beside_plain(way: str, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Raise unless the callback, or a class of `padding_free_trainer`, trains as the plain trainer, with a comparison.
    `make` builds a trainer with `callbacks` or a `trainer_class`, and the plain one without.
    """
    plain = make()
    theirs = trained(plain)

    def ours() -> tuple[Any, PaddingRemovalCallback]:
        callback = PaddingRemovalCallback(prefix_sharing=True)
        if way == "callback":
            return make(callbacks=[callback]), callback
        return make(trainer_class=padding_free_trainer(type(plain), prefix_sharing=True)), callback

    trainer, callback = ours()
    assert_same(trained(trainer), theirs, atol=1e-4)
    reports = callback.reports if way == "callback" else trainer.padding.parity["train"]
    assert [report.ok and report.packed_tokens < report.padded_tokens for report in reports] == [True]
    assert trainer.state.log_history[0]["padfix/shared_fraction"] > 0
    break_mode(monkeypatch, "prefix sharing")
    with pytest.raises(ParityError):
        ours()[0].train()


def is_bare(model: Any) -> bool:
    """Whether no module of a model is patched."""
    return not any("forward" in vars(module) for module in model.model.modules())


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("trl_padfix")]


def watch_decoder(trainer: Any, batches: list) -> None:
    """Watch with which ids and masks the decoder of the policy is called, but for calls with a cache."""

    def keep(module, args, kwargs):
        if not has_cache(kwargs) and kwargs.get("attention_mask") is not None:
            batches.append((kwargs["input_ids"], kwargs["attention_mask"]))

    decoder = next(m for m in trainer.model.modules() if type(m).__name__ == "Qwen2Model")
    decoder.register_forward_pre_hook(keep, with_kwargs=True)


def watch_inputs(*prefixes: str) -> Callable[[Any, list], None]:
    """Watch what losses are computed of; each batch has a forward for each of the `prefixes` of its names."""

    def watch(trainer, batches):
        compute_loss = trainer.compute_loss

        def watched(model, inputs, *args, **kwargs):
            batches.extend((inputs[f"{p}input_ids"], inputs[f"{p}attention_mask"]) for p in prefixes)
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = watched

    return watch
