"""
Two processes on CPU, through `accelerate launch`: the trajectory of one process with as many rows in a step.

The one process runs TRL's own script, padded. Each of the two takes every other micro-batch of half the size, so the
optimizer steps of both runs are over the same rows. Rows are evaluated one by one: TRL fills the last evaluation batch
up with rows from the beginning, and where a batch is one row those are left out of the loss.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from kit.cells import MATRIX
from kit.commands import as_flags, logs_of
from kit.online_runs import save_policy
from kit.processes import launched, logged, trained
from kit.tolerance import tolerance
from kit.trainer_runs import WORDS, words
from safetensors.torch import load_file
from transformers import TrainingArguments

from trl_padfix.tools.tiny import build_qwen2, train_tokenizer


STEPS = 4
ROUNDING = tolerance(1.0, terms=64, depth=2 * 8 * 2)
"""Of two layers and their backward."""
PAIR = ("prompt", "chosen", "rejected")
COLUMNS = {"dpo": PAIR, "sft": ("prompt", "completion")}
METRICS = {"dpo": ("rewards/margins", "logps/chosen"), "sft": ("mean_token_accuracy", "entropy")}
PACKED = ("--padding_free", "true", "--prefix_sharing", "true")
CONTEXT = ("--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--parallelism_config_cp_size", "2")

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs `pip install deepspeed`")

pytestmark = pytest.mark.slow
RESUMED = [("multi_gpu", "sft"), ("fsdp2", "dpo"), ("zero2", "dpo"), ("zero3", "sft")]


def strategies(every_push: list[tuple], cells: Iterable[tuple]) -> list[Any]:
    """Cells, each a strategy and something else, of which some run on every push and the others at night."""
    return [
        pytest.param(*cell, marks=[*(() if cell in every_push else MATRIX), *[needs_deepspeed] * ("zero" in cell[0])])
        for cell in cells
    ]


@dataclass
class Run:
    history: list[dict[str, float]]
    weights: dict[str, torch.Tensor]

    def curve(self, *names: str) -> torch.Tensor:
        logs = [log for log in self.history if "loss" in log]
        evaluated = [log["eval_loss"] for log in self.history if "eval_loss" in log]
        assert len(logs) == STEPS
        assert len(evaluated) == STEPS // 2
        return torch.tensor([log[name] for log in logs for name in ("loss", "grad_norm", *names)] + evaluated)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A model with sharp attention and ragged rows with common prompts, nine of them held out."""
    directory, draw = tmp_path_factory.mktemp("material"), random.Random(0)
    tokenizer = train_tokenizer([" ".join(WORDS)], vocab_size=320)
    shape = dict(layers=2, hidden_size=32, heads=4, kv_heads=2, intermediate_size=48, initializer_range=0.2)
    build_qwen2(tokenizer, **shape).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    prompts = [words(draw, 2, 18) for _ in range(4)]
    for split, count in (("train", 24), ("test", 9)):
        pairs = [[draw.choice(prompts), words(draw, 1, 12), words(draw, 1, 12)] for _ in range(count)]
        for method, names in COLUMNS.items():
            (directory / method).mkdir(exist_ok=True)
            rows = "".join(json.dumps(dict(zip(names, pair, strict=False))) + "\n" for pair in pairs)
            (directory / method / f"{split}.jsonl").write_text(rows)
    return directory


def flags(material: Path, method: str, output: Path, rows: int) -> list[str]:
    settings = {
        "model_name_or_path": material / "model",
        "dataset_name": material / method,
        "output_dir": output,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "bf16": "false",
        "gradient_checkpointing": "false",
        "report_to": "none",
        "disable_tqdm": "true",
    }
    return as_flags(settings)


@pytest.fixture(scope="module")
def one_process(material, tmp_path_factory):
    """TRL's own script in this process."""

    @cache
    def run(method: str, *more: str) -> Run:
        script = importlib.import_module(f"trl.scripts.{method}")
        output = tmp_path_factory.mktemp("one_process")
        args = [*flags(material, method, output, rows=4), "--use_cpu", "true", *more]
        script.main(*script.make_parser().parse_args_and_config(args))
        return outcome(output)

    return run


def outcome(output: Path) -> Run:
    return Run(logs_of(output), load_file(output / "model.safetensors"))


@pytest.fixture
def together(material, tmp_path):
    """Our script in two processes; where it `fails`, what they said."""

    def run(method: str, strategy: str, *more: str, fails: bool = False, **how: Any) -> Any:
        given = [*flags(material, method, tmp_path / "run", rows=2), *more]
        given += ["--use_cpu", "true"] if strategy == "multi_gpu" else []
        done = (launched if fails else trained)(strategy, tmp_path, "kit.launched", method, *given, **how)
        if fails:
            assert done.returncode != 0
            return done.stderr
        return outcome(tmp_path / "run")

    return run


