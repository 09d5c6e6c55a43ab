"""The path that a GPU takes, with real numbers on a simulated one: what is computed, in how many kernels, with how
many waits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from kit.simulated_cuda import Counts, to_simulated
from transformers import Qwen2Config, Qwen2ForCausalLM

import trl_padfix.core.attention.segments as segments
import trl_padfix.core.attention.varlen as kernels
import trl_padfix.core.call.layout_of
from trl_padfix import (
    PaddingRemovalError,
    check_parity,
    padding_free_layout,
    prefix_sharing_layout,
    remove_padding,
    unpack,
)
from trl_padfix.core.layout.flat_maps import sum_order
from trl_padfix.core.model.views import other_attention
from trl_padfix.core.parity import _precision


VOCABULARY = 96


def build(
    layers: int = 2, dtype: torch.dtype = torch.float32, implementation: str = "sdpa", **more
) -> Qwen2ForCausalLM:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = Qwen2Config(
        **{**sizes, "num_hidden_layers": layers, "num_key_value_heads": 2, "initializer_range": 0.08} | more
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = frequencies
    return model


def pairs(rows: int, columns: int = 24, common: int = 12, everyone: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which the second half begins as the first does, and all begin with the same few tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    ids[rows // 2 :, :common] = ids[: rows // 2, :common]
    ids[:, :everyone] = ids[0, :everyone]
    lengths = torch.randint(common + 2, columns + 1, (rows, 1), generator=generator)
    lengths[0], lengths[1] = columns, columns - 3
    return ids, (torch.arange(columns) < lengths).long()


def step(model, ids, mask, *, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a forward, and the gradient of their weighted sum."""
    model.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * (mask[:, 1:] * mask[:, :-1])
    weights = torch.linspace(0.5, 1, logps.numel(), device=ids.device).view_as(logps)
    (logps * weights).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    return logps.detach().cpu(), gradient.cpu()


# -- the simulated device itself


def test_the_simulated_device_counts_kernels_and_waits(gpu):
    x = to_simulated(torch.arange(6.0))
    assert (x.device, (x + 1).device) == (torch.device("cuda:0"), torch.device("cuda:0"))
    gpu.reset()
    y = (x * 2).view(2, 3)[1].sum()
    assert gpu.kernels == {"mul": 1, "sum": 1}  # a view and an index are no kernels
    assert (y.cpu().item(), not gpu.ours()) == (24.0, True)
    gpu.reset()
    waiting = [
        lambda: y.item(),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: torch.zeros(3).to("cuda:0"),
    ]
    for i, run in enumerate(waiting, start=1):
        run()
        assert sum(gpu.synchronisations.values()) == i
    torch.zeros(3).to("cuda:0", non_blocking=True)
    torch.zeros(3, device="cuda:0") + 1
    assert sum(gpu.synchronisations.values()) == len(waiting)


# -- the precision that attention computes in


@pytest.mark.parametrize("sharing", [False, True], ids=["padding-free", "prefix sharing"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False)], ids=["fp32 under autocast", "bf16"]
)
def test_every_layer_runs_on_torchs_varlen_kernel(gpu, dtype, autocast, sharing):
    ids, mask = pairs(8)
    want = step(build(), ids, mask, autocast=False)
    simulated = to_simulated(ids), to_simulated(mask)
    padded = step(to_simulated(build(dtype=dtype)), *simulated, autocast=autocast)
    assert gpu.varlen == []
    model = to_simulated(build(dtype=dtype))
    with remove_padding(model, prefix_sharing=sharing):
        packed = step(model, *simulated, autocast=autocast)

    assert len(gpu.varlen) == model.config.num_hidden_layers
    for got, other, exact in zip(packed, padded, want, strict=True):
        assert (got - exact).norm() < 1.3 * (other - exact).norm()


def test_float32_attends_segment_by_segment(gpu):
    ids, mask = pairs(8)
    want = step(build(), ids, mask, autocast=False)
    model = to_simulated(build())
    with remove_padding(model, prefix_sharing=True):
        got = step(model, to_simulated(ids), to_simulated(mask), autocast=False)
    assert gpu.varlen == []
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-5)
    assert (got[1] - want[1]).norm() / want[1].norm() < 1e-5


# -- kernels


