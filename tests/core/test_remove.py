"""`remove_padding`: the numbers of the padded computation from the real, distinct tokens alone, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import io
import types
import weakref
from contextlib import nullcontext
from typing import Any

import accelerate
import hypothesis
import peft
import pytest
import torch
import transformers
from kit.cells import every_pair
from kit.family_outcomes import leaking_layouts
from kit.flash_stand_in import flash_attention_stand_in
from kit.models import (
    COLUMNS,
    CONFIGS,
    PAD,
    ROWS,
    SUPPORTED,
    batch,
    build,
    drawn_batches,
    padded_positions,
    real_logps,
)
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

import trl_padfix.core.call.layout_of
from trl_padfix import PaddingRemovalError, check_parity, padding_free_layout, prefix_sharing_layout, remove_padding
from trl_padfix.core.call.calls import packed_call
from trl_padfix.core.call.step import step_layouts


TOLERANCE = 1e-5
"""Of log-probabilities in nats, and of each parameter's gradient relative to its norm, in fp32."""

SHARING = pytest.mark.parametrize("sharing", [False, True], ids=["padding_free", "prefix_sharing"])
SIDES = ("left", "right", "holes")

REAL = sum(map(len, ROWS))
DISTINCT = len({tuple(row[: n + 1]) for row in ROWS for n in range(len(row))})


@pytest.fixture(autouse=True, scope="module")
def _flash_attention():
    with flash_attention_stand_in():
        yield


def lora(model: torch.nn.Module) -> peft.PeftModel:
    """LoRA whose two matrices are both random, so that each has a gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        )


def checkpointed(model: torch.nn.Module, reentrant: bool) -> torch.nn.Module:
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def weighted_sum(logps: torch.Tensor) -> torch.Tensor:
    """A loss in which no two tokens count the same."""
    return (logps * torch.linspace(0.5, 1.5, logps.numel())).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def numbers(model, ids, mask, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the real tokens and the gradient of each parameter."""
    model.zero_grad()
    logps = real_logps(model(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs).logits, ids, mask)
    weighted_sum(logps).backward()
    return logps.detach(), gradients(model)