def assert_same(ours: Run, theirs: Run, *metrics: str) -> None:
    torch.testing.assert_close(ours.curve(*metrics), theirs.curve(*metrics), rtol=ROUNDING, atol=ROUNDING)
    assert ours.weights.keys() >= theirs.weights.keys()  # FSDP2 saves tied weights twice
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=ROUNDING)


def test_rows_that_see_each_other_do_not(together, one_process):
    env = {"BROKEN_LAYOUT": "1"}
    ours = together("dpo", "multi_gpu", *PACKED, "--parity_check", "false", env=env)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours, one_process("dpo"), *METRICS["dpo"])


@pytest.mark.matrix
@pytest.mark.parametrize(("strategy", "method"), strategies([("fsdp2", "dpo"), ("zero3", "sft")], RESUMED))
def test_a_resumed_run_is_one_process_that_never_stopped(strategy, method, together, one_process, tmp_path):
    ours = together(method, strategy, *PACKED)
    assert_same(ours, one_process(method), *METRICS[method])
    logs = [log for log in ours.history if "loss" in log]
    assert all(log["padfix/pad_fraction"] > 0.05 for log in logs)
    assert any(log["padfix/shared_fraction"] > 0.1 for log in logs)
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{STEPS}")
    resumed = together(method, strategy, *PACKED, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2"))
    assert_same(resumed, one_process(method), *METRICS[method])


BUDGETED = [("multi_gpu", True), ("fsdp2", True), ("zero2", True), ("zero3", False)]


@pytest.mark.parametrize(("strategy", "once"), strategies(BUDGETED[:1], BUDGETED))
def test_micro_batches_of_two_processes_share_prefixes_and_give_the_trajectory_of_one(
    strategy, once, together, one_process, tmp_path
):
    """Under ZeRO-3 processes have to run equally many forwards, and compute prefixes again."""
    budget = ("--max_tokens_per_batch", "128", "--max_length", "128")
    ours = together("dpo", strategy, *PACKED, *budget, env={"PREFIXES": str(tmp_path)})
    assert_same(ours, one_process("dpo"), *METRICS["dpo"])
    counts = [json.loads((tmp_path / f"prefixes-{rank}.json").read_text()) for rank in range(2)]
    assert all((count["prefixes"] > 0) == once for count in counts)


@pytest.mark.skipif("ddp_static_graph" not in signature(TrainingArguments).parameters, reason="transformers 4")
def test_the_check_runs_no_backward_that_a_static_graph_of_ddp_would_record(together, one_process):
    static = ("--ddp_static_graph", "true", "--gradient_accumulation_steps", "1", "--per_device_train_batch_size", "4")
    assert_same(together("dpo", "multi_gpu", *PACKED, *static), one_process("dpo"), *METRICS["dpo"])
    said = together("dpo", "multi_gpu", *PACKED, *static, "--max_tokens_per_batch", "128", fails=True)
    assert "splits a backward into several, and with `ddp_static_graph=True`" in said


@pytest.mark.skipif("DistillationTrainer" not in trl.__all__, reason="a TRL before 1.16")
@pytest.mark.parametrize(
    ("strategy", "names"), [("multi_gpu", ()), ("fsdp2", ["SFT, a hook beside a loss on one process"])]
)
def test_every_trainer_takes_trls_steps_on_two_processes(tmp_path, strategy, names):
    save_policy(tmp_path / "policy")
    for name, (theirs, ours) in logged(strategy, tmp_path, "kit.process_trainings", *names).items():
        for figure in ("loss", "grad_norm"):
            expected = torch.tensor(theirs[figure])
            torch.testing.assert_close(torch.tensor(ours[figure]), expected, rtol=ROUNDING, atol=ROUNDING, msg=name)
        assert (expected.diff().abs() > 10 * ROUNDING).all()  # a step late, norms would differ
        assert min(ours["padfix/shared_fraction"]) > 0.05


SPLIT = (*PACKED, "--per_device_train_batch_size", "4")


def test_processes_of_a_group_with_other_batches_stop_before_the_first_step(together):
    said = together("dpo", "fsdp2", *SPLIT, flags=CONTEXT, env={"ODD_BATCH": "1"}, fails=True)
    assert said.count("ValueError: The 2 processes that share packed rows were given different batches") == 2


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]
)
def test_a_users_loss_that_reads_padding_is_computed_padded_where_processes_shard(together, strategy):
    """The check of the model passes: only the check of the step sees the loss."""

    def losses(*more: str) -> torch.Tensor:
        return together("sft", strategy, *more, env={"READS_PADDING": "1"}).curve()[: 2 * STEPS]

    theirs, ours, unchecked = losses(), losses(*PACKED), losses(*PACKED, "--parity_check", "false")
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)
    assert ((unchecked - theirs).abs() > 10 * ROUNDING).any()
