"""`packed_attention` against dense attention of each row on its own, and what it refuses."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from kit.tolerance import assert_close
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from simulated_gpu.simulated_cuda import to_simulated
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo.models import COLUMNS, batch, build

import trl_padfix.core.attention.attention
from trl_padfix import Layout, PaddingRemovalError, padding_free_layout, prefix_sharing_layout, unpack
from trl_padfix.core.attention.attention import packed_attention, uses_attention_interface
from trl_padfix.core.call.calls import CALL, LocalTokens, PackedCall
from trl_padfix.core.model.positions import PackedMask


HEADS, KV_HEADS, SIZE = 4, 2, 8


@pytest.fixture(autouse=True, scope="module")
def flash_calls():
    with flash_attention_stand_in() as calls:
        yield calls


def attention_module(name: str = "qwen2", implementation: str = "sdpa") -> torch.nn.Module:
    """The first attention module of a tiny model; it has the `HEADS`, `KV_HEADS` and `SIZE` above."""
    return next(m for m in build(name, implementation).modules() if uses_attention_interface(m))


def random_states(layout: Layout, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values `(1, heads, T, D)`: leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, layout.packed_tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [(2 * torch.randn(s, generator=generator)).to(dtype).requires_grad_() for s in shapes]


def dense_attention(
    states: list[torch.Tensor],
    layout: Layout,
    mask: torch.Tensor,
    *,
    scaling: float = SIZE**-0.5,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    window_counts_tokens: bool = False,
) -> torch.Tensor:
    """The values `(R, heads, D)` that the real tokens of a padded batch attend to, by the definition of attention."""
    q, k, v = (unpack(x.transpose(1, 2), layout) for x in states)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = scaling * torch.einsum("bqnd,bknd->bnqk", q, k)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    columns = torch.arange(mask.shape[1]) - mask.argmax(1, keepdim=True)
    place = mask.cumsum(1) - 1 if window_counts_tokens else columns
    distance = place[:, :, None] - place[:, None, :]
    visible = mask[:, None, :].bool() & torch.ones_like(distance).tril().bool()
    if sliding_window is not None:
        visible &= distance < sliding_window
    if chunk is not None:
        visible &= (place // chunk)[:, :, None] == (place // chunk)[:, None, :]
    scores = scores.masked_fill(~visible[:, None], -1e30)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : mask.shape[1]]
    return torch.einsum("bnqk,bknd->bqnd", weights, v)[mask.bool()]


def layout_of(side: str, sharing: bool) -> tuple[Layout, torch.Tensor]:
    ids, mask = batch(side)
    return (prefix_sharing_layout(ids, mask) if sharing else padding_free_layout(mask)), mask


def attend(module, states, layout: Layout, asked: PackedMask | None = None, **kwargs) -> torch.Tensor:
    call = PackedCall(LocalTokens(layout), module.config._attn_implementation, module, layout.positions[None])
    values, weights = packed_attention(module, *states, asked, **{CALL: call, "scaling": SIZE**-0.5} | kwargs)
    assert weights is None
    return values


def assert_attends_like_dense(module, layout: Layout, mask: torch.Tensor, asked=None, **kwargs) -> None:
    """Values at every real token, and the gradients of queries, keys and values; dense ones are float64."""
    states, expected_states = random_states(layout), random_states(layout, torch.float64)
    by_tokens = module.config._attn_implementation == "flash_attention_2"

    got = unpack(attend(module, states, layout, asked, **kwargs), layout)[mask.bool()]
    if asked is not None:
        kwargs |= {"sliding_window": asked.window, "chunk": asked.chunk}
    expected = dense_attention(expected_states, layout, mask, window_counts_tokens=by_tokens, **kwargs)
    assert_close(got.detach(), expected.detach(), terms=COLUMNS, depth=8)

    upstream = torch.linspace(-1, 1, got.numel()).view_as(got)
    gradients = torch.autograd.grad(got, states, upstream)
    expected_gradients = torch.autograd.grad(expected, expected_states, upstream.double())
    size = max(float(gradient.abs().max()) for gradient in expected_gradients)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient, size=size, terms=COLUMNS, depth=16)


CASES = {
    "causal": ("qwen2", {}),
    "scaled": ("qwen2", {"scaling": 0.1}),
    "windowed": ("qwen2", {"sliding_window": 3}),
    "window of one": ("qwen2", {"sliding_window": 1}),
    "window longer than the rows": ("qwen2", {"sliding_window": 99}),
    "softcapped": ("gemma2", {"softcap": 1.5, "sliding_window": 4}),
    "sinks": ("gpt_oss", {"s_aux": torch.tensor([1.0, -1.0, 2.0, 0.0]), "sliding_window": 4}),
    "window of the mask": ("qwen2", {"asked": PackedMask(window=3)}),
    "chunks of the mask": ("qwen2", {"asked": PackedMask(chunk=3)}),
}
NOT_IN = {
    "softcapped": {"sdpa"},
    "sinks": {"sdpa", "flash_attention_2"},
    "window of the mask": {"flash_attention_2"},  # knows no mask, only what the module hands over
    "chunks of the mask": {"flash_attention_2"},
}


@pytest.mark.parametrize("case", CASES)
def test_each_row_attends_as_if_it_were_alone(case, monkeypatch):
    name, kwargs = CASES[case]
    for implementation in {"sdpa", "eager", "flash_attention_2"} - NOT_IN.get(case, set()):
        module = attention_module(name, implementation)
        if "s_aux" in kwargs:
            module.sinks.data = kwargs["s_aux"]  # eager reads it from the module
        for block, side, sharing in product((1024, 3), ("mixed", "holes"), (False, True)):
            monkeypatch.setattr(trl_padfix.core.attention.segments, "QUERIES_PER_BLOCK", block)
            assert_attends_like_dense(module, *layout_of(side, sharing), **kwargs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_the_comparison_notices_rows_that_attend_across(implementation):
    layout, mask = layout_of("mixed", sharing=False)
    merged = padding_free_layout(torch.ones(1, layout.packed_tokens))
    module, states = attention_module(implementation=implementation), random_states(layout)

    got = unpack(attend(module, states, merged), layout)[mask.bool()]

    assert (got - dense_attention(states, layout, mask)).abs().max() > 0.1


def test_flash_attention_is_one_call_of_the_layouts_segments(flash_calls):
    layout, _ = layout_of("mixed", sharing=True)
    states = random_states(layout)

    flash_calls.clear()
    attend(attention_module("mistral", "flash_attention_2"), states, layout, sliding_window=4)

    (call,) = flash_calls
    assert (call.total_q, call.total_k) == (layout.packed_tokens, layout.key_index.numel())
    assert call.segments == len(layout.queries.lengths)
    assert call.causal
    assert call.window_size[0] == 3


# -- waiting for the device


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_does_not_wait_for_the_device(implementation, gpu):
    layout, _ = layout_of("holes", sharing=True)
    states, layout = [to_simulated(x) for x in random_states(layout)], layout.to("cuda:0")
    gpu.reset()
    attend(attention_module("mistral", implementation), states, layout, sliding_window=4).sum().backward()
    assert gpu.launches
    assert not gpu.synchronisations
    layout.real_index.max().item()
    assert gpu.synchronisations


# -- memory


@pytest.mark.parametrize("shared", [0, 5])
def test_only_a_row_that_shares_is_masked(shared, monkeypatch):
    ids = torch.arange(24).view(2, 12)
    ids[1, :shared] = ids[0, :shared]
    layout = prefix_sharing_layout(ids, torch.ones_like(ids))
    padded = padding_free_layout(torch.ones_like(ids))
    states, module = random_states(layout), attention_module()
    alone = [unpack(x.transpose(1, 2), layout).flatten(0, 1)[None].transpose(1, 2) for x in states]
    expected = attend(module, alone, padded)
    masks, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    spy = lambda *states, **kwargs: masks.append(states[4]) or sdpa(*states, **kwargs)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spy)
    found = unpack(attend(module, states, layout), layout)
    assert_close(found, unpack(expected, padded), terms=12, depth=8)
    assert [mask is not None for mask in masks] == [False, shared > 0]


def test_a_kernel_that_the_user_chose_computes_shared_prefixes(gpu):
    """`sdpa_kernel(MATH)` is how one gets second-order gradients: no other kernel has them."""
    layout, _ = layout_of("mixed", sharing=True)
    states = [x.detach().requires_grad_() for x in random_states(layout)]
    gradients = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            loss = attend(attention_module(), states, layout).pow(2).sum()
            gradients.append(torch.autograd.grad(loss, states, create_graph=backend is SDPBackend.MATH))
            gpu.reset()
            attend(attention_module(), [to_simulated(x.bfloat16()) for x in states], layout.to("cuda:0"))
            assert bool(gpu.varlen) is (backend is not SDPBackend.MATH)
    for by_kernel, by_math in zip(*gradients, strict=True):
        assert_close(by_kernel, by_math, terms=COLUMNS, depth=16)
    assert torch.autograd.grad(gradients[1][0].pow(2).sum(), states[1])[0].any()


# -- torch's variable-length kernel


@pytest.mark.parametrize(
    ("side", "kwargs", "dtype", "applies"),
    [
        ("mixed", {}, torch.bfloat16, True),
        ("mixed", {"sliding_window": 3}, torch.float16, True),
        ("holes", {}, torch.bfloat16, True),
        ("mixed", {}, torch.float32, False),
        ("mixed", {"dropout": 0.1}, torch.bfloat16, False),
        # The kernel's window counts tokens, and the padded computation counts columns: with holes they differ.
        ("holes", {"sliding_window": 3}, torch.bfloat16, False),
    ],
    ids=["bf16", "fp16 window", "bf16 holes", "fp32", "dropout", "window over holes"],
)
def test_torchs_varlen_kernel_runs_where_it_is_exact(side, kwargs, dtype, applies, gpu):
    for sharing in (False, True):
        layout, mask = layout_of(side, sharing)
        states = random_states(layout, dtype)
        gpu.reset()
        got = attend(attention_module(), [to_simulated(x) for x in states], layout.to("cuda:0"), **kwargs)
        assert bool(gpu.varlen) is applies
        if "dropout" not in kwargs:
            expected = dense_attention([x.double() for x in states], layout, mask, **kwargs).detach()
            got = unpack(got.detach().cpu(), layout)[mask.bool()]
            # Scores and sums are float32; weights and values are rounded to the dtype.
            rounded = torch.finfo(dtype).eps * float(expected.abs().max())
            assert dtype == torch.float32 or (got - expected).abs().max() <= 2 * rounded
            assert dtype != torch.float32 or assert_close(got, expected, terms=COLUMNS, depth=8) is None


# -- what is refused, and how


UNACCOUNTED = [  # change of the module, arguments of its call, message
    ({"is_causal": False}, {}, r"Qwen2Attention \(layer 0\) attends in both directions"),
    ({}, {"is_causal": False}, "attends in both directions"),
    ({}, {"position_bias": torch.zeros(1)}, r"passes \['position_bias'\] to its attention function"),
    ({}, {CALL: None}, r"Qwen2Attention \(layer 0\) did not receive the layout"),
    ({}, {"asked": PackedMask(causal=False)}, "attends in both directions"),
    ({}, {"asked": PackedMask(custom=True)}, "builds its own attention mask"),
    ({}, {"asked": torch.zeros(1, 1, 62, 62)}, "builds its own attention mask"),
]


def test_what_a_layout_does_not_account_for_is_refused():
    layout, _ = layout_of("right", sharing=False)
    for change, kwargs, message in UNACCOUNTED:
        module = attention_module()
        vars(module).update(change)
        with pytest.raises(PaddingRemovalError, match=message):
            attend(module, random_states(layout), layout, **kwargs)


def test_flash_attention_refuses_chunks_that_a_row_exceeds():
    layout, mask = layout_of("right", sharing=False)
    module = attention_module(implementation="flash_attention_2")
    with pytest.raises(PaddingRemovalError, match=r"in chunks of 13 tokens and a row of the batch spans 14;.*'sdpa'"):
        attend(module, random_states(layout), layout, PackedMask(chunk=13))
    assert_attends_like_dense(module, layout, mask, PackedMask(chunk=14))


def own_function(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None, **_):
    """An attention function of a user's: a loop over segments."""
    q, k, v = query, *(x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    ends_q, ends_k = ([*x.tolist()] for x in (cu_seq_lens_q, cu_seq_lens_k))
    rows = []
    for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        rows.append(scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], mask, scale=scaling))
    return torch.cat(rows, dim=2).transpose(1, 2), None


def test_a_registered_function_that_takes_segments_attends(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own_function)
    module = attention_module()
    module.config._attn_implementation = "own"
    for side, sharing in product(("left", "right"), (False, True)):
        assert_attends_like_dense(module, *layout_of(side, sharing))
    layout, mask = layout_of("right", sharing=False)

    def one_segment(*args, cu_seq_lens_q, cu_seq_lens_k, **kwargs):
        ends = {"cu_seq_lens_q": cu_seq_lens_q[[0, -1]], "cu_seq_lens_k": cu_seq_lens_k[[0, -1]]}
        return own_function(*args, **ends, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", one_segment)
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_attends_like_dense(module, layout, mask)
    for window in ({"sliding_window": 3}, {"asked": PackedMask(window=3)}):  # of the module, or of its mask alone
        with pytest.raises(PaddingRemovalError, match="'own' has no parameter `sliding_window`"):
            attend(module, random_states(layout), layout, **window)