def launches_of_a_layer(gpu: Counts, rows: int, everyone: int, *, packed: bool) -> tuple[Counter, Counter]:
    """Kernels that each further layer adds: to the forwards of a policy and its reference, and to a backward."""
    ids, mask = (to_simulated(x) for x in pairs(rows, everyone=everyone))
    found = []
    for layers in (2, 4):
        model, forward = to_simulated(build(layers)), Counter()
        with remove_padding(model, prefix_sharing=True) if packed else contextlib.nullcontext():
            for is_policy in (False, True):
                gpu.reset()
                with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(is_policy):
                    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                forward += gpu.kernels
                assert len(gpu.varlen) == (layers if packed else 0)
            gpu.reset()
            logits.float().square().mean().backward()
        found.append((forward, gpu.kernels))
    return tuple(Counter({k: (b[k] - a[k]) // 2 for k in b}) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "everyone"), [(128, 4), (512, 8)], ids=["64 pairs", "512 rows, one system prompt"])
def test_a_layer_takes_as_many_kernels_as_a_padded_one(gpu, rows, everyone):
    forward, backward = launches_of_a_layer(gpu, rows, everyone, packed=True)
    padded, _ = launches_of_a_layer(gpu, 8, 4, packed=False)

    assert forward.total() < padded.total()
    weights = 2 * 10  # under autocast: seven matrices and three biases of each model are cast anew
    assert forward.total() - weights <= 90
    assert backward.total() <= 100
    assert backward["_embedding_bag_forward_only"] == 2  # the gradients of shared keys, and those of shared values


# -- gradients of what rows share


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_gradients_of_shared_keys_are_one_sum_in_float32():
    layout = prefix_sharing_layout(*pairs(512, everyone=8))
    upstream = torch.randn(layout.key_index.numel(), 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.zeros(layout.packed_tokens, 2, 16, dtype=torch.float64)
    exact.index_add_(0, layout.key_index, upstream.double())

    ours = segments.sum_by_token(upstream, layout)
    assert error(ours, exact) <= 1.7e-3
    assert all(torch.equal(segments.sum_by_token(upstream, layout), ours) for _ in range(3))

    running = torch.zeros_like(exact, dtype=torch.bfloat16)  # a sum that is rounded after every addition
    for token, row in zip(layout.key_index.tolist(), upstream, strict=True):
        running[token] += row
    assert error(running, exact) > 1e-2


def test_the_sum_is_that_of_every_place():
    layout = prefix_sharing_layout(*pairs(16))
    upstream = torch.randn(layout.key_index.numel(), 2, 4, dtype=torch.float64)
    want = torch.zeros(layout.packed_tokens, 2, 4, dtype=torch.float64).index_add_(0, layout.key_index, upstream)
    torch.testing.assert_close(segments.sum_by_token(upstream, layout), want)
    wrong = dataclasses.replace(layout, key_order=layout.key_order.roll(1))
    assert not torch.allclose(segments.sum_by_token(upstream, wrong), want)


# -- what the kernels are handed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_bounds_are_one_object(gpu, device):
    ids, mask = (x if device == "cpu" else to_simulated(x) for x in pairs(8))
    layout = padding_free_layout(mask)
    assert layout.cu_seqlens_q is layout.cu_seqlens_k
    shared = prefix_sharing_layout(ids, mask)
    assert not torch.equal(shared.cu_seqlens_q, shared.cu_seqlens_k)


@pytest.mark.parametrize(
    ("parameters", "complete", "given"),
    [
        ({"scale", "window_size", "enable_gqa"}, True, {"enable_gqa": True}),  # 2.12 and later
        ({"scale", "window_size"}, True, {}),  # 2.11 groups heads by itself
        ({"is_causal"}, False, None),  # 2.10
        (set(), False, None),  # 2.9 has none
    ],
    ids=["2.12", "2.11", "2.10", "2.9"],
)
def test_torch_2_11_and_later_have_what_it_takes(gpu, parameters, complete, given, monkeypatch):
    monkeypatch.setattr(kernels, "_varlen_parameters", lambda: frozenset(parameters))
    assert kernels.torch_varlen_is_complete() is complete
    if given is None:
        return
    calls = []

    def varlen_attn(query, key, value, *bounds, **kwargs):
        calls.append(kwargs)
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    layout = padding_free_layout(torch.ones(1, 3, dtype=torch.int64))
    states = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    kernels.attend_torch_varlen(*states, layout, {"scaling": 0.5})
    assert {k: v for k, v in calls[0].items() if k == "enable_gqa"} == given


def test_unpacking_makes_one_padded_tensor(gpu):
    layout = padding_free_layout(to_simulated(pairs(8)[1]))
    states = to_simulated(torch.randn(1, layout.packed_tokens, 16))
    gpu.reset()
    unpack(states, layout)
    assert gpu.kernels == Counter({"new_zeros": 1, "index_copy_": 1})


def test_unpacking_in_place_keeps_gradients():
    layout = prefix_sharing_layout(*pairs(8))
    states = torch.randn(1, layout.packed_tokens, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack(x, layout), states, fast_mode=True)


# -- what does not run on the fast kernel says so


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_dim": 12}, "multiples of 8, and this model's have 12"),
        ({"head_dim": 264}, "at most 256 dimensions"),
        ({"attention_dropout": 0.1}, "set `attention_dropout=0`"),
    ],
    ids=["odd head size", "large heads", "dropout"],
)
def test_a_slow_path_in_half_precision_is_said_once(gpu, config, reason, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    kernels.logger.setLevel("WARNING")
    kernels.logger.warning_once.__func__.cache_clear()
    model = to_simulated(build(dtype=torch.bfloat16, **config)).train()
    with remove_padding(model):
        for _ in range(2):
            model(*(to_simulated(x) for x in pairs(4)), use_cache=False)
    said = [r.getMessage() for r in caplog.records if "segment by segment" in r.getMessage()]
    assert len(said) == 1
    assert reason in said[0]
    assert gpu.varlen == []


# -- errors keep their names


@pytest.mark.parametrize(
    ("error", "autocast", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False, torch.OutOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), True, torch.OutOfMemoryError),
        (RuntimeError("an illegal memory access"), True, RuntimeError),
        (RuntimeError("FlashAttention only support fp16 and bf16"), False, PaddingRemovalError),
    ],
    ids=["memory", "memory under autocast", "another under autocast", "precision"],
)
def test_an_error_of_flash_attention_keeps_its_name(gpu, error, autocast, expected):
    def attend(*args, **kwargs):
        raise error

    layout = padding_free_layout(to_simulated(torch.ones(1, 3, dtype=torch.int64)))
    states = [to_simulated(torch.zeros(1, 2, 3, 8)) for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast), pytest.raises(Exception) as caught:  # noqa: PT011
        kernels.attend_varlen(attend, None, *states, layout, {})
    assert type(caught.value) is expected


# -- parity in half precision


def one_row_sees_a_foreign_token(layout):
    """The second row begins one token early among the keys: it sees the last token of the first."""
    bounds = layout.cu_seqlens_q.tolist()
    begins = [begin - (row == 1) for row, begin in enumerate(bounds[:-1])]
    index = torch.cat([torch.arange(begin, end) for begin, end in zip(begins, bounds[1:], strict=True)])
    lengths = tuple(end - begin for begin, end in zip(begins, bounds[1:], strict=True))
    order, offsets = sum_order(index, layout.packed_tokens)
    wrong = dataclasses.replace(
        layout.to("cpu"),
        key_index=index,
        key_lengths=lengths,
        cu_seqlens_k=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        key_order=order,
        key_offsets=offsets,
    )
    return wrong.to(layout.real_index.device)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "autocast"])
