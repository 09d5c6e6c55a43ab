"""An error of one of two processes is raised on both, and none waits for the other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.budget_runs import make
from kit.cells import slow_but
from kit.process_errors import CELLS
from kit.processes import trained

from trl_padfix.trainers.batching import micro_batch_budget
from trl_padfix.trainers.batching.micro_batch_budget import MicroBatchBudget
from trl_padfix.trainers.batching.micro_batches import MicroBatch
from trl_padfix.trainers.process_errors import ProcessErrors


@pytest.fixture(scope="module")
def errors(tmp_path_factory, request) -> list[dict[str, str]]:
    """By training, what each of two processes raised. One launch: after an error, collectives still match."""
    tests = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["cell"] for item in tests if "errors" in item.fixturenames]
    folder = tmp_path_factory.mktemp("errors")
    trained("multi_gpu", folder, "kit.process_errors", folder, *asked, timeout=60 + 30 * len(asked))
    return [json.loads(Path(folder, f"errors-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", slow_but(["loss of a micro-batch", "collator, texts"], CELLS))
def test_an_error_of_one_process_is_raised_on_both(cell, errors):
    first, second = (of_process[cell] for of_process in errors)
    assert second.startswith(CELLS[cell])
    if not CELLS[cell]:
        assert first == second == ""
        return
    assert first.startswith("RuntimeError: Process 1 stopped, and this process would wait for it.")
    assert first.endswith(second)


@pytest.mark.parametrize(("images", "is_refused"), [([1, 0], True), ([0, 2], True), ([1, 2], False), ([0, 0], False)])
def test_a_process_without_an_image_is_an_error_on_both(images, is_refused, monkeypatch):
    for rank, count in enumerate(images):
        texts = [MicroBatch({"input_ids": torch.ones(2, 3)}, 0.5)]
        with_images = [MicroBatch({"input_ids": torch.ones(1, 3), "pixel_values": torch.ones(1, 2)}, 0.5)] * count
        monkeypatch.setattr(micro_batch_budget, "max_over_processes", lambda trainer, count: 1)
        monkeypatch.setattr(micro_batch_budget, "gather_counts", lambda trainer, count: images)
        monkeypatch.setattr(micro_batch_budget, "is_sharded", lambda trainer: True)
        padding = SimpleNamespace(task=SimpleNamespace(rows_per_item=1), part=lambda kind: SimpleNamespace(images=[1]))
        state = SimpleNamespace(global_step=4)
        accelerator = SimpleNamespace(process_index=rank, num_processes=2)
        budget = MicroBatchBudget(SimpleNamespace(padding=padding, state=state, accelerator=accelerator))
        if is_refused:
            with pytest.raises(ValueError, match=f"No row of process {images.index(0)} has an image in step 5"):
                budget._match_other_processes(texts + with_images)
        else:
            found = budget._match_other_processes(texts + with_images)
            assert len(found) == 1 + max(images)


def test_an_error_of_a_training_that_another_one_ended_is_not_raised_by_the_next(tmp_path):
    trainer = make("dpo", tmp_path, ours=True, max_steps=2)
    trainer.train()
    # A micro-batch had an error that waits for the last one of its step, and Ctrl-C ended the training before.
    errors = trainer.padding.part(ProcessErrors)
    errors._error = FloatingPointError("of the training before")
    trainer.train()
    assert errors._error is None
