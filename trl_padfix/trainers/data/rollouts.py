"""
Makes training data from recorded agent rollouts: good rollouts for SFT, pairs for DPO, groups for GRPO.

A rollout is a row with `messages` (tool calls and answers of tools included), a reward, and the task that it is a
trial of.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, Value

from .chat_templates import TEMPLATE_COLUMNS, renderer
from .row_checks import validate_rows
from .tokenizers import tokenizer_of
from .turns import turns_of


if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ..parts.part import PaddingFreeTrainer


__all__ = ["RecordedRollouts", "good_rollouts", "rollout_pairs"]

logger = logging.getLogger(__name__)


def good_rollouts(dataset: Dataset, at_least: float = 1.0, *, reward: str = "reward") -> Dataset:
    """
    Select the rollouts with a reward of `at_least`, for SFT (with `expand_turns=True` for a row of each turn).

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages` and a reward.
        at_least (`float`, *optional*, defaults to `1.0`):
            Minimum reward of a good rollout.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Returns:
        [`~datasets.Dataset`] with the same columns.

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If it has no such column, a row has no messages or no reward, or no rollout is good.

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
    Make preference pairs for DPO: each two trials of a task with different rewards make a pair.

    `prompt` has the messages that both trials begin with. `chosen` and `rejected` have the messages that follow, up to
    the last assistant turn, of the trial with the higher and the lower reward. Ids of tool calls are not
    compared, because they differ between all trials. A warning counts the trials without a pair. It also counts the
    pairs whose first different message is not the assistant's: DPO then trains on messages of users and tools too.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages`, a task and a reward; `tools` and `chat_template_kwargs` are kept.
        task (`str`, *optional*, defaults to `"task"`):
            Column with the task of each trial.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Returns:
        [`~datasets.Dataset`] with `prompt`, `chosen`, `rejected`, the task, and `margin` (difference of the rewards).

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If a column is missing, a row has no messages or no reward, or no two trials of a task give a pair.

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
    columns = {name: dataset[name][:] for name in dataset.column_names if name in (task, *TEMPLATE_COLUMNS)}
    counts = Counter(single=sum(len(rows) == 1 for rows in trials.values()))
    pairs: list[dict[str, Any]] = []
    for rows in trials.values():
        counts["equal"] += len(rows) > 1 and len({rewards[i] for i in rows}) == 1
        for pair in combinations(rows, 2):
            worse, better = sorted(pair, key=rewards.__getitem__)
            if rewards[worse] == rewards[better]:
                continue
            shared = _count_shared(messages[better], messages[worse])
            chosen, rejected = (_to_last_turn(messages[i])[shared:] for i in (better, worse))
            if not (shared and chosen and rejected):
                counts["no_pair"] += 1
                continue
            counts["not_assistant"] += {chosen[0]["role"], rejected[0]["role"]} != {"assistant"}
            texts = {"prompt": messages[better][:shared], "chosen": chosen, "rejected": rejected}
            of_task = {name: values[better] for name, values in columns.items()}
            pairs.append(texts | {"margin": rewards[better] - rewards[worse]} | of_task)
    reasons = {
        "single": f"{counts['single']} of {len(trials)} tasks have one trial, so there is nothing to compare",
        "equal": f"the trials of {counts['equal']} tasks all have one reward",
        "no_pair": f"{counts['no_pair']} pairs of trials share no message, or one is the beginning of the other",
    }
    left_out = "; ".join(text for name, text in reasons.items() if counts[name])
    if not pairs:
        raise ValueError(
            f"`rollout_pairs` finds no pair in {len(dataset)} rollouts{left_out and f': {left_out}'}. A pair needs "
            f"two trials of one `{task}` with different values of `{reward}`. Check the columns, or sample more."
        )
    logger.info(f"`rollout_pairs`: {len(pairs)} pairs of {len(dataset)} rollouts of {len(trials)} tasks.")
    if left_out:
        logger.warning(f"`rollout_pairs`: {left_out}.")
    if counts["not_assistant"]:
        logger.warning(
            f"`rollout_pairs`: {counts['not_assistant']} of {len(pairs)} pairs part at a message that is not the "
            "assistant's. Messages of users or tools are in `chosen` and `rejected` too, and DPO trains on them."
        )
    # The types of the dataset: inferred ones would merge the keys of all tool calls into one struct.
    types = dict.fromkeys(("prompt", "chosen", "rejected"), dataset.features["messages"])
    types |= {"margin": Value("float64"), **{name: dataset.features[name] for name in columns}}
    return Dataset.from_list(pairs, features=Features(types))


