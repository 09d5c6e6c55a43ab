"""
Two processes that share every packed row: the trajectory of TRL's trainer in one process, whatever the set-up.

All trainings of the two processes that are asked for are one launch, with FSDP2 and `cp_size=2`.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.cells import slow_but
from kit.processes import trained
from kit.split_runs import assert_split
from kit.split_trainings import LENGTH, TRAININGS, TWO_GROUPS, method_of, save_material, train
from kit.trainer_runs import assert_same


pytestmark = pytest.mark.slow

CONTEXT = ("--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config")


def launch(sizes: dict[str, int], folder: Path, names: list[str], **how: Any) -> None:
    parts = ((f"--parallelism_config_{name}", size) for name, size in sizes.items())
    given = {"flags": [*CONTEXT, *chain(*parts)], "timeout": 90 + 25 * len(names)}
    trained("fsdp2", folder, "kit.split_trainings", folder, *names, **given, **how)


@pytest.fixture(scope="module")
def together(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("together")
    save_material(folder)
    tests = [item for item in request.session.items if item.path == request.path]
    asked = {name for item in tests if "together" in item.fixturenames for name in item.callspec.params.values()}
    launch({"cp_size": 2}, folder, [name for name in TRAININGS if name in asked])
    return lambda name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """TRL's trainer; ours where it takes other batches."""
    folder = tmp_path_factory.mktemp("one_process")
    save_material(folder)

    def run(name: str, ours: bool = False) -> Any:
        kind, case, own = (TRAININGS | TWO_GROUPS)[name]
        ours = ours or "group_by_prefix" in own
        return once(name if ours else next(n for n, given in TRAININGS.items() if given[:2] == (kind, case)), ours)

    @cache
    def once(name: str, ours: bool) -> Any:
        return train(name, folder / name, ours)

    return run


EVERY_PUSH = [
    "DPO, a last batch of one pair",
    "DPO, whole rows",
    "DPO, LoRA",
    "DPO, few lengths",
    "DPO, grouped",
    "SFT, budget",
    "SFT, accumulation",
    "Reward, LoRA",
    "KTO, precomputed",
]


@pytest.mark.parametrize("name", slow_but(EVERY_PUSH, TRAININGS))
def test_sharing_rows_gives_the_trajectory_of_one_process(name, together, one_process):
    """Losses, gradient norms, metrics, an evaluation and the weights."""
    case = TRAININGS[name][1]
    ours, method = together(name), method_of(name)
    theirs = one_process(name)
    logged = {metric for log in theirs.logs for metric in log}
    # Means over micro-batches, which hold other rows where prompts are brought together, or a budget cuts.
    left_out = method.means if case != method.plain else set()
    left_out = left_out | ({"entropy", "mean_token_accuracy"} if name.startswith("SFT, budget") else set())
    metrics = [metric for metric in method.metrics if metric in logged - left_out]
    for found in ours:
        assert_same(found["run"].trajectory(*metrics), theirs.trajectory(*metrics), atol=1e-6)
        # Of gradients that nearly cancel Adam makes steps of what rounding leaves, the learning rate being 1e-3.
        assert_same(found["weights"], theirs.weights(), atol=3e-5)
    counts = [found["counts"] for found in ours]
    if name.endswith("whole rows"):  # the split is switched off: a trajectory does not tell
        with pytest.raises(AssertionError):
            assert_split(counts)
    else:
        assert_split(counts)
    if "few lengths" in name:  # on each process, as matrices in eight bits need
        assert all(count["local"] % LENGTH == 0 for count in counts)


@pytest.mark.parametrize("name", slow_but([], TWO_GROUPS))
def test_two_groups_that_share_rows_give_the_trajectory_of_one_process(name, tmp_path, one_process):
    """Four processes; in a micro-batch the groups have other numbers of rows, and some have none of their own."""
    save_material(tmp_path)
    sizes, method = {"cp_size": 2, "dp_shard_size": 2}, method_of(name)
    launch(sizes, tmp_path, [name], num_processes=4)
    theirs = one_process(name)
    metrics = [metric for metric in method.metrics if metric not in method.means]
    for rank in range(4):
        found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False)
        assert_same(found["run"].trajectory(*metrics), theirs.trajectory(*metrics))
        assert found["counts"]["local"] < found["counts"]["packed"]
