"""Models and rows for stacks that read a model folder and text: the word `w17` is the token 17."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conformance.adapter import NotRun
from conformance.arbiter import IGNORED, Row
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


def save(model: PreTrainedModel, folder: Path) -> str:
    """A model folder with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompt_and_response(row: Row) -> tuple[str, str]:
    """A row as text: its labels are those of the response."""
    begin = next((n for n, label in enumerate(row.labels) if label != IGNORED), len(row.ids))
    if begin == 0 or row.labels[begin:] != row.ids[begin:] or begin == len(row.ids):
        raise NotRun("A row is a prompt and a response, both of one token at least.")
    return words(row.ids[:begin]).strip(), words(row.ids[begin:]).strip()