def padded_numbers(name: str, model, ids, mask) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same as the model computes them by itself."""
    # Rotary positions are relative; absolute ones must be told where a row begins.
    return numbers(model, ids, mask, **{"position_ids": padded_positions(mask)} if name == "gpt2" else {})


def assert_same_numbers(got, expected) -> None:
    assert (got[0] - expected[0]).abs().max() <= TOLERANCE
    assert_same_gradients(got[1], expected[1])


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        error, size = (got[name] - expected[name]).norm(), expected[name].norm()
        assert error <= TOLERANCE * size + 1e-7, f"{name}: {error} of {size}"


def logits_of(model, ids, mask, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **kwargs).logits


def assert_equal_where_real(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=TOLERANCE)


# -- the same numbers


@pytest.mark.parametrize(
    ("name", "implementation", "side", "checkpointing", "sharing"),
    every_pair(SUPPORTED, SIDES, [None, "reentrant", "non-reentrant"], [False, True]),
)
def test_packed_and_padded_give_the_same_numbers(name, implementation, side, checkpointing, sharing):
    ids, mask = batch(side)
    model = build(name, implementation)
    expected = padded_numbers(name, model, ids, mask)
    if checkpointing:
        checkpointed(model, reentrant=checkpointing == "reentrant")
    computed = []
    norm = next(m for n, m in model.named_modules() if n.endswith(("layers.0.input_layernorm", "h.0.ln_1")))
    norm.register_forward_hook(lambda module, args, output: computed.append(output.shape[:2]))

    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert_same_numbers(numbers(model, ids, mask), expected)

    times = 2 if checkpointing else 1
    assert computed == [(1, handle.stats.packed_tokens)] * times  # that mode, and that checkpointing, did run
    assert handle.stats.packed_tokens < handle.stats.padded_tokens


@SHARING
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
def test_lora_gives_the_same_numbers(implementation, checkpointing, sharing):
    ids, mask = batch("holes")
    model = lora(build("qwen2", implementation))
    expected = numbers(model, ids, mask)
    if checkpointing:
        checkpointed(model, reentrant=checkpointing == "reentrant")

    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert_same_numbers(numbers(model, ids, mask), expected)

    assert all("lora" in name for name in expected[1])
    assert handle.stats.packed_tokens < handle.stats.padded_tokens


@SHARING
@pytest.mark.parametrize(("name", "implementation"), [*SUPPORTED, ("gpt2", "flash_attention_2")])
def test_bf16_is_as_close_to_fp32_packed_as_padded(name, implementation, sharing):
    ids, mask = batch("mixed")
    kwargs = {"position_ids": padded_positions(mask)} if name == "gpt2" else {}
    exact = real_logps(logits_of(build(name, "eager"), ids, mask, **kwargs), ids, mask)
    model = build(name, implementation).bfloat16()
    padded = real_logps(logits_of(model, ids, mask, **kwargs), ids, mask)

    with remove_padding(model, prefix_sharing=sharing) as handle:
        packed = real_logps(logits_of(model, ids, mask), ids, mask)

    assert (packed - exact).abs().mean() <= 2 * (padded - exact).abs().mean()
    assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL)


tiny = functools.cache(build)


@SHARING
@pytest.mark.parametrize("name", ["mistral", "gpt2"])
@hypothesis.settings(max_examples=30)
@hypothesis.given(given=drawn_batches())
def test_any_batch_gives_the_same_numbers(name, sharing, given):
    ids, mask = given
    hypothesis.assume((mask[:, 1:] * mask[:, :-1]).any())  # else there is nothing to score
    model = tiny(name)
    expected, gradient = padded_numbers(name, model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing):
        got, packed_gradient = numbers(model, ids, mask)

    assert (got - expected).abs().max() <= TOLERANCE
    # Of all parameters at once: in rows of two tokens some gradients are zero but for rounding.
    one, other = (torch.cat([g.flatten() for g in each.values()]) for each in (packed_gradient, gradient))
    assert (one - other).norm() <= TOLERANCE * other.norm()


def merge_segments(layout):
    """Every row attends to the rows before it."""
    bounds = torch.tensor([0, layout.packed_tokens], dtype=torch.int32)
    lengths = (layout.packed_tokens,)
    return dataclasses.replace(
        layout,
        key_index=None,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        query_lengths=lengths,
        key_lengths=lengths,
        spans=lengths,
    )


def keep_counting_positions(layout):
    """Positions do not start anew with each row."""
    return dataclasses.replace(layout, positions=torch.arange(layout.packed_tokens))


def share_one_token_too_many(ids, mask):
    """20 is taken for 11: that is where the answers to the first prompt part."""
    return prefix_sharing_layout(ids.masked_fill(ids == 20, 11), mask)


WRONG_LAYOUTS = {
    "rows leak": (False, lambda ids, mask: merge_segments(padding_free_layout(mask))),
    "shared rows leak": (True, lambda ids, mask: merge_segments(prefix_sharing_layout(ids, mask))),
    "positions go on": (True, lambda ids, mask: keep_counting_positions(prefix_sharing_layout(ids, mask))),
    # 11 and 20 are where the answers to the first prompt part.
    "a token too many is shared": (
        True,
        lambda ids, mask: prefix_sharing_layout(ids.masked_fill(ids == 20, 11), mask),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_LAYOUTS)
@pytest.mark.parametrize(("name", "implementation"), SUPPORTED)
def test_a_wrong_layout_gives_other_numbers(name, implementation, wrong, monkeypatch):
    ids, mask = batch("mixed")
    model = build(name, implementation)
    expected = padded_numbers(name, model, ids, mask)
    sharing, layout = WRONG_LAYOUTS[wrong]
    monkeypatch.setattr(trl_padfix.core.call.layout_of, "padding_free_layout", lambda mask: layout(ids, mask))
    monkeypatch.setattr(
        trl_padfix.core.call.layout_of, "prefix_sharing_layout", lambda ids, mask, positions: layout(ids, mask)
    )

    with remove_padding(model, prefix_sharing=sharing):
        got = numbers(model, ids, mask)

    with pytest.raises(AssertionError):
        assert_same_numbers(got, expected)
    assert (got[0] - expected[0]).abs().max() > 0.01


def test_absolute_positions_that_go_on_give_other_numbers(monkeypatch):
    ids, mask = batch("left")
    model = build("gpt2")
    expected = padded_numbers("gpt2", model, ids, mask)
    wrong = keep_counting_positions(padding_free_layout(mask))
    monkeypatch.setattr(trl_padfix.core.call.layout_of, "padding_free_layout", lambda mask: wrong)

    with remove_padding(model), pytest.raises(AssertionError):
        assert_same_numbers(numbers(model, ids, mask), expected)


@SHARING
@pytest.mark.parametrize("when", ["after removal", "while disabled"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recomputation_is_packed_even_when_padding_removal_is_off_by_then(reentrant, when, sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = numbers(model, ids, mask)
    checkpointed(model, reentrant)
    model.zero_grad()

    with remove_padding(model, prefix_sharing=sharing) as handle:
        logps = real_logps(model(input_ids=ids, attention_mask=mask).logits, ids, mask)
        if when == "while disabled":
            with handle.disabled():
                weighted_sum(logps).backward()
    if when == "after removal":
        weighted_sum(logps).backward()

    assert_same_gradients(gradients(model), expected[1])
    del logps
    assert not attached_parts(model)


# -- real tokens only


@SHARING
@pytest.mark.parametrize("side", ["left", "right", "mixed", "both"])
def test_no_pad_enters_the_decoder(side, sharing):
    ids, mask = batch(side)
    model = build("qwen2")
    embedded, entered = [], []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].shape))

    with remove_padding(model, prefix_sharing=sharing) as handle:
        model(input_ids=ids, attention_mask=mask)

    tokens = DISTINCT if sharing else REAL
    assert entered == [(1, tokens, 32)]
    assert embedded[0].shape == (1, tokens)
    assert PAD not in embedded[0]
    assert handle.stats.packed_tokens == tokens


@SHARING
@pytest.mark.parametrize("side", ["left", "right", "mixed", "both"])
def test_the_head_scores_packed_tokens_only(side, sharing):
    ids, mask = batch(side)
    model = build("qwen2")
    expected = model(input_ids=ids, attention_mask=mask).logits
    project, scored = model.lm_head.forward, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        scored.append(hidden.shape[:2])
        return project(hidden)

    model.lm_head.forward = counted
    with remove_padding(model, prefix_sharing=sharing):
        logits = model(input_ids=ids, attention_mask=mask).logits
        model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)  # by hand: what it is given
    model(input_ids=ids, attention_mask=mask)

    assert scored == [(1, DISTINCT if sharing else REAL), ids.shape, ids.shape]
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)
    assert not logits[~mask.bool()].any()


class Waits(TorchDispatchMode):
    """Records the operations for which the host must wait for the device, were there one."""

    def __init__(self):
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_number = func is torch.ops.aten.index.Tensor and all(i is None or i.dtype != torch.bool for i in args[1])
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags) and not by_number:
            self.operations.append(str(func))
        return func(*args, **kwargs or {})


@SHARING
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_a_packed_forward_with_a_known_layout_waits_for_nothing(name, sharing):
    ids, mask = batch("mixed")
    model = build(name)
    with remove_padding(model, prefix_sharing=sharing), torch.no_grad(), contextlib.ExitStack() as stack:
        decoder = model.get_decoder()
        stack.enter_context(step_layouts())
        decoder(ids, attention_mask=mask)
        with Waits() as waits:
            decoder(ids, attention_mask=mask)
            assert waits.operations == []
            mask.sum().item()
            assert len(waits.operations) == 1  # it would be noticed


def test_stats_are_summed_until_reset():
    ids, mask = batch("left")
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=True) as handle:
        assert (handle.stats.pad_fraction, handle.stats.shared_fraction) == (0, 0)
        for _ in range(2):
            model(input_ids=ids, attention_mask=mask)

        stats = handle.stats
        assert (stats.padded_tokens, stats.real_tokens, stats.packed_tokens) == (2 * 7 * COLUMNS, 2 * 62, 2 * 33)
        assert stats.pad_fraction == pytest.approx(1 - 62 / 98)
        assert stats.shared_fraction == pytest.approx(1 - 33 / 62)
        stats.reset()
        assert (stats.padded_tokens, stats.real_tokens, stats.packed_tokens) == (0, 0, 0)


# -- every way to call the model


def without_cache(output: Any) -> Any:
    """`output`, which holds no keys of packed rows where the caller did not ask for a cache."""
    assert output.past_key_values is None or output.logits.shape[0] == output.past_key_values.layers[0].keys.shape[0]
    return output


@SHARING
@pytest.mark.parametrize(
    "call",
    [
        lambda model, ids, mask: model(ids, mask).logits,
        lambda model, ids, mask: model(ids, attention_mask=mask.bool()).logits,
        lambda model, ids, mask: model(ids, attention_mask=mask.float()).logits,
        lambda model, ids, mask: model(ids, mask, return_dict=False)[0],
        lambda model, ids, mask: model(ids, mask, use_cache=False, return_dict=False)[0],
        lambda model, ids, mask: model(ids, mask, logits_to_keep=0).logits,
        lambda model, ids, mask: model.lm_head(model.model(ids, mask).last_hidden_state),
        lambda model, ids, mask: model.lm_head(model.model(ids, mask, return_dict=False)[0]),
        lambda model, ids, mask: without_cache(model(ids, mask)).logits,
    ],
    ids=[
        "positional",
        "bool mask",
        "float mask",
        "tuple",
        "tuple without cache",
        "logits_to_keep",
        "decoder",
        "tuple of the decoder",
        "cache by default",
    ],
)
def test_a_model_can_be_called_as_before(call, sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    with torch.no_grad():
        expected = call(model, ids, mask)
        with remove_padding(model, prefix_sharing=sharing) as handle:
            got = call(model, ids, mask)

    assert got.shape == expected.shape
    assert_equal_where_real(got, expected, mask)
    assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL)


def test_inputs_embeds_are_packed():
    ids, mask = batch("mixed")
    model = build("qwen2")
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()

    def values_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits
        return logits, torch.autograd.grad(weighted_sum(real_logps(logits, ids, mask)), embeds)[0]

    expected, expected_gradient = values_and_gradient()
    with remove_padding(model) as handle:
        got, gradient = values_and_gradient()

    assert_equal_where_real(got, expected, mask)
    assert_equal_where_real(gradient, expected_gradient, mask)
    assert (gradient[mask == 0] == 0).all()
    assert handle.stats.packed_tokens == REAL


@SHARING
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["a row each", "a row for all"])
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


@SHARING
def test_token_types_are_packed_or_refused(sharing):
    ids, mask = batch("right")
    types = torch.arange(7)[:, None].expand_as(ids)  # embedded like tokens, and so another input in each row
    model = build("gpt2")
    expected = logits_of(model, ids, mask, token_type_ids=types)

    with contextlib.suppress(PaddingRemovalError), remove_padding(model, prefix_sharing=sharing):
        assert_equal_where_real(logits_of(model, ids, mask, token_type_ids=types), expected, mask)


@SHARING
@pytest.mark.parametrize("model", ["PhimoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_window_that_only_the_mask_knows_is_kept_or_refused(model, sharing):
    ids, mask = batch("right")
    experts = {"num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2, "initializer_range": 0.2}
    cls = getattr(transformers, model)
    network = cls(cls.config_class(**_TINY | experts | window | {"shared_expert_intermediate_size": 8})).eval()
    expected = logits_of(network, ids, mask)

    with contextlib.suppress(PaddingRemovalError), remove_padding(network, prefix_sharing=sharing):
        assert_equal_where_real(logits_of(network, ids, mask), expected, mask)


@SHARING
def test_all_hidden_states_are_laid_out_over_the_batch(sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    with torch.no_grad():
        expected = model(ids, mask, output_hidden_states=True).hidden_states
        with remove_padding(model, prefix_sharing=sharing):
            got = model(ids, mask, output_hidden_states=True).hidden_states

    assert len(got) == len(expected) == 4
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert_equal_where_real(one, other, mask)
        assert (one[mask == 0] == 0).all()


@SHARING
def test_router_logits_and_balancing_loss_are_those_of_the_padded_batch(sharing):
    ids, mask = batch("mixed")
    labels = ids.masked_fill(mask == 0, -100)
    labels[1::2].masked_fill_(padded_positions(mask)[1::2] == 0, -100)  # nothing stands before them but padding
    model = build("qwen3_moe")
    with torch.no_grad():
        expected = model(ids, mask, labels=labels)
        with remove_padding(model, prefix_sharing=sharing):
            got = model(ids, mask, labels=labels)

    torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    torch.testing.assert_close(got.loss, expected.loss)
    assert len(got.router_logits) == len(expected.router_logits) == 3
    for one, other in zip(got.router_logits, expected.router_logits, strict=True):
        assert one.shape == other.shape == (mask.numel(), 4)
        assert_equal_where_real(one, other, mask.flatten())


@SHARING
@pytest.mark.parametrize("side", ["left", "right"])
def test_reward_heads_pool_the_same_token(side, sharing):
    ids, mask = batch(side)
    config = CONFIGS["qwen2"](num_labels=2)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    expected = logits_of(model, ids, mask)

    with remove_padding(model, prefix_sharing=sharing) as handle:
        torch.testing.assert_close(logits_of(model, ids, mask), expected, rtol=0, atol=TOLERANCE)
    assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL)


@SHARING
@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_reward_heads_pool_the_end_of_the_mask_even_if_its_id_is_that_of_padding(side, sharing):
    ids, mask = batch(side)
    last = 9  # ends rows 3 and 6
    config = CONFIGS["qwen2"](num_labels=2, pad_token_id=last)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        alone = [model.score(model.model(torch.tensor([row])).last_hidden_state[0, -1]) for row in ROWS]

    with remove_padding(model, prefix_sharing=sharing, pool_last_token=True):
        got = logits_of(model, ids.masked_fill(mask == 0, last), mask)

    torch.testing.assert_close(got, torch.stack(alone), rtol=0, atol=TOLERANCE)


@SHARING
def test_wrappers_and_bare_decoders_are_found(sharing):
    ids, mask = batch("left")
    model = build("qwen2")
    for wrapper in (torch.nn.Sequential(model), model.model, torch.nn.ModuleDict({"policy": lora(build("qwen2"))})):
        with remove_padding(wrapper, prefix_sharing=sharing) as handle:
            handle.decoder(ids, mask)
            assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL)


@SHARING
def test_a_batch_without_anything_to_remove_runs_as_it_is(sharing):
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])
    mask = torch.ones_like(ids)
    model = build("qwen2")
    expected = logits_of(model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert torch.equal(logits_of(model, ids, mask), expected)
    assert handle.stats.packed_tokens == handle.stats.padded_tokens == 8


def test_without_a_mask_rows_still_share():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 3]])
    model = build("qwen2")
    expected = logits_of(model, ids, None)

    with remove_padding(model, prefix_sharing=True) as handle:
        assert_equal_where_real(logits_of(model, ids, None), expected, torch.ones_like(ids))
    assert handle.stats.packed_tokens == 6


@SHARING
def test_inference_mode_gives_the_same_numbers(sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=sharing) as handle:
        expected = logits_of(model, ids, mask)
        with torch.inference_mode():
            inside = batch("mixed")  # inference tensors
            assert torch.equal(model(*inside).logits, expected)
            assert torch.equal(model(ids, mask).logits, expected)
    assert handle.stats.packed_tokens == 3 * (DISTINCT if sharing else REAL)


@SHARING
@pytest.mark.parametrize("inner", [{}, {"use_cache": True}], ids=["padded", "cached"])
def test_a_model_may_be_called_while_it_runs(inner, sharing):
    ids, mask = batch("mixed")
    inner_ids, inner_mask = batch("left")
    model = build("qwen2")
    expected, inner_expected = logits_of(model, ids, mask), logits_of(model, inner_ids, inner_mask)
    nested = []

    def call_again(*_: Any) -> None:
        hook.remove()
        nested.append(logits_of(model, inner_ids, inner_mask, **inner))

    hook = model.model.layers[1].register_forward_pre_hook(call_again)
    with remove_padding(model, prefix_sharing=sharing):
        got = logits_of(model, ids, mask)

    assert_equal_where_real(got, expected, mask)
    assert_equal_where_real(nested[0], inner_expected, inner_mask)


@pytest.mark.slow
@SHARING
def test_a_compiled_model_gives_the_same_numbers_or_is_refused(sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = logits_of(model, ids, mask)
    with contextlib.suppress(PaddingRemovalError), remove_padding(model, prefix_sharing=sharing):
        got = logits_of(torch.compile(model, backend="eager"), ids, mask)
        assert_equal_where_real(got, expected, mask)


# -- calls that are not ours


@SHARING
@pytest.mark.parametrize(
    "kwargs",
    [
        lambda ids, mask: {"input_ids": ids, "attention_mask": mask, "use_cache": True},
        lambda ids, mask: {
            "input_ids": ids,
            "attention_mask": mask,
            "past_key_values": transformers.DynamicCache(),
        },
        lambda ids, mask: {"input_ids": ids[:1]},
        lambda ids, mask: {"input_ids": ids[:1], "position_ids": torch.arange(COLUMNS)[None]},
    ],
    ids=["use_cache", "past_key_values", "one row without mask", "one row with positions"],
)
def test_other_calls_go_through_untouched(kwargs, sharing):
    model, given = build("qwen2"), batch("left")
    with torch.no_grad():
        expected = model(**kwargs(*given))
        with remove_padding(model, prefix_sharing=sharing) as handle:
            got = model(**kwargs(*given))

    assert torch.equal(got.logits, expected.logits)
    assert (got.past_key_values is None) == (expected.past_key_values is None)
    assert handle.stats.packed_tokens == 0


@SHARING
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2"])
def test_generation_is_as_before(name, use_cache, sharing):
    ids, mask = batch("left")
    model = build(name)
    settings = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    expected = model.generate(input_ids=ids, attention_mask=mask, **settings)

    with remove_padding(model, prefix_sharing=sharing):
        assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), expected)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), expected)


def test_the_signature_of_forward_stays():
    model = build("qwen2")
    signatures = [inspect.signature(m.forward) for m in (model, model.model, model.model.layers[0].self_attn)]
    with remove_padding(model):
        for module, signature in zip((model, model.model, model.model.layers[0].self_attn), signatures, strict=True):
            assert inspect.signature(module.forward) == signature


def test_another_model_stays_as_it_is_bit_for_bit():
    ids, mask = batch("mixed")
    config = CONFIGS["qwen2"]()
    one, other = (transformers.Qwen2ForCausalLM(config).eval() for _ in range(2))  # they share the config object
    before = logits_of(other, ids, mask)

    with remove_padding(one):
        logits_of(one, ids, mask)
        assert torch.equal(logits_of(other, ids, mask), before)
        assert not attached_parts(other)


# -- nothing stays behind


def attached_parts(model: torch.nn.Module) -> list[str]:
    """What of an attachment a model still carries."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def traces(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """All that an attachment could leave in a model, its config and transformers' functions."""
    attributes = {
        f"{name}.{attribute}": len(value) if attribute.endswith("_hooks") else None
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }
    return attributes | vars(model.config) | {"search": transformers.masking_utils.find_packed_sequence_indices}


