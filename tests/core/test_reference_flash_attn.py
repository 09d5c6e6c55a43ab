"""
The reference of flash-attn refuses what the kernels misread, and its stand-in leaves transformers as it found it.

`test_conformance.py` compares the reference with attention written out.
"""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import transformers
from kit.flash_stand_in import flash_attention_stand_in
from kit.reference_flash_attn import calls, flash_attn_varlen_func
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils
from transformers.utils import import_utils


TRANSFORMERS = Version(transformers.__version__)


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
    q, k = torch.randn(5, 4, 3), torch.randn(5, 2, 3)
    arguments = {"q": q, "k": k, "v": k, "max_seqlen_q": 5, "max_seqlen_k": 5}
    arguments |= {"cu_seqlens_q": bounds(0, 2, 5), "cu_seqlens_k": bounds(0, 2, 5)}
    flash_attn_varlen_func(**arguments)
    calls.clear()
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**arguments | changed)
    assert calls == []


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
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    without_window = logits(tiny_model("eager", "mistral", sliding_window=None), mask, input_ids=ids)
    assert (actual - without_window).abs().max() > 1e-2


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
