"""Steps of the trainers through TRL's fused head with its kernels, against TRL's padded step in torch."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.dpo_cases import build_pairs
from kit.methods import make_trainer
from kit.rows import build_prompts, build_rows
from kit.trainer_runs import MODES, assert_same, break_mode, rows_for, run

import trl_padfix


pytest.importorskip("triton")
pytest.importorskip("trl.kernels", reason="this version of TRL has no kernels")

from simulated_gpu.interpreted import counted_kernels, trl_on_triton


pytestmark = pytest.mark.kernels

KINDS = ["DPO", "SFT", "SFT, packed", "KTO", "Reward", "GRPO", "RLOO"]


def given(kind: str) -> dict[str, Any]:
    """Arguments of a trainer and of its configuration."""
    match kind:
        case "DPO" | "Reward":
            return {"train_dataset": build_pairs(4)}
        case "KTO":
            return {"train_dataset": rows_for("KTO", build_pairs(4))}
        case "SFT" | "SFT, packed":
            packing = {"packing": True, "max_length": 24} if kind.endswith("packed") else {}
            return {"train_dataset": build_rows(4, kind="texts")} | packing
    return {"train_dataset": build_prompts(4), "num_generations": 2, "max_completion_length": 8}


def train(
    kind: str, package: Any, kernels: bool, tmp_path: Any, **config: Any
) -> tuple[torch.Tensor, Counter[str], int]:
    """The trajectory of one step, the kernels it launched, and positions whose logits were built."""
    name, logits = kind.partition(",")[0], []
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "optim": "sgd"} | given(kind) | config
    trainer = make_trainer(package, name, tmp_path / "run", **settings)
    head = trainer.model.get_output_embeddings()
    if head is not None:
        head.register_forward_hook(lambda m, i, out: logits.append(out.shape[:-1].numel() if m.training else 0))
    with trl_on_triton() if kernels else nullcontext(), counted_kernels() as launches:
        return run(trainer).trajectory(), launches, sum(logits)


@pytest.mark.parametrize("kind", slow_but(["DPO", "SFT"], KINDS))
def test_every_mode_gives_trls_step_through_its_kernels(kind, tmp_path):
    theirs, none, _ = train(kind, trl, False, tmp_path)
    padded, launches, built = train(kind, trl, True, tmp_path)
    assert not none
    assert_same(padded, theirs)
    # A reward has no head over the vocabulary.
    assert (set(launches) == {"_forward_kernel", "_backward_kernel"}) != (kind == "Reward")
    for mode in ("padding-free", "prefix sharing"):
        ours, ours_launched, ours_built = train(kind, trl_padfix, True, tmp_path, parity_check=False, **MODES[mode])
        assert_same(ours, theirs)
        assert set(ours_launched) == set(launches)
        assert ours_built <= built


@pytest.mark.parametrize("kind", slow_but(["DPO"], ["DPO", "SFT", "KTO"]))
def test_a_leaking_layout_would_be_seen(kind, tmp_path, monkeypatch):
    theirs, _, _ = train(kind, trl, False, tmp_path)
    broken = break_mode(monkeypatch, "padding-free")
    ours, _, _ = train(kind, trl_padfix, True, tmp_path, parity_check=False, **broken)
    assert not torch.allclose(ours, theirs, rtol=1e-3)