@SHARING
@pytest.mark.parametrize("times", [1, 100])
def test_removing_restores_everything(times, sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    logits = logits_of(model, ids, mask)
    before = copy.deepcopy(traces(model))

    for _ in range(times):
        handle = remove_padding(model, prefix_sharing=sharing)
        if times == 1:
            logits_of(model, ids, mask)
        handle.remove()
        handle.remove()  # does no harm

    assert traces(model) == before
    assert torch.equal(logits_of(model, ids, mask), logits)


@SHARING
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [False, True])
def test_removing_restores_everything_after_an_exception(training, error, sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    logits = logits_of(model, ids, mask)
    before = copy.deepcopy(traces(model))

    def fail(*_: Any) -> None:
        raise error

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    attached = remove_padding(model, prefix_sharing=sharing)
    with pytest.raises(error) as kept, torch.set_grad_enabled(training), attached:
        model(ids, mask)
    hook.remove()

    assert kept.tb is not None  # the frames live on, as those of the last error do in a notebook
    assert traces(model) == before
    assert torch.equal(logits_of(model, ids, mask), logits)


def test_after_an_exception_the_attached_model_goes_on():
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = logits_of(model, ids, mask)

    def fail(*_: Any) -> None:
        hook.remove()
        raise ValueError

    with remove_padding(model) as handle:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with contextlib.suppress(ValueError):
            logits_of(model, ids, mask)
        assert packed_call(handle.decoder) is None
        assert model.config._attn_implementation == "sdpa"
        assert_equal_where_real(logits_of(model, ids, mask), expected, mask)


def test_handles_and_models_die():
    ids, mask = batch("mixed")
    model = build("qwen2")
    handle = remove_padding(model)
    model(ids, mask).logits.sum().backward()
    handle.remove()
    removed = weakref.ref(handle)
    del handle
    gc.collect()
    assert removed() is None

    handle = remove_padding(model)
    model(ids, mask)
    dead = [weakref.ref(handle), weakref.ref(model)]
    del handle, model
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_layouts_die_with_their_batch_without_waiting_for_the_garbage_collector():
    model = build("qwen2")
    gc.collect()
    gc.disable()
    try:
        for sharing in (False, True):
            with remove_padding(model, prefix_sharing=sharing):
                ids, mask = batch("mixed")
                logits_of(model, ids, mask)
                refs = [weakref.ref(ids), weakref.ref(mask)]
                del ids, mask
                assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_patch_on_top_stays_when_ours_goes():
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = logits_of(model, ids, mask)
    handle = remove_padding(model)
    ours, calls = model.model.forward, []

    @functools.wraps(ours)
    def on_top(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    model.model.forward = on_top
    logits_of(model, ids, mask)
    handle.remove()

    assert torch.equal(logits_of(model, ids, mask), expected)
    assert calls == [1, 1]
    assert handle.stats.packed_tokens == REAL
    with pytest.raises(PaddingRemovalError, match=r"replaced before .*hides the module that it calls"):
        remove_padding(model)
    assert model.model.forward is on_top
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["model"]


@pytest.mark.parametrize("hook", [False, True], ids=["method", "accelerate's hook"])
def test_a_forward_that_was_replaced_before_goes_along(hook):
    ids, mask = batch("mixed")
    model, calls = build("qwen2"), []
    expected = logits_of(model, ids, mask)

    def counted(forward):
        @functools.wraps(forward)
        def call(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(self, *args, **kwargs)

        return call

    for module in (model.model, model.model.layers[0].self_attn):
        if hook:
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
        else:
            module.forward = types.MethodType(counted(type(module).forward), module)
    with remove_padding(model, prefix_sharing=True) as handle:
        assert_equal_where_real(logits_of(model, ids, mask), expected, mask)
    assert handle.stats.packed_tokens == DISTINCT
    assert hook or len(calls) == 2


def test_disabled_is_the_padded_computation():
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = logits_of(model, ids, mask)
    with remove_padding(model) as handle:
        with handle.disabled(), handle.disabled():
            assert torch.equal(logits_of(model, ids, mask), expected)
        with contextlib.suppress(ValueError), handle.disabled():
            raise ValueError
        assert handle.stats.packed_tokens == 0
        logits_of(model, ids, mask)
        assert handle.stats.packed_tokens == REAL


# -- copies, checkpoints


def test_a_deep_copy_is_attached_on_its_own():
    ids, mask = batch("mixed")
    model = build("qwen2")
    handle = remove_padding(model)
    twin = copy.deepcopy(model)
    expected = logits_of(model, ids, mask)
    entered = []
    twin.model.layers[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].shape[1]))

    assert torch.equal(logits_of(twin, ids, mask), expected)
    assert handle.stats.packed_tokens == REAL  # of one forward
    handle.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert not attached_parts(model)
    assert torch.equal(logits_of(twin, ids, mask), expected)
    assert entered == [REAL, REAL]
    assert {id(m) for m in twin.modules()}.isdisjoint(id(m) for m in model.modules())


def test_an_attached_model_can_be_saved_whole():
    ids, mask = batch("mixed")
    model = build("qwen2")
    file = io.BytesIO()
    with remove_padding(model, prefix_sharing=True):
        expected = logits_of(model, ids, mask)
        torch.save(model, file)

    file.seek(0)
    assert torch.equal(logits_of(torch.load(file, weights_only=False), ids, mask), expected)


def test_batches_can_be_saved_after_a_forward():
    ids, mask = batch("mixed")
    model = build("qwen2")
    file = io.BytesIO()
    with remove_padding(model, prefix_sharing=True):
        logits_of(model, ids, mask)
    torch.save({"ids": ids, "mask": mask}, file)

    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["ids"], ids)


