"""The load-balancing loss of experts under a token budget is that of all rows of a step, gradients too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from kit.budget_runs import BUDGETS, EXPERTS, assert_same, build_experts, figures_of, make
from kit.processes import logged
from kit.tolerance import assert_close
from packaging.version import Version
from transformers import PreTrainedModel

import trl_padfix
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


def test_the_mean_of_the_losses_of_parts_is_another_one(tmp_path, monkeypatch):
    of_all = sub_batches.balancing_loss

    def mean(model: Any, routed: Any, masks: Any) -> Any:
        each = [of_all(model, [r], [m]) for r, m in zip(routed, masks, strict=True)]
        counts = torch.stack([mask.sum() for mask in masks])
        return (torch.stack(each) * counts).sum() / counts.sum()

    found = []
    for wrong in (False, True):
        with monkeypatch.context() as patch:
            if wrong:
                patch.setattr(sub_batches, "balancing_loss", mean)
            given = {"model": build_experts("mixtral"), "router_aux_loss_coef": 0.5}
            found.append(figures_of(make(trl_padfix, "SFT", tmp_path, budget=True, **given)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(*found, factor=10)


def gradients(model: PreTrainedModel, budget: int | None, sharing: bool) -> tuple[Any, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 39, (6, 14), generator=draw)
    ids[3:, :8] = ids[:3, :8]
    mask = torch.ones_like(ids)
    for row, end in enumerate([14, 12, 9, 13, 14, 10]):
        mask[row, end:] = 0
    model.zero_grad()
    with (
        remove_padding(model, prefix_sharing=sharing),
        attach_runner_patch(model),
        within(runner=budget and SubBatches(partial(RowSplitter, budget, sharing))),
    ):
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        (output.logits[mask.bool()].log_softmax(-1)[:, 3].mean() + output.aux_loss).backward()
    real = mask.flatten().bool()
    values = [output.aux_loss.detach(), *(layer[real].detach() for layer in output.router_logits)]
    return values, [p.grad.clone() if p.grad is not None else torch.zeros(1) for p in model.parameters()]


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_sub_batches_have_the_router_logits_and_gradients_of_the_whole_forward(kind, sharing):
    model = build_experts(kind).train()
    whole = gradients(model, None, sharing)
    for budget in (14, 24, 40):
        for found, expected in zip(gradients(model, budget, sharing), whole, strict=True):
            size = max(float(tensor.norm()) for tensor in expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert_close(ours, theirs, terms=64, depth=32, size=size)


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
    with pytest.raises(ValueError, match=r"load-balancing loss of MixtralForCausalLM is .* but their router logits"):
        gradients(model, 14, False)
