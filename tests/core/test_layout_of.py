"""Layouts are read from the batch of each forward; within a step those of the same tensors are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.cells import by_turns
from kit.tolerance import CONTROL, assert_close, rounding
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from simulated_gpu.simulated_cuda import to_simulated
from zoo.model_numbers import assert_same_numbers, gradients, padded_numbers, weighted_sum
from zoo.models import SUPPORTED, batch, build, real_logps

from trl_padfix import PaddingRemovalError, packed_layout, remove_padding
from trl_padfix.core.call.arguments import DecoderInputs
from trl_padfix.core.call.batch_cache import TensorVersion, batch_cache, on_host
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


# -- rows that arrive packed: each sequence by itself, under every backend


def packed(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """The sequences of a padded batch as collators pack them: positions and bounds, no mask."""
    keep = mask.bool()
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    call = {"input_ids": ids[keep][None], "position_ids": (mask.cumsum(1) - 1)[keep][None]}
    sizes = {"max_length_q": int(mask.sum(1).max()), "max_length_k": int(mask.sum(1).max())}
    number = mask.cumsum(1)[:, -1].repeat_interleave(mask.sum(1))
    return call | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "seq_idx": number[None].int()} | sizes


def numbers(model, call: dict[str, Any], ids, mask) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the real tokens of the padded batch, and gradients."""
    model.zero_grad()
    packed = model(**call, use_cache=False).logits
    logits = torch.zeros(*ids.shape, packed.shape[-1]).masked_scatter(mask.bool()[..., None], packed)
    logps = real_logps(logits, ids, mask)
    weighted_sum(logps).backward()
    return logps.detach(), gradients(model)


# -- the layout


def test_a_sequence_begins_where_positions_do_not_go_on():
    layout = packed_layout(torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 0, 3, 4, 5]]))
    assert layout.batch_shape == (2, 6)
    assert layout.queries.lengths == layout.keys.lengths == layout.spans == (3, 2, 1, 2, 1, 3)
    assert layout.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 0, 0, 1, 2]
    assert layout.packed_index.tolist() == layout.real_index.tolist() == list(range(12))
    assert layout.queries.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 9, 12]
    assert layout.source is None
    assert not layout.is_trivial


def test_bounds_say_more_than_positions():
    positions = torch.arange(6)[None]
    assert packed_layout(positions).is_trivial
    assert packed_layout(torch.arange(4).expand(3, 4)).is_trivial
    assert packed_layout(positions, cu_seqlens=torch.tensor([0, 4, 6])).queries.lengths == (4, 2)
    assert packed_layout(positions, cu_seqlens=torch.tensor([0, 2, 2, 6, 6])).queries.lengths == (2, 4)
    # No sequence continues in the next row.
    assert packed_layout(positions.view(2, 3), cu_seqlens=torch.tensor([0, 4, 6])).queries.lengths == (3, 1, 2)


def test_bounds_that_do_not_ascend_over_the_whole_batch_are_an_error():
    ascending = [[0, 4], [0, 4, 2, 6], [0, -2, 6], [0, 2, 9], [1, 6], [], [0, 1, 7, 6]]
    for bounds in (*ascending, [0.0, 2.0, 6.0], [[0, 6]]):
        with pytest.raises(ValueError, match=r"`cu_seqlens` of dtype .* ascend from 0 to 6"):
            packed_layout(torch.arange(6)[None], cu_seqlens=torch.tensor(bounds))


def test_sequences_of_a_packed_row_share_what_they_begin_with():
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 5, 9, 1, 2]])
    layout = packed_layout(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1]]), input_ids=ids)
    assert ids[0, layout.packed_index].tolist() == [1, 2, 3, 4, 5, 9]
    assert layout.queries.lengths == (2, 2, 1, 1)
    assert layout.keys.lengths == (2, 4, 3, 1)
    assert ids[0, layout.packed_index][layout.source].tolist() == ids[0].tolist()
    # The same tokens at other positions are others.
    assert packed_layout(torch.tensor([[0, 1, 5, 6]]), input_ids=torch.tensor([[1, 2, 1, 2]])).packed_tokens == 4


@pytest.mark.parametrize(
    ("positions", "ids"), [(torch.arange(4), None), (torch.arange(4)[None], torch.zeros(2, 2, dtype=torch.long))]
)
def test_other_shapes_are_errors(positions, ids):
    with pytest.raises(ValueError, match=r"`\(B, L\)`"):
        packed_layout(positions, input_ids=ids)
    ids, mask = batch("right")
    with remove_padding(model := build("qwen2")), pytest.raises(ValueError, match=r"shape \(\d+,\): pass `\(B, L\)`"):
        model(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1]))


# -- the same numbers


@pytest.mark.parametrize(
    ("name", "implementation", "sharing", "bounds"), by_turns(SUPPORTED[::5], [True, False], [True, False])
)
def test_a_packed_row_gives_the_numbers_of_its_sequences(name, implementation, bounds, sharing, monkeypatch):
    with flash_attention_stand_in():
        ids, mask = batch("mixed")
        model = build(name, implementation, **{"output_router_logits": False} if name == "qwen3_moe" else {})
        expected = padded_numbers(name, model, ids, mask)
        call = packed(ids, mask)
        given = call if bounds else {name: call[name] for name in ("input_ids", "position_ids")}
        with remove_padding(model, prefix_sharing=sharing) as handle:
            got = numbers(model, given, ids, mask)
        wrong = lambda x, **_: packed_layout(x, cu_seqlens=torch.tensor([0, 5, x.shape[1]]))  # noqa: E731
        monkeypatch.setattr("trl_padfix.core.call.layout_of.packed_layout", wrong)
        with remove_padding(model), pytest.raises(AssertionError, match="off by"):
            assert_same_numbers(numbers(model, call, ids, mask), expected)
    assert_same_numbers(got, expected)
    assert handle.stats.padded_tokens == handle.stats.real_tokens == int(mask.sum())
    assert (handle.stats.packed_tokens < handle.stats.real_tokens) is sharing


def test_a_mask_beside_bounds_is_left_to_the_model():
    ids, mask = batch("mixed")
    call = packed(ids, mask)
    call |= {"attention_mask": torch.ones_like(call["input_ids"])}
    with remove_padding(build("qwen2")) as handle, torch.no_grad():
        handle_layout = layout_of(DecoderInputs.read(call, handle), handle)
    assert handle_layout is None
