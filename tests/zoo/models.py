"""
Tiny random models and ragged batches.

The weights are large (`initializer_range` of 0.2; of 0.1 for GPT-OSS, whose gates amplify rounding), so that attention
is sharp: a token that sees one token too many moves its log-probability by far more than any tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


BOS, EOS, PAD = 0, 1, 39
"""Special tokens; no row of [`ROWS`] holds the last one."""

COLUMNS = 14

SHAPE: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, bos_token_id=BOS, eos_token_id=EOS,
    pad_token_id=PAD,
)  # fmt: skip

_GPT2_SHAPE: dict[str, Any] = dict(
    vocab_size=40, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.2, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip


def _config(name: str, **own: Any) -> Callable[..., PretrainedConfig]:
    return lambda **more: getattr(transformers, name)(**SHAPE | own | more)  # some versions do not have all of them


_EXPERTS: dict[str, Any] = dict(head_dim=8, num_experts_per_tok=2)
CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen2": _config("Qwen2Config"),
    "llama": _config("LlamaConfig"),
    "mistral": _config("MistralConfig", sliding_window=4),
    "gpt2": lambda **more: transformers.GPT2Config(**_GPT2_SHAPE | more),
    "qwen3_moe": _config(
        "Qwen3MoeConfig", **_EXPERTS, num_experts=4, moe_intermediate_size=16, output_router_logits=True
    ),
    "gemma2": _config("Gemma2Config", head_dim=8, sliding_window=4, attn_logit_softcapping=2.0),
    "gpt_oss": _config("GptOssConfig", **_EXPERTS, num_local_experts=4, sliding_window=4, initializer_range=0.1),
    "llama4": _config(
        "Llama4TextConfig", head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=4,
        no_rope_layers=[1, 0, 1], attn_temperature_tuning=False,
    ),
}  # fmt: skip
"""Grouped heads, no biases, a window, absolute positions, experts, windows with softcap, sinks, chunks."""

_IMPLEMENTATIONS = {
    "gpt2": ("sdpa", "eager"),  # its flash path in fp32 looks for an `nn.Linear` to take the dtype of, and has none
    "gemma2": ("eager", "flash_attention_2"),  # softcap
    "gpt_oss": ("eager",),  # sinks, else on kernels for Hopper only
    "llama4": ("sdpa", "eager"),
}

SUPPORTED = [
    (name, implementation)
    for name in CONFIGS
    for implementation in _IMPLEMENTATIONS.get(name, ("sdpa", "eager", "flash_attention_2"))
]
"""Models, each with the attention implementations that transformers has for it."""


def build(
    name: str, implementation: str | None = "sdpa", seed: int = 0, auto: Any = AutoModelForCausalLM, **config: Any
) -> PreTrainedModel:
    """
    Build one of the models of [`CONFIGS`] in evaluation mode.

    `flash_attention_2` can be built, and run, inside `flash_attention_stand_in()` only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(CONFIGS[name](**config), attn_implementation=implementation).eval()


ROWS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],  # a prompt of six tokens and its chosen answer
    [5, 6, 7, 8, 9, 10, 20, 21, 22],  # the rejected one
    [5, 6, 7, 16, 17, 18, 19, 23],  # a second pair: its first three tokens are those of the first
    [5, 6, 7, 16, 17, 24, 25, 26, 27, 28, 4, 3, 9, 9],  # as long as the batch
    [5, 6, 7, 8, 9, 10],  # the first prompt alone: a prefix of other rows
    [5, 6, 7, 8, 9, 10, 20, 21, 22],  # the second row again
    [29, 6, 7, 8, 9],  # differs from the first token on
]


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`ROWS`] as padded ids and attention mask, both `(7, 14)`: padded `"left"`, `"right"`, `"mixed"` (by turns), at
    `"both"` ends, or with `"holes"` (mixed, and tokens inside rows masked too).
    """
    ids = torch.full((len(ROWS), COLUMNS), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(ROWS):
        room = COLUMNS - len(row)
        begin = {"left": room, "right": 0, "both": room // 2}.get(side, room * (i % 2))
        ids[i, begin : begin + len(row)] = torch.tensor(row)
        mask[i, begin : begin + len(row)] = 1
    if side == "holes":
        # In the first two rows behind what they share, in the next two in one place that they share, in the last
        # two in places of their own. The ids stay: no masked token may be recognised by its id.
        for i, column in ((0, 7), (1, 5 + 7), (2, 4), (3, 4), (5, 5 + 2), (6, 1)):
            mask[i, column] = 0
    return ids, mask


def inputs(side: str = "left") -> dict[str, torch.Tensor]:
    """[`batch`] as the arguments of a model."""
    return dict(zip(("input_ids", "attention_mask"), batch(side), strict=True))


@st.composite
def drawn_batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a small vocabulary, so that rows share much, under any mask that leaves no row empty."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    table = st.lists(st.integers(0, 1), min_size=columns, max_size=columns)
    ids = draw(st.lists(table, min_size=rows, max_size=rows))
    mask = draw(st.lists(table.filter(any), min_size=rows, max_size=rows))
    return torch.tensor(ids), torch.tensor(mask)


def padded_positions(mask: torch.Tensor) -> torch.Tensor:
    """Columns since the first real token of each row: what a model with absolute positions needs."""
    return (torch.arange(mask.shape[1]) - mask.argmax(1, keepdim=True)).clamp(min=0)


def real_logps(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the real tokens that stand right behind a real token, row after row."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logps[(mask[:, :-1] * mask[:, 1:]).bool()]
