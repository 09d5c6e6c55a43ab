"""Evaluation means over items: their weights, and the duplicate rows of the last batch, on literal tensors."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.observe import StandIn
from torch.utils.data import IterableDataset

from trl_padfix.trainers.metrics.exact_eval_means import ExactMeans, drop_duplicate_rows
from trl_padfix.trainers.parts.part import Evaluation, Step
from trl_padfix.trainers.settings import Settings


class Task:
    """Counts the loss by rows and the metric `entropy` by tokens of the mask."""

    rows_per_item = 1

    def num_loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        return torch.tensor(len(batch["input_ids"]))

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"entropy": batch["mask"].sum()}

    def packs_rows(self) -> bool:
        return False


def build_accelerator(process: int = 0, processes: int = 1, remainder: int = -1, is_last: bool = True) -> Any:
    """What the part reads of an accelerator; `remainder` are the items of the last batch over all processes."""
    return SimpleNamespace(
        num_processes=processes,
        process_index=process,
        gradient_state=SimpleNamespace(end_of_dataloader=is_last, remainder=remainder),
        gather=lambda x: torch.cat([x, x]),
        gather_for_metrics=lambda x: torch.cat([x, x]),
        reduce=lambda x: x,
    )


def build_part(accelerator: Any = None, **attributes: Any) -> ExactMeans:
    trainer = StandIn(
        accelerator=accelerator or build_accelerator(),
        padding=SimpleNamespace(settings=Settings(exact_eval_means=True), task=Task()),
        _metrics={"eval": {}},
        compute_metrics=None,
        args=SimpleNamespace(eval_batch_size=2),
        train_dataset=None,
        eval_dataset=None,
    )
    vars(trainer).update(attributes)
    vars(made := ExactMeans(trainer)).update(kept=trainer)
    return made


def run_step(part: ExactMeans, rows: int, loss: float, *, tokens: int = 1, **logged: float) -> Step:
    """A step on `rows` rows with `tokens` tokens each, in which TRL appends `logged` to its metrics."""
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    mask = torch.zeros(rows, 4, dtype=torch.int64)
    mask[:, :tokens] = 1
    step = Step(None, {"input_ids": ids, "mask": mask}, "eval", 0, part.trainer.padding.task)
    with part.around_step(step):
        for name, value in logged.items():
            part.trainer._metrics["eval"].setdefault(name, []).append(value)
        step.result = torch.tensor(loss)
    return step


def evaluate(part: ExactMeans, *batches: tuple) -> tuple[float | None, dict[str, list[float]]]:
    """Loss and logged metrics of an evaluation over batches of `(rows, loss, tokens, metric by name)`."""
    evaluation = Evaluation("eval", None)
    with part.around_evaluation_loop(evaluation):
        for rows, loss, tokens, logged in batches:
            run_step(part, rows, loss, tokens=tokens, **logged)
        evaluation.output = SimpleNamespace(metrics={})
    part.log({}, "eval")
    return evaluation.output.metrics.get("eval_loss"), part.trainer._metrics["eval"]


# -- weights


def test_nan_without_items_does_not_count():
    nan = {"entropy": float("nan")}
    loss, metrics = evaluate(build_part(), (2, 1.0, 0, nan), (2, 3.0, 1, {"entropy": 5.0}))
    assert loss == 2.0
    assert metrics["entropy"] == [5.0]
    _, metrics = evaluate(build_part(), (2, 1.0, 1, nan), (2, 3.0, 1, {"entropy": 5.0}))
    assert math.isnan(metrics["entropy"][0])  # with items it counts


# -- duplicate rows


def kept(process: int, rows: int, rows_per_item: int = 1, replicas: int = 1, **state: Any) -> tuple[list[int], bool]:
    """The rows that are left of a batch of the rows `0 ... rows - 1`, and whether one is no duplicate."""
    batch = {"input_ids": torch.arange(rows)[:, None], "scalar": torch.tensor(3.0), "name": "x"}
    accelerator = build_accelerator(process, **{"processes": 2} | state)
    result, has_rows = drop_duplicate_rows(accelerator, batch, rows_per_item, replicas)
    assert result["scalar"] == 3.0
    return result["input_ids"].flatten().tolist(), has_rows


LAST_BATCHES = {
    4: [([0, 1], True), ([0, 1], True)],
    3: [([0, 1], True), ([0], True)],
    2: [([0, 1], True), ([0, 1], False)],  # a batch of duplicates only runs its forward, without weight
    1: [([0], True), ([0, 1], False)],
    0: [([0, 1], True), ([0, 1], True)],  # accelerate's number for "no remainder"
    -1: [([0, 1], True), ([0, 1], True)],  # and for a dataset without a length
}


LEFT = [  # process, rows, and the state of the evaluation
    # Rows 0-2 are chosen, 3-5 rejected; of three pairs the first two are no duplicates.
    (1, 6, {"rows_per_item": 2, "remainder": 5}, [0, 1, 3, 4]),
    (1, 6, {"rows_per_item": 1, "remainder": 8}, [0, 1]),  # wrong for pairs: it drops rejected rows only
    # Processes with the same rows keep the same ones.
    (1, 2, {"processes": 4, "replicas": 2, "remainder": 3}, [0, 1]),
    (2, 2, {"processes": 4, "replicas": 2, "remainder": 3}, [0]),
    # Nothing is dropped before the last batch, nor in one process.
    (1, 2, {"remainder": 1, "is_last": False}, [0, 1]),
    (0, 2, {"remainder": 1, "processes": 1}, [0, 1]),
    (1, 2, {"remainder": 1, "processes": 2, "replicas": 2}, [0, 1]),
]


def test_rows_that_are_no_duplicates_are_left():
    found = {remainder: [kept(process, 2, remainder=remainder) for process in (0, 1)] for remainder in LAST_BATCHES}
    assert found == LAST_BATCHES
    for process, rows, state, left in LEFT:
        assert kept(process, rows, **state) == (left, True), state
    batch = {"input_ids": torch.zeros(2, 4), "patches": torch.zeros(7, 5)}  # other rows: it stays as it is
    assert drop_duplicate_rows(build_accelerator(1, 2, remainder=3), batch, 1) == (batch, True)


def test_two_processes_add_up_to_the_mean_over_all_rows():
    """Three rows with losses 1, 2 and 6: the first process has two of them, the second one and a duplicate."""
    losses = torch.tensor([[1.0, 2.0], [6.0, 1.0]])
    parts, weighted = [], []
    for process in (0, 1):
        parts.append(build_part(build_accelerator(process, 2, remainder=3)))
        rows = [True, process == 0]
        step = run_step(parts[-1], 2, losses[process][rows].mean().item())
        assert len(step.inputs["input_ids"]) == sum(rows)
        weighted.append(parts[-1]._sums["loss"])
    total, items = sum(weighted).tolist()
    assert (total / items, items) == (3.0, 3)
    assert losses.mean() != 3.0  # with the duplicate


# -- what cannot be exact


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


EVALUATIONS = [
    (2, Stream(), {}, True),
    (2, range(6), {"compute_metrics": len}, True),
    (2, range(6), {"_is_vision_dataset": True}, True),
    (2, range(8), {"compute_metrics": len}, False),  # 8 rows fill the batches of 2 processes of 2 rows
    (2, range(6), {}, False),
    (1, Stream(), {}, False),
]


def test_duplicates_that_cannot_be_dropped_are_refused():
    for processes, dataset, attributes, is_refused in EVALUATIONS:
        part = build_part(build_accelerator(processes=processes), eval_dataset=dataset, **attributes)
        with (
            pytest.raises(NotImplementedError, match="counts each row of the eval dataset once")
            if is_refused
            else nullcontext()
        ):
            part.on_init_end()