def test_checkpoints_hold_nothing_of_ours(tmp_path):
    ids, mask = batch("mixed")
    model = build("qwen2")
    expected = logits_of(model, ids, mask)
    model.save_pretrained(tmp_path / "before")
    with remove_padding(model):
        logits_of(model, ids, mask)
        assert model.state_dict().keys() == build("qwen2").state_dict().keys()
        model.save_pretrained(tmp_path / "attached")

    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "attached").iterdir()) == names
    for name in names:
        assert (tmp_path / "attached" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached").eval()
    assert torch.equal(logits_of(reloaded, ids, mask), expected)


# -- one layout for all forwards of a batch


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """The layouts that are built, by the name of what builds them."""
    names: list[str] = []
    for function in (padding_free_layout, prefix_sharing_layout):

        def counting(*args: Any, function=function) -> Any:
            names.append(function.__name__)
            return function(*args)

        monkeypatch.setattr(trl_padfix.core.call.layout_of, function.__name__, counting)
    return names


@SHARING
def test_policy_and_reference_use_one_layout(sharing, built):
    ids, mask = batch("mixed")
    policy, reference = build("qwen2"), build("qwen2", seed=1)
    with remove_padding(policy, prefix_sharing=sharing), remove_padding(reference, prefix_sharing=sharing):
        with step_layouts():
            for model in (policy, reference, policy):
                logits_of(model, ids, mask)
        assert len(built) == 1
        logits_of(policy, ids, mask)
    assert len(built) == 2


@SHARING
def test_a_batch_that_was_written_to_is_another_batch(sharing, built):
    ids, mask = batch("right")
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=sharing) as handle, step_layouts():
        logits_of(model, ids, mask)
        mask[0, 10] = 0
        expected = logits_of(build("qwen2"), ids, mask)
        assert_equal_where_real(logits_of(model, ids, mask), expected, mask)
        assert len(built) == 2

        ids[0, 0] = 3  # matters where ids are compared
        expected = logits_of(build("qwen2"), ids, mask)
        assert_equal_where_real(logits_of(model, ids, mask), expected, mask)
        assert len(built) == (3 if sharing else 2)

        logits_of(model, ids.clone(), mask.clone())
        assert len(built) == (4 if sharing else 3)
    assert handle.stats.packed_tokens > 0


