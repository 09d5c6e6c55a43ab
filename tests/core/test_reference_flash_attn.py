"""The reference attention is right, and transformers runs on it inside the stand-in as it would on flash-attn."""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import transformers
from kit.flash_stand_in import flash_attention_stand_in, index_first_axis, pad_input, unpad_input
from kit.reference_flash_attn import (
    VarlenCall,
    calls,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils
from transformers.utils import import_utils


TRANSFORMERS = Version(transformers.__version__)


def naive_attention(q, k, v, causal, window_size, softcap) -> Tensor:
    """Attention of `(L, heads, D)`, one head and one query at a time, over the list of keys that the query sees."""
    (length_q, heads, size), length_k = q.shape, k.shape[0]
    shared = heads // k.shape[1]
    left, right = window_size
    rows = []
    for i in range(length_q):
        place = i + (length_k - length_q)
        first = 0 if left == -1 else max(0, place - left)
        last = length_k - 1 if right == -1 else min(length_k - 1, place + right)
        if causal:
            last = min(last, place)
        for head in range(heads):
            if first > last:
                rows.append(torch.zeros(size, dtype=q.dtype))
                continue
            seen_k, seen_v = k[first : last + 1, head // shared], v[first : last + 1, head // shared]
            scores = (seen_k @ q[i, head]) / size**0.5
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            exponentials = (scores - scores.max().detach()).exp()
            rows.append(exponentials @ seen_v / exponentials.sum())
    return torch.stack(rows).reshape(length_q, heads, size)


def random_qkv(length_q, length_k, heads=4, kv_heads=2, size=3, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(length_q, heads, size), (length_k, kv_heads, size), (length_k, kv_heads, size)]
    return tuple(torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes)


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (1, 4), (6, 4)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window_size", [(-1, -1), (2, -1), (-1, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_naive_attention_with_gradients(causal, window_size, softcap, kv_heads, lengths):
    q, k, v = random_qkv(*lengths, kv_heads=kv_heads)
    options = {"causal": causal, "window_size": window_size, "softcap": softcap}
    expected = naive_attention(q, k, v, **options)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v), allow_unused=True)

    dense = flash_attn_func(q[None], k[None], v[None], **options)[0]
    varlen = flash_attn_varlen_func(q, k, v, bounds(0, lengths[0]), bounds(0, lengths[1]), *lengths, **options)
    for actual in (dense, varlen):
        torch.testing.assert_close(actual, expected)
        gradients = torch.autograd.grad((actual * weights).sum(), (q, k, v))
        torch.testing.assert_close(gradients, expected_gradients)


def mean_of_visible(length_q: int, length_k: int, **options) -> list[float]:
    """The output for equal scores: key `j` has the value `2**j`, so the sum over seen keys tells which were seen."""
    q, k = torch.zeros(1, length_q, 1, 1), torch.zeros(1, length_k, 1, 1)
    v = 2.0 ** torch.arange(length_k).view(1, -1, 1, 1)
    return flash_attn_func(q, k, v, **options).flatten().tolist()


def test_causal_mask_is_aligned_to_the_bottom_right():
    assert mean_of_visible(2, 5, causal=True) == pytest.approx([(1 + 2 + 4 + 8) / 4, (1 + 2 + 4 + 8 + 16) / 5])
    assert mean_of_visible(5, 2, causal=True) == pytest.approx([0, 0, 0, 1, (1 + 2) / 2])


def test_windows_are_inclusive_on_both_sides():
    assert mean_of_visible(4, 4, window_size=(1, 0)) == pytest.approx([1, (1 + 2) / 2, (2 + 4) / 2, (4 + 8) / 2])
    assert mean_of_visible(4, 4, window_size=(0, 1)) == pytest.approx([(1 + 2) / 2, (2 + 4) / 2, (4 + 8) / 2, 8])
    assert mean_of_visible(2, 4, window_size=(1, 0)) == pytest.approx([(2 + 4) / 2, (4 + 8) / 2])
    # causal wins over the right side, which transformers sets as wide as the left
    assert mean_of_visible(4, 4, causal=True, window_size=(1, 1)) == mean_of_visible(4, 4, window_size=(1, 0))


def test_softmax_scale_and_softcap_literally():
    q, k, v = torch.tensor([2.0]), torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])
    q, k, v = (tensor.view(1, -1, 1, 1) for tensor in (q, k, v))
    assert flash_attn_func(q, k, v, softmax_scale=0.5).item() == pytest.approx(torch.tensor(3.0).sigmoid().item())
    capped = 2 * torch.tensor(3.0 / 2).tanh()
    output = flash_attn_func(q, k, v, softmax_scale=0.5, softcap=2.0)
    assert output.item() == pytest.approx(capped.sigmoid().item())


def test_bfloat16_is_computed_in_float32():
    q, k, v = (tensor.detach().bfloat16() for tensor in random_qkv(5, 5, size=8))
    cu_seqlens = bounds(0, 5)
    exact = flash_attn_varlen_func(q.float(), k.float(), v.float(), cu_seqlens, cu_seqlens, 5, 5, causal=True)
    output = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())


