"""Rows of a benchmark: those of a user, and random ones with given lengths or branches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from trl.trainer.utils import pad

from ...trainers.data.row_checks import TRAINED, validate_rows
from ..data import load_rows, rename_columns
from ..formats import rows_for_trainer, to_trl_format


if TYPE_CHECKING:
    from .settings import BenchSettings


__all__ = [
    "RolloutTree", "load_examples", "pairs_of_lengths", "parse_lengths", "parse_tree", "random_completions",
    "random_prompts", "select_rows", "synthetic_rows", "tree_pairs", "tree_rows",
]  # fmt: skip


def select_rows(
    data: str | None, settings: BenchSettings, *, spread: float = 0.25, split: str = "train",
    columns: str | None = None,
) -> tuple[Dataset | None, str]:  # fmt: skip
    """
    Rows of a benchmark, and their description for a report.

    Args:
        data (`str`, *optional*):
            `equal`, `lengths:...` or `tree:...` of [`synthetic_rows`], or what [`load_examples`] reads. `None` for
            GRPO's random prompts: no rows are returned.
        settings ([`BenchSettings`]):
            Trainer, sizes and seed.
        spread (`float`):
            Relative spread of the lengths of `lengths:...`.
        split (`str`):
            Split of a folder or Hub id.
        columns (`str`, *optional*):
            Columns to rename.
    """
    if data is None:
        return None, "random"
    count = settings.pairs * (settings.steps + settings.warmup)
    if (rows := synthetic_rows(data, settings.trainer, count, spread, settings.seed)) is not None:
        if settings.trainer == "grpo":
            raise ValueError(f"{data} is for dpo and sft: of grpo give --prompt-length and --completion-length.")
        return rows, f"{data}, spread {spread:g}" if data.startswith("lengths:") else data
    rows = load_examples(data, settings.trainer, expand_turns=settings.expand_turns, split=split, columns=columns)
    return rows, Path(data).name


def load_examples(
    data: str, trainer: str = "dpo", *, expand_turns: bool = False, split: str = "test", columns: str | None = None
) -> Dataset:
    """
    Load rows for a trainer with [`load_rows`], and convert them with [`to_trl_format`].

    DPO takes pairs; SFT texts, conversations or pairs (it trains on the chosen side); GRPO prompts.

    Args:
        data (`str`):
            File, folder, Hub id or recipe.
        trainer (`str`):
            `"dpo"`, `"sft"` or `"grpo"`.
        expand_turns (`bool`):
            Whether to keep the conversations, which are expanded later to a row for each turn of the assistant.
        split (`str`):
            Split of a folder or Hub id.
        columns (`str`, *optional*):
            Columns to rename, such as `"question=prompt"`.

    Raises:
        ValueError: If the trainer does not take the columns, or if a row has no text.
    """
    rows = rename_columns(load_rows(data, split), columns)
    if images := sorted({"image", "images"} & set(rows.column_names)):
        raise ValueError(f"{data} has {images}, and the models that are measured read text: remove these columns.")
    rows = to_trl_format(rows)
    if expand_turns:
        return validate_rows(rows, "", ["messages"])
    return validate_rows(rows_for_trainer(rows, trainer), "", TRAINED, strict=False)


@dataclass(frozen=True)
class RolloutTree:
    """
    Sizes of one task: `rollouts` of `turns` turns, each of about `turn` tokens, after a system prompt.

    A quarter of a turn is input (a question, the output of a tool), the rest is the answer of the model.
    """

    rollouts: int
    turns: int
    system: int
    turn: int

    @property
    def rows(self) -> int:
        """Rows of one tree: one for each turn."""
        return self.rollouts * self.turns

    @property
    def longest(self) -> int:
        """Largest number of tokens of a row: a turn has up to 5/4 of its mean."""
        return self.system + self.turns * (self.turn + self.turn // 4)


def parse_tree(data: str) -> RolloutTree | None:
    """Parse `tree:ROLLOUTSxTURNS/SYSTEM/TURN`; `None` if `data` does not begin with `tree:`."""
    if not data.startswith("tree:"):
        return None
    match = re.fullmatch(r"tree:(\d+)x(\d+)/(\d+)/(\d+)", data)
    sizes = [int(size) for size in match.groups()] if match else [0]
    if min(sizes) < 1 or sizes[-1] < 4:
        raise ValueError(
            f"{data!r} gives no sizes: write `tree:ROLLOUTSxTURNS/SYSTEM/TURN`, such as `tree:4x8/600/80` for 4 "
            "rollouts of 8 turns of about 80 tokens behind a system prompt of 600; a turn has 4 tokens or more."
        )
    return RolloutTree(*sizes)


def parse_lengths(data: str) -> tuple[int, int] | None:
    """Parse `lengths:PROMPT/COMPLETION`; `None` if `data` does not begin with `lengths:`."""
    match = re.fullmatch(r"lengths:(\d+)/(\d+)", data)
    if data.startswith("lengths:") and (match is None or min(int(match[1]), int(match[2])) < 1):
        raise ValueError(f"{data!r} gives no lengths: write `lengths:PROMPT/COMPLETION`, both of 1 token or more.")
    return (int(match[1]), int(match[2])) if match else None


def synthetic_rows(data: str, trainer: str, count: int, spread: float = 0.25, seed: int = 0) -> Dataset | None:
    """
    Draw `count` tokenized rows for `equal`, `lengths:PROMPT/COMPLETION` or `tree:ROLLOUTSxTURNS/SYSTEM/TURN`; `None`
    for other data. A row for SFT is the prompt of a pair with the chosen completion.
    """
    if tree := parse_tree(data):
        return (tree_rows if trainer == "sft" else tree_pairs)(tree, count, seed)
    if lengths := parse_lengths(data):
        pairs = pairs_of_lengths(count, *lengths, spread, seed)
    elif data == "equal":  # and a prompt of one token: nothing can be saved
        pairs = pairs_of_lengths(count, 1, 127, spread=0, seed=seed)
    else:
        return None
    if trainer != "sft":
        return pairs
    rows = [row["prompt_ids"] + row["chosen_ids"] for row in pairs]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def pairs_of_lengths(count: int, prompt: int, completion: int, spread: float = 0.25, seed: int = 0) -> Dataset:
    """Draw tokenized pairs with lengths uniform in `mean * (1 - spread)` to `mean * (1 + spread)`."""
    draw = torch.Generator().manual_seed(seed)
    means = {"prompt_ids": prompt, "chosen_ids": completion, "rejected_ids": completion}
    lengths = {name: _draw_lengths(count, mean, spread, draw) for name, mean in means.items()}
    draw.manual_seed(seed)
    return Dataset.from_dict({name: [_tokens(n, draw) for n in column] for name, column in lengths.items()})


def tree_rows(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """
    Draw tokenized rows for SFT, tree after tree: one row for each turn. It holds all earlier turns, and its labels are
    the answer of its turn.
    """
    turns = islice(_turns(tree, torch.Generator().manual_seed(seed)), count)
    return Dataset.from_list(
        [{"input_ids": path + answer, "labels": [-100] * len(path) + answer} for path, answer in turns]
    )


def tree_pairs(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """Draw pairs, one for each turn of [`tree_rows`]: its answer is chosen over a random one."""
    draw = torch.Generator().manual_seed(seed)
    turns = islice(_turns(tree, draw), count)
    return Dataset.from_list(
        [{"prompt_ids": path, "chosen_ids": answer, "rejected_ids": _turn(tree, draw)[1]} for path, answer in turns]
    )


def random_prompts(count: int, settings: BenchSettings, draw: torch.Generator) -> list[list[int]]:
    """Draw token ids of prompts of about the length of the settings."""
    return [_tokens(n, draw) for n in _draw_lengths(count, settings.prompt_length, 0.25, draw)]


def random_completions(
    prompts: list[list[int]], settings: BenchSettings, vocab_size: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """
    Draw a batch as TRL's online trainers score it: prompts padded on the left, `generations` completions of each
    padded on the right.
    """
    repeated = [prompt for prompt in prompts for _ in range(settings.generations)]
    lengths = _draw_lengths(len(repeated), settings.completion_length, 0.25, draw)
    batch = {"advantages": torch.rand(len(repeated), generator=draw) + 0.5}  # none is 0: each one has a gradient
    completions = [_tokens(n, draw, vocab_size) for n in lengths]
    for name, rows, side in (("prompt", repeated, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        batch[f"{name}_ids"] = pad(ids, padding_side=side)
        batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], padding_side=side)
    return batch | {"num_items_in_batch": batch["completion_mask"].sum()}


def _draw_lengths(count: int, mean: int, spread: float, draw: torch.Generator) -> list[int]:
    low, high = max(1, int(mean * (1 - spread))), int(mean * (1 + spread))
    return torch.randint(low, high + 1, (count,), generator=draw).tolist()


def _turns(tree: RolloutTree, draw: torch.Generator) -> Iterator[tuple[list[int], list[int]]]:
    """Ids before the answer of each turn, and the ids of the answer: rollout after rollout, without end."""
    while True:
        system = _tokens(tree.system, draw)
        for _ in range(tree.rollouts):
            path = system
            for _ in range(tree.turns):
                question, answer = _turn(tree, draw)
                path = path + question
                yield path, answer
                path = path + answer


def _turn(tree: RolloutTree, draw: torch.Generator) -> tuple[list[int], list[int]]:
    """Ids of the input and of the answer of a turn: together within a quarter of their mean."""
    low, high = tree.turn - tree.turn // 4, tree.turn + tree.turn // 4
    length = int(torch.randint(low, high + 1, (1,), generator=draw))
    question = length // 4
    return _tokens(question, draw), _tokens(length - question, draw)


def _tokens(count: int, draw: torch.Generator, vocab_size: int = 256) -> list[int]:
    # No special tokens (below 3), and by default ids that every vocabulary has.
    return torch.randint(3, vocab_size, (count,), generator=draw).tolist()
