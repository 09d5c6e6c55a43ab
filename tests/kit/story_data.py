"""Data and tokenizer of the stories on TRL 0.17."""

from __future__ import annotations

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo.stack_models import EOS, PAD


WORDS = {"<bos>": 0, "<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, 39)}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def examples(kind: str) -> Dataset:
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return "".join(f"w{draw.randint(2, 38)} " for _ in range(draw.randint(low, high)))

    if kind == "sft":
        return Dataset.from_list([{"text": words(4, 20)} for _ in range(8)])
    return Dataset.from_list(
        [{"prompt": words(2, 9), "chosen": words(1, 9), "rejected": words(1, 9)} for _ in range(8)]
    )
