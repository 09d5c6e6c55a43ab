"""
What was wrong or slow on the GPU path, and what notices it: nine findings, none of which takes a GPU to guard.

Each guard passes as the package is, and fails where the old behaviour is put back: the negative control.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import gpu_runs
from kit.gpu_runs import check_half_precision
from kit.simulated_cuda import to_simulated
from torch.utils._python_dispatch import TorchDispatchMode

import trl_padfix.core.attention.attention as attention
import trl_padfix.core.attention.segments as segments
import trl_padfix.core.attention.varlen as kernels
import trl_padfix.core.call.layout_of as batches
import trl_padfix.core.decoder as patches
import trl_padfix.core.parity as parity
import trl_padfix.core.remove as remove
import trl_padfix.tools.bench.building as building
from trl_padfix import (
    PaddingRemovalError,
    check_parity,
    pack,
    padding_free_layout,
    prefix_sharing_layout,
    remove_padding,
    unpack,
)
from trl_padfix.tools.bench import BenchSettings


COLUMNS = 56
TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)


def small(**more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return gpu_runs.build(gpu_runs.Qwen2Config(**gpu_runs.CONFIG | TINY | more), "sdpa")


def rows(columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = gpu_runs.pairs(columns)
    return to_simulated(ids), to_simulated(mask)


# -- 1. TRL's default precision, float32 weights under bfloat16 autocast, reaches the varlen kernel


def every_layer_is_varlen(gpu, **config: Any) -> None:
    model = to_simulated(small(**config))
    gpu.reset()
    with remove_padding(model, prefix_sharing=True), torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        ids, mask = rows()
        model(ids, attention_mask=mask, use_cache=False)
    assert len(gpu.varlen) == model.config.num_hidden_layers


def test_1_queries_that_stay_in_float32_are_noticed(gpu, monkeypatch):
    every_layer_is_varlen(gpu)
    monkeypatch.setattr(attention, "in_attention_dtype", lambda *states: list(states))
    with pytest.raises(AssertionError):
        every_layer_is_varlen(gpu)


# -- 2. torch 2.11 groups heads by itself, and is enough


def test_2_a_gate_that_asks_for_torch_2_12_is_noticed(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "_varlen_parameters", lambda: frozenset({"scale", "window_size"}))
    every_layer_is_varlen(gpu, num_key_value_heads=4)
    wanted = {"scale", "window_size", "enable_gqa"}
    monkeypatch.setattr(kernels, "torch_varlen_is_complete", lambda: wanted <= kernels._varlen_parameters())
    with pytest.raises(AssertionError):
        every_layer_is_varlen(gpu, num_key_value_heads=4)


# -- 3. the backward of the gather is one sum, in float32


def shared_gradients_are_one_sum(gpu) -> None:
    layout = prefix_sharing_layout(*rows())
    draw = torch.Generator().manual_seed(0)
    states = to_simulated(torch.randn(1, 2, layout.packed_tokens, 16, generator=draw).bfloat16()).requires_grad_()
    upstream = torch.randn(1, 2, layout.gathered_keys, 16, generator=draw).bfloat16()
    gathered = segments._gather_keys(states, layout)
    gpu.reset()
    (found,) = torch.autograd.grad(gathered, states, to_simulated(upstream))
    assert gpu.launches <= 4
    exact = torch.zeros(layout.packed_tokens, 2, 16, dtype=torch.float64)
    assert layout.key_index is not None
    exact.index_add_(0, layout.key_index.cpu(), upstream[0].transpose(0, 1).double())
    assert (found.cpu()[0].transpose(0, 1).double() - exact).norm() / exact.norm() <= 1.7e-3


def one_addition_for_each_segment(upstream: torch.Tensor, layout: Any) -> torch.Tensor:
    total, begin = upstream.new_zeros(layout.packed_tokens, *upstream.shape[1:]), 0
    for length in layout.key_lengths:
        part = slice(begin, begin + length)
        total.index_add_(0, layout.key_index[part], upstream[part])
        begin += length
    return total


def test_3_a_backward_that_adds_segment_by_segment_is_noticed(gpu, monkeypatch):
    shared_gradients_are_one_sum(gpu)
    monkeypatch.setattr(segments, "sum_by_token", one_addition_for_each_segment)
    with pytest.raises(AssertionError):
        shared_gradients_are_one_sum(gpu)


# -- 4. the tests that need a GPU compare what they say


def check(autocast: bool = True) -> None:
    settings: dict[str, Any] = {"implementation": "sdpa", "window": None, "sharing": True, "columns": COLUMNS}
    check_half_precision(to_simulated, autocast=autocast, **settings, **TINY)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "fp32 under autocast"])
def test_4_the_test_for_gpus_passes_on_the_simulated_one(autocast, gpu):
    check(autocast)


def test_4_models_that_share_a_config_are_noticed(gpu, monkeypatch):
    monkeypatch.setattr(gpu_runs, "copy", SimpleNamespace(deepcopy=lambda config: config))
    with pytest.raises(AssertionError, match="attend with"):
        check()


def test_4_rounded_frequencies_are_noticed(gpu, monkeypatch):
    monkeypatch.setattr(gpu_runs, "to_bfloat16", lambda model: model.bfloat16())
    with pytest.raises(AssertionError, match="frequencies are rounded"):
        check(autocast=False)


def test_4_attention_that_is_not_varlen_is_noticed(gpu, monkeypatch):
    monkeypatch.setattr(attention, "torch_varlen_applies", lambda *args: False)
    with pytest.raises(AssertionError, match="0 layers ran"):
        check()


# -- 5. `tf32=True` can be read


def test_5_reading_the_older_setting_of_tf32_is_noticed(gpu, monkeypatch):
    ids, mask = rows()
    batch, before = {"input_ids": ids, "attention_mask": mask}, torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"  # what `tf32=True` does
        assert check_parity(to_simulated(small()), batch).ok
        monkeypatch.setattr(parity, "multiplies_in_tf32", lambda: torch.backends.cuda.matmul.allow_tf32)
        with pytest.raises(RuntimeError):
            check_parity(to_simulated(small()), batch)
    finally:
        torch.backends.fp32_precision = before


# -- 6. the limit of the parity check in half precision is measured, and no constant


def second_row_sees_the_first(layout: Any) -> Any:
    """The second row begins one token early among the keys."""
    device, layout = layout.real_index.device, layout.to("cpu")
    bounds = layout.cu_seqlens_q.tolist()
    begins = [begin - (row == 1) for row, begin in enumerate(bounds[:-1])]
    index = torch.cat([torch.arange(begin, end) for begin, end in zip(begins, bounds[1:], strict=True)])
    lengths = [end - begin for begin, end in zip(begins, bounds[1:], strict=True)]
    counts = torch.bincount(index, minlength=layout.packed_tokens)
    wrong = dataclasses.replace(
        layout,
        key_index=index,
        key_lengths=tuple(lengths),
        cu_seqlens_k=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        key_order=torch.argsort(index, stable=True),
        key_offsets=counts.cumsum(0) - counts,
    )
    return wrong.to(device)


def a_foreign_token_is_caught(model: Any, monkeypatch) -> None:
    ids, mask = rows(112)
    batch, build = {"input_ids": ids, "attention_mask": mask}, batches.padding_free_layout
    assert check_parity(to_simulated(model), batch, prefix_sharing=False).ok
    with monkeypatch.context() as patch:
        patch.setattr(batches, "padding_free_layout", lambda mask: second_row_sees_the_first(build(mask)))
        assert not check_parity(to_simulated(model), batch, prefix_sharing=False).ok


def test_6_a_fixed_limit_that_lets_a_foreign_token_pass_is_noticed(gpu, monkeypatch):
    model = small(initializer_range=0.02, hidden_size=128, intermediate_size=96, vocab_size=1024)
    gpu_runs.to_bfloat16(model)
    a_foreign_token_is_caught(model, monkeypatch)
    monkeypatch.setattr(parity, "_tolerances", lambda *args: (0.05, 0.5))  # in nats, as they were
    with pytest.raises(AssertionError):
        a_foreign_token_is_caught(model, monkeypatch)


# -- 7. `bench` measures what users run, and builds its models on their device


def the_default_precision_is_measured() -> None:
    assert building._arguments(BenchSettings(pairs=2, shape="tiny", dtype="autocast")).bf16
    assert building.weights_dtype("autocast") == torch.float32


def test_7_a_bench_of_pure_bfloat16_is_noticed(monkeypatch):
    the_default_precision_is_measured()
    config = building.trl.DPOConfig
    monkeypatch.setattr(building.trl, "DPOConfig", lambda **given: config(**given | {"bf16": False}))
    with pytest.raises(AssertionError):
        the_default_precision_is_measured()


class DrawsOnHost(TorchDispatchMode):
    """Counts the numbers that are drawn on the CPU."""

    drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "normal" in str(func) and args[0].device.type == "cpu":
            self.drawn += args[0].numel()
        return func(*args, **kwargs or {})


def weights_are_drawn_on_the_device() -> None:
    tokenizer = building.train_tokenizer([""], 1024)
    with DrawsOnHost() as host:
        model = building._model(tokenizer, BenchSettings(pairs=2, shape="tiny", device="meta"), seed=0)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert host.drawn == 0


def test_7_models_that_are_built_on_the_host_are_noticed(monkeypatch):
    weights_are_drawn_on_the_device()
    build = building.build_qwen2

    def on_host(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return build(*args, **kwargs)

    monkeypatch.setattr(building, "build_qwen2", on_host)
    with pytest.raises(AssertionError):
        weights_are_drawn_on_the_device()


# -- 8. cuDNN, which torch 2.15 prefers on Hopper, takes causal calls only where both bounds are one object


def cudnn_takes_the_bounds(monkeypatch) -> None:
    model, given = to_simulated(small()), []

    def varlen_attn(query, key, value, cu_seqlens_q, cu_seqlens_k, *args, **kwargs):
        given.append(cu_seqlens_q is cu_seqlens_k)
        return query

    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
        with remove_padding(model), torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            ids, mask = rows()
            model(ids, attention_mask=mask, use_cache=False)
    assert given == [True] * model.config.num_hidden_layers


def test_8_bounds_that_are_equal_and_two_objects_are_noticed(gpu, monkeypatch):
    assert kernels.torch_varlen_is_complete()
    cudnn_takes_the_bounds(monkeypatch)
    build = batches.padding_free_layout

    def two_objects(mask: torch.Tensor) -> Any:
        layout = build(mask)
        return dataclasses.replace(layout, cu_seqlens_k=layout.cu_seqlens_q.clone())

    monkeypatch.setattr(batches, "padding_free_layout", two_objects)
    with pytest.raises(AssertionError):
        cudnn_takes_the_bounds(monkeypatch)


# -- 9. one padded tensor, one dispatch for each forward, several devices refused, errors keep their names


def unpacking_copies_no_batch(gpu, unpack) -> None:
    _, mask = rows()
    layout = padding_free_layout(mask)
    states = pack(to_simulated(torch.randn(*mask.shape, 16)), layout)
    gpu.reset()
    unpack(states, layout)
    assert dict(gpu.kernels) == {"new_zeros": 1, "index_copy_": 1}


def test_9_a_second_padded_tensor_is_noticed(gpu):
    def out_of_place(x: torch.Tensor, layout: Any) -> torch.Tensor:
        zeros = x.new_zeros(layout.padded_tokens, *x.shape[2:])
        return zeros.index_copy(0, layout.real_index, x[0]).unflatten(0, layout.batch_shape)

    unpacking_copies_no_batch(gpu, unpack)
    with pytest.raises(AssertionError):
        unpacking_copies_no_batch(gpu, out_of_place)


def dispatch_is_entered_once(layers: int) -> None:
    entered, running = [], patches.running

    @contextlib.contextmanager
    def counted(call: Any) -> Iterator[None]:
        entered.append(call)
        with running(call):
            yield

    model = small(num_hidden_layers=layers)
    ids, mask = gpu_runs.pairs(COLUMNS)
    with pytest.MonkeyPatch.context() as patch, remove_padding(model), torch.no_grad():
        patch.setattr(patches, "running", counted)
        model(ids, attention_mask=mask, use_cache=False)
    assert len(entered) == 1


def test_9_a_dispatch_in_every_layer_is_noticed(monkeypatch):
    for layers in (2, 4):
        dispatch_is_entered_once(layers)
    call_once = attention.ViewPatch.call

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patches.running(patches.packed_call()):
            return call_once(self, *args, **kwargs)

    monkeypatch.setattr(attention.ViewPatch, "call", call)
    with pytest.raises(AssertionError):
        dispatch_is_entered_once(2)


def several_devices_are_refused() -> None:
    model = small()
    to_simulated(model.model.layers[1])
    with pytest.raises(PaddingRemovalError, match="several devices"):
        remove_padding(model)


def test_9_several_devices_that_are_not_refused_are_noticed(gpu, monkeypatch):
    several_devices_are_refused()
    monkeypatch.setattr(remove, "refuse_devices", lambda decoder: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        several_devices_are_refused()


def an_error_keeps_its_name(error: Exception) -> None:
    def attend(*args: Any, **kwargs: Any) -> Any:
        raise error

    layout = padding_free_layout(to_simulated(torch.ones(1, 3, dtype=torch.int64)))
    states = [to_simulated(torch.zeros(1, 2, 3, 8)) for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(Exception) as caught:  # noqa: PT011
        kernels.attend_varlen(attend, torch.nn.Module(), *states, layout, {})
    assert caught.value is error


def test_9_an_error_under_autocast_that_is_renamed_is_noticed(gpu, monkeypatch):
    error = RuntimeError("an illegal memory access")
    an_error_keeps_its_name(error)
    # As it was: asked of the dtype of the states, which autocast has not reached yet.
    monkeypatch.setattr(kernels, "in_attention_dtype", lambda *states: list(states))
    with pytest.raises(AssertionError):
        an_error_keeps_its_name(error)