def test_both_modes_keep_their_own_layout(built):
    ids, mask = batch("right")
    one, other = build("qwen2"), build("qwen2")
    with remove_padding(one) as first, remove_padding(other, prefix_sharing=True) as second, step_layouts():
        for model in (one, other, one, other):
            logits_of(model, ids, mask)

    assert sorted(built) == ["padding_free_layout", "prefix_sharing_layout"]
    assert (first.stats.packed_tokens, second.stats.packed_tokens) == (2 * REAL, 2 * DISTINCT)


# -- what is refused, and why


@pytest.mark.parametrize(
    ("sharing", "kwargs", "error", "message"),
    [
        (False, {"attention_mask": torch.ones(2, 1, 4, 4)}, PaddingRemovalError, r"\(2, 1, 4, 4\).*`\(B, L\)`"),
        (False, {"attention_mask": {"full_attention": None}}, PaddingRemovalError, r"mask of dict"),
        (False, {"attention_mask": torch.ones(2, 5)}, ValueError, r"\(2, 5\) and the batch \(2, 4\)"),
        (False, {"attention_mask": torch.ones(2, 4, requires_grad=True)}, ValueError, "requires a gradient"),
        (False, {"attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])}, ValueError, r"Rows \[0\]"),
        (
            True,
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 32), "attention_mask": torch.ones(2, 4)},
            PaddingRemovalError,
            "`prefix_sharing=True` compares token ids.*prefix_sharing=False",
        ),
    ],
    ids=["4-D mask", "prepared masks", "mask of another shape", "mask with gradient", "empty row", "inputs_embeds"],
)
def test_calls_that_cannot_be_packed_are_refused(sharing, kwargs, error, message):
    model = build("qwen2")
    given = {"input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 9, 3]])} | kwargs
    with remove_padding(model, prefix_sharing=sharing), pytest.raises(error, match=message):
        model(**given)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: "gpt2", "takes a model, got `str`"),
        (lambda: torch.nn.Linear(1, 1), "`Linear` contains none"),
        (lambda: torch.nn.ModuleList([build("gpt2"), build("qwen2")]), "contains GPT2LMHeadModel, Qwen2ForCausalLM"),
    ],
    ids=["no module", "no model", "two models"],
)
def test_it_takes_exactly_one_model(model, message):
    with pytest.raises(TypeError, match=message):
        remove_padding(model())


