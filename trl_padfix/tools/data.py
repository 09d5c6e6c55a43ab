"""Load rows from a file, a folder or the Hub, and tokenize them as TRL's trainers do, before truncation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase
from trl.data_utils import extract_prompt, is_conversational, is_conversational_from_value, maybe_convert_to_chatml

from ..files import DATA_FILES
from ..trainers.data.chat_templates import renderer
from ..trainers.data.columns import needed_columns


__all__ = ["TokenRow", "load_rows", "token_rows", "trainer_of"]

TokenRow: TypeAlias = dict[str, Any]
"""A tokenized row: lists of token ids, and perhaps the number of prompt tokens."""


def load_rows(data: str) -> Dataset:
    """
    Load the training split of a local `.jsonl`, `.json`, `.json.gz`, `.csv`, `.parquet` or `.arrow`, a folder (also of
    `save_to_disk`), or a Hub id.

    Raises:
        ValueError: If there is no row.
    """
    file = f"{data}/*.arrow" if (Path(data) / "state.json").is_file() else data  # of `save_to_disk`
    builder = None if Path(file).is_dir() else DATA_FILES.get(Path(file).suffix)
    rows = load_dataset(builder or data, data_files=file if builder else None, split="train")
    if not len(rows):
        raise ValueError(f"{data} has no row in its split 'train'.")
    is_sharegpt = is_conversational_from_value(rows[0])  # TRL's SFT trainer converts it
    return rows.map(maybe_convert_to_chatml, remove_columns="conversations") if is_sharegpt else rows


def trainer_of(columns: Iterable[str]) -> str:
    """
    The first trainer that takes rows with these columns.

    Raises:
        ValueError: If no trainer does.
    """
    names = {*columns} - {"input_ids"}  # TRL takes them, too; they are not counted here
    for trainer in ("dpo", "kto", "sft"):
        if any(needed <= names for needed in needed_columns(trainer)[0]):
            return trainer
    taken = "dpo: chosen, rejected; kto: completion, label, prompt; sft: completion, prompt or messages or text"
    raise ValueError(
        f"The data has the columns {', '.join(columns)}. This command counts {taken}, not GRPO's prompts."
    )


def token_rows(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[TokenRow]:
    """
    Tokenize rows as TRL's trainer does, before truncation.

    Returns:
        `list[TokenRow]`: For pairs `prompt_ids`, `chosen_ids` and `rejected_ids`; for KTO `prompt_ids` and
        `completion_ids`; for texts `input_ids`, and in `prompt` the number of tokens at their
        beginning that are not trained on.
    """
    trainer = trainer_of(rows[0])
    if trainer == "dpo" and "prompt" not in rows[0]:
        rows = [extract_prompt(row) for row in rows]
    names = ["prompt"] if "prompt" in rows[0] else []
    sides = [side for side in ("chosen", "rejected", "completion", "messages", "text") if side in rows[0]]
    sides = sides[: 2 if trainer == "dpo" else 1]
    prompts = _token_ids(rows, names, tokenizer) if names else [[]] * len(rows)
    result = []
    for prompt, *sequences in zip(prompts, *(_token_ids(rows, [*names, s], tokenizer) for s in sides), strict=True):
        # A token may span the end of a prompt. Then the prompt ends before that token, as in TRL.
        end = len([*takewhile(lambda at: len({*at}) == 1, zip(prompt, *sequences, strict=False))])
        row = {"prompt_ids": sequences[0][:end]}
        row |= {f"{side}_ids": ids[end:] for side, ids in zip(sides, sequences, strict=True)}
        result.append({"input_ids": sequences[0], "prompt": end} if trainer == "sft" else row)
    return result


def _token_ids(rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the columns `names`, joined as TRL joins them for the model."""
    conversational, is_prompt, eos = is_conversational(rows[0]), names == ["prompt"], str(tokenizer.eos_token or "")
    texts: list[str] = []
    for row in rows:
        if conversational:
            messages = [message for name in names for message in row[name]]
            texts.append(renderer(row, tokenizer)(messages, add_generation_prompt=is_prompt))
        else:
            text = "".join(row[name] for name in names)
            # TRL ends each plain sequence with EOS, unless it ends so already.
            texts.append(text if is_prompt or text.endswith(eos) else text + eos)
    # Chat templates write the special tokens themselves.
    return tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"]  # type: ignore[return-value]
