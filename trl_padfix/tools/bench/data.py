"""What a benchmark runs on: real pairs or dialogues, pairs of given lengths, completions of given lengths."""

from __future__ import annotations

import re

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from ...trainers.data.row_checks import sound_rows
from ..data import load_rows, rename_columns
from ..formats import as_trl_takes_them, of_trainer
from .tree import parse_tree, tree_pairs, tree_rows


__all__ = [
    "equal_length_pairs",
    "load_examples",
    "made_up",
    "pairs_of_lengths",
    "random_completions",
]


def load_examples(
    data: str, trainer: str = "dpo", *, expand_turns: bool = False, split: str = "test", columns: str | None = None
) -> Dataset:
    """
    Rows for a trainer from wherever [`load_rows`] finds them, in a format that it takes or that
    [`as_trl_takes_them`] knows: pairs for DPO; texts, conversations or pairs, of which the chosen ones are taken, for
    SFT; prompts for GRPO. `question` and `answer`, as GSM8K has them, are `prompt` and `completion`.

    Of a folder or Hub id it is this `split`, and `columns` are renamed (`"question=prompt"`). Rows without text and
    columns that the trainer does not take are a `ValueError`.
    """
    rows = rename_columns(load_rows(data, split), columns)
    given = rows.column_names
    if images := sorted({"image", "images"} & set(rows.column_names)):
        raise ValueError(f"{data} has {images}, and the models that are measured read text: remove these columns.")
    if {"question", "answer"} <= set(rows.column_names):
        rows = rows.rename_columns({"question": "prompt", "answer": "completion"})
    rows = as_trl_takes_them(rows)
    if expand_turns:
        if "messages" not in rows.column_names:
            raise ValueError(f"{data} has no column `messages`, whose turns are expanded; it has {sorted(given)}.")
        return sound_rows(rows, "", ["messages"])
    rows = of_trainer(rows, trainer)
    ways = {"dpo": [{"chosen", "rejected", "prompt"}], "grpo": [{"prompt"}]}
    texts = [names for names in ({"messages"}, {"text"}, {"prompt", "completion"}) if names <= set(rows.column_names)]
    taken = ways.get(trainer, texts)[0]
    more = {"tools", "chat_template_kwargs"}
    rows = rows.select_columns([name for name in rows.column_names if name in taken | more])
    return sound_rows(rows, "", sorted(taken))


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
    prompts: int | list[list[int]], generations: int, prompt_length: int, completion_length: int, vocab_size: int,
    draw: torch.Generator,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """
    A batch as TRL's online trainers score it: prompts padded left, several completions of each padded right. Of
    prompts their ids are given, or how many are drawn.
    """
    rows = (prompts if isinstance(prompts, int) else len(prompts)) * generations

    def ragged(count: int, about: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = _ragged(count, about, 0.25, draw)[:, None]
        ids = torch.randint(3, vocab_size, (count, int(lengths.max())), generator=draw)
        return ids, (torch.arange(ids.shape[1]) < lengths).long()

    if isinstance(prompts, int):
        backwards = ragged(prompts, prompt_length)
    else:
        ids = [torch.tensor(prompt).flip(0) for prompt in prompts]
        backwards = tuple(pad_sequence(x, batch_first=True) for x in (ids, [torch.ones_like(row) for row in ids]))
    prompt_ids, prompt_mask = (x.flip(1).repeat_interleave(generations, 0) for x in backwards)
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
