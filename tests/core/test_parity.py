"""`check_parity`: it passes what is right, fails what is wrong with the figures, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.cells import by_turns, slow_but
from kit.tolerance import tolerance
from kit.trainer_runs import BROKEN, break_mode
from simulated_gpu.simulated_cuda import to_simulated
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from zoo import families, gpu_models
from zoo.models import SUPPORTED, build, inputs

import trl_padfix.core.attention.attention
import trl_padfix.core.call.arguments
import trl_padfix.core.call.layout_of
from trl_padfix import PaddingRemovalError, ParityError, check_parity, remove_padding


pytestmark = pytest.mark.usefixtures("flash")


# -- what is right passes


@pytest.mark.parametrize(
    ("name", "implementation", "side", "sharing"), by_turns(SUPPORTED[::5], ["left", "right", "holes"], [True, False])
)
def test_a_supported_model_passes(name, implementation, side, sharing):
    result = check_parity(build(name, implementation), inputs(side), prefix_sharing=sharing)

    result.raise_if_failed()
    assert result.ok
    assert result.maximum < tolerance(28, terms=64, depth=24)
    assert (result.implementation, result.prefix_sharing, result.dtype) == (implementation, sharing, torch.float32)
    assert 0 < result.packed_tokens < result.padded_tokens  # it did compare a packed forward with a padded one
    assert result.compared > 0


def test_small_batches_without_padding_are_compared():
    for rows in (1, 2):
        ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20, 21]])[:rows]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        result = check_parity(build("qwen2"), given, prefix_sharing=True)
        assert result.ok
        assert 0 < result.packed_tokens < result.padded_tokens
    first = {name: x[:, :1] for name, x in given.items()}  # a row of one token has no score
    assert "parity not tested, because nothing was compared" in str(check_parity(build("qwen2"), first))
    reports = [str(check_parity(build("qwen2"), batch)) for batch in (given, {"input_ids": ids})]
    assert ["no `attention_mask`: every token counts as real" in report for report in reports] == [False, True]


@pytest.mark.parametrize("family", ["bloom", "qwen3_5_text"])
def test_masked_tokens_that_a_packed_forward_cannot_serve_are_left_out(family, monkeypatch):
    """A batch of such rows is computed padded, and the other batches of the training are what is compared."""
    ids = torch.randint(3, 60, (3, 12))
    ids[:, :4] = ids[0, :4]
    mask = torch.ones_like(ids)
    mask[:, 6], mask[1, 9:] = 0, 0
    model = families.build(family)
    with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="masked tokens between real"):
        model(ids, attention_mask=mask, use_cache=False)
    call = {"input_ids": ids, "attention_mask": mask}
    report = check_parity(model, call, prefix_sharing=True)
    assert report.ok
    assert report.compared > 0
    leaking_layouts(monkeypatch)
    assert not check_parity(model, call, prefix_sharing=True).ok


# -- what is wrong fails


def leaking_layouts(monkeypatch) -> None:
    for mode in BROKEN:
        break_mode(monkeypatch, mode)


def attention_without_segments(monkeypatch) -> None:
    def attend_to_all(attend, module, query, key, value, layout, kwargs, **implementation):
        return attend(module, query, key, value, None, **kwargs)[0]

    monkeypatch.setattr(trl_padfix.core.attention.attention, "attend_by_segment", attend_to_all)


def attention_of_one_token_less(monkeypatch) -> None:
    by_segment = trl_padfix.core.attention.attention.attend_by_segment

    def forget(attend, module, query, key, value, layout, kwargs, **implementation):
        key, value = key.roll(1, dims=2), value.roll(1, dims=2)
        return by_segment(attend, module, query, key, value, layout, kwargs, **implementation)

    monkeypatch.setattr(trl_padfix.core.attention.attention, "attend_by_segment", forget)


def unpacking_in_another_order(monkeypatch) -> None:
    unpack = trl_padfix.core.call.arguments.unpack
    monkeypatch.setattr(trl_padfix.core.call.arguments, "unpack", lambda x, layout: unpack(x.roll(1, dims=1), layout))


@pytest.mark.parametrize(
    ("break_it", "dtype", "sharing"),
    [
        (leaking_layouts, torch.float32, False),
        (leaking_layouts, torch.bfloat16, True),
        (attention_without_segments, torch.float32, True),
        (attention_of_one_token_less, torch.bfloat16, False),
        (unpacking_in_another_order, torch.float32, True),
    ],
)
def test_a_wrong_packed_forward_fails_with_the_figures(break_it, dtype, sharing, monkeypatch):
    break_it(monkeypatch)
    result = check_parity(build("qwen2").to(dtype), inputs(), prefix_sharing=sharing)

    assert not result.ok
    assert result.mean > result.mean_tolerance
    with pytest.raises(ParityError) as caught:
        result.raise_if_failed()
    assert f"mean {result.mean:.2e} (at most" in str(caught.value)
    assert f"largest {result.maximum:.2e} (at most" in str(caught.value)


@pytest.mark.parametrize("where", ["packed", "everywhere"])
def test_nan_fails(where, monkeypatch):
    model = build("qwen2")
    if where == "everywhere":
        model.model.norm.weight.data.fill_(torch.nan)
    else:
        nothing = lambda attend, module, query, *_, **__: query.transpose(1, 2) * torch.nan  # noqa: E731
        monkeypatch.setattr(trl_padfix.core.attention.attention, "attend_by_segment", nothing)
    result = check_parity(model, inputs())

    assert not result.ok
    assert result.finite is (where == "packed")
    said = (
        "difference of .* nan" if where == "packed" else "The padded forward of this model gives scores that are NaN"
    )
    with pytest.raises(ParityError, match=said):
        result.raise_if_failed()


def test_a_hook_that_mixes_tokens_is_named():
    def center(module: Any, args: Any, output: Any) -> Any:
        return output - output.mean(1, keepdim=True)

    model = build("qwen2")
    model.model.layers[1].mlp.register_forward_hook(center)
    with pytest.raises(ParityError, match=r"center`, a hook of a Qwen2MLP, gets packed rows; remove it"):
        check_parity(model, inputs()).raise_if_failed()


# -- each row alone decides


def wrong_if_padded(module: Any, args: Any, output: Any) -> Any:
    """A hook that spoils batches of several rows, as a layer with a mistake in its mask would."""
    return output + 0.5 if len(output) > 1 else output


@pytest.mark.parametrize(("dtype", "sharing"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_wrong_padded_forward_is_told_from_a_right_packed_one(dtype, sharing):
    model = build("qwen2", "sdpa" if sharing else "eager").to(dtype)
    right = check_parity(model, inputs(), prefix_sharing=sharing)
    model.model.layers[1].register_forward_hook(wrong_if_padded)
    state, random = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()

    found = check_parity(model, inputs(), prefix_sharing=sharing)

    found.raise_if_failed()
    assert found.fault.startswith("The padded forward of this model is wrong, and packed is right")
    assert found.maximum > 2 * found.maximum_tolerance
    assert found.packed_from_alone.ok
    assert not found.padded_from_alone.ok
    assert found.alone_dtype == (torch.float64 if dtype == torch.float32 else dtype)
    assert f"From each row alone ({found.alone_dtype}), packed differs by mean" in str(found)
    assert (right.ok, right.fault, right.packed_from_alone) == (True, "", None)  # nothing to decide
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (False, "The packed forward of this model is wrong: padded equals each row alone, and packed does not"),
        (True, "The packed forward of this model is wrong, as is the padded one: neither equals each row alone"),
    ],
)
def test_a_leak_stops_whatever_the_padded_forward_gives(spoilt, said, monkeypatch):
    model = build("qwen2")
    if spoilt:
        model.model.layers[1].register_forward_hook(wrong_if_padded)
    assert check_parity(model, inputs()).ok
    leaking_layouts(monkeypatch)
    found = check_parity(model, inputs())
    assert found.padded_from_alone.ok is not spoilt
    with pytest.raises(ParityError, match=said) as caught:
        found.raise_if_failed()
    assert f"packed differs by {found.packed_from_alone}; padded differs by {found.padded_from_alone}" in str(
        caught.value
    )


def test_what_a_model_amplifies_is_measured_on_rows_alone(monkeypatch):
    """A delta net takes rounding further than sums explain: 2e-4, packed as padded."""
    ids = torch.randint(3, 60, (4, 300), generator=torch.Generator().manual_seed(0))
    ids[1, :150] = ids[0, :150]
    batch = {"input_ids": ids, "attention_mask": (torch.arange(300) < torch.tensor([[300], [280], [40], [30]])).long()}
    model = families.build("qwen3_5_text")
    found = check_parity(model, batch, prefix_sharing=True)
    assert (found.ok, found.fault) == (True, "")
    leaking_layouts(monkeypatch)
    assert not check_parity(model, batch, prefix_sharing=True).ok


# -- the report


@pytest.mark.parametrize("wrong", [False, True])
def test_what_forked_states_round_in_half_precision_is_measured(wrong, monkeypatch):
    """Another attention function rounds far less than a delta net that starts from the state of a prefix."""
    delta_net = {f"linear_{x}_head_dim": 8 for x in ("key", "value")} | {"linear_num_value_heads": 4}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 12, "vocab_size": 600}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes, **heads, **delta_net))
    ids = torch.randint(5, 600, (8, 80))
    ids[:, :50] = ids[0, :50]
    if wrong:
        break_mode(monkeypatch, "prefix sharing")
    with torch.autocast("cpu", torch.bfloat16):
        report = check_parity(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prefix_sharing=True)
    assert report.ok != wrong, report


def test_the_precision_may_be_given():
    result = check_parity(build("qwen2"), inputs(), dtype=torch.float16)
    assert result.dtype == torch.float16
    assert result.rounding < 1e-5  # the model computes in float32 all the same
    assert result.mean_tolerance == torch.finfo(torch.float16).eps / 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"attention_mask": torch.ones(4, 3)}, r"mask has shape \(4, 3\) and the batch \(7, "),
        ({"prefix_sharing": "no"}, "`prefix_sharing` is True, False or 'auto', got 'no'"),
        ({"dtype": "bfloat16"}, "`dtype` must be a `dtype`, got `str`"),
    ],
)
def test_bad_arguments_are_refused(given, error):
    batch = inputs()
    options = {name: given[name] for name in given.keys() - batch.keys()}
    with pytest.raises((ValueError, TypeError), match=error):
        check_parity(build("qwen2"), batch | {k: v for k, v in given.items() if k in batch}, **options)


def test_the_precision_within_a_forward_counts_and_ddp_is_left_out():
    model = build("qwen2")
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as accelerate's `prepare` does
    assert check_parity(model, inputs()).dtype == torch.bfloat16
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = build("qwen2")  # a forward of the wrapper would fail: there is no other process
    check_parity(wrapped, inputs()).raise_if_failed()


# -- the parity check in half precision: its limit is measured, and one foreign token is beyond it


@pytest.mark.parametrize(
    ("initializer", "layers", "precision"),
    slow_but(
        [(0.08, 2, "autocast")],
        [(0.02, 2, "bf16"), (0.08, 2, "autocast"), (0.2, 4, "fp16"), (0.02, 24, "bf16"), (0.08, 24, "autocast")],
    ),
)
def test_half_precision_tells_one_foreign_token_from_rounding(gpu, initializer, layers, precision, monkeypatch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[precision]
    model = gpu_models.build(layers, dtype, initializer_range=initializer, vocab_size=1024, hidden_size=128)
    ids, mask = (to_simulated(x) for x in gpu_models.pairs(6, columns=120, common=60))

    def check(sharing: bool = False):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            batch = {"input_ids": ids, "attention_mask": mask}
            return check_parity(to_simulated(model), batch, prefix_sharing=sharing)

    for sharing in (False, True):
        right = check(sharing)
        assert right.ok, right
        assert right.mean <= 1.3 * right.rounding  # far below the limit of 3 times
        assert f"scores of two padded forwards differ by {right.rounding:.2e}" in str(right)
    assert len(gpu.varlen) == 4 * layers  # short rows, and the longest one
    right_layout = trl_padfix.core.call.layout_of.padding_free_layout
    monkeypatch.setattr(
        trl_padfix.core.call.layout_of,
        "padding_free_layout",
        lambda mask: gpu_models.second_row_sees_the_first(right_layout(mask)),
    )
    wrong = check()
    assert not wrong.ok, wrong
    assert min(wrong.mean / right.mean, wrong.maximum / right.maximum) > 4


@pytest.mark.parametrize(("setting", "dtype"), [("tf32", torch.float16), ("ieee", torch.float32)])
def test_tf32_is_read_however_it_was_set(gpu, setting, dtype):
    batch = dict(zip(("input_ids", "attention_mask"), map(to_simulated, gpu_models.pairs(4)), strict=True))
    model, before = to_simulated(gpu_models.build()), torch.backends.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "none"  # as `torch.backends`
        torch.backends.fp32_precision = setting  # what `tf32=True` sets; `allow_tf32` cannot be read from then on
        report = check_parity(model, batch)
    finally:
        torch.backends.fp32_precision = before
    assert (report.dtype, report.ok) == (dtype, True)


def test_a_head_with_one_value_for_each_token_is_compared(monkeypatch):
    model = families.build_type("qwen2", {"num_labels": 1}, auto=AutoModelForTokenClassification)
    assert check_parity(model, inputs()).ok
    leaking_layouts(monkeypatch)
    report = check_parity(model, inputs())
    assert not report.ok
    assert report.gradient > 10 * report.gradient_tolerance
