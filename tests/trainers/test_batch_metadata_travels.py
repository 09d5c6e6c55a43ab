"""A step of training on a simulated GPU: its kernels, its waits, and the layouts that travel with the batches."""

from __future__ import annotations

import pickle

import pytest
import torch
import trl
from accelerate.utils import send_to_device
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_pairs
from simulated_gpu.simulated_cuda import to_simulated
from simulated_gpu.simulated_steps import on_simulated, place_models, step

import trl_padfix
from trl_padfix import PaddingRemovalError
from trl_padfix.core import heads
from trl_padfix.core.call.layout_of import LayoutInputs
from trl_padfix.core.layout.flat_maps import FlatIndexMaps
from trl_padfix.trainers.data.batch_metadata import batch_metadata_of, pop_metadata
from trl_padfix.trainers.data.layout_collator import LayoutCollator


def dpo(tmp_path, *, pairs: int = 8, layers: int = 2, package=trl_padfix, **given) -> trl.DPOTrainer:
    model, reference = (build_model(seed=seed, num_hidden_layers=layers) for seed in (0, 1))
    modes = {"padding_free": True, "prefix_sharing": True} if package is trl_padfix else {}
    given = {"per_device_train_batch_size": pairs} | modes | given
    data = build_pairs(pairs, prompt=(3, 9), answer=(2, 9))
    return make_trainer(package, "DPO", tmp_path, model=model, ref_model=reference, train_dataset=data, **given)


def sft(tmp_path, *, package=trl_padfix, **given) -> trl.SFTTrainer:
    modes = {"padding_free": True} if package is trl_padfix else {}
    return make_trainer(package, "SFT", tmp_path, **modes | given)


# -- waits


def first_batch(trainer) -> dict[str, torch.Tensor]:
    """The first batch, on the device; a step has been run on it, with the comparison of the first batch."""
    batch = on_simulated(next(iter(trainer.get_train_dataloader())))
    place_models(trainer)
    step(trainer, batch)
    return batch


@pytest.mark.parametrize(("make", "waits", "waits_of_trl"), [(dpo, 18, 28), (sft, 6, 12)])
def test_labels_that_are_all_labels_are_not_selected(make, waits, waits_of_trl, gpu, tmp_path, monkeypatch):
    trainer = make(tmp_path)
    batch = first_batch(trainer)
    trainer.model.zero_grad()

    def count() -> tuple[int, torch.Tensor, list[torch.Tensor]]:
        gpu.reset()
        loss = step(trainer, batch)
        gradients = [p.grad.held for p in trainer.model.parameters()]
        trainer.model.zero_grad()
        return gpu.synchronisations.total(), loss, gradients

    found, loss, gradients = count()
    monkeypatch.setattr(heads, "_score_every_position", lambda forward: forward)
    selecting, same_loss, same_gradients = count()
    forwards = 2 if make is dpo else 1
    assert found == waits == selecting - 2 * forwards - 2  # two in each forward, and two in the backward
    assert loss == same_loss
    assert all(map(torch.equal, gradients, same_gradients))
    theirs = make(tmp_path, package=trl)
    batch = first_batch(theirs)
    gpu.reset()
    step(theirs, batch)
    assert gpu.synchronisations.total() == waits_of_trl


def test_labels_that_are_written_unseen_are_noticed_before_the_next_log(gpu, tmp_path):
    trainer = dpo(tmp_path)
    batch = first_batch(trainer)
    labels = batch["completion_mask"].held
    labels.copy_(labels.roll(1, dims=1))
    step(trainer, batch)
    with pytest.raises(PaddingRemovalError, match=r"labels of the batch.* in step 1 of train"):
        trainer.log({})
    trainer.log({})  # said once


def test_labels_that_are_replaced_are_read_from_the_device(gpu, tmp_path):
    trainer = dpo(tmp_path)
    batch = first_batch(trainer)
    before = step(trainer, batch)
    other = batch | {"completion_mask": to_simulated(batch["completion_mask"].held.roll(1, dims=1))}
    plain, _ = pop_metadata(other)
    assert step(trainer, other) == step(trainer, plain) != before


# -- what travels


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sharing", [False, True], ids=["padding-free", "prefix sharing"])
def test_batches_come_with_their_layouts(workers, sharing, tmp_path):
    trainer = dpo(tmp_path, pairs=4, prefix_sharing=sharing, dataloader_num_workers=workers)
    (batch,) = trainer.get_train_dataloader()
    plain, batch_metadata = pop_metadata(batch)
    layout = batch_metadata.layouts[""]
    want = trainer.padding.handle.layout_of({k: plain[k] for k in ("input_ids", "attention_mask")})
    assert layout.query_lengths == want.query_lengths
    for name in ("real_index", "packed_index", "positions", "cu_seqlens_q", "cu_seqlens_k"):
        assert torch.equal(getattr(layout, name), getattr(want, name))
    assert (layout.cu_seqlens_k is layout.cu_seqlens_q) is (not sharing)
    labels = plain["completion_mask"][:, 1:] * plain["attention_mask"][:, :-1]
    assert torch.equal(batch_metadata.forward_metadata[""].label_positions, labels.flatten().nonzero().squeeze(1))
    assert batch_metadata_of(plain) is None


def test_a_layout_is_one_block_that_is_pinned_and_pickled(gpu):
    maps = FlatIndexMaps.of(sft_batch_layout())
    again = pickle.loads(pickle.dumps(maps)).pin_memory().to("cpu")
    assert again.cu_seqlens_q is again.cu_seqlens_k
    assert again.positions.tolist() == [0, 1, 2, 0, 1]
    assert again.cu_seqlens_q.dtype == torch.int32
    gpu.reset()
    maps.to("cuda:0")
    assert gpu.kernels["_to_copy"] <= 2  # the block, and the bounds to int32
    assert not gpu.synchronisations


def collated_batch():
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    return LayoutCollator(lambda rows: batch, prefix_sharing=False)([])


def sft_batch_layout():
    return batch_metadata_of(collated_batch().to("cpu")).layouts[""]


def test_a_batch_may_be_moved_again():
    """As a user's `training_step` does that calls `inputs.to(device)`."""
    moved = collated_batch().to("cpu")
    again = send_to_device(moved, "cpu")
    for batch in (moved, again):
        (known,) = batch_metadata_of(batch).known_batches(batch)
        assert known.matches_inputs(known.inputs)


@pytest.mark.parametrize("batch", [["rows"], {"prompt": ["a text"]}], ids=["no batch", "texts"])
def test_what_is_no_batch_of_tokens_is_left_as_it_is(batch):
    assert LayoutCollator(lambda rows: batch, prefix_sharing=True)([]) is batch


@pytest.mark.parametrize(
    "more",
    [{"token_type_ids": torch.zeros(2, 3, dtype=torch.int64)}, {"pixel_values": torch.zeros(4, 8)}],
    ids=["types of tokens", "images"],
)
def test_ids_alone_do_not_say_what_rows_of_images_share(more):
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    text = {"input_ids": ids, "attention_mask": mask}
    assert LayoutInputs.read(text, prefix_sharing=True).shares
    inputs = LayoutInputs.read(text | more, prefix_sharing=True)
    assert inputs.shares == ("token_type_ids" in more)  # then they are compared, too
    collate = LayoutCollator(lambda rows: text | more, prefix_sharing=True)
    assert batch_metadata_of(collate([])) is None  # the forward says it
