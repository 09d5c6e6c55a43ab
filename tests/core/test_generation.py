"""Every prompt of a batch is continued as it would be alone, whatever its padding; the model stays as it was."""

from contextlib import nullcontext

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from kit.cells import by_turns
from kit.observe import each_row_alone
from torch import nn
from transformers import BartConfig, BartForCausalLM, T5Config, T5ForConditionalGeneration
from zoo.models import EOS, PAD, ROWS, SUPPORTED, batch, build

from trl_padfix import PaddingRemovalError, generate, left_align, remove_padding
from trl_padfix.core.handle import PaddingRemoval


pytestmark = pytest.mark.usefixtures("flash")

SETTINGS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
SIDES = ["left", "right", "mixed", "both", "holes"]


def alone(model, ids, mask):
    """What follows each prompt when it is the whole batch, padded as in a batch of them."""

    def compute(row, ones):
        return new_tokens(model.generate(row, attention_mask=ones, **SETTINGS), row.shape[1])

    return each_row_alone(compute, ids, mask)


def continued(model, ids, mask, **settings):
    """What `generate` appends to each prompt of a batch."""
    found = generate(model, {"input_ids": ids, "attention_mask": mask}, **SETTINGS | settings)
    return new_tokens(found, ids.shape[1])


def new_tokens(sequences, columns):
    new = sequences[:, columns:]
    return nn.functional.pad(new, (0, 6 - new.shape[1]), value=PAD)


# Aligning


@hypothesis.given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1))
)
def test_any_mask_is_aligned_with_everything_that_goes_with_it(rows):
    mask = torch.tensor(rows).long()
    ids = torch.arange(mask.numel()).view(mask.shape)
    found, found_mask, found_embeddings = left_align(ids, mask, torch.stack([ids, -ids], -1))
    longest = max(map(sum, rows))
    assert found.shape == found_mask.shape == (len(rows), longest)
    for i, row in enumerate(rows):
        assert found_mask[i].tolist() == [0] * (longest - sum(row)) + [1] * sum(row)
        assert found[i, longest - sum(row) :].tolist() == ids[i][mask[i].bool()].tolist()
    assert torch.equal(found_embeddings, torch.stack([found, -found], -1))


NOT_ALIGNED = [
    (torch.tensor([[1, 2]]), "holds \\[1, 2\\]"),
    (torch.tensor([[0.0, -1e9]]), "needs 1 for real tokens"),
    (torch.tensor([[1, 1, 1]]), r"shape \(1, 3\).*\(1, 2\)"),
    (torch.ones(1, 1, 2, 2), "same `\\(B, L\\)`"),
]


def test_masks_that_cannot_be_aligned_are_refused():
    for mask, message in NOT_ALIGNED:
        with pytest.raises(ValueError, match=message):
            left_align(torch.tensor([[5, 6]]), mask)


# Generating


@pytest.mark.parametrize(("name", "implementation", "side"), by_turns(SUPPORTED[::4], SIDES))
def test_a_batch_is_continued_as_each_prompt_alone(name, implementation, side):
    model = build(name, implementation)
    ids, mask = batch(side)
    expected = alone(model, ids, mask)
    assert torch.equal(continued(model, ids, mask), expected)
    assert len(set(map(tuple, expected.tolist()))) > 3  # the prompts matter


def test_right_padded_generation_without_the_package_gives_other_tokens():
    model = build("qwen2")
    ids, mask = batch("right")
    plain = model.generate(ids, attention_mask=mask, **SETTINGS)
    assert not torch.equal(new_tokens(plain, ids.shape[1]), alone(model, ids, mask))


