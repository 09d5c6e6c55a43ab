"""
Evaluations: TRL's metrics, whatever the batch size.

Those that are compared with TRL's are one batch: TRL's metrics are means over batches, ours over tokens.
"""

import pytest
import torch
from accelerate import Accelerator
from kit.rows import build_pairs, build_rows
from kit.sft_cases import EXACT, NEWEST, evaluated
from kit.tolerance import CONTROL, tolerance
from kit.trainer_runs import MODES, SIDED_MODES
from torch.utils._python_dispatch import TorchDispatchMode


ROUNDING = tolerance(1.0, terms=64, depth=2 * 8 * 2)
METRICS = {
    "SFT": ["loss", "mean_token_accuracy", *(["entropy"] if NEWEST else [])],
    "DPO": ["loss", "rewards/margins", "rewards/chosen", "rewards/accuracies", "logps/rejected"]
    + (["entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy"] if NEWEST else []),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("SFT", "padded, left"), ("DPO", "prefix sharing, right")],
)
def test_any_evaluation_batch_size_gives_the_same_metrics(kind, mode, makers):
    make, rows = makers(kind), {"SFT": build_rows, "DPO": build_pairs}[kind](21, 3)

    def metrics(trainer_class, size, config):
        trainer = make(trainer_class, config | {"per_device_eval_batch_size": size}, eval_dataset=rows)
        found = evaluated(trainer)
        return {name: found[f"eval_{name}"] for name in METRICS[kind]}

    one_batch = metrics(make.method.theirs, 64, {})
    for size in (1, 8):
        assert metrics(None, size, SIDED_MODES[mode] | EXACT) == pytest.approx(one_batch, rel=ROUNDING, abs=ROUNDING)
    assert metrics(make.method.theirs, 8, {}) != pytest.approx(one_batch, abs=CONTROL * ROUNDING)


def test_packed_rows_that_processes_repeat_and_that_cannot_be_left_out_are_refused(make, monkeypatch):
    """Two processes repeat rows in the last batches, and would count them twice."""
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    config = EXACT | {"per_device_eval_batch_size": 8, "packing": True, "max_length": 48}
    with pytest.raises(NotImplementedError, match="eval dataset once, and 2 processes"):
        make(config=config, eval_dataset=build_rows(21, 3))


class LogitsSized(TorchDispatchMode):
    """Whether something of `(B, L, V)` was made."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == 40:
            self.seen = True
        return out


@pytest.mark.skipif(not NEWEST, reason="TRL computes its loss from logits")
def test_an_evaluation_of_the_loss_makes_no_logits(make):
    trainer = make(config=MODES["padding-free"] | {"parity_check": False})
    with LogitsSized() as logits:
        trainer.evaluate()
    assert not logits.seen
    with LogitsSized() as logits, torch.no_grad():
        trainer.model(torch.tensor([[1, 2]]))
    assert logits.seen
