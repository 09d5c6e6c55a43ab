"""The parity check compares gradients too, and leaves nothing of them behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.tolerance import tolerance
from torch import nn
from zoo.families import build as build_family
from zoo.models import build, inputs

import trl_padfix.core.attention.attention
import trl_padfix.core.attention.segments
from trl_padfix import ParityError, check_parity
from trl_padfix.core.anatomy import find_decoder, find_pretrained
from trl_padfix.core.mixers.row_buckets import RowBuckets


def queries_count_twice(monkeypatch) -> None:
    """The values of attention are right; of the queries the gradient is twice what it should be."""
    by_segment = trl_padfix.core.attention.attention.attend_by_segment

    def attend(attend, module, query, *states, **kwargs):
        return by_segment(attend, module, 2 * query - query.detach(), *states, **kwargs)

    monkeypatch.setattr(trl_padfix.core.attention.attention, "attend_by_segment", attend)


def shared_keys_count_once(monkeypatch) -> None:
    """The gradient of a shared key is that of one of the segments that gathered it."""

    def first(rows, order, offsets):
        return rows[order[offsets]]

    monkeypatch.setattr(trl_padfix.core.attention.segments, "sum_by_token", first)


@pytest.mark.parametrize(
    ("break_it", "dtype"), [(queries_count_twice, torch.bfloat16), (shared_keys_count_once, torch.float32)]
)
def test_right_outputs_with_wrong_gradients_fail(break_it, dtype, monkeypatch):
    model = build("qwen2", initializer_range=0.2).to(dtype)
    right = check_parity(model, inputs(), prefix_sharing=True)
    assert right.ok, right
    assert 0 < right.gradient < right.gradient_tolerance / 2
    break_it(monkeypatch)
    wrong = check_parity(model, inputs(), prefix_sharing=True)
    assert wrong.maximum == right.maximum
    assert wrong.gradient > 2 * wrong.gradient_tolerance
    with pytest.raises(ParityError, match=rf"gradient off by {wrong.gradient:.2e} of its norm .*The packed backward"):
        wrong.raise_if_failed()
    assert check_parity(model, inputs(), prefix_sharing=True, gradients=False).ok


def test_gradients_of_mixers_on_rows_are_compared(monkeypatch):
    model = build_family("bloom")
    right = check_parity(model, inputs())
    assert right.ok
    assert right.gradient is not None
    assert not right.not_compared
    scatter = RowBuckets.scatter

    def detached_once(rows, outputs):
        return scatter(rows, [x / 2 + x.detach() / 2 for x in outputs])

    monkeypatch.setattr(RowBuckets, "scatter", detached_once)
    assert check_parity(model, inputs()).gradient > 10 * right.gradient_tolerance


def adapted(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


WEIGHTS = {
    "all trained": lambda model: model,
    "all frozen": lambda model: model.requires_grad_(False),
    "LoRA": adapted,
}


def _count_steps(module: Any, args: Any) -> None:
    module.steps += module.training


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nothing_is_left_behind(weights):
    model = WEIGHTS[weights](build("qwen2", attention_dropout=0.5))
    model.gradient_checkpointing_enable()
    model.train()
    find_decoder(find_pretrained(model)).layers[1].eval()
    modes = [module.training for module in model.modules()]
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained:
        trained[0].grad = torch.ones_like(trained[0])
    model.register_buffer("steps", torch.zeros(1))
    model.register_forward_pre_hook(_count_steps)
    state = torch.get_rng_state()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    hooks = len(model.get_input_embeddings()._forward_hooks)

    report = check_parity(model, inputs(), prefix_sharing=True)

    assert report.ok, report
    assert report.gradient < tolerance(1, terms=64, depth=48)
    assert [p for p in trained[1:] if p.grad is not None] == []
    assert not trained or torch.equal(trained[0].grad, torch.ones_like(trained[0]))
    assert torch.equal(torch.get_rng_state(), state)  # dropout is off
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert len(model.get_input_embeddings()._forward_hooks) == hooks


def test_models_in_the_hands_of_fsdp_and_deepspeed_are_compared_forward_only():
    engine = type("DeepSpeedEngine", (nn.Module,), {"forward": lambda self, **kwargs: self.module(**kwargs)})()
    engine.module = build("qwen2")
    report = check_parity(engine, inputs())
    assert (report.ok, report.gradient) == (True, None)
    assert "gradients not compared: FSDP or DeepSpeed" in repr(report)
    with torch.inference_mode():
        assert "gradients not compared: torch is in inference mode" in str(check_parity(build("qwen2"), inputs()))
