"""What the stand-ins for kernels save, hybrids that are counted with them, and torch's count as a second opinion."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PretrainedConfig, Qwen2Config, Qwen3NextConfig

from trl_padfix.tools.counted_step import (
    StepSettings,
    _build,
    _counted,
    _counted_recurrences,
    _LiveBytes,
    _put_on_cpu,
    _run,
)
from trl_padfix.tools.kernel_stand_ins import STAND_INS
from trl_padfix.tools.model_sizes import ModelSizes


def test_a_delta_rule_keeps_what_its_kernel_saves():
    """Per token in bfloat16: normalised queries and keys, chunk rows; in float32 two factors and the summed decays."""
    T, H, D, V, E = 128, 2, 8, 4, 16
    with FakeTensorMode():
        key = torch.empty(1, T, H, D, dtype=torch.bfloat16, requires_grad=True)
        value = torch.empty(1, T, V, E, dtype=torch.bfloat16)
        g, beta = torch.empty(1, T, V), torch.empty(1, T, V, dtype=torch.bfloat16)
        with _LiveBytes([key, value, g, beta]) as live:
            out, _ = STAND_INS["torch_chunk_gated_delta_rule"](key, key, value, g=g, beta=beta)
        kept = live.now - out.numel() * 2
    assert kept == T * (2 * (2 * H * D + 64 * V) + 4 * (2 * H + V))
    assert live.peak > kept + T * 2 * (D * E * V // 64 + V * D + 2 * V * E)  # and in between states and products


@pytest.mark.slow
def test_a_hybrid_is_counted_by_its_kinds_of_layers():
    """Three delta nets and an attention; more heads of values are kept, and checkpoints are as those of attention."""
    shape = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_experts=0)
    few, many = (ModelSizes.of(Qwen3NextConfig(**shape, linear_num_value_heads=16 * n)) for n in (1, 2))
    assert few._counted_layers() == (1, 5)
    kept = [sizes.step(StepSettings()).kept_by_layer for sizes in (few, many)]
    # Of three of four layers: chunk rows, values, the output of the net before and after its norm, and its gate. With
    # what the norm keeps in float32 it is 2.8 times that, and without stand-ins, in torch's own functions, 10.8 times.
    least = 0.75 * 16 * (2 * 64 + 2 * 128 * 4)
    assert least < kept[1] - kept[0] < 3 * least
    assert few.step(StepSettings(checkpointing=True)).kept_by_layer == 4 * 64


def counts(config: PretrainedConfig, settings: StepSettings, tokens: int) -> list[tuple[int, int]]:
    """Bytes that a step keeps, and its peak, beside weights and gradients: by our count, and by torch's tracker."""
    with torch.device("meta"), _counted():
        model = _build(config, settings)
    with FakeTensorMode(), _counted(), _counted_recurrences(model):
        _put_on_cpu(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        ids, tracker = torch.zeros(1, tokens, dtype=torch.long), MemTracker()
        tracker.track_external(model)

        def total(when: str) -> int:
            return tracker.get_tracker_snapshot(when)[torch.device("cpu")]["Total"]

        with tracker:
            before = total("current")
            with torch.autocast("cpu", torch.bfloat16):
                out = model(input_ids=ids, use_cache=False, logits_to_keep=1)
            loss = out.logits.float().sum()
            del out
            kept = total("current") - before
            loss.backward()
        return [_run(model, settings, tokens), (kept, total("peak") - before)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["attention", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_torchs_tracker_counts_the_same_bytes(kind, checkpointing):
    shape = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    hybrid = Qwen3NextConfig(**shape, num_hidden_layers=4, num_experts=0)
    config = Qwen2Config(**shape, num_hidden_layers=2) if kind == "attention" else hybrid
    settings = StepSettings(checkpointing=checkpointing)
    ours, torchs = counts(config, settings, 1024)
    assert ours == torchs
    assert ours != counts(config, settings, 1025)[1]
