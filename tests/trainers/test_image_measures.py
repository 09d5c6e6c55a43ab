"""
Batches by token budget of rows with images: the trajectory of fixed batches, whatever the split.

TRL's own trainer with all rows of an optimizer step in one forward is what every split is compared with.
"""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import trl
from accelerate import PartialState
from kit.budget_runs import (
    IMAGE_BATCH,
    IMAGE_BUDGETS,
    IMAGE_ROWS,
    IMAGE_STEPS,
    IN_ORDER,
    assert_same,
    make_on_images,
    partly_pictured,
    pictured,
    watched,
)
from kit.cells import every_second, once_each, slow_but
from kit.observe import entered_tokens
from kit.processes import logged
from kit.trainer_runs import figures
from kit.vision_runs import NEEDS_TORCHVISION, PROCESSORS, build_captions, build_pairs, build_processor, build_vlm
from simulated_gpu.torchvision_stand_in import torchvision_loads
from transformers import LlavaForConditionalGeneration

import trl_padfix
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.trainers.batching import micro_batch_budget, micro_batches
from trl_padfix.trainers.batching.image_measures import measure_images
from trl_padfix.trainers.batching.step_plan import StepPlan
from trl_padfix.trainers.batching.sub_batches import SubBatches
from trl_padfix.trainers.data.image_rows import select_rows, split_images


needs_torchvision = pytest.mark.skipif(not torchvision_loads(), reason="its video processor needs torchvision")
FAMILIES = [
    pytest.param(family, marks=needs_torchvision if family in NEEDS_TORCHVISION else ()) for family in PROCESSORS
]
KINDS = ("DPO", "SFT")
SHARING = {"prefix_sharing": True}


def trained(trainer: Any) -> torch.Tensor:
    """The figures of a training and an evaluation."""
    trainer.train()
    trainer.evaluate()
    return figures(trainer.state.log_history)


@cache
def trls(kind: str, family: str, **given: Any) -> torch.Tensor:
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return trained(make_on_images(trl, kind, family, "unused", **given))


def longest(kind: str, family: str) -> int:
    """Tokens of the longest row of the train dataset: a pair, or an example."""
    trainer = make_on_images(trl_padfix, kind, family, "unused", padding_free=True)
    return max(int(trainer.data_collator([row])["attention_mask"].sum()) for row in trainer.train_dataset)


CASES = {
    "padding-free": {},
    "sharing, left": SHARING | {"padding_side": "left"},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 1},
    "another budget": {"budget": 1.4},
}


AVERAGES_TOKENS = {"qwen2_5_vl", "qwen3_vl"}
"""Families whose SFT is refused where a step has several forwards of TRL's."""


@pytest.mark.parametrize(
    ("kind", "case", "family"),
    every_second(once_each(product(KINDS, CASES), sorted(PROCESSORS, key=lambda family: family in NEEDS_TORCHVISION))),
)
def test_any_split_of_rows_with_images_gives_the_trajectory_of_fixed_batches(family, kind, case, tmp_path):
    if family in NEEDS_TORCHVISION and not torchvision_loads():
        pytest.skip("its video processor needs torchvision")
    if kind == "SFT" and family in AVERAGES_TOKENS and case == "accumulation":
        pytest.skip("the loss of a micro-batch is a mean over its tokens")
    config = dict(CASES[case])
    budget = int(longest(kind, family) * config.pop("budget", 1))
    given = {"padding_free": True, "max_tokens_per_batch": budget, "parity_check": False, **config}
    trainer = make_on_images(trl_padfix, kind, family, tmp_path, **given)
    computed = entered_tokens(trainer.model.get_decoder())
    steps = watched(trainer)
    seen = len(computed)
    trainer.evaluate()
    assert_same(figures(trainer.state.log_history), trls(kind, family))
    rows = 2 if kind == "DPO" else 1
    assert all(sum(map(len, step)) == rows * IMAGE_BATCH for step in steps)
    assert all(len(step) > 1 for step in steps)
    if not config.get("prefix_sharing"):
        assert max(sum(batch) for step in steps for batch in step) <= budget
        assert sum(computed[:seen]) == sum(sum(batch) for step in steps for batch in step)
    assert max(computed[:seen]) <= budget
    evaluated = [int(b["attention_mask"].sum(1).max()) for b in trainer.get_eval_dataloader()]
    assert max(computed[seen:]) <= max(budget, *evaluated)
    # Its four rows (pairs) are one batch, and none of it needs more than the budget.
    assert len(computed) - seen > len(evaluated)


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_do_not_give_the_trajectory_of_fixed_batches(kind, tmp_path, monkeypatch):
    budget = longest(kind, "llava")
    trainer = make_on_images(trl_padfix, kind, "llava", tmp_path, padding_free=True, max_tokens_per_batch=budget)
    rising = staticmethod(lambda rows, of_step: np.arange(1, rows + 1) * 2 / rows / (rows + 1))
    monkeypatch.setattr(StepPlan, "weights", rising)
    monkeypatch.setattr(trainer, "_get_num_items_in_batch", lambda *args: None)
    found = trained(trainer)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(found, trls(kind, "llava"))


