"""
Models that transformers shards while it loads them (`DistributedConfig`): the trajectory of TRL in one process.

All trainings of the same sizes that are asked for are one launch; the model is a tiny Qwen3-MoE.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.cells import by_turns, slow_but
from kit.distributed_configs import BAD, BUDGET, SIZES, save_models, train
from kit.methods import ONLINE
from kit.processes import trained
from kit.trainer_runs import assert_same


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers.distributed.mixin") is None, reason="needs transformers 5.23"),
]

METRICS = {
    "SFT": ("entropy", "mean_token_accuracy"),
    "DPO": ("rewards/margins", "logps/chosen"),
    "Reward": ("mean_reward", "margin"),
    "GRPO": ("reward", "kl"),
    "RLOO": ("reward", "kl"),
    "Distillation": (),
}
STEPS = 3


def processes(sizes: dict[str, Any]) -> int:
    return math.prod(sizes.get(name, 1) for name in ("fsdp_size", "tp_size", "dp_replicate_size", "pp_size"))


def launch(folder: Path, count: int, cells: list[str], seconds: float) -> None:
    """Run cells in `count` processes; those that wait for each other are ended, and the test fails."""
    how = {"num_processes": count, "timeout": 120 + seconds * len(cells)}
    trained("tensor_parallel", folder, "kit.distributed_configs", folder, *cells, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def together(folder, request):
    tests = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in tests if "together" in item.fixturenames]
    asked = {(p["sizes"], p["method"], p["mode"]) for p in params}
    asked |= {(*cell[:2], "LoRA") for cell in asked if cell[0] == "TP" and cell[2].startswith("LoRA")}  # TRL's

    @cache
    def run(sizes: str) -> None:
        cells = sorted(f"{sizes}; {method}; {mode}" for name, method, mode in asked if name == sizes)
        launch(folder, processes(SIZES[sizes]), cells, seconds=60)

    def outcome(sizes: str, method: str, mode: str) -> list[dict[str, Any]]:
        run(sizes)
        count = processes(SIZES[sizes])
        return [torch.load(folder / f"{sizes}; {method}; {mode}-{r}.pt", weights_only=False) for r in range(count)]

    return outcome


@pytest.fixture(scope="module")
def refused(folder, request):
    tests = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in tests if "refused" in item.fixturenames]
    return cache(lambda count: launch(folder, count, [name for name in asked if BAD[name][2] == count], seconds=30))


@pytest.fixture(scope="module")
def one_process(folder):
    """TRL's trainer, padded, on all weights."""
    return cache(lambda method, mode="": train(method, "LoRA" * mode.startswith("LoRA"), folder))


CELLS = [
    # Each mesh with one trainer; under tensor parallelism generation and a budget are refused.
    *by_turns(SIZES, ["DPO", "SFT", "Reward"], ["sharing"]),
    ("FSDP2", "GRPO", "sharing"),
    *(
        ("FSDP2", "SFT", "budget"),
        ("EP", "DPO", "budget"),
        ("EP", "GRPO", "budget"),
        ("FSDP2", "RLOO", "budget"),
        ("FSDP2", "Distillation", "budget"),
        ("FSDP2 and EP", "Reward", "budget"),
    ),
    # A prefix of a sharded model is a forward of the whole model, which would balance its experts.
    ("EP", "DPO", "router logits"),
    *product(["FSDP2"], ["DPO"], ["LoRA, sharing", "LoRA, budget"]),
]


def assert_one_process(found: list[dict[str, Any]], theirs: Any, method: str) -> None:
    names = METRICS[method]
    expected = theirs.trajectory(*names)[:STEPS]
    for each in found:
        assert_same(each["run"].trajectory(*names)[:STEPS], expected, atol=1e-5)
        assert_same(each["weights"], theirs.weights(), atol=1e-5)
        if method not in ONLINE:  # whose evaluation draws
            assert_same(each["run"].trajectory()[STEPS:], theirs.trajectory()[STEPS:], atol=1e-5)


@pytest.mark.parametrize(("sizes", "method", "mode"), slow_but([("EP", "DPO", "budget")], CELLS))
def test_sharded_while_loaded_a_model_has_the_trajectory_of_one_process(sizes, method, mode, together, one_process):
    found, theirs = together(sizes, method, mode), one_process(method, mode)
    assert_one_process(found, theirs, method)
    batches = found[:: SIZES[sizes].get("tp_size", 1)]
    assert sum(each["run"].entered for each in batches) < theirs.entered
    if not mode.endswith("sharing"):
        assert max(each["run"].forwards[0] for each in batches) <= BUDGET["max_tokens_per_batch"] < theirs.forwards[0]


@pytest.mark.matrix
@pytest.mark.parametrize(("sizes", "method", "mode"), [("TP", "DPO", "LoRA, sharing")])
def test_adapters_under_tensor_parallelism_have_the_trajectory_of_trl(sizes, method, mode, together, one_process):
    """PEFT draws others than in one process."""
    for found, theirs in zip(together(sizes, method, mode), together(sizes, method, "LoRA"), strict=True):
        assert_same(found["run"].trajectory(), theirs["run"].trajectory(), atol=1e-5)
        assert_same(found["weights"], theirs["weights"], atol=1e-5)
        assert found["run"].entered < theirs["run"].entered
        with pytest.raises(AssertionError, match="not close"):
            assert_same(found["weights"], one_process(method, mode).weights(), atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(("sizes", "method", "mode"), [("FSDP2", "DPO", "confused"), ("TP", "DPO", "confused")])
def test_tokens_taken_for_others_are_seen(sizes, method, mode, together, one_process):
    with pytest.raises(AssertionError, match="not close"):
        assert_one_process(together(sizes, method, mode), one_process(method), method)


@pytest.mark.parametrize("name", slow_but([], BAD))
def test_what_cannot_run_stops_every_process_before_the_first_step(name, folder, refused):
    *_, count, says = BAD[name]
    refused(count)
    for rank in range(count):
        found = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
        assert says in found["error"]
        assert found["steps"] == 0