@pytest.mark.parametrize(
    ("name", "use_cache", "sharing"), [("qwen2", True, True), ("qwen2", False, True), ("gpt2", False, False)]
)
def test_attached_padding_removal_changes_nothing_and_stays(name, use_cache, sharing):
    model = build(name, "sdpa")
    ids, mask = batch("right")
    expected = alone(model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert torch.equal(continued(model, ids, mask, use_cache=use_cache), expected)
        assert (handle.stats.packed_tokens > 0) is not use_cache
        assert PaddingRemoval.of(model) is handle
        assert handle.enabled


def test_new_tokens_begin_behind_the_columns_that_were_given():
    model = build("qwen2")
    ids, mask = (nn.functional.pad(t, (3, 5), value=v) for t, v in zip(batch("both"), (PAD, 0), strict=True))
    expected = alone(model, ids, mask)
    inputs = {"input_ids": ids, "attention_mask": mask}
    found = generate(model, inputs, **SETTINGS)
    assert torch.equal(new_tokens(found, ids.shape[1]), expected)
    assert torch.equal(generate(model, inputs, return_dict_in_generate=True, **SETTINGS).sequences, found)
    assert torch.equal(generate(model, ids, attention_mask=mask, **SETTINGS), found)
    assert found[:, : -6 - max(map(len, ROWS))].eq(PAD).all()
    of_columns = generate(model, inputs, **SETTINGS | {"max_new_tokens": None}, max_length=ids.shape[1] + 6)
    assert torch.equal(of_columns, found)


def test_the_prompts_of_an_encoder_are_left_as_they_are():
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
    ids, mask = batch("right")
    expected = model.generate(input_ids=ids, attention_mask=mask, **SETTINGS)
    assert torch.equal(generate(model, {"input_ids": ids, "attention_mask": mask}, **SETTINGS), expected)


# State


def state_of(model):
    modes = [module.training for module in model.modules()]
    return modes, model.config.use_cache, model.is_gradient_checkpointing, "forward" in vars(model.base_model)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_model_is_as_it_was(error):
    model = build("qwen2", attention_dropout=0.5)
    ids, mask = batch("right")
    expected = alone(model, ids, mask)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[1].eval()
    model.config.use_cache = False
    handle = remove_padding(model)
    before, entered = state_of(model), []

    def watch(layer, args, kwargs):
        entered.append(args[0].shape[1])
        if error is not None and len(entered) == 3:
            raise error

    hook = model.model.layers[0].register_forward_pre_hook(watch, with_kwargs=True)
    with pytest.raises(error) if error else nullcontext():
        assert torch.equal(continued(model, ids, mask), expected)  # without dropout
    assert entered[1:] == [1] * (len(entered) - 1)  # with a cache
    assert state_of(model) == before
    hook.remove()
    handle.remove()


# Errors


def call(**settings):
    model = settings.pop("model", None) or build("qwen2")
    ids, mask = batch("right")
    inputs = {"input_ids": ids, "attention_mask": mask} | settings.pop("inputs", {})
    return generate(model, {k: v for k, v in inputs.items() if v is not None}, **SETTINGS | settings)


BART = {"vocab_size": 40, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}

REFUSED = [
    ({"inputs": {"attention_mask": None}}, ValueError, "batch of 7 prompts has no `attention_mask`"),
    ({"inputs": {"attention_mask": torch.zeros(7, 14).long()}}, ValueError, r"Prompts \[0, 1, .*no real token"),
    ({"past_key_values": ()}, ValueError, "carries `past_key_values`"),
    ({"inputs": {"input_ids": torch.tensor([5, 6])}}, ValueError, r"`input_ids` has shape \(2,\), not `\(B, L\)`"),
    ({"model": "gpt2"}, TypeError, "`model` must be a `Module`, got `str`"),
    ({"model": BartForCausalLM(BartConfig(**BART))}, NotImplementedError, "counts the columns"),
]


def test_what_would_be_answered_wrongly_is_refused():
    for settings, error, message in REFUSED:
        with pytest.raises(error, match=message):
            call(**settings)
    with pytest.raises(TypeError, match="`input_ids` must be a `Tensor`, got `list`"):
        generate(build("qwen2"), [[5, 6]])


def test_a_cache_in_a_padded_batch_that_is_trained_on_is_said_and_counted():
    model, ids = build("qwen2"), torch.tensor([[5, 6, 7, 8], [5, 6, 39, 39]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with remove_padding(model) as handle:
        model(ids, attention_mask=mask, use_cache=True)
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, 0)
        with torch.no_grad():  # as generation does
            model(ids, attention_mask=mask, use_cache=True)
        assert handle.stats.padded_forwards == 1
        with pytest.raises(ValueError, match="To decode, pass `use_cache=True`"):  # no cache came from an earlier call
            model(ids[:, -1:], attention_mask=nn.functional.pad(mask, (0, 1), value=1))
    with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="use_cache"):
        model(ids, attention_mask=mask, use_cache=True)
