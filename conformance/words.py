"""A tokenizer for stacks that read text: the word `w17` is the token 17, and nothing is added."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conformance.families import VOCABULARY


SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def words(ids: list[int]) -> str:
    return "".join(f" {_word(token)}" for token in ids)


def _word(token: int) -> str:
    return SPECIAL[token] if token < len(SPECIAL) else f"w{token}"


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    pad, bos, eos, unknown = SPECIAL
    made = Tokenizer(models.WordLevel({_word(token): token for token in range(VOCABULARY)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unknown)
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side=side, **special)