class RecordedRollouts:
    """
    Recorded rollouts instead of generation: the loss of GRPO on an agent's turns, weighted by its rewards.

    As TRL's `rollout_func` it returns all trials of a task in one step. TRL computes the weights from the rewards
    (distance from the mean of the task, by `scale_rewards`). Messages of users and tools are not trained on. The
    policy did not sample these rollouts, and the ratio of its probabilities to the agent's is taken as 1: the loss is
    a weighted likelihood. Train for few steps, or set `beta`.

    The most common number of trials per task is used. Tasks with fewer trials and tasks whose trials all have one
    reward (no advantage) are left out; of tasks with more trials the first ones are taken. A warning counts them.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rollouts, with `messages`, a task and a reward; `tools` and `chat_template_kwargs` go to the chat template.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer, with a chat template.
        task (`str`, *optional*, defaults to `"task"`):
            Column with the task of each trial.
        reward (`str`, *optional*, defaults to `"reward"`):
            Column of the rewards.

    Attributes:
        prompts ([`~datasets.Dataset`]): The dataset for the trainer: one row per task.
        trials (`int`): Number of trials of each task; set `num_generations` to it.

    Raises:
        TypeError: If the dataset is a stream.
        ValueError: If a column is missing, if no task has trials with different rewards, or if the template changes
            earlier turns, so that a rendered turn is not the beginning of the text with the next one.

    Example:

    ```python
    from trl_padfix import GRPOConfig, GRPOTrainer, RecordedRollouts

    recorded = RecordedRollouts(rollouts, tokenizer)
    args = GRPOConfig(output_dir="runs/agent", num_generations=recorded.trials, padding_free=True, prefix_sharing=True)
    trainer = GRPOTrainer(model, recorded.rewards, args, recorded.prompts, rollout_func=recorded)
    ```
    """

    __name__ = "recorded"  # TRL reads the name of a `rollout_func`; instances have none

    def __init__(
        self,
        dataset: Dataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        task: str = "task",
        reward: str = "reward",
    ):
        values, trials = _rewards(dataset, reward), _trials(dataset, task)
        most = Counter(map(len, trials.values())).most_common(1)[0][0]
        fewer = sum(len(rows) < most for rows in trials.values())
        groups = {str(name): rows[:most] for name, rows in trials.items() if len(rows) >= most > 1}
        compared = {name: rows for name, rows in groups.items() if len({values[i] for i in rows}) > 1}
        summary = (
            f"of {len(trials)} tasks most have {most} trial{'s' * (most > 1)}, {fewer} have fewer, and the trials of "
            f"{len(groups) - len(compared)} all have one reward"
        )
        if not compared:
            raise ValueError(
                f"`RecordedRollouts` finds nothing to compare: {summary}. A task needs two trials or more with "
                f"different values of `{reward}`; check the columns, or sample more trials."
            )
        logger.warning(f"`RecordedRollouts` trains on {len(compared)} tasks: {summary}.")
        self.trials = most
        self.prompts = Dataset.from_dict({"prompt": list(compared)})
        self._tokens = {
            name: [(*_token_ids(dataset[i], i, processing_class), values[i]) for i in rows]
            for name, rows in compared.items()
        }

    def __call__(self, prompts: list[str], trainer: PaddingFreeTrainer) -> dict[str, Any]:
        """The trials of the tasks in `prompts` (each `num_generations` times there), as TRL's `rollout_func`."""
        counts = Counter(prompts)
        if wrong := {name: count for name, count in counts.items() if count != self.trials}:
            raise ValueError(
                f"A task has {self.trials} trials, and a process was asked for {next(iter(wrong.values()))} of one. "
                f"Set `num_generations={self.trials}`, and `per_device_train_batch_size` to a multiple of it."
            )
        # TRL repeats the prompt of a group: the first time is trial 0, the second trial 1, ...
        trials = {name: iter(self._tokens[name]) for name in counts}
        columns = map(list, zip(*(next(trials[name]) for name in prompts), strict=True))
        names = ("prompt_ids", "completion_ids", "env_mask", "recorded")
        return {"logprobs": None, **dict(zip(names, columns, strict=True))}

    @staticmethod
    def rewards(completions: list[Any], recorded: list[float], **columns: Any) -> list[float]:
        """The recorded rewards, as TRL's `reward_funcs`."""
        return recorded


