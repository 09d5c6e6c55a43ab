"""Random models, and tokenizers trained on given texts, for recipes and benchmarks that run offline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


__all__ = ["CHAT_TEMPLATE", "RESPONSE_TEMPLATE", "SHAPES", "build_qwen2", "train_tokenizer"]

PAD, EOS, START = "<|pad|>", "<|end|>", "<|start|>"

UNKNOWN = "<|endoftext|>"
"""The token that `AutoTokenizer` adds to the tokenizer of any Qwen2; a model without it would lack an embedding."""

_MESSAGE = (
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}" + EOS
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}" + "{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}" + _MESSAGE + "{% endgeneration %}"
    "{% else %}" + _MESSAGE + "{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + f"{START}assistant\n" + "{% endif %}"
)
"""Chat template. Messages of the assistant with their end token are marked for `assistant_only_loss`."""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": f"{START}assistant\n",
    "fields": {"content": {"close_pattern": re.escape(EOS) + r"\s*", "content": "text"}},
}
"""How transformers reads an answer back from its text: TRL's rollout worker needs it."""

SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=352, vocab_size=2048),
    "small": dict(layers=6, hidden_size=512, heads=8, kv_heads=2, intermediate_size=1408, vocab_size=8192),
    "0.5b": dict(layers=24, hidden_size=896, heads=14, kv_heads=2, intermediate_size=4864, vocab_size=151936),
    "7b": dict(layers=28, hidden_size=3584, heads=28, kv_heads=4, intermediate_size=18944, vocab_size=152064),
}
"""Shapes of Qwen2: two for CPUs, and the shapes of Qwen2.5-0.5B and Qwen2.5-7B."""


_FIELDS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""Names in a shape, and the fields of transformers' configurations."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer with pad and EOS tokens and a chat template.

    The vocabulary has at most `vocab_size` entries, special tokens included; with little text it has fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes: no text has unknown tokens
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, special_tokens=[PAD, EOS, START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([UNKNOWN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )
    fast.response_template = RESPONSE_TEMPLATE  # transformers before 5.13 does not save it
    return fast


def build_qwen2(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """
    Build a randomly initialized Qwen2 for a tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer with the special tokens, and with the vocabulary unless `shape` has a `vocab_size`.
        seed (`int`):
            Seed of the weights. The global generator keeps its state.
        **shape:
            One of [`SHAPES`], and other fields of [`~transformers.Qwen2Config`].
    """
    tokens = dict(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,  # Qwen2 begins no text with a token
    )
    fields = tokens | {_FIELDS.get(name, name): value for name, value in shape.items()}
    with torch.random.fork_rng(devices=[]):  # of the CPU only
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**fields, tie_word_embeddings=True))
