"""Micro-batches after an out-of-memory error: a lower budget, and the same steps."""

import torch
from kit.budget_runs import BUDGET, make
from kit.loss_watchers import before_loss
from kit.trainer_runs import trajectory


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
