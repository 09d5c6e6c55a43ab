"""
TRL's trainers and ours on images: one trajectory, whatever the mode and the side.

The processors of some families need torchvision; their tests are skipped where there is none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import trl
from kit.cells import MATRIX
from kit.observe import entered_tokens
from kit.trainer_runs import assert_same, break_mode, trained
from kit.vision_runs import (
    NEEDS_TORCHVISION,
    PROCESSORS,
    build_captions,
    build_pairs,
    build_processor,
    build_vlm,
    make_vision_trainer,
)
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from simulated_gpu.torchvision_stand_in import torchvision_loads

import trl_padfix
from trl_padfix import (
    DataCollatorForVisionLanguageModeling,
    DataCollatorForVisionPreference,
    ParityError,
)


needs_torchvision = pytest.mark.skipif(not torchvision_loads(), reason="its video processor needs torchvision")
FAMILIES = [
    pytest.param(family, marks=needs_torchvision if family in NEEDS_TORCHVISION else ()) for family in PROCESSORS
]
DATA = {"DPO": build_pairs, "SFT": build_captions}
MODES = {
    "padded, left": {"padding_side": "left"},
    "padding-free, left": {"padding_free": True, "padding_side": "left"},
    "prefix sharing, right": {"padding_free": True, "prefix_sharing": True},
}
IMAGES = (2, 0, 1)
"""Images of the examples, by turns."""


def build_trainer(library: Any, kind: str, family: str, tmp_path: Any, **given: Any) -> Any:
    """A trainer of TRL's or of ours on ragged examples with two images, one and none."""
    rows = {"train_dataset": DATA[kind](9, IMAGES), "eval_dataset": DATA[kind](3, IMAGES, seed=1)}
    given = {"max_steps": 2, "per_device_train_batch_size": 3} | rows | given
    return make_vision_trainer(library, kind, family, tmp_path, **given)


@cache
def trls(kind: str, family: str) -> torch.Tensor:
    return trained(build_trainer(trl, kind, family, "unused"))


FAST = [("DPO", "prefix sharing, right"), ("SFT", "padding-free, left"), ("SFT", "padded, left")]
NIGHTLY = [("SFT", "padding-free, left"), ("DPO", "prefix sharing, right"), ("DPO", "prefix sharing, right")]
CELLS = [  # each family in a fast cell and in a slow one, by turns
    pytest.param(*param.values, *cells[i % len(cells)], marks=[*param.marks, *marks])
    for i, param in enumerate(FAMILIES)
    for cells, marks in ((FAST, ()), (NIGHTLY, MATRIX))
]


@pytest.mark.parametrize(("family", "kind", "mode"), CELLS)
def test_training_on_images_is_trls(family, kind, mode, tmp_path):
    trainer = build_trainer(trl_padfix, kind, family, tmp_path, **MODES[mode])
    computed = entered_tokens(trainer.model.get_decoder())
    assert_same(trained(trainer), trls(kind, family))

    batches = list(trainer.get_eval_dataloader())
    log = trainer.state.log_history[0]
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["attention_mask"].numel() for batch in batches)
    last = computed[-len(batches) :]
    if mode.startswith("padded"):
        assert sum(last) == padded
        assert "padfix/pad_fraction" not in log
    else:
        shares = sum(last) < real
        if not mode.startswith("prefix"):
            assert sum(last) == real
        elif kind == "DPO" or family != "llava_next":  # its rows are long, and what these share does not pay
            assert shares
        assert log["padfix/pad_fraction"] > 0
        assert (log["padfix/shared_fraction"] > 0) == shares


@pytest.mark.parametrize(("kind", "mode"), [("DPO", "padding-free"), ("SFT", "prefix sharing")])
def test_a_leak_bends_the_trajectory_and_is_found_by_the_parity_check(kind, mode, monkeypatch, tmp_path):
    config = break_mode(monkeypatch, mode)
    monkeypatch.setattr("trl_padfix.core.call.images.token_keys", lambda call, shape: None)
    trainer = build_trainer(trl_padfix, kind, "llava", tmp_path, parity_check=False, **config)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(trainer), trls(kind, "llava"), atol=1e-4, rtol=1e-3)
    with pytest.raises(ParityError):
        build_trainer(trl_padfix, kind, "llava", tmp_path, **config).train()


@needs_torchvision
@pytest.mark.parametrize(("side", "padding_free"), [("right", False), ("left", True)])
def test_qwen2_5_vl_evaluates_under_flash_attention_whatever_the_side(side, padding_free, tmp_path):
    # ms-swift's users met "... batched generation with padding_side='right' ..." in the evaluation of a fine-tuning.
    with flash_attention_stand_in() as calls:
        trainer = build_trainer(
            trl_padfix,
            "SFT",
            "qwen2_5_vl",
            tmp_path,
            model=build_vlm("qwen2_5_vl", build_processor("qwen2_5_vl"), "flash_attention_2"),
            padding_side=side,
            padding_free=padding_free,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=4,
        )
        trainer.train()
        assert calls
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    expected = build_trainer(trl, "SFT", "qwen2_5_vl", tmp_path, eval_strategy="steps", eval_steps=1)
    expected.train()
    theirs = [log["eval_loss"] for log in expected.state.log_history if "eval_loss" in log]
    assert losses == pytest.approx(theirs, rel=1e-4)


# -- collators

BY_TURNS = [("llava", "DPO"), ("idefics3", "SFT"), pytest.param("qwen2_5_vl", "SFT", marks=needs_torchvision)]


def collated(kind: str, side: str, family: str = "idefics3", **settings: Any) -> dict[str, torch.Tensor]:
    collator = {"DPO": DataCollatorForVisionPreference, "SFT": DataCollatorForVisionLanguageModeling}[kind]
    return collator(build_processor(family), padding_side=side, **settings)(list(DATA[kind](4, IMAGES)))


@pytest.mark.parametrize(("family", "kind"), BY_TURNS)
def test_both_sides_hold_the_same_rows(family, kind):
    right, left = (collated(kind, side, family) for side in ("right", "left"))
    assert right.keys() == left.keys()
    moved = [name for name, value in right.items() if value.shape == right["input_ids"].shape]
    assert {"input_ids", "attention_mask"} < set(moved)
    assert ("mm_token_type_ids" in moved) == family.startswith("qwen")
    rooms = right["attention_mask"].shape[1] - right["attention_mask"].sum(1)
    assert rooms.max() > 0
    for name, value in right.items():
        rows = [row.roll(int(room)) for row, room in zip(value, rooms, strict=True)] if name in moved else value
        rows = torch.stack(rows) if name in moved else rows
        if name != "labels":
            assert torch.equal(left[name], rows), name
    assert (left["attention_mask"][:, -1] == 1).all()
    if kind == "SFT":
        first = left["attention_mask"].argmax(1)
        assert (left["labels"].gather(1, first[:, None])[first > 0] == -100).all()
