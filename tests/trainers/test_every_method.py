"""
Whole trainings, TRL's and ours: one trajectory, whatever is combined with what.

[`CELLS`] are written down so that any two values of any two axes meet in one. Each has a control: its first step with
rows that leak, or with a hidden token where padding stays.
"""

from __future__ import annotations

import ast
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import trl
from kit.methods import METHODS, PACKED, Maker
from kit.sft_cases import NEWEST
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    SPECIAL,
    TWO_MODES,
    Run,
    assert_mode_ran,
    assert_other,
    assert_same,
    break_mode,
    build_model,
    figures,
)
from simulated_gpu.flash_stand_in import flash_attention_stand_in

import trl_padfix
from trl_padfix import ParityError


LATER = pytest.mark.skipif(not NEWEST, reason="tried with later versions of TRL")
BUDGET = 60
"""Tokens, at least those of a pair without anything in common."""
FLASH = "flash_attention_2"


class Cell(NamedTuple):
    """Our training of a case of a method in one of `MODES`. TRL's run has SDPA, and no budget."""

    method: str
    case: str
    mode: str
    side: str = ""  # of the padding, if there is a collator
    attention: str = "sdpa"
    budget: int | None = None  # max_tokens_per_batch
    multiple: int | None = None  # packed_multiple_of


CELLS = [
    Cell("SFT", "short rows, padded to multiples of 8", "padded", "left", "eager"),
    Cell("SFT", "texts", "prefix sharing", "left", "sdpa", BUDGET),
    Cell("SFT", "accumulation", "prefix sharing", "right", FLASH, BUDGET),
    Cell("SFT", "checkpointing", "padding-free", "left", "sdpa", BUDGET),
    Cell("SFT", "lora, checkpointing", "prefix sharing", "right", "eager"),
    Cell("SFT", "keep_end", "padding-free", "right"),
    Cell("SFT", "label smoothing", "prefix sharing", "left", "sdpa", BUDGET),
    Cell("SFT", "a loss of one's own", "padding-free", "left"),
    Cell("SFT", "a stream", "prefix sharing", "right"),
    Cell("SFT", "wrapped", "padding-free", "right"),
    Cell("SFT", "short", "padding-free", "left", multiple=32),
    Cell("DPO", "short", "padded", "left", FLASH),
    Cell("DPO", "absolute positions", "padded", "left"),
    Cell("DPO", "reentrant checkpointing", "padding-free", "left"),
    Cell("DPO", "checkpointing", "prefix sharing", "right", FLASH, BUDGET),
    Cell("DPO", "accumulation", "padding-free", "left", "eager", BUDGET),
    Cell("DPO", "synchronised reference", "prefix sharing", "left", "sdpa", BUDGET),
    Cell("DPO", "precomputed reference, ld_alpha", "padding-free", "left"),
    Cell("DPO", "lora, precomputed reference", "prefix sharing", "right", "eager"),
    Cell("DPO", "an adapter trained before", "padding-free", "left", "sdpa", BUDGET),
    Cell("DPO", "experts", "prefix sharing", "left"),
    Cell("DPO", "lora, checkpointing", "prefix sharing", "right", multiple=32),
    Cell("DPO", "answers that are equal, or begin alike", "prefix sharing", "right", "sdpa", BUDGET),
    Cell("Reward", "accumulation", "padding-free", "left", FLASH, BUDGET),
    Cell("Reward", "checkpointing", "prefix sharing", "right", "eager", BUDGET),
    Cell("Reward", "lora", "padding-free", "left"),
    Cell("Reward", "margins", "prefix sharing", "right", FLASH, BUDGET, 20),
    Cell("KTO", "apo_zero_unpaired", "padding-free", "left", "eager", BUDGET),
    Cell("KTO", "accumulation", "prefix sharing", "left", "sdpa", BUDGET),
    Cell("KTO", "checkpointing", "padding-free", "right", FLASH),
    Cell("KTO", "precomputed reference", "prefix sharing", "right", "eager", BUDGET),
    Cell("KTO", "lora, accumulation", "prefix sharing", "left", FLASH),
    Cell("GRPO", "checkpointing", "padding-free", "", "eager", BUDGET),
    Cell("GRPO", "lora", "prefix sharing", "", "sdpa", BUDGET),
    Cell("GRPO", "two generations of a step", "prefix sharing"),
    Cell("GRPO", "continuous batching", "padding-free"),
    Cell("GRPO", "generation without a cache", "prefix sharing"),
    Cell("RLOO", "accumulation", "padding-free", "", "eager"),
    Cell("RLOO", "lora", "prefix sharing"),
    Cell("RLOO", "normalised advantages", "prefix sharing", "", "sdpa", BUDGET),
    Cell("RLOO", "checkpointing", "padding-free"),
    Cell("Distillation", "checkpointing", "padding-free", "", "eager"),
    Cell("Distillation", "accumulation", "prefix sharing", "", "sdpa", BUDGET),
    Cell("Distillation", "lora", "padding-free"),
]