def test_varlen_batch_equals_each_sequence_alone():
    q, k, v = random_qkv(8, 11)
    cu_seqlens_q, cu_seqlens_k = bounds(0, 3, 3, 4, 8), bounds(0, 3, 5, 6, 11)
    options = {"causal": True, "window_size": (2, 2), "softcap": 3.0}
    calls.clear()
    output = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 4, torch.tensor(5), **options)
    assert calls == [VarlenCall(total_q=8, total_k=11, segments=4, **options)]
    for (q0, k0), (q1, k1) in [((0, 0), (3, 3)), ((3, 5), (4, 6)), ((4, 6), (8, 11))]:
        alone = flash_attn_func(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)[0]
        torch.testing.assert_close(output[q0:q1], alone)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_k": bounds(1, 2, 5)}, "cu_seqlens_k must start at 0"),
        ({"cu_seqlens_q": bounds(0, 2, 4)}, "cu_seqlens_q must end at the 5 tokens of q, not at 4"),
        ({"cu_seqlens_k": bounds(0, 2, 6)}, "cu_seqlens_k must end at the 5 tokens of k, not at 6"),
        ({"cu_seqlens_q": bounds(0, 6, 5)}, "cu_seqlens_q must not decrease"),
        ({"cu_seqlens_q": bounds(0, 5)}, "bounds 1 segments but cu_seqlens_k bounds 2"),
        ({"cu_seqlens_q": bounds(0)}, "at least two bounds"),
        ({"cu_seqlens_q": bounds(0, 2, 5)[None]}, "at least two bounds"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2 but the longest segment has 3"),
        ({"max_seqlen_k": torch.tensor(2)}, "max_seqlen_k is 2 but the longest segment has 3"),
        ({"q": torch.zeros(5, 4, 2)}, "q has head size 2 but k has 3"),
        ({"q": torch.zeros(5, 3, 3)}, "3 heads of q cannot share 2 heads of k"),
        ({"q": torch.zeros(1, 5, 4, 3)}, "q must have 3 dimensions"),
        ({"v": torch.zeros(5, 2, 2)}, "k and v must have the same shape"),
        ({"k": torch.zeros(5, 2, 3, dtype=torch.bfloat16)}, "k is torch.bfloat16"),
    ],
)
def test_wrong_arguments_raise(changed, message):
    q, k, v = random_qkv(5, 5, dtype=torch.float32)
    arguments = {"q": q, "k": k, "v": v, "max_seqlen_q": 5, "max_seqlen_k": 5}
    arguments |= {"cu_seqlens_q": bounds(0, 2, 5), "cu_seqlens_k": bounds(0, 2, 5)}
    flash_attn_varlen_func(**arguments)
    calls.clear()
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**arguments | changed)
    assert calls == []


@pytest.mark.parametrize(
    "option", [{"dropout_p": 0.1}, {"alibi_slopes": torch.zeros(4)}, {"block_table": torch.zeros(1, 1)}]
)
def test_unsupported_options_raise(option):
    q, k, v = random_qkv(5, 5)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        flash_attn_varlen_func(q, k, v, bounds(0, 5), bounds(0, 5), 5, 5, **option)
    if "block_table" not in option:
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            flash_attn_func(q[None], k[None], v[None], **option)
    with pytest.raises(NotImplementedError):
        flash_attn_with_kvcache(q, k, v)


def test_padding_functions_literally():
    tokens = torch.arange(1.0, 7.0).view(2, 3, 1)
    mask = torch.tensor([[1, 1, 0], [0, 0, 1]])
    kept, indices, cu_seqlens, longest, used = unpad_input(tokens, mask)
    assert kept.flatten().tolist() == [1, 2, 6]
    assert indices.tolist() == [0, 1, 5]
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 2, 3]
    assert (longest, used.tolist()) == (2, [2, 1])
    assert pad_input(kept, indices, 2, 3).flatten().tolist() == [1, 2, 0, 0, 0, 6]
    assert index_first_axis(tokens.flatten(0, 1), indices).equal(kept)