@pytest.mark.parametrize(
    ("initializer", "layers"),
    [(0.02, 2), (0.08, 2), (0.2, 4), *(pytest.param(i, 24, marks=pytest.mark.slow) for i in (0.02, 0.08))],
)
def test_half_precision_tells_one_foreign_token_from_rounding(gpu, initializer, layers, precision, monkeypatch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[precision]
    model = build(layers, dtype, initializer_range=initializer, vocab_size=1024, hidden_size=128)
    ids, mask = (to_simulated(x) for x in pairs(6, columns=120, common=60))

    def check(sharing: bool = False):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            batch = {"input_ids": ids, "attention_mask": mask}
            return check_parity(to_simulated(model), batch, prefix_sharing=sharing)

    for sharing in (False, True):
        right = check(sharing)
        assert right.ok, right
        assert right.mean <= 1.3 * right.rounding  # far below the limit of 3 times
        assert f"where two padded forwards differ by {right.rounding:.2e}" in str(right)
    assert len(gpu.varlen) == 2 * layers
    build_layout = trl_padfix.core.call.layout_of.padding_free_layout
    monkeypatch.setattr(
        trl_padfix.core.call.layout_of,
        "padding_free_layout",
        lambda mask: one_row_sees_a_foreign_token(build_layout(mask)),
    )
    wrong = check()
    assert not wrong.ok, wrong
    assert min(wrong.mean / right.mean, wrong.maximum / right.maximum) > 4


def test_tf32_is_read_however_it_was_set(gpu, monkeypatch):
    model = build()
    ids, mask = pairs(4)
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"  # what `tf32=True` does
        with pytest.raises(RuntimeError):
            _ = torch.backends.cuda.matmul.allow_tf32
        assert _precision(model.model, torch.device("cuda")) == torch.float16
        report = check_parity(
            to_simulated(model), {"input_ids": to_simulated(ids), "attention_mask": to_simulated(mask)}
        )
        assert (report.dtype, report.ok) == (torch.float16, True)
        torch.backends.fp32_precision = "ieee"
        assert _precision(model.model, torch.device("cuda")) == torch.float32
    finally:
        torch.backends.fp32_precision = before


def test_a_padded_forward_with_another_attention_leaves_nothing_behind():
    model = build()
    ids, mask = pairs(4)
    functions = []
    with remove_padding(model) as handle, handle.disabled(), other_attention("eager"):
        hook = model.model.layers[0].self_attn.register_forward_hook(lambda m, i, out: functions.append(out[1]))
        model(ids, attention_mask=mask, use_cache=False)
        hook.remove()
    assert functions[0] is not None  # eager attention returns its weights, and sdpa none
    assert model.config._attn_implementation == "sdpa"


# -- devices


def test_layers_on_several_devices_are_refused(gpu):
    model = build()
    to_simulated(model.model.layers[1])
    with pytest.raises(PaddingRemovalError, match=r"several devices \(cpu, cuda:0\).*without `device_map`"):
        remove_padding(model)
    remove_padding(to_simulated(model)).remove()


def test_layers_that_are_sent_to_several_gpus_are_refused():
    model = build()
    for index, layer in enumerate(model.model.layers):
        layer._hf_hook = AlignDevicesHook(execution_device=index)
    with pytest.raises(PaddingRemovalError, match="cuda:0, cuda:1"):
        remove_padding(model)
