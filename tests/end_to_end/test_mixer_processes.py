"""
Two processes on decoders whose layers one packed row cannot serve: the trajectory of one process, gradients included.

The one process runs TRL's trainer, padded. Of each step one of the two processes has rows of one length, with nothing
to remove, and the other one ragged rows, so that modules on rows would run a different number of times.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from kit.mixer_runs import STEP_ROWS, STEPS, save_initial, train_saved
from kit.processes import logged
from safetensors.torch import load_file
from zoo.family_outcomes import gradient_difference, stable_topk


pytestmark = pytest.mark.slow

FAMILIES = ["qwen3_5_text", "nemotron_h", "lfm2", "bloom", "deepseek_v32"]
CASES = [
    *(f"{family},dpo,{('padding-free', 'prefix sharing')[i % 2]}" for i, family in enumerate(FAMILIES)),
    *("qwen3_5_text,sft,padding-free", "bloom,sft,padding-free"),
]
ZERO_3 = {
    "zero_optimization": {
        "stage": 3,
        # Parameters of this size would stay gathered, and those of real models do not.
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 10_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}
"""All parameters are gathered when a module is called, and given up behind it."""

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs `pip install deepspeed`")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_initial(family, folder)
    return folder


@pytest.fixture(scope="module")
def one_process(models, tmp_path_factory):
    """TRL's trainer in this process."""

    @cache
    def run(family: str, kind: str, holes: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = tmp_path_factory.mktemp("one_process")
        with stable_topk():
            logs = train_saved(kind, trl, models / family, output, holes, per_device_train_batch_size=STEP_ROWS)
        return curve(logs), load_file(output / "model.safetensors")

    return run


def curve(logs: list[dict[str, float]]) -> torch.Tensor:
    steps = [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log]
    ends = [(log["eval_loss"], 0.0) for log in logs if "eval_loss" in log]
    assert (len(steps), len(ends)) == (STEPS, 1)
    return torch.tensor(steps + ends, dtype=torch.float64)


def launch(strategy: str, cases: list[str], models: Path, folder: Path, **env: str) -> dict[str, Any]:
    """Train the cases in two processes; ZeRO-3 gathers all parameters again."""
    for family in {case.split(",")[0] for case in cases}:
        (folder / family).symlink_to(models / family)
    settings: dict[str, Any] = {}
    if strategy == "zero3":
        (folder / "zero3.json").write_text(json.dumps(ZERO_3))
        settings = {"deepspeed_config": {"deepspeed_config_file": str(folder / "zero3.json"), "zero3_init_flag": True}}
        settings |= {"mixed_precision": None}  # what DeepSpeed's own file says is not said twice
    return logged(strategy, folder, "kit.mixer_runs", *cases, env=env, timeout=120 + 30 * len(cases), **settings)


def assert_same(ours: Path, logs: Any, theirs: tuple[torch.Tensor, dict[str, torch.Tensor]], initial: Path) -> None:
    """Losses and gradient norms, and what the steps have added to every weight: the sum of the gradients."""
    torch.testing.assert_close(curve(logs), theirs[0], rtol=1e-4, atol=1e-4)
    begin = load_file(initial / "policy" / "model.safetensors")
    # Under ZeRO-3 the second Qwen3.5 of a process is saved under the names of a model with images (transformers 5.23).
    saved = load_file(ours / "model.safetensors").items()
    end = {name.replace("model.language_model.", "model."): weight for name, weight in saved}
    assert end.keys() >= theirs[1].keys()  # FSDP2 saves tied weights twice
    added, expected = ({name: w[name] - begin[name] for name in theirs[1]} for w in (end, theirs[1]))
    assert max(change.abs().max() for change in expected.values()) > 1e-3
    assert gradient_difference(added, expected) <= 1e-3


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=[pytest.mark.matrix, NEEDS_DEEPSPEED])])
def test_two_processes_give_the_trajectory_of_one(strategy, models, one_process, tmp_path):
    found = launch(strategy, CASES, models, tmp_path)
    for case in CASES:
        family, kind, mode = case.split(",")
        assert_same(tmp_path / case, found[case], one_process(family, kind), models / family)
        steps = [log for log in found[case] if "loss" in log]
        assert max(log["padfix/pad_fraction"] for log in steps) > 0.05, case
        assert (max(log["padfix/shared_fraction"] for log in steps) > 0.05) == (mode == "prefix sharing"), case


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=[pytest.mark.matrix, NEEDS_DEEPSPEED])])
def test_a_process_may_compute_its_batch_padded_while_the_other_one_packs(strategy, models, one_process, tmp_path):
    """Its rows have masked tokens between real ones; TRL's figures without such tokens are the control."""
    cases = ["bloom,dpo,holes"]
    found = launch(strategy, cases, models, tmp_path)
    for case in cases:
        family, kind, _ = case.split(",")
        steps = [log for log in found[case] if "loss" in log]
        assert min(log["padfix/padded_forwards"] for log in steps) > 0, case
        assert max(log.get("padfix/pad_fraction", 0.0) for log in steps) > 0.05, case  # none if both are padded
        assert_same(tmp_path / case, found[case], one_process(family, kind, holes=True), models / family)
        with pytest.raises(AssertionError, match="not close"):
            assert_same(tmp_path / case, found[case], one_process(family, kind), models / family)


@pytest.mark.matrix
def test_rows_that_see_each_other_do_not(models, one_process, tmp_path):
    case = "qwen3_5_text,dpo,padding-free"
    found = launch("multi_gpu", [case], models, tmp_path, BROKEN_LAYOUT="1")
    with pytest.raises(AssertionError, match="not close"):
        assert_same(tmp_path / case, found[case], one_process("qwen3_5_text", "dpo"), models / "qwen3_5_text")
