"""Layouts are read from the batch of each forward; within a step those of the same tensors are shared."""

from __future__ import annotations

import pytest
import torch
from kit.tolerance import CONTROL, assert_close, rounding
from simulated_gpu.simulated_cuda import to_simulated
from zoo.models import batch, build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.call.batch_cache import TensorVersion, batch_cache, on_host
from trl_padfix.core.call.inputs import DecoderInputs
from trl_padfix.core.call.layout_of import layout_of
from trl_padfix.core.patches.heads import follow_padding


def after_a_write(sharing: bool) -> float:
    """What the logits after a `write` between two forwards are off those of the padded model, in tolerances."""
    model = build("qwen2")
    ids, mask = batch("right")
    other_ids, other_mask = (x.flip(0).contiguous() for x in (ids, mask))
    with torch.no_grad():
        expected = model(other_ids, attention_mask=other_mask, use_cache=False).logits
        with remove_padding(model, prefix_sharing=sharing), batch_cache():
            model(ids, attention_mask=mask)
            version = ids._version, mask._version
            ids.data.copy_(other_ids)
            mask.data.copy_(other_mask)
            found = model(ids, attention_mask=mask).logits
    assert (ids._version, mask._version) == version  # the version counters do not show the write
    return (found - expected)[other_mask.bool()].abs().max().item() / rounding(expected)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_batch_that_was_written_to_unseen_is_another_batch(sharing, monkeypatch):
    assert after_a_write(sharing) <= 1
    monkeypatch.setattr(TensorVersion, "matches", lambda self, other: self.tensor is other)  # values not compared
    assert after_a_write(sharing) > CONTROL


def test_on_a_device_a_tensor_is_known_by_identity_and_version(gpu):
    x = to_simulated(torch.tensor([[5, 6, 7]]))
    version = TensorVersion.of(x)
    assert version.matches(x)
    assert version.matches(x.view(1, 3))  # accelerate and DDP pass views
    assert not version.matches(x.clone())
    assert not version.matches(x[:, :2])
    x += 1
    assert not version.matches(x)
    assert not gpu.synchronisations


def test_the_host_waits_once_for_all_that_it_reads(gpu):
    ids, mask, labels = (to_simulated(torch.tensor([[1, 1, 1], [1, 1, 0]])) for _ in range(3))
    with remove_padding(build("qwen2")) as handle, batch_cache():
        gpu.reset()
        on_host(ids, mask, labels, None)
        assert gpu.synchronisations.total() == 1
        for sharing in (False, True, True):
            handle.prefix_sharing = sharing
            inputs = DecoderInputs.read({"input_ids": ids, "attention_mask": mask}, handle)
            assert layout_of(inputs, handle) is not None
        assert not follow_padding(*on_host(labels, mask))
        assert gpu.synchronisations.total() == 1
        mask += 0
        assert [x if x is None else x.tolist() for x in on_host(mask, None)] == [[[1, 1, 1], [1, 1, 0]], None]
        assert gpu.synchronisations.total() == 2
    on_host(ids)
    assert gpu.synchronisations.total() == 3  # nothing is kept beyond a block


# Sharing that does not pay


def alike(rows: int, length: int, shared: int) -> torch.Tensor:
    """Ids of rows that begin with the same `shared` tokens."""
    ids = torch.randint(3, 30, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, :shared] = ids[0, :shared]
    ids[:, shared] = torch.arange(3, 3 + rows)
    return ids


@pytest.mark.parametrize(
    ("shared", "pays", "mode"), [(1, False, True), (1, False, "auto"), (3, True, True), (60, True, "auto")]
)
def test_keys_are_gathered_where_that_costs_less_than_what_it_saves(mode, shared, pays):
    model, ids = build("qwen2"), alike(4, 100, shared)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with remove_padding(model, prefix_sharing=mode) as handle:
            found = model(ids, attention_mask=torch.ones_like(ids)).logits
            inputs = DecoderInputs.read({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, handle)
            layout = layout_of(inputs, handle)
    assert_close(found, expected, terms=100, depth=24)
    assert handle.stats.packed_tokens == 400 - 3 * shared * pays
    assert (layout.key_index is not None) is pays
    assert (handle.stats.shared_forwards, handle.stats.forwards) == (pays, 1)


def test_embeddings_are_packed_and_not_shared():
    model, ids = build("qwen2"), alike(2, 12, 6)
    embeds, mask = model.get_input_embeddings()(ids), torch.ones_like(ids)
    mask[1, -1] = 0
    with torch.no_grad():
        expected = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
        with (
            remove_padding(model, prefix_sharing=True, strict=True),
            pytest.raises(PaddingRemovalError, match="compares token ids"),
        ):
            model(inputs_embeds=embeds, attention_mask=mask)
        for sharing in (True, "auto"):
            with remove_padding(model, prefix_sharing=sharing) as handle:
                found = model(inputs_embeds=embeds, attention_mask=mask).logits
            assert (handle.stats.packed_tokens, handle.stats.padded_forwards) == (23, 0)
            assert_close(found[mask.bool()], expected[mask.bool()], terms=64, depth=24)
    with pytest.raises(ValueError, match="True, False or 'auto', got 'never'"):
        remove_padding(model, prefix_sharing="never")
