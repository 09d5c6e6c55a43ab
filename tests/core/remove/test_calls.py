"""An attached model can be called in every way that it could be called before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from kit.observe import CACHE
from kit.tolerance import assert_close
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from zoo.families import build as build_family
from zoo.model_numbers import DISTINCT, REAL, assert_equal_where_real, logits_of
from zoo.models import COLUMNS, batch, build, padded_positions

from trl_padfix import remove_padding


# -- every way to call the model


def without_cache(output: Any) -> Any:
    """`output`, which holds no keys of packed rows where the caller did not ask for a cache."""
    assert output.past_key_values is None or output.logits.shape[0] == output.past_key_values.layers[0].keys.shape[0]
    return output


CALLS = {
    "positional": lambda model, ids, mask: model(ids, mask).logits,
    "bool mask": lambda model, ids, mask: model(ids, attention_mask=mask.bool()).logits,
    "float mask": lambda model, ids, mask: model(ids, attention_mask=mask.float()).logits,
    "tuple": lambda model, ids, mask: model(ids, mask, return_dict=False)[0],
    "tuple without cache": lambda model, ids, mask: model(ids, mask, use_cache=False, return_dict=False)[0],
    "logits_to_keep": lambda model, ids, mask: model(ids, mask, logits_to_keep=0).logits,
    "columns in another order": lambda model, ids, mask: model(
        ids, mask, logits_to_keep=torch.arange(ids.shape[1]).flip(0)
    ).logits.flip(1),
    "decoder": lambda model, ids, mask: model.lm_head(model.model(ids, mask).last_hidden_state),
    "tuple of the decoder": lambda model, ids, mask: model.lm_head(model.model(ids, mask, return_dict=False)[0]),
    "cache by default": lambda model, ids, mask: without_cache(model(ids, mask)).logits,
}


def test_a_model_can_be_called_as_before():
    ids, mask = batch("mixed")
    for i, (name, call) in enumerate(CALLS.items()):
        model, sharing = build("qwen2"), bool(i % 2)
        with torch.no_grad():
            expected = call(model, ids, mask)
            with remove_padding(model, prefix_sharing=sharing) as handle:
                got = call(model, ids, mask)
        assert got.shape == expected.shape, name
        assert_equal_where_real(got, expected, mask)
        assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL), name


class Twice(transformers.Qwen2ForCausalLM):
    """Calls its decoder on two batches of one shape, then its head on both."""

    def forward(self, input_ids, attention_mask=None, others=None, unpacked=None, **kwargs):
        first = self.model(input_ids, attention_mask, use_cache=False)[0]
        with unpacked or nullcontext():
            second = self.model(*others, use_cache=False)[0]
        return self.lm_head(first), self.lm_head(second)


@pytest.mark.parametrize("of_second", ["mixed", "full", "disabled"])
def test_a_head_packs_no_states_with_the_layout_of_another_decoder_call(of_second):
    """The layout of one call would leave real tokens of the other out, or in their place the logits of others."""
    model, (ids, mask) = Twice(build("qwen2").config).eval(), batch("mixed")
    masks = mask, torch.ones_like(mask) if of_second == "full" else mask.flip(0)
    with torch.no_grad():
        expected = model(ids, mask, (ids.flip(0), masks[1]))
        with remove_padding(model) as handle:
            unpacked = handle.disabled() if of_second == "disabled" else None
            got = model(ids, mask, (ids.flip(0), masks[1]), unpacked)
    for x, y, real in zip(got, expected, masks, strict=True):
        assert_equal_where_real(x, y, real)


@pytest.mark.parametrize(("name", "broadcast", "sharing"), [("gpt2", True, True), ("qwen2", False, True)])
def test_given_positions_are_used(name, broadcast, sharing):
    ids, mask = batch("right")
    positions = 2 * padded_positions(mask)[:1] if broadcast else 2 * padded_positions(mask) + torch.arange(7)[:, None]
    model = build(name)
    expected = logits_of(model, ids, mask, position_ids=positions)
    unmoved = logits_of(model, ids, mask)

    with remove_padding(model, prefix_sharing=sharing) as handle:
        got = logits_of(model, ids, mask, position_ids=positions)

    assert_equal_where_real(got, expected, mask)
    assert (got - unmoved)[mask.bool()].abs().max() > 0.01
    assert handle.stats.packed_tokens == (DISTINCT if sharing and broadcast else REAL)


@pytest.mark.parametrize("in_each_row", [False, True], ids=["equal rows", "another type in each row"])
def test_token_types_are_keys_of_the_prefix_tree(in_each_row, monkeypatch):
    ids, mask = batch("right")
    # Embedded like tokens: rows of other types have other inputs.
    types = torch.arange(7)[:, None].expand_as(ids) if in_each_row else torch.arange(COLUMNS)[None].expand_as(ids)
    model = build("gpt2")
    expected = logits_of(model, ids, mask, token_type_ids=types)
    assert (expected - logits_of(model, ids, mask))[mask.bool()].abs().max() > 0.01

    # Not called, since a packed row has no padding.
    monkeypatch.setattr(transformers.GPT2Model, "warn_if_padding_and_no_attention_mask", None)
    with remove_padding(model, prefix_sharing=True) as handle:
        assert_equal_where_real(logits_of(model, ids, mask, token_type_ids=types), expected, mask)
    assert handle.stats.packed_tokens == (REAL if in_each_row else DISTINCT)


def test_router_logits_and_balancing_loss_are_those_of_the_padded_batch():
    ids, mask = batch("mixed")
    labels = ids.masked_fill(mask == 0, -100)
    labels[1::2].masked_fill_(padded_positions(mask)[1::2] == 0, -100)  # nothing stands before them but padding
    model = build("qwen3_moe")
    with torch.no_grad():
        expected = model(ids, mask, labels=labels)
        with remove_padding(model, prefix_sharing=True):
            got = model(ids, mask, labels=labels)

    assert_close(got.aux_loss, expected.aux_loss, terms=64, depth=24)
    assert_close(got.loss, expected.loss, size=float(expected.logits.abs().max()), terms=64, depth=24)
    assert len(got.router_logits) == len(expected.router_logits) == 3
    for one, other in zip(got.router_logits, expected.router_logits, strict=True):
        assert one.shape == other.shape == (mask.numel(), 4)
        assert_equal_where_real(one, other, mask.flatten())


def test_wrappers_and_bare_decoders_are_found():
    ids, mask = batch("left")
    model, policy = build("qwen2"), get_peft_model(build("qwen2"), LoraConfig())
    for wrapper in (torch.nn.Sequential(model), model.model, torch.nn.ModuleDict({"policy": policy})):
        with remove_padding(wrapper, prefix_sharing=True) as handle:
            handle.decoder(ids, mask)
            assert handle.stats.packed_tokens == DISTINCT


def test_inference_mode_gives_the_same_numbers():
    ids, mask = batch("mixed")
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=True) as handle:
        expected = logits_of(model, ids, mask)
        with torch.inference_mode():
            assert torch.equal(model(*batch("mixed")).logits, expected)  # inference tensors
            assert torch.equal(model(ids, mask).logits, expected)
    assert handle.stats.packed_tokens == 3 * DISTINCT


def test_behind_virtual_tokens_a_call_with_a_fraction_for_each_token_is_computed_padded():
    """With `prefix_sharing` its numbers are compared before the call is refused."""
    ids, mask = batch("right")
    model = get_peft_model(build("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    given["loss_weights"] = torch.ones(len(ids), ids.shape[1] + 2)
    with torch.no_grad():
        expected = model(**given).logits
        with remove_padding(model, prefix_sharing=True) as handle:
            assert torch.equal(model(**given).logits, expected)
    assert handle.stats.padded_forwards == 1


@pytest.mark.parametrize("name", ["shift_labels", "loss_weights"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_tensors_for_a_loss_that_reach_the_attention_leave_a_call_packed(name, checkpoints):
    """The caller's own: decoders hand on what they do not know. One that a layer makes is refused, as before."""
    model, (ids, mask) = build("qwen2").train(), batch("right")
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100).masked_fill(mask == 0, -100)
    shifted[torch.arange(len(ids)), mask.sum(1) - 1] = -100
    given = {name: shifted} | ({"labels": ids.masked_fill(mask == 0, -100)} if name == "shift_labels" else {})

    def figures():
        model.zero_grad()
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, **given)
        loss = output.loss if "labels" in given else (output.logits * mask[..., None]).square().mean()
        loss.backward()
        return torch.stack([loss.detach(), *(p.grad.norm() for p in model.parameters())])

    expected = figures()
    with remove_padding(model, prefix_sharing=True) as handle:
        found = figures()
    assert_close(found, expected, terms=64, depth=48)
    assert 0 < handle.stats.packed_tokens < REAL
    assert handle.stats.padded_forwards == 0


