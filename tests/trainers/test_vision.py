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
import trl.trainer.kto_trainer as trl_kto
from datasets import Dataset
from kit import trainer_runs
from kit.cells import MATRIX
from kit.observe import accept_hooks, entered_tokens, has_cache
from kit.trainer_runs import SIDED_MODES, assert_other, assert_same, break_mode, trained
from kit.vision_runs import (
    NEEDS_TORCHVISION,
    PROCESSORS,
    build_captions,
    build_pairs,
    build_processor,
    build_vlm,
    make_vision_trainer,
)
from simulated_gpu.torchvision_stand_in import torchvision_loads

import trl_padfix
from trl_padfix import DataCollatorForVisionLanguageModeling, DataCollatorForVisionPreference, ParityError


needs_torchvision = pytest.mark.skipif(not torchvision_loads(), reason="its video processor needs torchvision")
FAMILIES = [
    pytest.param(family, marks=needs_torchvision if family in NEEDS_TORCHVISION else ()) for family in PROCESSORS
]
DATA = {"DPO": build_pairs, "SFT": build_captions}
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
    trainer = build_trainer(trl_padfix, kind, family, tmp_path, **SIDED_MODES[mode])
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
    monkeypatch.setattr("trl_padfix.core.call.layout_of.token_keys", lambda call, shape: [])
    trainer = build_trainer(trl_padfix, kind, "llava", tmp_path, parity_check=False, **config)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(trainer), trls(kind, "llava"), atol=1e-4, rtol=1e-3)
    with pytest.raises(ParityError):
        build_trainer(trl_padfix, kind, "llava", tmp_path, **config).train()


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


# -- GRPO, RLOO, distillation and KTO on images: TRL's trajectory, generation included, whatever the mode

images_without_pairs = pytest.mark.skipif(
    not hasattr(trl_kto, "DataCollatorForVisionUnpairedPreference"), reason="this TRL takes no images in KTO"
)
UNPAIRED = (1, 2, 0)
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def reward_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart by their tokens."""
    return [sum(7 * i % 11 for i in ids) / 44 for ids in completion_ids]


def build_data(kind: str, count: int) -> Dataset:
    # TRL's distillation takes no row without images beside rows with some.
    data = build_captions(count, UNPAIRED[:2] if kind == "Distillation" else UNPAIRED)
    if kind != "KTO":
        return data.remove_columns("completion")
    return data.add_column("label", [i % 3 != 0 for i in range(count)])


def build_unpaired(library: Any, kind: str, family: str, tmp_path: Any, **given: Any) -> Any:
    given = {"max_steps": 2, "train_dataset": build_data(kind, 9)} | given
    if kind == "KTO":
        given = {"per_device_train_batch_size": 3} | given
    else:
        given = {"max_completion_length": 6} | ({} if kind == "Distillation" else {"beta": 0.0}) | given
        if family == "gemma3":
            given |= {"temperature": 8.0}  # its tiny model is so sure that all completions of a prompt are one
        if kind == "Distillation":
            given["teacher_model"] = build_vlm(family, build_processor(family))
            given["teacher_model"].lm_head.weight.data.mul_(2)
        else:
            given["reward_funcs"] = reward_tokens
    return make_vision_trainer(library, kind, family, tmp_path, **given)


def trajectory(trainer: Any) -> torch.Tensor:
    # Of distillation `entropy` is a mean over micro-batches, which a budget and shared prompts make other ones.
    reward = {"KTO": "kl", "Distillation": "num_tokens"}.get(type(trainer).__name__.removesuffix("Trainer"), "reward")
    return trained(trainer, reward)


@cache
def trls_unpaired(kind: str, family: str, scattered: bool) -> torch.Tensor:
    return trajectory(build_unpaired(trl, kind, family, "unused", **(SCATTERED if scattered else {})))


UNPAIRED_CELLS = [
    ("llava", "GRPO", "prefix sharing"),
    ("llava", "RLOO", "padding-free"),
    ("llava", "KTO", "prefix sharing"),
    ("llava", "Distillation", "padding-free"),
    pytest.param("gemma3", "GRPO", "prefix sharing", marks=pytest.mark.slow),
    pytest.param("gemma3", "KTO", "padding-free", marks=pytest.mark.slow),
]


@images_without_pairs
@pytest.mark.parametrize(("family", "kind", "mode"), UNPAIRED_CELLS)
def test_training_on_images_without_pairs_is_trls(family, kind, mode, tmp_path):
    scattered = kind != "KTO"
    config = trainer_runs.MODES[mode] | (SCATTERED if scattered else {})
    expected = trls_unpaired(kind, family, scattered)  # before the trainer is built, which seeds what is drawn
    trainer = build_unpaired(trl_padfix, kind, family, tmp_path, **config)
    assert_same(trajectory(trainer), expected, atol=1e-4)
    assert (expected[:, 1] > 0).all()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    assert log["padfix/pad_fraction"] > 0
    assert (log["padfix/shared_fraction"] > 0) == (mode == "prefix sharing")


@images_without_pairs
@pytest.mark.parametrize(("kind", "mode"), [("GRPO", "prefix sharing"), ("KTO", "padding-free")])
def test_a_token_budget_splits_rows_with_images(kind, mode, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trl_padfix")
    expected = trls_unpaired(kind, "llava", kind != "KTO")
    config = {"max_tokens_per_batch": 64, "parity_check": False} | (SCATTERED if kind != "KTO" else {})
    trainer = build_unpaired(trl_padfix, kind, "llava", tmp_path, **config, **trainer_runs.MODES[mode])
    computed = []
    decoder = trainer.model.get_decoder()
    decoder.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: None if has_cache(kwargs) else computed.append(args[0].shape[:2].numel()),
        with_kwargs=True,
    )
    accept_hooks(trainer.model)
    assert_same(trajectory(trainer), expected, atol=1e-4)
    assert 0 < max(computed) <= 64
    assert len(computed) > 4
    assert ("sub-batches: images are not compared" in caplog.text) == (mode == "prefix sharing")
    config |= break_mode(monkeypatch, mode)
    monkeypatch.setattr("trl_padfix.core.call.layout_of.token_keys", lambda call, shape: [])
    assert_other(trajectory(build_unpaired(trl_padfix, kind, "llava", tmp_path, **config)), expected, atol=1e-4)
