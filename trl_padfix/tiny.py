"""Random models and tokenizers trained on the spot, for recipes and benchmarks that run offline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


__all__ = ["CHAT_TEMPLATE", "SHAPES", "build_qwen2", "train_tokenizer"]

PAD, EOS, START = "<|pad|>", "<|end|>", "<|start|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}" + "{{ message['role'] }}\n{{ message['content'] }}" + f"{EOS}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + f"{START}assistant\n" + "{% endif %}"
)


def _shape(*sizes: int) -> dict[str, int]:
    names = ("layers", "hidden_size", "heads", "kv_heads", "intermediate_size", "vocab_size")
    return dict(zip(names, sizes, strict=True))


SHAPES: dict[str, dict[str, int]] = {
    "tiny": _shape(2, 128, 4, 2, 352, 2048),
    "small": _shape(6, 512, 8, 2, 1408, 8192),
    "0.5b": _shape(24, 896, 14, 2, 4864, 151936),
    "7b": _shape(28, 3584, 28, 4, 18944, 152064),
}
"""Qwen2 shapes: two for CPUs, and those of Qwen2.5-0.5B and Qwen2.5-7B."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer with pad and EOS tokens and a chat template.

    Args:
        texts (`Iterable[str]`):
            Text to train on.
        vocab_size (`int`):
            Most entries of the vocabulary, special tokens included; little text gives fewer.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`].
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS, START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )


def build_qwen2(
    tokenizer: PreTrainedTokenizerFast,
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    vocab_size: int | None = None,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """
    Build a randomly initialised Qwen2 for a tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Gives the vocabulary and the special tokens.
        layers, hidden_size, heads, kv_heads, intermediate_size (`int`):
            Shape of the model.
        vocab_size (`int`, *optional*):
            Vocabulary of the model; by default the tokenizer's.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights; the global generator is left as it was.
        **config:
            More of [`~transformers.Qwen2Config`].
    """
    fork = torch.random.fork_rng(devices=[])
    with fork:
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocab_size or len(tokenizer),
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                tie_word_embeddings=True,
                **config,
            )
        )