@pytest.mark.parametrize("case", slow_but(["padding-free"], ["padding-free", "sharing, left"]))
def test_a_loss_that_is_a_mean_over_the_tokens_of_a_forward_is_split_by_tokens(case, tmp_path, monkeypatch):
    """As transformers has it for Qwen2.5-VL and Qwen3-VL, where TRL does not count the tokens of a step."""
    monkeypatch.setattr(LlavaForConditionalGeneration, "accepts_loss_kwargs", False, raising=False)
    config = {"max_tokens_per_batch": longest("SFT", "llava"), "padding_free": True, **CASES[case]}
    runs = []
    for library, given in ((trl_padfix, config), (trl, {})):
        trainer = make_on_images(library, "SFT", "llava", tmp_path, **given)
        assert not trainer.model_accepts_loss_kwargs
        steps = watched(trainer)
        trainer.evaluate()
        runs.append(figures(trainer.state.log_history))
        assert all(len(step) > 1 for step in steps) == (library is trl_padfix)
    assert_same(*runs)
    monkeypatch.setattr(trl_padfix.SFTTrainer.task_class, "loss_is_token_mean", lambda task: False)
    found = trained(make_on_images(trl_padfix, "SFT", "llava", tmp_path, **config))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(found, runs[1])


def test_means_over_the_tokens_of_several_forwards_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(LlavaForConditionalGeneration, "accepts_loss_kwargs", False, raising=False)
    config = {"padding_free": True, "max_tokens_per_batch": 500, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match=r"of LlavaForConditionalGeneration is a mean over .* has several of them"):
        make_on_images(trl_padfix, "SFT", "llava", tmp_path, **config)


# The tokens of a row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_cost_what_their_batches_hold(family, kind, tmp_path):
    trainer = make_on_images(trl_padfix, kind, family, tmp_path, padding_free=True)
    data, collator = trainer.train_dataset, trainer.data_collator
    measure, shared = (measure_images(data, collator, sharing=sharing) for sharing in (False, True))
    batch = collator(list(data))
    assert measure.costs(data).total() == batch["attention_mask"].sum()
    assert measure.longest(data).max() == batch["attention_mask"].sum(1).max()
    assert measure.images.tolist() == [len(images) for images in data["images"]]
    measure.check(range(IMAGE_ROWS), batch)
    if kind == "DPO":  # a prompt counts once
        prompts = (batch["attention_mask"].bool() & (batch["completion_mask"] == 0))[:IMAGE_ROWS].sum(1)
        assert (measure.costs(data).tokens - shared.costs(data).tokens).tolist() == prompts.tolist()


def test_processes_count_the_tokens_of_a_part_each(monkeypatch):
    collator = trl_padfix.DataCollatorForVisionLanguageModeling(build_processor("llava"))
    data = build_captions(7, (2, 0, 1))
    whole = measure_images(data, collator)
    parts: list[Any] = []
    gather = "trl_padfix.trainers.batching.image_measures.gather_object"
    with monkeypatch.context() as patch:
        patch.setattr(gather, lambda rows: parts.extend(rows) or parts)
        for process in range(3):
            found = measure_images(data, collator, processes=(process, 3))
    assert found.sequence_tokens.tolist() == whole.sequence_tokens.tolist()


