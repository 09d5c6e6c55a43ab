"""
Published rollouts of an agent as training data: the good ones, pairs between trials of a task, groups of GRPO.

A rollout is a row with `messages` (tool calls and what tools answered among them), a reward, and a task that other
rows are trials of.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from itertools import chain, combinations
from typing import Any

from datasets import Dataset, Features

from .turns import check_tool_messages, renderer, turns_of


__all__ = ["RecordedRollouts", "good_rollouts", "rollout_pairs"]

logger = logging.getLogger(__name__)

KEPT = ("tools", "chat_template_kwargs")
"""Columns that a chat template is rendered with."""


def good_rollouts(dataset: Dataset, at_least: float = 1.0, *, reward: str = "reward") -> Dataset:
    """
    The rollouts with a reward of `at_least`, for SFT (with `expand_turns=True` for a row of each turn).

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages` and a reward.
        at_least (`float`, *optional*, defaults to `1.0`):
            The least reward that is good.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Returns:
        [`~datasets.Dataset`] with the same columns.

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If it has no such column, a row has no reward, or no rollout is good.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl_padfix import good_rollouts

    >>> asked = {"role": "user", "content": "2+2?"}
    >>> trials = [("3", 0.0), ("4", 1.0)]
    >>> rows = [{"reward": r, "messages": [asked, {"role": "assistant", "content": c}]} for c, r in trials]
    >>> [row["messages"][1]["content"] for row in good_rollouts(Dataset.from_list(rows))]
    ['4']

    ```
    """
    rewards = _rewards(dataset, reward)
    good = [i for i, value in enumerate(rewards) if value >= at_least]
    if not good:
        raise ValueError(
            f"None of the {len(rewards)} rollouts has a `{reward}` of at least {at_least:g}; the highest is "
            f"{max(rewards, default=math.nan):g}. Lower `at_least`."
        )
    logger.info(f"`good_rollouts`: {len(good)} of {len(rewards)} have a `{reward}` of at least {at_least:g}.")
    return dataset.select(good)


def rollout_pairs(dataset: Dataset, *, task: str = "task", reward: str = "reward") -> Dataset:
    """
    Preference pairs between trials of one task, for DPO: of every two with different rewards.

    `prompt` is what both begin with, `chosen` goes on as the trial with the higher reward did, to the last turn of the
    assistant, and `rejected` as the other one. Ids of tool calls are not compared: they differ in every trial. A
    warning counts what gives no pair, and the pairs that part at a message which is not the assistant's: what a user
    or a tool says in `chosen` and `rejected` is trained on too.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages`, a task and a reward; `tools` and `chat_template_kwargs` are kept.
        task (`str`, *optional*, defaults to `"task"`):
            Column whose value the trials of a task have in common.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Returns:
        [`~datasets.Dataset`] with `prompt`, `chosen`, `rejected`, the task, and `margin`, by which the rewards differ.

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If a column is missing, a row has no reward, or no two trials of a task give a pair.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl_padfix import rollout_pairs

    >>> asked = {"role": "user", "content": "2+2?"}
    >>> trials = [("3", 0.0), ("4", 1.0), ("22", 0.0)]
    >>> rows = [
    ...     {"task": 7, "reward": reward, "messages": [asked, {"role": "assistant", "content": text}]}
    ...     for text, reward in trials
    ... ]
    >>> pairs = rollout_pairs(Dataset.from_list(rows))
    >>> [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in pairs]
    [('4', '3'), ('4', '22')]

    ```
    """
    rewards, trials = _rewards(dataset, reward), _trials(dataset, task)
    messages = dataset["messages"][:]
    counts = Counter(one=sum(len(rows) == 1 for rows in trials.values()))
    pairs: dict[str, list[Any]] = {"prompt": [], "chosen": [], "rejected": [], "margin": [], "row": []}
    for rows in trials.values():
        counts["alike"] += len(rows) > 1 and len({rewards[i] for i in rows}) == 1
        for pair in combinations(rows, 2):
            worse, better = sorted(pair, key=rewards.__getitem__)
            if rewards[worse] == rewards[better]:
                continue
            shared = _shared(messages[better], messages[worse])
            chosen, rejected = (_to_last_turn(messages[i])[shared:] for i in (better, worse))
            if not (shared and chosen and rejected):
                counts["nothing"] += 1
                continue
            counts["elsewhere"] += {chosen[0]["role"], rejected[0]["role"]} != {"assistant"}
            margin = rewards[better] - rewards[worse]
            for name, value in zip(pairs, (messages[better][:shared], chosen, rejected, margin, better), strict=True):
                pairs[name].append(value)
    said = {
        "one": f"{counts['one']} of {len(trials)} tasks have one trial, which there is nothing to compare with",
        "alike": f"the trials of {counts['alike']} tasks all have one reward",
        "nothing": f"{counts['nothing']} pairs of trials share no message, or one is the beginning of the other",
    }
    found = "; ".join(text for name, text in said.items() if counts[name])
    source = pairs.pop("row")
    if not source:
        raise ValueError(
            f"`rollout_pairs` makes no pair of {len(dataset)} rollouts: {found or 'there is none'}. A pair needs two "
            f"trials of one `{task}` with different values of `{reward}`; check the columns, or sample more trials."
        )
    logger.info(f"`rollout_pairs`: {len(source)} pairs of {len(dataset)} rollouts of {len(trials)} tasks.")
    if found:
        logger.warning(f"`rollout_pairs`: {found}.")
    if counts["elsewhere"]:
        logger.warning(
            f"`rollout_pairs`: {counts['elsewhere']} of {len(source)} pairs part at a message that is not the "
            "assistant's. What a user or a tool says is in `chosen` and `rejected` too, and DPO trains on it."
        )
    kind = dataset.features["messages"]
    kept = dataset.select_columns([name for name in dataset.column_names if name in (task, *KEPT)]).select(source)
    features = Features(dict.fromkeys(("prompt", "chosen", "rejected"), kind) | {"margin": dataset.features[reward]})
    made = Dataset.from_dict(pairs, features=features)
    for name in kept.column_names:
        made = made.add_column(name, kept[name][:], feature=kept.features[name])
    return made


class RecordedRollouts:
    """
    Recorded rollouts in place of generation: the loss of GRPO on what an agent did, weighted by its reward.

    A step takes all trials of a task, as TRL's `rollout_func`. TRL makes the weights of their rewards (their distance
    from the mean of the task, by `scale_rewards`); what users and tools said is not trained on. The policy did not
    sample what it is trained on, and the ratio of its probabilities to those of the agent is taken as 1: this is a
    weighted likelihood, to be kept short or held by `beta`.

    Tasks whose trials all have one reward teach nothing and are left out, and those with fewer trials than most; of
    those with more the first ones are taken. A warning says how many.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages`, a task and a reward; `tools` and `chat_template_kwargs` go to the chat template.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer, with a chat template.
        task (`str`, *optional*, defaults to `"task"`):
            Column whose value the trials of a task have in common.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Attributes:
        prompts ([`~datasets.Dataset`]): The dataset for the trainer, a row for each task.
        trials (`int`): Trials of a task, to be set as `num_generations`.

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If a column is missing, no task can be compared, or the template does not render a turn as the
            beginning of what follows it.

    Example:

    ```python
    from trl_padfix import GRPOConfig, GRPOTrainer, RecordedRollouts

    recorded = RecordedRollouts(rollouts, tokenizer)
    args = GRPOConfig(output_dir="runs/agent", num_generations=recorded.trials, padding_free=True, prefix_sharing=True)
    trainer = GRPOTrainer(model, recorded.rewards, args, recorded.prompts, rollout_func=recorded)
    ```
    """

    __name__ = "recorded"

    def __init__(self, dataset: Dataset, processing_class: Any, *, task: str = "task", reward: str = "reward"):
        values, trials = _rewards(dataset, reward), _trials(dataset, task)
        check_tool_messages(dataset, processing_class, "train", ("messages",))
        most = Counter(map(len, trials.values())).most_common(1)[0][0]
        fewer = sum(len(rows) < most for rows in trials.values())
        groups = {str(name): rows[:most] for name, rows in trials.items() if len(rows) >= most > 1}
        compared = {name: rows for name, rows in groups.items() if len({values[i] for i in rows}) > 1}
        found = (
            f"of {len(trials)} tasks most have {most} trial{'s' * (most > 1)}, {fewer} have fewer, and the trials of "
            f"{len(groups) - len(compared)} all have one reward"
        )
        if not compared:
            raise ValueError(
                f"`RecordedRollouts` finds nothing to compare: {found}. A task needs two trials or more with "
                f"different values of `{reward}`; check the columns, or sample more trials."
            )
        logger.warning(f"`RecordedRollouts` trains on {len(compared)} tasks: {found}.")
        self.trials = most
        self.prompts = Dataset.from_dict({"prompt": list(compared)})
        self._tokens = {
            name: [(*_token_ids(dataset[i], i, processing_class), values[i]) for i in rows]
            for name, rows in compared.items()
        }

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The trials of each task that is named, as TRL's `rollout_func` returns them: `num_generations` of each."""
        counts = Counter(prompts)
        if odd := {name: count for name, count in counts.items() if count != self.trials}:
            raise ValueError(
                f"A task has {self.trials} trials, and a process was asked for {next(iter(odd.values()))} of one. Set "
                f"`num_generations={self.trials}`, and `per_device_train_batch_size` to a multiple of it."
            )
        taken: Counter[str] = Counter()
        rows = []
        for name in prompts:
            rows.append(self._tokens[name][taken[name]])
            taken[name] += 1
        prompt_ids, completion_ids, mask, rewards = (list(column) for column in zip(*rows, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
            "env_mask": mask,
            "recorded": rewards,
        }

    @staticmethod
    def rewards(completions: list[Any], recorded: list[float], **columns: Any) -> list[float]:
        """The recorded rewards, as TRL's `reward_funcs`."""
        return recorded


def _rewards(dataset: Any, reward: str) -> list[float]:
    """The reward of each rollout, once the dataset is seen to have rollouts."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"Rollouts are compared with one another, so a `datasets.Dataset` is needed, and not a "
            f"`{type(dataset).__name__}`. Make one of a stream with `Dataset.from_generator`."
        )
    _require(dataset, "messages", "Rollouts are conversations: rename their column.")
    _require(dataset, reward, "Rollouts are told apart by it: name the column of the rewards with `reward=`.")
    values = dataset[reward][:]
    without = [i for i, value in enumerate(values) if value is None or not math.isfinite(float(value))]
    if without:
        raise ValueError(
            f"{len(without)} of {len(values)} rollouts have no number as `{reward}`, the first of them row "
            f"{without[0]} (counted from 0): {values[without[0]]!r}. Give them one, or filter them out."
        )
    return [float(value) for value in values]


def _trials(dataset: Dataset, task: str) -> dict[Any, list[int]]:
    """The rows of each task."""
    _require(
        dataset, task, "Trials are compared within a task: name the column that they have in common with `task=`."
    )
    trials: dict[Any, list[int]] = {}
    for i, name in enumerate(dataset[task][:]):
        trials.setdefault(name, []).append(i)
    if without := trials.get(None):
        raise ValueError(
            f"{len(without)} of {len(dataset)} rollouts have no `{task}`, the first of them row {without[0]} "
            "(counted from 0): they would be taken for trials of one task. Give them one, or filter them out."
        )
    return trials


def _require(dataset: Dataset, column: str, remedy: str) -> None:
    if column not in dataset.column_names:
        raise ValueError(f"The rollouts have no column `{column}`; they have {sorted(dataset.column_names)}. {remedy}")


def _shared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """How many messages two trials begin with in common."""
    pairs = zip(map(_said, one), map(_said, other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids of its tool calls, and without what is not there."""
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls") or ()]
    rest = {k: v for k, v in message.items() if v is not None and k not in ("tool_calls", "tool_call_id")}
    return rest | {"tool_calls": calls}


def _to_last_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns = turns_of(messages)
    return messages[: turns[-1][1]] if turns else []


def _token_ids(row: dict[str, Any], number: int, processing_class: Any) -> tuple[list[int], list[int], list[int]]:
    """Tokens before the first turn of the assistant, those after, and which of these the assistant said."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    render, messages = renderer(row, processing_class), row["messages"]
    parts, mask, so_far = [], [], ""
    for begin, end in turns_of(messages):
        for text, said in ((render(messages[:begin], add_generation_prompt=True), 0), (render(messages[:end]), 1)):
            if not text.startswith(so_far):
                raise ValueError(
                    f"The chat template does not render the first {begin} messages of row {number} (counted from 0) "
                    "as the beginning of those that follow: it changes earlier turns, so that a rollout is no one "
                    "sequence. Train on a row for each turn: `expand_turns`."
                )
            parts.append(tokenizer(text[len(so_far) :], add_special_tokens=False)["input_ids"])
            mask.append([said] * len(parts[-1]))
            so_far = text
    if not parts or not parts[0]:
        raise ValueError(
            f"Row {number} (counted from 0) has no turn of the assistant behind another message. Filter it out."
        )
    return parts[0], [*chain(*parts[1:])], [*chain(*mask[1:])]
