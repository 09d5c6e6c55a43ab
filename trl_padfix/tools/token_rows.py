"""Tokenize rows as TRL's trainers do, before truncation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase
from trl.data_utils import extract_prompt, is_conversational

from ..trainers.data.chat_templates import renderer


__all__ = ["COLUMNS", "TokenRow", "sequences_of", "token_rows", "trainer_of"]

COLUMNS = {
    "dpo": ({"chosen", "rejected"},),
    "kto": ({"prompt", "completion", "label"},),
    "sft": ({"prompt", "completion"}, {"messages"}, {"text"}),
}
"""The sets of columns for each trainer; it needs one set."""

TokenRow: TypeAlias = dict[str, Any]
"""A tokenized row: lists of token ids, and perhaps the number of prompt tokens."""


def trainer_of(columns: Iterable[str]) -> str:
    """
    The first trainer that takes rows with these columns.

    Raises:
        ValueError: If no trainer does.
    """
    found = next((t for t, sets in COLUMNS.items() if any(names <= {*columns} for names in sets)), None)
    if found is None:
        taken = "; ".join(f"{t}: {' or '.join(', '.join(sorted(names)) for names in COLUMNS[t])}" for t in COLUMNS)
        raise ValueError(f"The data has the columns {', '.join(columns)}. This command counts {taken}.")
    return found


def token_rows(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, trainer: str = "") -> list[TokenRow]:
    """
    Tokenize rows as TRL's trainer does, before truncation.

    Returns:
        `list[TokenRow]`: For pairs `prompt_ids`, `chosen_ids` and `rejected_ids`; for KTO `prompt_ids` and
        `completion_ids`; for texts `input_ids`, and in `prompt` the number of tokens at their
        beginning that are not trained on.
    """
    if not rows:
        return []
    if "chosen" in rows[0]:
        return _token_pairs(rows, tokenizer)
    prompts = _token_ids(rows, ["prompt"], tokenizer) if "prompt" in rows[0] else [[]] * len(rows)
    names = ["prompt", "completion"] if "prompt" in rows[0] else ["text" if "text" in rows[0] else "messages"]
    sequences = _token_ids(rows, names, tokenizer)
    # A token may span the end of a prompt. Then the prompt ends before that token, as in TRL.
    ends = [_common(prompt, ids) for prompt, ids in zip(prompts, sequences, strict=True)]
    if trainer == "kto":
        pairs = zip(ends, sequences, strict=True)
        return [{"prompt_ids": ids[:end], "completion_ids": ids[end:]} for end, ids in pairs]
    return [{"input_ids": ids, "prompt": end} for end, ids in zip(ends, sequences, strict=True)]


def _token_pairs(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[TokenRow]:
    if "prompt" not in rows[0]:
        rows = [extract_prompt(row) for row in rows]
    prompts = _token_ids(rows, ["prompt"], tokenizer)
    both = [_token_ids(rows, ["prompt", side], tokenizer) for side in ("chosen", "rejected")]
    result = []
    for prompt, chosen, rejected in zip(prompts, *both, strict=True):
        end = min(_common(prompt, chosen), _common(prompt, rejected))
        result.append({"prompt_ids": chosen[:end], "chosen_ids": chosen[end:], "rejected_ids": rejected[end:]})
    return result


def sequences_of(row: TokenRow) -> list[list[int]]:
    """The sequences of a row of [`token_rows`] in a batch: a text, or its prompt with each completion."""
    if "input_ids" in row:
        return [row["input_ids"]]
    completions = [ids for name, ids in row.items() if name in ("chosen_ids", "rejected_ids", "completion_ids")]
    return [row["prompt_ids"] + ids for ids in completions or [[]]]


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


def _common(ids: list[int], others: list[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))
