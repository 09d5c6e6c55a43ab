"""The errors that users paste: in the words in which they were printed, or raised on the spot."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from kit.models import CONFIGS, build
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import trl_padfix
from trl_padfix import ParityReport, remove_padding
from trl_padfix.core.attention.attention import packed_attention
from trl_padfix.tools.known_errors import KNOWN_ERRORS, explain
from trl_padfix.tools.tiny import train_tokenizer


needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="raises what a machine without a GPU raises")

PRINTED = yaml.safe_load(Path(__file__).with_name("known_errors.yaml").read_text("utf-8"))


def load(name: str, implementation: str):
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)


def tokenizer(**settings) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["a few words"], 300)
    return PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **settings)


def differing_report() -> ParityReport:
    return ParityReport(1.0, 2.0, 1e-4, 1e-3, 9, 20, 10, torch.float32, "sdpa", False)


def attend_without_layout() -> None:
    packed_attention(build("qwen2").model.layers[0].self_attn, *[torch.zeros(1, 4, 3, 8)] * 3, None)


def share_embeddings() -> None:
    model, mask = build("qwen2"), torch.ones(2, 3, dtype=torch.int64)
    with remove_padding(model, prefix_sharing=True):
        model(inputs_embeds=torch.zeros(2, 3, 32), attention_mask=mask)


def read_beyond_the_vocabulary() -> None:
    model = build("qwen2")
    with remove_padding(model):
        model(torch.tensor([[1, 2, 99]]), attention_mask=torch.tensor([[0, 1, 1]]))


RAISED: dict[str, list[Callable]] = {
    "FlashAttention is not installed": [
        lambda: load("qwen2", "flash_attention_2")
    ],
    "Hub kernels are not installed": [
        lambda: load("qwen2", "kernels-community/flash-attn2")
    ],
    "attention that the model does not have": [
        lambda: load("gpt_oss", "sdpa")
    ],
    "no pad token": [lambda: tokenizer()(["a", "a few"], padding=True)],
    "no chat template": [lambda: tokenizer().apply_chat_template([{"role": "user", "content": "a"}])],
    "NaN": [lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)],
    "an id beyond the vocabulary": [
        lambda: torch.nn.Embedding(4, 2)(torch.tensor([5])),
        read_beyond_the_vocabulary,
    ],
    "the packed forward differs": [lambda: differing_report().raise_if_failed()],
    "padding cannot be removed": [lambda: remove_padding(build("qwen2", "flex_attention"))],
    "prefix sharing without packing": [
        lambda: trl_padfix.DPOConfig(prefix_sharing=True, use_cpu=True, bf16=False, report_to=[])
    ],
    "prefix sharing and more than ids": [share_embeddings],
    "the layout did not arrive": [attend_without_layout],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in PRINTED.items() for text in texts])
def test_an_error_that_was_printed_is_explained(name, text):
    assert [error.name for error in explain(text)] == [name]


@needs_cpu
@pytest.mark.parametrize(("name", "fail"), [(name, fail) for name, calls in RAISED.items() for fail in calls])
def test_an_error_that_is_raised_is_explained(name, fail):
    with pytest.raises((ValueError, ImportError, RuntimeError, NotImplementedError, IndexError)) as error:
        fail()
    assert name in [known.name for known in explain(f"{error.type.__name__}: {error.value}")]


def test_every_known_error_is_tried():
    names = [error.name for error in KNOWN_ERRORS]
    assert len(names) == len(set(names)) >= 55
    assert set(names) == PRINTED.keys() | RAISED.keys()
    assert all(error.cause.endswith((".", "numbers.")) and error.fix for error in KNOWN_ERRORS)
