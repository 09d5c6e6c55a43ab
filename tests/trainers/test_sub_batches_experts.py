"""The load-balancing loss of experts under a token budget is that of all rows of a step, gradients too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import trl
import trl.trainer.utils as trl_utils
from kit.budget_runs import BUDGET, COEFFICIENT, EXPERTS, assert_same, build_experts, make_experts
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.online_runs import ENDS
from kit.processes import logged
from kit.rows import build_prompts
from kit.trainer_runs import figures, trajectory
from transformers import PreTrainedModel

import trl_padfix
from trl_padfix import remove_padding
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.trainers.batching import sub_batches
from trl_padfix.trainers.batching.balancing_loss import joins_balancing_losses
from trl_padfix.trainers.batching.sub_batches import SubBatches


pytestmark = pytest.mark.skipif(not joins_balancing_losses(), reason="this TRL takes the loss from the model")
SHARING = {"prefix_sharing": True}


def trained(trainer: Any) -> torch.Tensor:
    trainer.train()
    trainer.evaluate()
    assert {"aux_loss", "eval_aux_loss"} <= {name for log in trainer.state.log_history for name in log}
    return figures(trainer.state.log_history, ["num_tokens"])


@cache
def trls(name: str, kind: str) -> torch.Tensor:
    return trained(make_experts(name, kind, "unused", ours=False))


CELLS = [(n, k, m) for n in ("sft", "dpo", "kto") for k in EXPERTS for m in ("padding-free", "sharing", "checkpoints")]
MODES = {"padding-free": {}, "sharing": SHARING, "checkpoints": {"gradient_checkpointing": True}}
FAST = [("sft", "mixtral", "padding-free"), ("dpo", "qwen3_moe", "sharing"), ("sft", "qwen3_moe", "checkpoints")]
FAST += [("kto", "mixtral", "padding-free")]


@pytest.mark.parametrize(("name", "kind", "mode"), slow_but(FAST, CELLS))
def test_a_split_step_has_trls_loss_of_experts(name, kind, mode, tmp_path):
    trainer = make_experts(name, kind, tmp_path, ours=True, parity_check=False, **MODES[mode])
    forwards = entered_tokens(trainer.model)
    assert_same(trained(trainer), trls(name, kind))
    assert max(forwards) <= BUDGET[name]
    assert len(forwards) > 4 * 3


@pytest.mark.parametrize(
    ("name", "kind"), slow_but([("GRPO", "mixtral")], [(n, k) for n in ("GRPO", "RLOO") for k in EXPERTS])
)
def test_online_trainers_split_a_step_with_trls_loss_of_experts(name, kind, tmp_path):
    runs = []
    for library in (trl_padfix, trl):
        budget = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 48}
        given = {"router_aux_loss_coef": COEFFICIENT, "beta": 0.0, "max_steps": 3, "train_dataset": build_prompts(16)}
        given |= budget if library is trl_padfix else {}
        model = build_experts(kind)
        model.generation_config.eos_token_id = ENDS
        trainer = make_trainer(library, name, tmp_path, model=model, **given)
        forwards = entered_tokens(trainer.model)
        trainer.train()
        runs.append(trajectory(trainer, "reward", "aux_loss"))
        taken = [count for count in forwards if count > 8]  # others are of generation
        assert (sum(count > 8 * 18 for count in taken) == 0) == (library is trl_padfix)
    assert_same(*runs)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["fsdp2"], ["multi_gpu", "fsdp2"]))
def test_two_processes_have_the_loss_of_their_whole_batches(strategy, tmp_path):
    found = logged(strategy, tmp_path, "kit.budget_runs", "experts")
    for name in ("sft", "dpo"):
        whole, split = found[name]
        steps = [[log for log in run["history"] if "loss" in log] for run in (whole, split)]
        names = sorted(n for n in steps[0][0] if not n.startswith(("perf/", "padfix/")))
        assert {"loss", "grad_norm", "aux_loss"} <= set(names)
        assert_same(*(torch.tensor([[log[n] for n in names] for log in logs]) for logs in steps))
        assert max(split["forwards"]) <= BUDGET[name] < max(whole["forwards"])


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_mean_of_the_losses_of_parts_is_another_one(name, tmp_path, monkeypatch):
    of_all = sub_batches.balancing_loss

    def mean(model: Any, routed: Any, masks: Any) -> Any:
        each = [of_all(model, [r], [m]) for r, m in zip(routed, masks, strict=True)]
        counts = torch.stack([mask.sum() for mask in masks])
        return (torch.stack(each) * counts).sum() / counts.sum()

    monkeypatch.setattr(sub_batches, "balancing_loss", mean)
    trainer = make_experts(name, "mixtral", tmp_path, ours=True, parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(trainer), trls(name, "mixtral"))


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
        within(runner=budget and SubBatches(budget, sharing)),
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
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(theirs.abs().max().item(), 1e-3))


def test_a_loss_of_another_kind_is_an_error(monkeypatch):
    model = build_experts("mixtral").train()
    monkeypatch.setattr(model.config, "num_experts_per_tok", 1)
    with pytest.raises(ValueError, match=r"load-balancing loss of MixtralForCausalLM is .* by their router logits"):
        gradients(model, 14, False)


def test_where_trl_takes_the_loss_from_the_model_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(trl_utils, "add_fused_lm_head")
    with pytest.raises(ValueError, match=r"takes the load-balancing loss of experts .* over a whole forward"):
        make_experts("sft", "mixtral", tmp_path, ours=True)