@pytest.mark.parametrize("where", ["call", "config"])
def test_attention_weights_are_refused(where):
    ids, mask = batch("right")
    model = build("qwen2", "eager")
    model.config.output_attentions = where == "config"
    with remove_padding(model) as handle:
        with pytest.raises(PaddingRemovalError, match=r"`output_attentions=True` asks for `\(B, N, L, L\)` weights"):
            model(ids, attention_mask=mask, **({"output_attentions": True} if where == "call" else {}))
        with handle.disabled():
            weights = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert len(weights) == model.config.num_hidden_layers


def test_attaching_twice_is_refused():
    model = build("qwen2")
    with remove_padding(model):
        with pytest.raises(ValueError, match=r"attached to this Qwen2Model already.*`.remove\(\)`"):
            remove_padding(model, prefix_sharing=True)
        with pytest.raises(ValueError, match="already"):
            remove_padding(model.model)
    remove_padding(model).remove()


_TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
}


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            "T5ForConditionalGeneration",
            {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
            "it is an encoder-decoder model",
        ),
        (
            "BertForMaskedLM",
            {k: v for k, v in _TINY.items() if k != "num_key_value_heads"},
            r"layer `encoder.layer.0.attention` \(BertAttention\) attends in both directions",
        ),
        (
            "XLNetLMHeadModel",
            {"vocab_size": 40, "d_model": 32, "d_head": 8, "n_head": 4, "d_inner": 48, "n_layer": 1},
            "no module that attends or otherwise mixes tokens was found",
        ),
        (
            "Gemma3ForCausalLM",
            _TINY | {"head_dim": 8, "use_bidirectional_attention": True},
            "attends in both directions|use_bidirectional_attention",
        ),
        ("Qwen2ForCausalLM", _TINY | {"attn_implementation": "flex_attention"}, "`flex_attention`.*'sdpa'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0].isupper() else "",
)
def test_models_without_an_exact_packed_forward_are_refused(model, config, message):
    cls = getattr(transformers, model)
    network = cls(cls.config_class(**config))
    with pytest.raises(PaddingRemovalError, match=rf"Padding cannot be removed from {model}: .*{message}"):
        remove_padding(network)
    assert not attached_parts(network)