# -- calls that are not ours


OTHER_CALLS = {
    "use_cache": lambda ids, mask: {"input_ids": ids, "attention_mask": mask, "use_cache": True},
    "cache": lambda ids, mask: {"input_ids": ids, "attention_mask": mask, CACHE: transformers.DynamicCache()},
    "rows without mask": lambda ids, mask: {"input_ids": ids},
    "one row without mask": lambda ids, mask: {"input_ids": ids[:1]},
    "one row with positions": lambda ids, mask: {"input_ids": ids[:1], "position_ids": torch.arange(COLUMNS)[None]},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_go_through_untouched(name):
    kwargs, model, given = OTHER_CALLS[name], build("qwen2"), batch("left")
    with torch.no_grad():
        expected = model(**kwargs(*given))
        counted = name == "rows without mask"  # and computed as they came
        with remove_padding(model, prefix_sharing=not counted) as handle:
            got = model(**kwargs(*given))

    assert torch.equal(got.logits, expected.logits)
    assert (got.past_key_values is None) == (expected.past_key_values is None)
    assert handle.stats.packed_tokens == counted * given[0].numel()


def test_a_decoder_that_drops_tokens_is_computed_padded(caplog):
    """BigBird fills the packed row up to its blocks, and cuts that off again; attention on rows returns no filler."""
    model, lengths = build_family("big_bird"), torch.tensor([9, 20, 5, 3, 14])
    mask = (torch.arange(20) < lengths[:, None]).long()
    call = {"input_ids": torch.arange(5, 25).expand(5, -1), "attention_mask": mask, "use_cache": False}
    with remove_padding(model) as handle:
        found = model(**call).logits
    assert_close(found, build_family("big_bird")(**call).logits, terms=32, depth=8)
    assert (handle.stats.forwards, handle.stats.padded_forwards) == (0, 1)
    assert "(1, 50, 32) for 51 packed tokens" in caplog.text