def train(make: Maker, cell: Cell, **more: Any) -> Run:
    """Our training of a cell."""
    config = MODES[cell.mode] | ({"padding_side": cell.side} if cell.side else {})
    config |= {"max_tokens_per_batch": cell.budget, "parity_check": False} if cell.budget else {}
    config |= {"packed_multiple_of": cell.multiple} if cell.multiple else {}
    given = {name: more.pop(name) for name in ("eval_dataset",) if name in more}
    if cell.attention == "eager":
        config["attn_implementation"] = "eager"
    with flash_attention_stand_in() if cell.attention == FLASH else nullcontext():
        if cell.attention == FLASH:
            given["model"] = build_model("reward" if cell.method == "Reward" else "causal", attn_implementation=FLASH)
        return make.train(cell.case, given=given, **config | more)


def assert_filled(run: Run, multiple: int) -> None:
    """Packed rows had lengths that were asked for, and the log says how much of them is filler."""
    assert not any(tokens % multiple for tokens in run.forwards)
    for stats in (handle.stats for handle in run.trainer.padding.handles):
        assert 0 < stats.filler_tokens < multiple * stats.forwards
        assert (stats.packed_tokens + stats.filler_tokens) % multiple == 0
    shares = [log[name] for log in run.logs for name in log if name.endswith("padfix/filler_fraction")]
    assert all(0 < share < 0.5 for share in shares)
    assert len(shares) > len(run.logs) / 2  # none is logged where rows have such a length by themselves


def hide_first_tokens(trainer: Any) -> None:
    """Let no token see the first one of its row."""

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[torch.arange(len(mask)), mask.argmax(1)] = 0
        return args, kwargs | {"attention_mask": mask}

    holds_layers = lambda m: any(isinstance(child, torch.nn.ModuleList) for child in m.children())  # noqa: E731
    next(filter(holds_layers, trainer.model.modules())).register_forward_pre_hook(hide, with_kwargs=True)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.method in METHODS], ids=lambda c: ", ".join(map(str, c)))
def test_a_training_and_an_evaluation_are_trls(cell, makers, monkeypatch):
    make = makers(cell.method)
    method, theirs = make.method, make.theirs(cell.case)
    ours = train(make, cell)
    regroups = cell.budget or (method.means and ours.trainer.padding.task.may_regroup())
    left_out = method.means | {"entropy", "mean_token_accuracy"} if regroups else set()
    logged = {name for log in theirs.logs for name in log}
    metrics = [metric for metric in method.metrics if metric in logged - left_out]
    assert ours.completions == theirs.completions
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics))

    handles = ours.trainer.padding.handles
    if cell.mode == "padded":
        assert not handles
        for mode in PACKED:
            with pytest.raises(AssertionError):
                assert_mode_ran(ours, mode)
    assert all(0 < h.stats.packed_tokens <= h.stats.real_tokens < h.stats.padded_tokens for h in handles)
    if cell.budget:
        assert max(ours.forwards) <= cell.budget < max(theirs.forwards)
    if cell.multiple:
        assert_filled(ours, cell.multiple)
    elif not cell.budget and cell.case not in method.uncounted:
        assert_mode_ran(ours, cell.mode)

    once = {"max_steps": 1, "eval_dataset": None, "parity_check": False}
    if cell.mode == "padded":
        control = train(make, cell, change=hide_first_tokens, **once)
    else:
        break_mode(monkeypatch, cell.mode)
        control = train(make, cell, **once)
    assert_other(control.trajectory(), theirs.trajectory()[:1])