@pytest.mark.parametrize("sharing", [False, True])
def test_prompt_learning_that_cannot_be_packed_is_refused(sharing):
    config = peft.PromptTuningConfig if sharing else peft.PrefixTuningConfig
    settings = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    reason = "PromptTuningConfig.*compared by token ids.*sharing=False" if sharing else "PrefixTuningConfig.*a cache"
    with pytest.raises(PaddingRemovalError, match=reason):
        remove_padding(peft.get_peft_model(build("qwen2"), settings), prefix_sharing=sharing)


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PromptEncoderConfig])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_virtual_tokens_are_packed(config, name):
    settings = {"encoder_hidden_size": 16} if config is peft.PromptEncoderConfig else {}
    torch.manual_seed(0)
    model = peft.get_peft_model(build(name), config(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)).eval()
    found: dict[bool, Any] = {}
    for side in ("left", "right"):
        ids, mask = batch(side)
        for packed in (False, True):
            with remove_padding(model) as handle:
                with nullcontext() if packed else handle.disabled():
                    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, 3:]
                assert handle.stats.packed_tokens == (mask.sum() + 3 * len(mask) if packed else 0)
            scores = real_logps(logits, ids, mask)
            model.zero_grad(set_to_none=True)
            scores.sum().backward()
            found[packed] = scores.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
        assert len(found[True][1]) > 0
        torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-4, atol=1e-4)
        report = check_parity(model, {"input_ids": ids, "attention_mask": mask})
        assert report.ok
        assert report.compared
        with leaking_layouts():
            assert not check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok


# -- TRL's fused LM head

FUSED = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


def fused(name: str, **config: Any) -> transformers.PreTrainedModel:
    model = build(name, "eager" if name == "gemma2" else "sdpa", **config)
    add_fused_lm_head(model, temperature=0.9, outputs=FUSED)
    return model


def answers(ids: torch.Tensor, mask: torch.Tensor, prompt: int = 3) -> torch.Tensor:
    """Labels: real tokens behind real tokens, the first `prompt` of each row left out."""
    behind_real = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool() & mask.bool()
    return ids.masked_fill(~behind_real | (mask.cumsum(1) <= prompt), -100)


def fused_numbers(model, ids, mask, labels, **kwargs) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **kwargs)
    (output.loss + weighted_sum((output.log_probs + 0.1 * output.entropy).flatten())).backward()
    return output, gradients(model)


def assert_same_fused_numbers(got, expected) -> None:
    assert got[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert got[0][name].dtype == value.dtype, name
        torch.testing.assert_close(
            got[0][name], value, rtol=0, atol=TOLERANCE, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert_same_gradients(got[1], expected[1])


@pytest.mark.parametrize(
    ("name", "side", "items", "sharing"),
    every_pair(["qwen2", "gemma2", "qwen3_moe"], SIDES, [None, 17], [False, True]),
)
def test_the_fused_head_scores_the_labels_and_nothing_else(name, side, items, sharing):
    ids, mask = batch(side)
    labels = answers(ids, mask)
    kwargs = {} if items is None else {"num_items_in_batch": items}
    model = fused(name)
    expected = fused_numbers(model, ids, mask, labels, **kwargs)
    scored = []
    model.model.register_forward_hook(lambda module, args, output: scored.append(output.last_hidden_state.shape[:2]))

    with remove_padding(model, prefix_sharing=sharing) as handle:
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels, **kwargs), expected)

    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert scored == [(1, (labels != -100).sum().item())]


