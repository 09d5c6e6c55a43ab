"""What a benchmark runs on: rows that a user has, and random ones of given lengths or branches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from ...trainers.data.row_checks import TRAINED, sound_rows
from ..data import load_rows, rename_columns
from ..formats import as_trl_takes_them, of_trainer


__all__ = [
    "RolloutTree",
    "equal_length_pairs",
    "load_examples",
    "pairs_of_lengths",
    "parse_lengths",
    "parse_tree",
    "random_completions",
    "synthetic_rows",
    "tree_pairs",
    "tree_rows",
]


def load_examples(
    data: str, trainer: str = "dpo", *, expand_turns: bool = False, split: str = "test", columns: str | None = None
) -> Dataset:
    """
    Rows for a trainer from wherever [`load_rows`] finds them, in a format that it takes or that
    [`as_trl_takes_them`] knows: pairs for DPO; texts, conversations or pairs, of which the chosen ones are taken, for
    SFT; prompts for GRPO.

    Of a folder or Hub id it is this `split`, and `columns` are renamed (`"question=prompt"`). Rows without text and
    columns that the trainer does not take are a `ValueError`.
    """
    rows = rename_columns(load_rows(data, split), columns)
    if images := sorted({"image", "images"} & set(rows.column_names)):
        raise ValueError(f"{data} has {images}, and the models that are measured read text: remove these columns.")
    rows = as_trl_takes_them(rows)
    if expand_turns:
        return sound_rows(rows, "", ["messages"])
    return sound_rows(of_trainer(rows, trainer), "", TRAINED)


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


def parse_lengths(data: str) -> tuple[int, int] | None:
    """`(prompt, completion)` of `lengths:PROMPT/COMPLETION`, and `None` for what does not begin like this."""
    match = re.fullmatch(r"lengths:(\d+)/(\d+)", data)
    if data.startswith("lengths:") and (match is None or min(int(match[1]), int(match[2])) < 1):
        raise ValueError(f"{data!r} gives no lengths: write `lengths:PROMPT/COMPLETION`, both of 1 token or more.")
    return (int(match[1]), int(match[2])) if match else None


def synthetic_rows(data: str, trainer: str, count: int, spread: float = 0.25, seed: int = 0) -> Dataset | None:
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


def equal_length_pairs(count: int, length: int = 128, seed: int = 0) -> Dataset:
    """Tokenized pairs of one length that share a prompt of one token: where removing padding cannot help."""
    return _pairs([1] * count, [length - 1] * count, [length - 1] * count, seed)


def pairs_of_lengths(count: int, prompt: int, completion: int, spread: float = 0.25, seed: int = 0) -> Dataset:
    """Tokenized random pairs, whose lengths are drawn evenly from their mean times `1 - spread` to `1 + spread`."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (_ragged(count, mean, spread, draw).tolist() for mean in (prompt, completion, completion))
    return _pairs(*lengths, seed)


def tree_rows(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """
    Tokenized rows for SFT, tree after tree: one for each turn, with all that is before it, trained on what it answers.
    """
    turns = islice(_turns(tree, torch.Generator().manual_seed(seed)), count)
    return Dataset.from_list(
        [{"input_ids": path + answer, "labels": [-100] * len(path) + answer} for path, answer in turns]
    )


def tree_pairs(tree: RolloutTree, count: int, seed: int = 0) -> Dataset:
    """The same as pairs: each turn's answer was chosen over another one, and the rollout went on from it."""
    draw = torch.Generator().manual_seed(seed)
    turns = islice(_turns(tree, draw), count)
    return Dataset.from_list(
        [{"prompt_ids": path, "chosen_ids": said, "rejected_ids": _turn(tree, draw)[1]} for path, said in turns]
    )


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
    return Dataset.from_dict({name: [_tokens(n, draw) for n in lengths] for name, lengths in columns.items()})


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
