"""
Layouts that come with batches, of every trainer and every kind of batch: no step then waits to build one.

Each is counted on the simulated device, beside the same batch without its layouts, where the host has to look.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from kit.cells import every_second, once_each, slow_but
from kit.methods import DEFAULTS, make_trainer
from kit.rows import build_rows
from kit.trainer_runs import run
from kit.vision_runs import build_captions, make_vision_trainer
from kit.vision_runs import build_pairs as build_image_pairs
from simulated_gpu.simulated_steps import on_simulated, place_models, step, waits_and_losses

import trl_padfix
import trl_padfix.core.call.layout_of
from trl_padfix import PaddingRemovalError
from trl_padfix.core.layout.layout import Layout
from trl_padfix.trainers.batching.micro_batch_budget import MicroBatchBudget
from trl_padfix.trainers.batching.micro_batches import MicroBatch, micro_batches_of, to_equal_count
from trl_padfix.trainers.batching.prefix_schedule import MicroBatchRunner
from trl_padfix.trainers.data.batch_metadata import BatchWithMetadata, batch_metadata_of, pop_metadata
from trl_padfix.trainers.data.layout_collator import LayoutCollator
from trl_padfix.trainers.data.precomputed_layouts import PrecomputedLayouts
from trl_padfix.trainers.metrics.token_counts import TokenCounts
from trl_padfix.trainers.online import OnlineLayouts


def make(kind: str, tmp_path, package: Any = trl_padfix, **given: Any) -> Any:
    given = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 3} | given
    given = {name: DEFAULTS[kind][name]() for name in ("train_dataset", "eval_dataset")} | given
    return make_trainer(
        package, kind, tmp_path / "run", **({"padding_free": True} if package is trl_padfix else {}) | given
    )


def assert_no_waits(gpu, trainer, batch, *, training: bool = True, without: int) -> None:
    """A step waits for no layout; without its layouts it waits `without` times. Losses are equal."""
    place_models(trainer)
    carried = on_simulated(batch)
    plain, layouts = pop_metadata(carried)
    assert layouts
    first = step(trainer, carried, training)  # with the comparison of the first batch
    waits, losses = waits_and_losses(gpu, trainer, carried, plain, training=training)
    assert gpu.varlen  # the kernel of packed rows
    assert waits[0] == {}
    assert sum(waits[1].values()) == without
    assert losses[0] == losses[1] == first


# -- each trainer, each kind of batch

PACKING = {"packing": True, "max_length": 32, "eval_packing": False}


@pytest.mark.parametrize(
    ("kind", "config", "without", "sharing"),
    every_second(
        once_each(
            [
                # For each batch of rows, ids and mask are read once, and labels after padding, too; each forward
                # looks for its labels.
                ("KTO", {}, 8),
                ("DPO", {}, 4),
                ("SFT", {}, 4),
                ("SFT", PACKING, 3),  # rows that arrive packed have bounds, too
                ("SFT", {"padding_side": "left", "dataloader_num_workers": 1}, 3),
                ("Reward", {}, 2),  # ids and mask, and which token of a row is scored
                ("Reward", {"padding_side": "left"}, 2),
                ("Reward", {"pool_last_token": True}, 1),
            ],
            [False, True],
        )
    ),
)
def test_a_step_waits_for_nothing_of_ours(kind, config, without, sharing, gpu, tmp_path):
    trainer = make(kind, tmp_path, prefix_sharing=sharing, **config)
    batch = next(iter(trainer.get_train_dataloader()))
    assert_no_waits(gpu, trainer, batch, without=without)


@pytest.mark.parametrize(
    ("kind", "without"), slow_but([("DPO", 4)], [("DPO", 4), ("KTO", 8), ("Reward", 2), ("SFT", 4)])
)
def test_an_evaluation_waits_for_nothing_of_ours(kind, without, gpu, tmp_path):
    trainer = make(kind, tmp_path, prefix_sharing=True)
    batch = next(iter(trainer.get_eval_dataloader()))
    assert_no_waits(gpu, trainer, batch, training=False, without=without)


def test_rows_that_are_packed_by_themselves_come_with_their_layouts(gpu, tmp_path):
    trainer = make("SFT", tmp_path, padding_free=False, **PACKING)
    batch = next(iter(trainer.get_train_dataloader()))
    assert_no_waits(gpu, trainer, batch, without=3)


@pytest.mark.parametrize(("kind", "sharing"), every_second(once_each(["GRPO", "RLOO"], [False, True])))
def test_the_steps_of_a_generation_wait_for_nothing_of_ours(kind, sharing, gpu, tmp_path):
    """What the model generates is known on its device alone: the host looks once for all steps on it."""
    trainer = make(kind, tmp_path, prefix_sharing=sharing, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2  # `train` sets it
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    batches = [pop_metadata(batch)[0] for batch in trainer._buffered_inputs]
    assert all(batch_metadata_of(batch) is not None for batch in trainer._buffered_inputs)
    place_models(trainer)
    plain = [on_simulated(batch) for batch in batches]
    gpu.reset()
    carried = trainer.padding.part(OnlineLayouts).with_layouts(plain)
    assert len(carried) == 2
    assert list(gpu.ours().values()) == [1]
    first = step(trainer, carried[0])
    waits, losses = waits_and_losses(gpu, trainer, carried[0], carried[1], plain[0], plain[1])
    assert waits[:2] == [{}, {}]
    assert [sum(w.values()) for w in waits[2:]] == [2, 2]
    assert first == losses[0] == losses[2] != losses[1] == losses[3]


def test_the_layout_of_other_rows_is_noticed_in_grpo(tmp_path):
    trainer = make("GRPO", tmp_path, prefix_sharing=True, parity_check=False)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    take = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda model, ids, *args, **kwargs: take(
        model, ids.roll(1, 0), *args, **kwargs
    )
    with pytest.raises(PaddingRemovalError, match=r"rows of the batch are those .* in step 1 of train.*Rows: \["):
        trainer.compute_loss(trainer.model, inputs)


# -- images


def vision(kind: str, tmp_path, data: Dataset, family: str = "llava", **given: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "padding_free": True, "train_dataset": data} | given
    return make_vision_trainer(trl_padfix, kind, family, tmp_path / "run", **given)


@pytest.mark.parametrize(
    ("kind", "without"),
    # Mask, labels, and whether images repeat themselves: of captions the tower and what follows it look, of pairs the
    # tower alone. The reference looks for images and labels, too.
    slow_but([("SFT", 6)], [("SFT", 6), ("DPO", 8)]),
)
def test_a_step_on_images_waits_for_nothing_of_ours(kind, without, gpu, tmp_path):
    trainer = vision(kind, tmp_path, (build_captions if kind == "SFT" else build_image_pairs)(4))
    batch = next(iter(trainer.get_train_dataloader()))
    assert_no_waits(gpu, trainer, batch, without=without)


@pytest.mark.parametrize(
    ("kind", "family", "sharing", "carried"),
    # What rows of images share; and whether images repeat that a model has cut out of those of the batch.
    slow_but(
        [("SFT", "llava", True, 1)],
        [("SFT", "llava", True, 1), ("DPO", "llava", True, 2), ("DPO", "llava_next", False, 2)],
    ),
)
def test_what_only_the_model_knows_of_images_is_seen_on_the_device_once_a_forward(
    kind, family, sharing, carried, gpu, tmp_path
):
    data = (build_captions if kind == "SFT" else build_image_pairs)(4)
    trainer = vision(kind, tmp_path, data, family, prefix_sharing=sharing)
    batch = on_simulated(next(iter(trainer.get_train_dataloader())))
    place_models(trainer)
    step(trainer, batch)
    waits, losses = waits_and_losses(gpu, trainer, batch, pop_metadata(batch)[0])
    assert sum(waits[0].values()) == carried < sum(waits[1].values())
    assert losses[0] == losses[1]


def test_images_repeat_only_if_their_grids_do():
    pixels, ids = torch.randn(8, 12).repeat(2, 1), torch.ones(4, 3, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "completion_mask": ids, "pixel_values": pixels}

    def repeat(**more: torch.Tensor) -> bool:
        collated = LayoutCollator(lambda rows: rows[0], prefix_sharing=False)([batch | more])
        return batch_metadata_of(collated.to("cpu")).forward_metadata[""].halves_equal

    grids = torch.tensor([[1, 2, 4], [1, 4, 2]])
    assert repeat()
    assert repeat(image_grid_thw=grids[[0, 0]], ref_chosen_logps=torch.randn(2))
    assert not repeat(image_grid_thw=grids)
    assert not repeat(pixel_values=torch.randn(16, 12))


# -- streams


def curve(trainer: Any) -> torch.Tensor:
    return run(trainer).trajectory()


@pytest.mark.parametrize("kind", slow_but(["SFT"], ["DPO", "KTO", "SFT"]))
def test_a_stream_brings_the_layouts_of_its_batches(kind, tmp_path, monkeypatch):
    built = []
    build = trl_padfix.core.call.layout_of.prefix_sharing_layout

    def counted(ids, *args):
        built.append(ids)
        return build(ids, *args)

    monkeypatch.setattr(trl_padfix.core.call.layout_of, "prefix_sharing_layout", counted)
    stream = DEFAULTS[kind]["train_dataset"]().to_iterable_dataset()
    settings = {"prefix_sharing": True, "parity_check": False}
    ours = make(kind, tmp_path, train_dataset=stream, **settings)
    assert batch_metadata_of(next(iter(ours.get_train_dataloader()))) is not None
    built.clear()
    trajectory = curve(ours)
    forwards = 2 if kind == "KTO" else 1
    assert len(built) <= forwards * (ours.args.max_steps + 1 + 2)  # by the loaders, which may be ahead by one batch
    theirs = curve(make(kind, tmp_path, train_dataset=stream, package=trl))
    torch.testing.assert_close(trajectory, theirs, rtol=1e-4, atol=1e-6)


def test_batches_that_one_process_cuts_for_all_bring_none(tmp_path, monkeypatch):
    trainer = make("SFT", tmp_path, train_dataset=build_rows(48).to_iterable_dataset())
    config = trainer.accelerator.dataloader_config

    def bring_layouts() -> list[bool]:
        part = trainer.padding.part(PrecomputedLayouts)
        return [part.can_precompute(data, is_training=True) for data in (trainer.train_dataset, trainer.eval_dataset)]

    assert bring_layouts() == [True, True]
    config.dispatch_batches = None
    # One process would dispatch the batches of a stream to itself.
    assert batch_metadata_of(next(iter(trainer.get_train_dataloader()))) is not None
    assert config.dispatch_batches is None
    config.dispatch_batches = False
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert bring_layouts() == [True, True]  # TRL has each process read the stream for itself
    config.dispatch_batches = None
    assert bring_layouts() == [False, True]  # accelerate's default
    config.dispatch_batches = True
    assert bring_layouts() == [False, False]
    assert batch_metadata_of(next(iter(trainer.get_train_dataloader()))) is None


def test_micro_batches_of_a_budget_bring_their_layouts_and_lose_them_where_they_are_cut(gpu, tmp_path):
    trainer = make("SFT", tmp_path, max_length=32, max_tokens_per_batch=64, prefix_sharing=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(micro_batches_of(batch)) > 1
    for micro_batch in micro_batches_of(batch):
        assert isinstance(batch_metadata_of(micro_batch).layouts[""], Layout)
    batches = [MicroBatch(b, 1.0) for b in micro_batches_of(batch)]
    cut = [m.batch for m in to_equal_count(batches, len(batches) + 1, 1)]
    assert sum(batch_metadata_of(b) is not None for b in cut) == len(batches) - 1
    trainer.padding.part(MicroBatchBudget).running = MicroBatchRunner(1)  # as `training_step` runs one
    assert_no_waits(gpu, trainer, micro_batches_of(batch)[0], without=4)


def test_a_layout_of_another_shape_is_not_taken(tmp_path):
    trainer = make("SFT", tmp_path, parity_check=False)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()

    def loss(batch: dict[str, Any]) -> float:
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, copy(batch)).item()

    want = loss(pop_metadata(batch)[0])
    half = BatchWithMetadata({k: v[:4] for k, v in batch.items()}, batch_metadata_of(batch))
    assert loss(half) == loss(pop_metadata(half)[0]) != want


# -- counts over processes


def test_token_counts_of_several_processes_are_read_when_they_are_logged(gpu, tmp_path, monkeypatch):
    trainer = make("SFT", tmp_path)
    batch = on_simulated(next(iter(trainer.get_train_dataloader())))
    place_models(trainer)
    step(trainer, batch)
    counter = trainer.padding.part(TokenCounts).counters["train"]
    alone = counter.report(True)
    accelerator = trainer.accelerator
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    monkeypatch.setattr(type(accelerator), "device", torch.device("cuda:0"))
    monkeypatch.setattr(accelerator, "reduce", lambda counts: counts * 2)
    for name in ("gather", "gather_for_metrics"):
        monkeypatch.setattr(accelerator, name, lambda x: x)
    gpu.reset()
    trainer.state.global_step = 1  # the first step, with the parity check, waits
    step(trainer, batch)
    assert gpu.ours() == {}
    two = counter.report(True)
    assert sum(gpu.ours().values()) == 1
    assert two["padfix/pad_fraction"] == alone["padfix/pad_fraction"]


def test_layouts_of_several_forwards_travel_in_one_block(tmp_path):
    trainer = make("KTO", tmp_path)
    examples = [trainer.train_dataset[i] for i in range(4)]
    batch = LayoutCollator(trainer.data_collator, prefix_sharing=False)(examples)
    assert batch_metadata_of(batch).flat.block.dim() == 1
    assert batch_metadata_of(batch.to("cpu")).layouts.keys() == {"", "KL_"}


def test_a_collator_that_raises_stop_iteration_does_not_end_the_epoch_in_silence():
    def collate(rows: list[Any]) -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match=r"function raised StopIteration, .* end of the data"):
        LayoutCollator(collate, False)([1])
