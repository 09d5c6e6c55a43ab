"""A parity error of one of two processes is raised on both, and none waits for the other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.processes import trained

from trl_padfix.trainers.batching import micro_batch_budget
from trl_padfix.trainers.batching.micro_batch_budget import MicroBatchBudget
from trl_padfix.trainers.batching.micro_batches import MicroBatch


@pytest.mark.slow
def test_a_parity_error_of_one_process_is_raised_on_both(tmp_path):
    trained("multi_gpu", tmp_path, "kit.process_errors", tmp_path)
    first, second = (json.loads(Path(tmp_path, f"errors-{rank}.json").read_text()) for rank in range(2))
    assert second["True"].startswith("ParityError: ")
    assert first["True"].startswith("RuntimeError: Process 1 stopped, and this process would wait for it.")
    assert first["True"].endswith(second["True"])
    assert first["False"] == second["False"] == ""


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