@LATER
@pytest.mark.parametrize("name", METHODS)
def test_every_metric_is_logged_as_trl_logs_it(name, makers):
    make = makers(name)
    ours, theirs = make.train(make.method.plain, **MODES["prefix sharing"]), make.theirs(make.method.plain)
    found, expected = (figures(run.logs, tuple(make.method.means)) for run in (ours, theirs))
    assert_same(found, expected)
    assert_other(found.roll(1, 0), expected)  # the control: figures of the step before


@pytest.mark.parametrize("name", METHODS)
def test_a_leaking_layout_stops_training_and_evaluation(name, makers, monkeypatch):
    trainer = makers(name)(config=break_mode(monkeypatch, PACKED[len(name) % 2]))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(ParityError, match=r"parity FAILED .* difference of \d+ scores mean .*`padding_free=False`"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


@LATER
def test_accumulation_does_not_scatter_a_group(makers):
    ours = makers("GRPO").train("accumulation", **MODES["prefix sharing"])
    assert ours.entered < makers("GRPO").theirs("accumulation").counts()["prefix sharing"]


@pytest.mark.parametrize("name", [name for name in ("SFT", "KTO", "GRPO") if name in METHODS])
def test_fractions_are_those_of_the_forwards_of_the_loss(name, makers):
    make = makers(name)
    online = {} if make.method.side else {"beta": 0.0}
    ours = make.train(make.method.plain, **MODES["prefix sharing"], max_steps=3, **online)
    forwards = 2 if name == "KTO" else 1
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        assert 0 < log["padfix/pad_fraction"] < 1
        one = Run(ours.trainer, [], 0, ours.batches[forwards * i : forwards * (i + 1)]).counts()
        assert log["padfix/pad_fraction"] == pytest.approx(1 - one["padding-free"] / one["padded"])
        assert log["padfix/shared_fraction"] == pytest.approx(1 - one["prefix sharing"] / one["padding-free"])
        assert log["perf/tokens_per_second"] > 0
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1
    assert 0 < evaluated["eval_padfix/shared_fraction"] < 1
    assert evaluated["eval_perf/tokens_per_second"] > 0


@LATER
@pytest.mark.parametrize(("name", "mode"), [("SFT", TWO_MODES[0]), ("DPO", TWO_MODES[1])])
def test_compute_metrics_sees_trls_logits_of_the_real_tokens(name, mode, makers):
    def compute_metrics(prediction):
        logits, ids = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
        real = (ids >= 0) & (ids != SPECIAL["<pad>"])
        return {"sum": logits[real].double().abs().sum().item(), "tokens": int(real.sum())}

    make, config = makers(name), {"loss_type": "nll"} if name == "SFT" else {}
    theirs, ours = (
        make(trainer_class, config | mode, compute_metrics=compute_metrics).evaluate()
        for trainer_class, mode in ((make.method.theirs, {}), (None, SIDED_MODES[mode]))
    )
    assert ours["eval_tokens"] == theirs["eval_tokens"]
    for figure in ("eval_sum", "eval_loss"):
        assert ours[figure] == pytest.approx(theirs[figure], rel=1e-5)


SCRIPTS = {path.stem: path for path in Path(trl.__file__).with_name("scripts").glob("*.py")}


def test_trls_script_runs_with_another_import(monkeypatch):
    """`from trl import ...` of its scripts also names `ModelConfig`, `TrlParser`, `get_peft_config`."""
    for script in [name.lower() for name in METHODS if name.lower() in SCRIPTS]:
        text = SCRIPTS[script].read_text().replace("from trl import", "from trl_padfix import")
        names = {
            a.name for n in ast.walk(ast.parse(text)) if getattr(n, "module", "") == "trl_padfix" for a in n.names
        }
        ours = {name for name in names if getattr(trl_padfix, name) is not getattr(trl, name)}
        assert ours == names & {*trl_padfix.__all__}
        assert len(names) > len(ours) > 1
        module = ModuleType(script)
        monkeypatch.setitem(sys.modules, script, module)  # where its dataclasses look their module up
        exec(compile(text, script, "exec"), vars(module))
        parsed, *_ = module.make_parser().parse_known_args(["--output_dir", "x", "--padding_free", "--bf16", "false"])
        assert parsed.padding_free is True  # a field of ours, or of another meaning in TRL