def test_rows_that_change_their_length_are_an_error(tmp_path):
    data = build_captions(6)
    calls = iter(range(10**6))

    def drawn(rows: dict[str, Any]) -> dict[str, Any]:
        """Longer with every look."""
        prompts = [[{"role": "user", "content": "w3 " * (3 + next(calls))}] for _ in rows["images"]]
        return {**rows, "prompt": prompts}

    given = {"padding_free": True, "max_tokens_per_batch": 500, "train_dataset": data.with_transform(drawn)}
    trainer = make_on_images(trl_padfix, "SFT", "llava", tmp_path, **given)
    with pytest.raises(ValueError, match=r"Row \d of the train dataset has \[\d+\] tokens, and had \[\d+\] before"):
        trainer.train()


def test_a_row_that_no_forward_could_hold_is_an_error_before_the_first_step(tmp_path):
    trainer = make_on_images(trl_padfix, "SFT", "llava", tmp_path, padding_free=True, max_tokens_per_batch=20)
    with pytest.raises(ValueError, match="have a sequence of more tokens than `max_tokens_per_batch=20`"):
        trainer.train()


# Batches that are cut, and not


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["fsdp2"], ["multi_gpu", "fsdp2"]))
def test_two_processes_give_the_trajectory_of_one(strategy, tmp_path):
    found = logged(strategy, tmp_path, "kit.budget_runs", "images")
    theirs = {}
    for name in IMAGE_BUDGETS:
        trainer = make_on_images(trl, name, "llava", tmp_path, train_dataset=pictured(name), eval_dataset=None)
        trainer.train()
        theirs[name] = figures(trainer.state.log_history)
        assert_same(figures(found[name]["history"]), theirs[name])
        mixed = make_on_images(trl, name, "llava", tmp_path, train_dataset=partly_pictured(name), **IN_ORDER)
        mixed.train()
        assert_same(figures(found[f"{name}, some with images"]["history"]), figures(mixed.state.log_history))
    first, second = torch.tensor([found[name]["micro_batches"] for name in IMAGE_BUDGETS]).unbind(1)
    assert (first != second).any()  # some computed micro-batches again, without a weight
    assert min(first.min(), second.min()) > 1
    if strategy == "fsdp2":  # TRL 1.16 takes the gradient of the LM head for that of one process; docs/many_gpus.md
        with pytest.raises(AssertionError, match="not close"):
            assert_same(figures(found["TRL's DPO"]["history"]), theirs["DPO"])


def test_a_process_with_fewer_micro_batches_computes_one_with_images_again_without_a_weight(tmp_path, monkeypatch):
    to_equal_count = micro_batches.to_equal_count
    monkeypatch.setattr(
        micro_batch_budget, "to_equal_count", lambda batches, count, rows: to_equal_count(batches, count + 2, rows)
    )
    data = build_pairs(IMAGE_ROWS, (2, 1, 1))
    theirs = trained(make_on_images(trl, "DPO", "llava", tmp_path, train_dataset=data))
    config = {"padding_free": True, "max_tokens_per_batch": 10**6, "train_dataset": data}
    trainer = make_on_images(trl_padfix, "DPO", "llava", tmp_path, **config)
    steps = watched(trainer)
    trainer.evaluate()
    assert [[len(batch) for batch in step] for step in steps] == [[2 * IMAGE_BATCH] * 3] * IMAGE_STEPS
    assert_same(figures(trainer.state.log_history), theirs)


