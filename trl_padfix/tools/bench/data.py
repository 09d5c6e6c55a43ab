"""What a benchmark runs on: real pairs or dialogues, pairs of given lengths, completions of given lengths."""

from __future__ import annotations

import re

import torch
from datasets import Dataset

from ..data import checked_rows, load_rows
from .tree import parse_tree, tree_pairs, tree_rows


__all__ = ["equal_length_pairs", "load_dialogues", "load_pairs", "made_up", "pairs_of_lengths", "random_completions"]


def load_pairs(data: str) -> Dataset:
    """Preference pairs as texts, from wherever [`load_rows`] finds them; of a Hub id the test split."""
    dataset = load_rows(data, split="test")
    if missing := {"chosen", "rejected"} - set(dataset.column_names):
        raise ValueError(f"{data} has no column {sorted(missing)}; it has {dataset.column_names}.")
    for row in checked_rows(dataset):
        if not all(isinstance(row[side], str) for side in ("chosen", "rejected")):
            raise ValueError(
                f"{data} has conversations in `chosen` and `rejected`, and texts are measured. Render them with the "
                "chat template of your model (`trl.apply_chat_template`), and give the file of that."
            )
    return dataset


def load_dialogues(data: str, expand_turns: bool = False) -> Dataset:
    """
    Rows for SFT, from wherever [`load_rows`] finds them: `messages`, `text`, `prompt` and `completion`, `question` and
    `answer` (as GSM8K has them), or preference pairs, of which the chosen ones are taken.
    """
    dataset = load_rows(data, split="test")
    columns = set(dataset.column_names)
    if expand_turns:
        if "messages" not in columns:
            raise ValueError(f"{data} has no column `messages`, whose turns are expanded; it has {sorted(columns)}.")
        return dataset
    if {"chosen", "rejected"} <= columns:
        return load_pairs(data)
    if {"question", "answer"} <= columns:
        dataset = dataset.rename_columns({"question": "prompt", "answer": "completion"})
    names = next(
        (n for n in (["messages"], ["text"], ["prompt", "completion"]) if {*n} <= {*dataset.column_names}), None
    )
    if names is None:
        raise ValueError(
            f"{data} has columns {sorted(columns)}, and SFT is measured on `messages`, `text`, `prompt` and "
            "`completion`, `question` and `answer`, or `chosen` and `rejected`: rename them."
        )
    return dataset.select_columns(names)


def equal_length_pairs(count: int, length: int = 128, seed: int = 0) -> Dataset:
    """Tokenized pairs of one length that share a prompt of one token: where removing padding cannot help."""
    return _pairs([1] * count, [length - 1] * count, [length - 1] * count, seed)


def pairs_of_lengths(count: int, prompt: int, completion: int, spread: float = 0.25, seed: int = 0) -> Dataset:
    """Tokenized random pairs, whose lengths are drawn evenly from their mean times `1 - spread` to `1 + spread`."""
    draw = torch.Generator().manual_seed(seed)
    prompts, chosen, rejected = (
        _ragged(count, mean, spread, draw).tolist() for mean in (prompt, completion, completion)
    )
    return _pairs(prompts, chosen, rejected, seed)


def made_up(data: str, trainer: str, count: int, spread: float = 0.25, seed: int = 0) -> Dataset | None:
    """
    `count` tokenized rows of `equal`, `lengths:PROMPT/COMPLETION` or `tree:ROLLOUTSxTURNS/SYSTEM/TURN`, and `None` for
    data of another name. For SFT a pair is its prompt with the chosen completion.
    """
    if tree := parse_tree(data):
        return (tree_rows if trainer == "sft" else tree_pairs)(tree, count, seed)
    if lengths := parse_lengths(data):
        pairs = pairs_of_lengths(count, *lengths, spread, seed)
    elif data == "equal":
        pairs = equal_length_pairs(count, seed=seed)
    else:
        return None
    if trainer != "sft":
        return pairs
    rows = [row["prompt_ids"] + row["chosen_ids"] for row in pairs]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def parse_lengths(data: str) -> tuple[int, int] | None:
    """`(prompt, completion)` of `lengths:PROMPT/COMPLETION`, and `None` for what does not begin like this."""
    match = re.fullmatch(r"lengths:(\d+)/(\d+)", data)
    if data.startswith("lengths:") and (match is None or min(int(match[1]), int(match[2])) < 1):
        raise ValueError(f"{data!r} gives no lengths: write `lengths:PROMPT/COMPLETION`, both of 1 token or more.")
    return (int(match[1]), int(match[2])) if match else None


def random_completions(
    prompts: int, generations: int, prompt_length: int, completion_length: int, vocab_size: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """A batch as TRL's online trainers score it: prompts padded left, several completions of each padded right."""
    rows = prompts * generations

    def ragged(count: int, about: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = _ragged(count, about, 0.25, draw)[:, None]
        ids = torch.randint(3, vocab_size, (count, int(lengths.max())), generator=draw)
        return ids, (torch.arange(ids.shape[1]) < lengths).long()

    prompt_ids, prompt_mask = (x.flip(1).repeat_interleave(generations, 0) for x in ragged(prompts, prompt_length))
    completion_ids, completion_mask = ragged(rows, completion_length)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.rand(rows, generator=draw) + 0.5,
        "num_items_in_batch": completion_mask.sum(),
    }


def _ragged(count: int, mean: int, spread: float, draw: torch.Generator) -> torch.Tensor:
    low, high = max(1, int(mean * (1 - spread))), int(mean * (1 + spread))
    return torch.randint(low, high + 1, (count,), generator=draw)


def _pairs(prompts: list[int], chosen: list[int], rejected: list[int], seed: int) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    columns = {"prompt_ids": prompts, "chosen_ids": chosen, "rejected_ids": rejected}
    return Dataset.from_dict(
        {
            name: [torch.randint(3, 256, (length,), generator=draw).tolist() for length in lengths]
            for name, lengths in columns.items()
        }
    )