def tiny_model(attn_implementation: str, model_type: str = "qwen2", **settings) -> PreTrainedModel:
    """A small model with sharp attention, the same for every `attn_implementation`."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        **settings,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    assert model.config._attn_implementation == attn_implementation
    return model


def right_padded() -> dict[str, Tensor]:
    """Three sequences of 9, 6 and 3 tokens."""
    mask = (torch.arange(9) < torch.tensor([[9], [6], [3]])).long()
    return {
        "input_ids": torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(2)) * mask,
        "attention_mask": mask,
    }


@torch.no_grad()
def logits(model: PreTrainedModel, mask: Tensor | None = None, **inputs) -> Tensor:
    """The logits, at real tokens only if there is a `mask`."""
    if mask is not None:
        inputs["attention_mask"] = mask
    output = model(**inputs, use_cache=False).logits
    return output if mask is None else output[mask.bool()]


def assert_logits_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_qwen2_on_a_right_padded_batch_equals_eager():
    batch = right_padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = logits(tiny_model("eager"), mask, input_ids=ids)
    with flash_attention_stand_in() as recorded:
        assert_logits_close(logits(tiny_model("flash_attention_2"), mask, input_ids=ids), expected)
    unlimited = VarlenCall(total_q=18, total_k=18, segments=3, window_size=(-1, -1), softcap=0.0, causal=True)
    assert recorded == [unlimited] * 2
    assert recorded is calls


def test_mistral_with_a_sliding_window_equals_eager():
    batch = right_padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with flash_attention_stand_in() as recorded:
        model = tiny_model("flash_attention_2", "mistral", sliding_window=4)
        actual = logits(model, mask, input_ids=ids)
    # Up to 4.55, transformers asks FlashAttention for a window one token wider than the eager one.
    extra = int(TRANSFORMERS.release < (4, 56))
    assert [call.window_size for call in recorded] == [(3 + extra, 3 + extra)] * 2
    expected = logits(tiny_model("eager", "mistral", sliding_window=4 + extra), mask, input_ids=ids)
    assert_logits_close(actual, expected)
    without_window = logits(tiny_model("eager", "mistral", sliding_window=None), mask, input_ids=ids)
    assert (actual - without_window).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ["qwen2", "mistral"])
def test_packed_row_equals_each_sequence_alone(model_type):
    ids = right_padded()["input_ids"]
    sequences = [row[:length] for row, length in zip(ids, (9, 6, 3), strict=True)]
    eager = tiny_model("eager", model_type)
    expected = torch.cat([logits(eager, input_ids=sequence[None])[0] for sequence in sequences])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    with flash_attention_stand_in() as recorded:
        model = tiny_model("flash_attention_2", model_type)
        actual = logits(model, input_ids=torch.cat(sequences)[None], position_ids=positions[None])[0]
        assert [call.segments for call in recorded] == [3, 3]
    assert_logits_close(actual, expected)


@pytest.mark.skipif(
    TRANSFORMERS.release[:2] == (4, 54),
    reason="transformers 4.54 takes any batch without padding for packed, and computes its first row only",
)
def test_batch_without_padding_needs_no_varlen():
    ids = right_padded()["input_ids"][:, :3]
    with flash_attention_stand_in() as recorded:
        actual = logits(tiny_model("flash_attention_2"), input_ids=ids)
        assert recorded == []
    assert_logits_close(actual, logits(tiny_model("eager"), input_ids=ids))


@pytest.mark.parametrize(
    ("model_type", "settings", "gone_in"),
    [
        ("qwen2", {}, "4.53"),
        ("mistral", {}, "4.53"),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}, "5.0"),
    ],
)
def test_old_models_refuse_right_padding_with_the_cache_on(model_type, settings, gone_in):
    """A check for generation that training on padded batches runs into as well, unless `use_cache` is off."""
    if Version(gone_in) <= TRANSFORMERS:
        pytest.skip(f"{model_type} dropped the check in transformers {gone_in}")
    with flash_attention_stand_in():
        model = tiny_model("flash_attention_2", model_type, **settings).train()
        with pytest.raises(ValueError, match="padding_side='right'"):
            model(**right_padded())
        model(**right_padded(), use_cache=False)


def snapshot() -> list:
    """All that the stand-in changes."""
    table = vars(modeling_flash_attention_utils).get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    return [
        dict(vars(modeling_flash_attention_utils)),
        {name: value for name, value in vars(PreTrainedModel).items() if not name.startswith("_abc")},
        {name: value for name, value in vars(import_utils).items() if "flash" in name},
        {name: value for name, value in vars(transformers.utils).items() if "flash" in name},
        {version: dict(entry) for version, entry in table.items()},
        {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")},
        import_utils.is_flash_attn_2_available(),
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_restored(raises, monkeypatch):
    before = snapshot()
    importer = ModuleType("imported_inside")
    monkeypatch.setitem(sys.modules, "imported_inside", importer)
    outcome = pytest.raises(RuntimeError, match="inside") if raises else nullcontext()
    with outcome, flash_attention_stand_in():
        assert import_utils.is_flash_attn_2_available()
        assert transformers.utils.is_flash_attn_2_available()
        importer.is_flash_attn_2_available = transformers.utils.is_flash_attn_2_available
        logits(tiny_model("flash_attention_2"), input_ids=torch.ones(1, 3, dtype=torch.long))
        assert sys.modules["flash_attn"].bert_padding is sys.modules["flash_attn.bert_padding"]
        assert snapshot() != before
        if raises:
            raise RuntimeError("inside")
    assert snapshot() == before
    assert importer.is_flash_attn_2_available is import_utils.is_flash_attn_2_available


@pytest.mark.skipif(import_utils.is_flash_attn_2_available(), reason="flash-attn is really installed")
def test_nothing_is_left_where_flash_attn_is_not_installed():
    with flash_attention_stand_in():
        tiny_model("flash_attention_2")
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    assert not import_utils.is_flash_attn_2_available()
    with pytest.raises(ImportError):
        tiny_model("flash_attention_2")