def _rewards(dataset: Dataset | IterableDataset, reward: str) -> list[float]:
    """The reward of each rollout; raises a `TypeError` or `ValueError` if the dataset does not hold rollouts."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"Rollouts are compared with one another, so a `datasets.Dataset` is needed, and not a "
            f"`{type(dataset).__name__}`. Make one from a stream with `Dataset.from_generator`."
        )
    _require(dataset, "messages", "Rollouts are conversations: rename their column.")
    _require(dataset, reward, "It distinguishes good rollouts: name the column of the rewards with `reward=`.")
    validate_rows(dataset, "rollouts", ("messages",))
    values = dataset[reward][:]
    numbers = list(map(_as_number, values))
    without = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    if without:
        raise ValueError(
            f"{len(without)} of {len(values)} rollouts have no number as `{reward}`, the first of them row "
            f"{without[0]} (counted from 0): {values[without[0]]!r}. Give them one, or filter them out."
        )
    return numbers


def _as_number(value: Any) -> float:
    """A value as a number; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _trials(dataset: Dataset, task: str) -> dict[Any, list[int]]:
    """The indices of the rows of each task."""
    _require(dataset, task, "Trials are compared within a task: name the column of the task with `task=`.")
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


def _count_shared(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> int:
    """Number of messages that two trials have in common at their beginning."""
    pairs = zip(map(_without_ids, a), map(_without_ids, b), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids of tool calls, and without missing values (Arrow adds `None` for absent keys)."""
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls") or ()]
    rest = {k: v for k, v in message.items() if v is not None and k not in ("tool_calls", "tool_call_id")}
    return rest | {"tool_calls": calls}


def _to_last_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the end of the assistant's last turn; none without a turn."""
    turns = turns_of(messages)
    return messages[: turns[-1][1]] if turns else []


def _token_ids(
    row: dict[str, Any], number: int, processing_class: PreTrainedTokenizerBase | ProcessorMixin
) -> tuple[list[int], list[int], list[int]]:
    """Ids before the first turn of the assistant, ids after, and a mask of the latter: 1 in turns of the assistant."""
    tokenizer = tokenizer_of(processing_class)
    render, messages = renderer(row, processing_class), row["messages"]
    chunks, mask, previous = [], [], ""
    for begin, end in turns_of(messages):
        # The generation prompt belongs to the prompt: the model does not sample it.
        prompt, with_turn = render(messages[:begin], add_generation_prompt=True), render(messages[:end])
        for text, is_assistant in ((prompt, 0), (with_turn, 1)):
            if not text.startswith(previous):
                raise ValueError(
                    f"The chat template does not render the first {begin} messages of row {number} (counted from 0) "
                    "as the beginning of those that follow: it changes earlier turns, so that a rollout is not one "
                    "sequence. Train on a row for each turn: `expand_turns`."
                )
            # Tokenized by turn, as generation does it: a token never spans the border of a turn.
            chunks.append(tokenizer(text[len(previous) :], add_special_tokens=False)["input_ids"])
            mask.append([is_assistant] * len(chunks[-1]))
            previous = text
    if not chunks or not chunks[0]:
        raise ValueError(f"Row {number} (counted from 0) has no assistant turn after another message. Filter it out.")
    return chunks[0], [*chain(*chunks[1:])], [*chain(*mask[1:])]