@SHARING
@pytest.mark.parametrize("side", ["left", "both", "holes"])
def test_labels_behind_padding_are_not_scored(side, sharing):
    ids, mask = batch(side)
    model = fused("qwen2")
    expected = fused_numbers(model, ids, mask, answers(ids, mask, prompt=0))

    with remove_padding(model, prefix_sharing=sharing):
        # Each first real token is a label here, and in every row that begins behind padding nothing predicts it.
        got = fused_numbers(model, ids, mask, ids.masked_fill(mask == 0, -100))

    assert_same_fused_numbers(got, expected)


@SHARING
def test_a_batch_without_labels_has_no_loss(sharing):
    ids, mask = batch("left")
    model = fused("qwen2")
    with remove_padding(model, prefix_sharing=sharing) as handle:
        output, grads = fused_numbers(model, ids, mask, torch.full_like(ids, -100))

    assert output.loss == 0
    assert not output.label_mask.any()
    assert not output.log_probs.any()
    assert all(not grad.any() for grad in grads.values())
    assert handle.stats.packed_tokens == (DISTINCT if sharing else REAL)


@SHARING
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_the_fused_head_scores_batches_without_anything_to_remove(masked, sharing):
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])
    mask = torch.ones_like(ids)
    labels = answers(ids, mask, prompt=2)
    model = fused("qwen2")
    given = mask if masked else None
    expected = fused_numbers(model, ids, given, labels)

    with remove_padding(model, prefix_sharing=sharing):
        assert_same_fused_numbers(fused_numbers(model, ids, given, labels), expected)


@SHARING
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_the_fused_head_works_with_lora_and_checkpointing(reentrant, sharing):
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    base = fused("qwen2")
    model = lora(base)
    expected = fused_numbers(model, ids, mask, labels)
    checkpointed(model, reentrant)

    with remove_padding(model, prefix_sharing=sharing):
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)


@SHARING
def test_the_fused_head_may_be_added_after_attaching(sharing):
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    expected = fused_numbers(fused("qwen2"), ids, mask, labels)
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=sharing) as handle:
        add_fused_lm_head(model, temperature=0.9, outputs=FUSED)
        assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)
    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert_same_fused_numbers(fused_numbers(model, ids, mask, labels), expected)


def test_the_fused_head_stays_when_padding_removal_goes():
    ids, mask = batch("mixed")
    labels = answers(ids, mask)
    model = fused("qwen2")
    forward = model.forward
    expected = fused_numbers(model, ids, mask, labels)

    with remove_padding(model) as handle:
        assert_equal_where_real(logits_of(model, ids, mask), logits_of(build("qwen2"), ids, mask), mask)
        with handle.disabled():
            assert torch.equal(fused_numbers(model, ids, mask, labels)[0].log_probs, expected[0].log_probs)

    assert model.forward is forward
    assert torch.equal(fused_numbers(model, ids, mask, labels)[0].log_probs, expected[0].log_probs)


def test_pre_shifted_labels_are_left_to_trl():
    ids, mask = batch("right")
    shifted = torch.nn.functional.pad(answers(ids, mask)[:, 1:], (0, 1), value=-100)
    model = fused("qwen2")
    with torch.no_grad():
        expected = model(ids, mask, shift_labels=shifted, fused_lm_head=True)
        with remove_padding(model):
            got = model(ids, mask, shift_labels=shifted, fused_lm_head=True)

    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=0, atol=TOLERANCE)


@SHARING
def test_a_layout_from_inference_serves_training(sharing):
    ids, mask = batch("mixed")
    model = build("qwen2")
    with remove_padding(model, prefix_sharing=sharing):
        with torch.inference_mode():
            model(ids, attention_mask=mask)
        got = numbers(model, ids, mask)
    assert_same_numbers(got, numbers(model, ids, mask))


def test_accelerate_unwraps_an_attached_model():
    ids, mask = batch("mixed")
    model, accelerator = build("qwen2"), accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    expected = logits_of(model, ids, mask)
    handle = remove_padding(model)
    unwrapped = accelerator.unwrap_model(accelerator.prepare_model(model), keep_fp32_wrapper=False)
    assert_equal_where_real(logits_of(unwrapped, ids, mask), expected, mask)
    assert handle.stats.packed_tokens == REAL
    handle.remove()
    assert_equal_where_real(logits_of(unwrapped, ids, mask), expected, mask)


def test_an_attention_that_was_changed_after_attachment_is_refused():
    ids, mask = batch("mixed")
    model = build("qwen2")
    remove_padding(model)
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(PaddingRemovalError, match="flex_attention"):
        model(ids, attention_mask=mask)


@SHARING
def test_ids_beyond_the_vocabulary_are_an_error_that_says_how_many_there_are(sharing):
    ids, mask = batch("right")
    ids[0, 0] = 777
    handle = remove_padding(build("qwen2"), prefix_sharing=sharing)
    with pytest.raises(ValueError, match=r"token id 777, and the embedding of Qwen2Model has 40 rows.*tokenizer"):
        handle.decoder(ids, attention_mask=mask)


@SHARING
def test_a_mask_on_another_device_is_an_error_that_names_both(sharing):
    ids, mask = batch("right")
    handle = remove_padding(build("qwen2"), prefix_sharing=sharing)
    with pytest.raises(ValueError, match="mask is on meta and the batch on cpu"):
        handle.decoder(ids, attention_mask=mask.to("meta"))
