"""Data that branches: rollouts of several turns behind one system prompt, a row or a pair for each turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from datasets import Dataset


__all__ = ["RolloutTree", "parse_tree", "tree_pairs", "tree_rows"]


@dataclass(frozen=True)
class RolloutTree:
    """
    One task: `rollouts` of `turns`, each of about `turn` tokens, behind a system prompt of `system` tokens.

    A quarter of a turn is what the model is shown (a question, the output of a tool), the rest is what it answers.
    """

    rollouts: int
    turns: int
    system: int
    turn: int

    @property
    def rows(self) -> int:
        """Rows of one tree."""
        return self.rollouts * self.turns

    @property
    def longest(self) -> int:
        """The most tokens that a row can have."""
        return self.system + self.turns * (self.turn + self.turn // 4)


def parse_tree(data: str) -> RolloutTree | None:
    """The sizes of `tree:ROLLOUTSxTURNS/SYSTEM/TURN`, and `None` for what does not begin like this."""
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


def tree_rows(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """
    Tokenized rows for SFT, tree after tree: one for each turn, with all that is before it, trained on what it answers.
    """
    turns = _turns(tree, torch.Generator().manual_seed(seed))
    rows = [
        {"input_ids": path + answer, "labels": [-100] * len(path) + answer} for path, answer in islice(turns, count)
    ]
    return Dataset.from_list(rows)


def tree_pairs(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """The same as pairs: each turn's answer was chosen over another one, and the rollout went on from it."""
    draw = torch.Generator().manual_seed(seed)
    pairs = [
        {"prompt_ids": path, "chosen_ids": answer, "rejected_ids": _turn(tree, draw)[1]}
        for path, answer in islice(_turns(tree, draw), count)
    ]
    return Dataset.from_list(pairs)


def _turns(tree: RolloutTree, draw: torch.Generator) -> Iterator[tuple[list[int], list[int]]]:
    """What is before the answer of each turn, and the answer: rollout after rollout, one tree behind the other."""
    while True:
        system = _tokens(tree.system, draw)
        for _ in range(tree.rollouts):
            path = system
            for _ in range(tree.turns):
                shown, answer = _turn(tree, draw)
                path = path + shown
                yield path, answer
                path = path + answer


def _turn(tree: RolloutTree, draw: torch.Generator) -> tuple[list[int], list[int]]:
    """What a turn shows, and what it answers: together within a quarter of their mean."""
    low, high = tree.turn - tree.turn // 4, tree.turn + tree.turn // 4
    length = int(torch.randint(low, high + 1, (1,), generator=draw))
    shown = length // 4
    return _tokens(shown, draw), _tokens(length - shown, draw)


def _tokens(count: int, draw: torch.Generator) -> list[int]:
    return torch.randint(3, 256, (count,), generator=draw).tolist()
