"""The load-balancing loss of experts under a token budget is that of all rows of a step, gradients too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from kit.budget_runs import BUDGETS, assert_same, build_experts
from kit.processes import logged
from kit.tolerance import assert_close
from packaging.version import Version

from trl_padfix import remove_padding
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.trainers.batching import sub_batches
from trl_padfix.trainers.batching.row_splits import RowSplitter
from trl_padfix.trainers.batching.sub_batches import SubBatches


@pytest.mark.matrix
@pytest.mark.slow
def test_two_processes_have_the_loss_of_their_whole_batches(tmp_path):
    found = logged("fsdp2", tmp_path, "kit.budget_runs", "experts")
    for name in ("SFT", "DPO"):
        whole, split = found[name]
        steps = [[log for log in run["history"] if "loss" in log] for run in (whole, split)]
        names = sorted(n for n in steps[0][0] if not n.startswith(("perf/", "padfix/")))
        assert {"loss", "grad_norm", "aux_loss"} <= set(names)
        assert_same(*(torch.tensor([[log[n] for n in names] for log in logs]) for logs in steps))
        assert max(split["forwards"]) <= BUDGETS[name] < max(whole["forwards"])


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("num_items", [None, 40])
def test_a_loss_without_logits_has_the_balancing_loss_of_all_rows_once(num_items, counts, monkeypatch):
    """
    TRL up to 1.15 and Liger compute the loss within the head. TRL's counts tokens beside it, and reads the weight from
    the configuration under transformers 5.
    """
    model = build_experts("mixtral").eval()
    weights = {"model": 50.0, "config": 20.0}
    model.router_aux_loss_coef, model.config.router_aux_loss_coef = weights.values()
    added = weights["config"] - weights["model"] if counts and Version(transformers.__version__).major > 4 else 0.0
    ids = torch.randint(2, 39, (6, 14), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 30, -100)}
    call |= {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    forward = model.forward

    def head(**given: Any) -> Any:
        output = forward(**given)
        hits = output.logits[:, :-1].argmax(-1) == given["labels"][:, 1:]
        output["loss"] = output.loss + added * output.aux_loss
        output |= {"num_correct_tokens": hits.sum()} if counts else {}
        output["logits"] = None
        return output

    def figures(runner: SubBatches | None) -> torch.Tensor:
        with remove_padding(model), attach_runner_patch(model), within(runner=runner), torch.no_grad():
            output = model(**call, use_cache=False, output_router_logits=True)
        return torch.stack([output.loss, output.num_correct_tokens if counts else ids.new_ones(()), output.aux_loss])

    monkeypatch.setattr(model, "forward", head)
    split = figures(SubBatches(partial(RowSplitter, 14, False)))
    assert_close(split, figures(None), terms=64, depth=32)
    monkeypatch.setattr(sub_batches, "_balancing_term", lambda model, output: 0.0)
    wrong = figures(SubBatches(partial(RowSplitter, 14, False)))
    assert abs(wrong[0] - split[0]) > 0.1
    assert wrong[1] == split[1] > 0


def test_a_loss_of_another_kind_is_an_error(monkeypatch):
    model = build_experts("mixtral").train()
    monkeypatch.setattr(model.config, "num_experts_per_tok", 1)
    runner = SubBatches(partial(RowSplitter, 14, False))
    call = {"input_ids": (ids := torch.arange(2, 34).view(4, 8)), "attention_mask": torch.ones_like(ids)}
    refused = pytest.raises(ValueError, match=r"load-balancing loss of Mixtral\w+ is .* but their router logits")
    with remove_padding(model), attach_runner_patch(model), within(runner=runner), refused:
        model(**call, use_cache=False, output_router_logits=True)
