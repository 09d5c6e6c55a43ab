"""A stream under a token budget has the steps of the same rows without one, and says which row does not fit."""

import contextlib
from dataclasses import replace

import pytest
import torch
from kit.budget_runs import (
    BUDGET,
    GLOBAL_BATCH,
    STREAMED,
    TRAINERS,
    assert_same,
    build_branching,
    build_data,
    make,
    stream_of,
)
from kit.observe import entered_tokens
from kit.processes import logged
from kit.trainer_runs import break_mode, figures, trajectory

from trl_padfix.trainers.batching.sampler import StepOrder


SHORT = {"max_steps": 5}


def uneven(name):
    """Three steps and a fourth one of fewer rows."""
    return stream_of(build_data(name).select(range(3 * GLOBAL_BATCH + 5)))


def followed(trainer):
    """The trajectory of a training, and the tokens of its forwards."""
    with entered_tokens(trainer.model) as entered:
        trainer.train()
    return trajectory(trainer), list(entered)


@pytest.mark.parametrize("name", ["dpo", "sft", pytest.param("reward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_steps_of_a_stream_are_those_of_trl(name, accumulated, tmp_path, monkeypatch):
    size = {"per_device_train_batch_size": GLOBAL_BATCH // accumulated, "gradient_accumulation_steps": accumulated}
    data, own = {**SHORT, **size, "train_dataset": uneven(name)}, {"ours": True, "parity_check": False}
    theirs, padded = followed(make(name, tmp_path, ours=False, **data))
    ours, packed = followed(make(name, tmp_path, **own, **data))
    assert_same(ours, theirs)
    assert max(packed) <= BUDGET[name] < max(padded)
    assert len(packed) > SHORT["max_steps"]
    break_mode(monkeypatch, "padding-free")
    wrong, _ = followed(make(name, tmp_path, **own, **data))
    with pytest.raises(AssertionError):
        assert_same(wrong, theirs)


def test_a_stream_is_resumed_in_the_middle_of_an_epoch(tmp_path):
    data = {"max_steps": 4, "train_dataset": uneven("sft"), "save_strategy": "steps", "save_steps": 2}
    whole = make("sft", tmp_path, ours=True, **data)
    whole.train()
    resumed = make("sft", tmp_path, ours=True, **data)
    # Within the first pass: transformers does not know how many batches a pass over a stream has.
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(trajectory(resumed), trajectory(whole))
    assert not torch.allclose(trajectory(whole)[2:], trajectory(whole)[:2], rtol=1e-2)  # of other rows


@pytest.mark.matrix
@pytest.mark.slow
def test_two_processes_have_the_steps_of_one(tmp_path):
    found = logged("multi_gpu", tmp_path, "kit.budget_runs", "streams")
    for name in TRAINERS:
        assert_same(*(figures(found[f"{name}, {kind}"]) for kind in ("stream", "rows")))
        config = STREAMED | {"gradient_accumulation_steps": 4, "train_dataset": uneven(name)}
        theirs = make(name, tmp_path, ours=False, **config)
        theirs.train()
        histories = found[f"{name}, stream"], theirs.state.log_history
        ours, expected = (
            torch.tensor([[log[n] for n in ("loss", "grad_norm")] for log in history if "loss" in log])
            for history in histories
        )
        assert_same(ours[:3], expected[:3])
        with pytest.raises(AssertionError):  # where there are two, the first rows fill the fourth step
            assert_same(ours[3], expected[3])


def test_processes_that_read_other_rows_are_refused(tmp_path, monkeypatch):
    trainer = make("sft", tmp_path, ours=True, train_dataset=uneven("sft").shuffle(buffer_size=16), **SHORT)
    order = trainer.padding.part(StepOrder)
    two = replace(order.plan(), processes=2)
    gathered = "trl_padfix.trainers.batching.sampler.gather_object"
    for seeds, message in (([0, 1], "read other first rows of the stream"), ([3, 3], None)):
        monkeypatch.setattr(order, "plan", lambda: two)
        streams = [uneven("sft").shuffle(seed=seed, buffer_size=16) for seed in seeds]
        begins = []
        monkeypatch.setattr(gathered, lambda found, begins=begins: begins.append(found[0]) or begins)
        prepared = [stream.map(lambda row: {"input_ids": [1], "labels": [1]}) for stream in streams]
        order.stream(prepared[0], 30)
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            order.stream(prepared[1], 30)


def test_rows_of_a_stream_are_grouped_and_split(tmp_path):
    given = {"prefix_sharing": True, "group_by_prefix": True, "parity_check": False, **SHORT, "ours": True}
    stream = build_branching("sft").to_iterable_dataset()
    trainer = make("sft", tmp_path, train_dataset=stream, group_by_prefix_buffer=32, **given)
    ours, entered = followed(trainer)
    assert max(entered) <= BUDGET["sft"]
    known = make("sft", tmp_path, train_dataset=build_branching("sft"), train_sampling_strategy="sequential", **given)
    assert_same(ours, followed(known)[0])


def test_a_row_beyond_the_budget_is_named_before_its_step(tmp_path):
    rows = build_data("sft").to_list()
    rows[13]["text"] = "w5 " * 40
    given = {"train_dataset": stream_of(rows), "max_length": None, "max_steps": 4}
    trainer = make("sft", tmp_path, ours=True, **given)
    with pytest.raises(ValueError, match=r"A row of the train stream .* the longest 4\d \(row 13\).*, or drop it"):
        trainer.train()
    assert trainer.state.global_step <= 1  # the second step is its own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"prefix_sharing": True, "group_by_prefix": True, "group_by_prefix_buffer": 7},
            r"`group_by_prefix_buffer=7` rows are fewer than the 8 of an optimizer step",
        ),
        ({"dataloader_num_workers": 2}, "2 data loader workers would read it in parts"),
    ],
)
def test_what_would_make_other_steps_is_an_error_before_the_first(given, message, tmp_path):
    trainer = make("sft", tmp_path, ours=True, train_dataset=stream_of(build_data("sft")), **SHORT, **given)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_stream_with_images_is_refused(tmp_path):
    rows = [{**row, "images": []} for row in build_data("dpo").to_list()]
    with pytest.raises(ValueError, match="is a `IterableDataset` with images, whose tokens are counted before"):
        make("dpo", tmp_path, ours=True, train_dataset=stream_of(rows), **SHORT)
