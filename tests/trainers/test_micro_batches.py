"""Micro-batches: after an out-of-memory error, and where several processes compute a packed row."""

import pytest
import torch
from kit.budget_runs import BUDGET, make
from kit.loss_watchers import before_loss
from kit.trainer_runs import trajectory
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_padfix import padding_free_layout
from trl_padfix.core.parallel.layout import ranges_of_rows
from trl_padfix.trainers.batching.budget_collator import BudgetCollator
from trl_padfix.trainers.batching.measures import TextMeasure
from trl_padfix.trainers.batching.step_plan import Share, StepPlan


def test_after_an_out_of_memory_error_the_budget_is_lower_and_the_steps_are_the_same(tmp_path, monkeypatch):
    runs = {}
    for fails in (False, True):
        trainer = make("dpo", tmp_path, ours=True, max_steps=3, auto_find_batch_size=True, parity_check=False)
        steps, step = [], trainer.training_step
        failures = [2] if fails else [0]

        def training_step(*args, step=step, steps=steps):
            steps.append([])
            return step(*args)

        def look(inputs, steps=steps, failures=failures):
            if failures[0]:
                failures[0] -= 1
                steps.clear()
                raise RuntimeError("CUDA out of memory.")
            steps[-1].append(int(inputs["attention_mask"].sum()))

        trainer.training_step = training_step
        before_loss(trainer, look)
        trainer.train()
        runs[fails] = trajectory(trainer), steps
    torch.testing.assert_close(runs[True][0], runs[False][0], rtol=1e-5, atol=1e-5)
    assert [sum(step) for step in runs[True][1]] == [sum(step) for step in runs[False][1]]
    most = [max(max(step) for step in steps) for _, steps in runs.values()]
    assert most[1] < most[0] <= BUDGET["dpo"]


@pytest.mark.parametrize(("share", "cp_size"), [(False, 4), (True, 4), (False, 1)])
def test_rows_that_fit_a_process_are_not_cut_beside_longer_ones(share, cp_size):
    """Of four processes that compute a row of 4,096 tokens each has 1,024."""
    lengths = [2048, *[256] * 8]
    rows = [{"input_ids": [i] * length} for i, length in enumerate(lengths)]
    collator = BudgetCollator(
        DataCollatorForLanguageModeling(pad_token_id=0),
        TextMeasure(),
        4096,
        StepPlan(9, 9),
        share_across_micro_batches=share,
        cp_size=cp_size,
    )
    step = collator([(Share(9, list(range(9)), [0] * 9), rows)])
    masks = [batch["attention_mask"] for batch, *_ in step.micro_batches]
    found, layouts = [mask.sum(1).tolist() for mask in masks], list(map(padding_free_layout, masks))
    is_split = [ranges_of_rows(layout, 4) is None for layout in layouts]
    if cp_size == 1:
        assert (found, is_split) == ([lengths], [True])
    else:
        assert (found, is_split) == ([[256] * 8, [2048]], [False, True])
    assert sum(m.weight for m in step.micro_batches) == pytest.approx(1)
