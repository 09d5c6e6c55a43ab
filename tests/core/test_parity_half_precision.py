"""The parity check in half precision: its limit is measured, and one foreign token is beyond it."""

from __future__ import annotations

import pytest
import torch
from kit.cells import slow_but
from simulated_gpu.simulated_cuda import to_simulated
from zoo.gpu_models import build, pairs, second_row_sees_the_first

import trl_padfix.core.call.layout_of as batches
import trl_padfix.core.parity.check as parity
from trl_padfix import check_parity


@pytest.mark.parametrize(
    ("initializer", "layers", "precision"),
    slow_but(
        [(0.08, 2, "autocast")],
        [(0.02, 2, "bf16"), (0.08, 2, "autocast"), (0.2, 4, "fp16"), (0.02, 24, "bf16"), (0.08, 24, "autocast")],
    ),
)
def test_half_precision_tells_one_foreign_token_from_rounding(gpu, initializer, layers, precision, monkeypatch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[precision]
    model = build(layers, dtype, initializer_range=initializer, vocab_size=1024, hidden_size=128)
    ids, mask = (to_simulated(x) for x in pairs(6, columns=120, common=60))

    def check(sharing: bool = False):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            batch = {"input_ids": ids, "attention_mask": mask}
            return check_parity(to_simulated(model), batch, prefix_sharing=sharing)

    for sharing in (False, True):
        right = check(sharing)
        assert right.ok, right
        assert right.mean <= 1.3 * right.rounding  # far below the limit of 3 times
        assert f"where two padded forwards differ by {right.rounding:.2e}" in str(right)
    assert len(gpu.varlen) == 2 * layers
    right_layout = batches.padding_free_layout
    monkeypatch.setattr(batches, "padding_free_layout", lambda mask: second_row_sees_the_first(right_layout(mask)))
    wrong = check()
    assert not wrong.ok, wrong
    assert min(wrong.mean / right.mean, wrong.maximum / right.maximum) > 4


@pytest.mark.parametrize(("setting", "dtype"), [("tf32", torch.float16), ("ieee", torch.float32)])
def test_tf32_is_read_however_it_was_set(gpu, setting, dtype, monkeypatch):
    batch = dict(zip(("input_ids", "attention_mask"), map(to_simulated, pairs(4)), strict=True))
    model, before = to_simulated(build()), torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = setting  # what `tf32=True` sets; `allow_tf32` cannot be read from then on
        report = check_parity(model, batch)
        if setting == "tf32":
            monkeypatch.setattr(parity, "multiplies_in_tf32", lambda: torch.backends.cuda.matmul.allow_tf32)
            with pytest.raises(RuntimeError):
                check_parity(model, batch)
    finally:
        torch.backends.fp32_precision = before
    assert (report.dtype, report.ok) == (dtype, True)