def test_a_text_is_cut_before_images_are_repeated():
    text = {"input_ids": torch.arange(4).view(4, 1)}
    image = {"input_ids": torch.arange(6).view(6, 1), "pixel_values": torch.ones(6, 3, 2, 2)}
    given = [micro_batches.MicroBatch(image, 0.6), micro_batches.MicroBatch(text, 0.4)]
    found = micro_batches.to_equal_count(given, 6, rows_per_item=1)
    assert [(len(batch["input_ids"]), weight) for batch, weight, _ in found] == [
        (6, 0.6), (1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1), (1, 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "family", [param for param in FAMILIES if param.values[0] in ("llava", "idefics3", "llava_next", "qwen2_vl")]
)
def test_a_forward_is_cut_if_its_images_are_numbered_by_row(family, caplog):
    PartialState()  # whose logger warns
    processor = build_processor(family)
    model = build_vlm(family, processor)
    batch = trl_padfix.DataCollatorForVisionLanguageModeling(processor)(list(build_captions(4, (2, 0, 1))))
    whole = model(**batch, use_cache=False)
    mask, towers = batch["attention_mask"].bool(), entered_tokens(model.get_decoder())
    for counts, forwards in (({"num_images": [2, 0, 1, 2]}, 2), (None, 1), ({"num_images": [2, 0, 1]}, 1)):
        towers.clear()
        with attach_runner_patch(model), within(runner=SubBatches(60, False, images=counts)):
            cut = model(**batch, use_cache=False)
        assert (len(towers) >= 2) == (forwards == 2)
        torch.testing.assert_close(cut.logits[mask], whole.logits[mask], rtol=1e-5, atol=1e-5)
    assert "it is unknown which of its images belong to which row" in caplog.text
    if family == "idefics3":  # its processor pads the images of a row, so they are rows of their own
        return
    # Of other rows images are other logits, or none at all.
    found = []
    with (
        contextlib.suppress(ValueError),  # of the model: other features than tokens
        attach_runner_patch(model),
        within(runner=SubBatches(60, False, images={"num_images": [1, 1, 1, 2]})),
    ):
        found.append(model(**batch, use_cache=False).logits[mask])
    assert not found or not torch.allclose(found[0], whole.logits[mask], rtol=1e-3)


COMPARING = product([("aot",), ("sigmoid", "sft")], ["llava", "idefics3"], [1, 2])
FAST = [(("aot",), "llava", 2)]


@pytest.mark.parametrize(("loss", "family", "accumulated"), slow_but(FAST, list(COMPARING)))
def test_losses_that_compare_rows_with_images_are_split(loss, family, accumulated, tmp_path):
    given = {"loss_type": loss, "per_device_train_batch_size": IMAGE_BATCH // accumulated}
    theirs = trls("DPO", family, **given, gradient_accumulation_steps=accumulated)
    budget = longest("DPO", family)
    given |= {"padding_free": True, "max_tokens_per_batch": budget, "parity_check": False, "loss_type": list(loss)}
    ours = make_on_images(trl_padfix, "DPO", family, tmp_path, **given, gradient_accumulation_steps=accumulated)
    computed = entered_tokens(ours.model.get_decoder())
    assert_same(trained(ours), theirs, rtol=1e-4)
    assert max(computed) <= budget
    assert len(computed) > 2 * accumulated * IMAGE_STEPS
    # The negative control: the rows of a step compared at once, or by other micro-batches.
    other = {"per_device_train_batch_size": IMAGE_BATCH // 3, "gradient_accumulation_steps": 3}
    wrong = trained(make_on_images(trl_padfix, "DPO", family, tmp_path, **given | other))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(wrong, theirs, rtol=1e-4)


# Rows of batches


TILES = torch.arange(6.0).view(3, 2, 1, 1, 1)
GRID = {"image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 1, 3]])}
BATCHES = {
    "an entry for each image": ({}, torch.arange(3.0).view(3, 1, 1, 1), [2], [0, 1]),
    "patches by a grid": (GRID, torch.arange(6.0).view(6, 1), [3, 4, 5], [0, 1, 2]),
    "images of a row padded": ({}, TILES, [4, 5], [0, 1]),
    "tiles of an image": ({"image_sizes": torch.ones(3, 2)}, TILES, [4, 5], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_rows_take_their_images_along(case):
    more, pixels, last, first = BATCHES[case]
    batch = {"input_ids": torch.arange(3).view(3, 1), "pixel_values": pixels, **more}
    counts = {"num_images": [2, 0, 1]}
    for row, expected in ((2, last), (0, first)):
        selected = select_rows(batch, torch.tensor([row]), 3, counts)
        assert selected["input_ids"].tolist() == [[row]]
        assert selected["pixel_values"].flatten().tolist()[: len(expected)] == expected
        assert selected.keys() == batch.keys()
    text = select_rows(batch, torch.tensor([1]), 3, counts)
    assert text.keys() == {"input_ids"}
    # Unknown, or other images than were counted.
    assert split_images(batch, 3, None) is None
    assert case == "images of a row padded" or split_images(batch, 3, {"num_images": [2, 1, 1]}) is None
