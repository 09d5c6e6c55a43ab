"""
The reference of flash-attn refuses what the kernels misread, and its stand-in leaves transformers as it found it.

`test_backends_conformance.py` compares the reference with attention written out.
"""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import transformers
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from simulated_gpu.reference_flash_attn import calls, flash_attn_varlen_func
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.utils import import_utils
from zoo.models import build


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = [
    {"cu_seqlens_q": torch.tensor([0, 2, 5])},
    {"cu_seqlens_k": bounds(1, 2, 5)},
    {"cu_seqlens_q": bounds(0, 2, 4)},
    {"cu_seqlens_k": bounds(0, 2, 6)},
    {"cu_seqlens_q": bounds(0, 6, 5)},
    {"cu_seqlens_q": bounds(0, 5)},
    {"cu_seqlens_q": bounds(0)},
    {"cu_seqlens_q": bounds(0, 2, 5)[None]},
    {"max_seqlen_q": 2},
    {"max_seqlen_k": torch.tensor(2)},
    {"q": torch.zeros(5, 4, 2)},
    {"q": torch.zeros(5, 3, 3)},
    {"q": torch.zeros(1, 5, 4, 3)},
    {"v": torch.zeros(5, 2, 2)},
    {"k": torch.zeros(5, 2, 3, dtype=torch.bfloat16)},
]


def test_wrong_arguments_raise():
    q, k = torch.randn(5, 4, 3), torch.randn(5, 2, 3)
    arguments = {"q": q, "k": k, "v": k, "max_seqlen_q": 5, "max_seqlen_k": 5}
    arguments |= {"cu_seqlens_q": bounds(0, 2, 5), "cu_seqlens_k": bounds(0, 2, 5)}
    flash_attn_varlen_func(**arguments)
    calls.clear()
    for changed in WRONG:
        with pytest.raises(AssertionError):
            flash_attn_varlen_func(**arguments | changed)
    assert calls == []


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
        build("qwen2", "flash_attention_2")(torch.ones(1, 3, dtype=torch.long))
        assert sys.modules["flash_attn"].bert_padding is sys.modules["flash_attn.bert_padding"]
        assert snapshot() != before
        if raises:
            raise RuntimeError("inside")
    assert snapshot() == before
    assert importer.is_flash_attn_2_available is import_utils.is_flash_attn_2_available
