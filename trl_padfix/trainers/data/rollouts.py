"""
Recorded rollouts of an agent as the completions of GRPO.

A rollout is a row with `messages` (tool calls and answers of tools included), a reward, and the task that it is a
trial of.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from ..messages import counted
from .chat_templates import renderer, tokenizer_of
from .columns import require_columns
from .turns import turns_of


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ..distributed import PaddingFreeTrainer


__all__ = ["RecordedRollouts"]

logger = logging.getLogger(__name__)


class RecordedRollouts:
    """
    Feed recorded rollouts to GRPO instead of generating.

    As TRL's `rollout_func` it returns all rollouts of a task in one step. TRL computes the weights from the rewards
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
        ValueError: If a column is missing, if a rollout has no task or reward, if no task has trials with different
            rewards, or if the template changes earlier turns, so that a rendered turn is not the beginning of the text
            with the next one.

    Example:

    ```python
    from trl_padfix import GRPOConfig, GRPOTrainer, RecordedRollouts

    recorded = RecordedRollouts(rollouts, tokenizer)
    args = GRPOConfig("runs/agent", num_generations=recorded.trials, padding_free=True, prefix_sharing="auto")
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
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"Rollouts are compared with one another, so a `datasets.Dataset` is needed, and not a "
                f"`{type(dataset).__name__}`. Choose a split, or make one from a stream with "
                "`Dataset.from_generator`."
            )
        require_columns(dataset, "rollouts", [{"messages", task, reward}], "Rollouts need them")
        values = list(dataset[reward])
        if unknown := [i for i, x in enumerate(values) if not isinstance(x, int | float) or math.isnan(x)]:
            raise ValueError(
                f"The `{reward}` of row {unknown[0]} (counted from 0) is not a number: {values[unknown[0]]!r}. Write "
                "one, or filter the row out."
            )
        trials: dict[str, list[int]] = {}
        for i, name in enumerate(dataset[task]):
            trials.setdefault(str(name), []).append(i)
        most = Counter(map(len, trials.values())).most_common(1)[0][0] if trials else 0
        fewer = sum(len(rows) < most for rows in trials.values())
        groups = {name: rows[:most] for name, rows in trials.items() if len(rows) >= most > 1}
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
        logger.warning(f"`RecordedRollouts` trains on {counted(len(compared), 'task')}: {summary}.")
        self.trials = most
        self.prompts = Dataset.from_dict({"prompt": list(compared)})
        self._tokens = {
            name: [(*_token_ids(dataset[i], i, processing_class), values[i]) for i in rows]
            for name, rows in compared.items()
        }

    def __call__(self, prompts: list[str], trainer: PaddingFreeTrainer) -> dict[str, Any]:
        """The trials of the tasks in `prompts` (each `num_generations` times there), as TRL's `rollout_func`."""
        if not {str(prompt) for prompt in prompts} <= self._tokens.keys():
            raise ValueError("These prompts were not recorded: pass (a part of) `recorded.prompts` as the dataset.")
        counts = Counter(prompts)
        if wrong := next((count for count in counts.values() if count != self.trials), 0):
            mode, suffix = ("train", "") if trainer.model.training else ("eval", "_eval")
            raise ValueError(
                f"Each task has {self.trials} trials, but a process was asked for {wrong} of one. Set "
                f"`num_generations{suffix}={self.trials}`, and `per_device_{mode}_batch_size` to a multiple of it."
            )
        # TRL repeats the prompt of a group: the first time is trial 0, the second trial 1, ...
        trials = {name: iter(self._tokens[name]) for name in counts}
        columns = map(list, zip(*(next(trials[name]) for name in prompts), strict=True))
        names = ("prompt_ids", "completion_ids", "env_mask", "recorded")
        return {"logprobs": None, **dict(zip(names, columns, strict=True))}

    @staticmethod
    def rewards(completions: list[Any], recorded: list[float] | None = None, **columns: Any) -> list[float]:
        """The recorded rewards, as TRL's `reward_funcs`."""
        if recorded is None:
            raise ValueError(
                "These completions were not recorded. Also pass the recorded rollouts as `rollout_func=`."
            )
        return recorded


def _token_ids(
    row: dict[str, Any], number: int, processing_class: PreTrainedTokenizerBase | ProcessorMixin
) -> tuple[list[int], list[int], list[int]]:
    """Ids before the first turn of the assistant, ids after, and a mask of the latter: 1 in turns of the assistant."""
    tokenizer = tokenizer_of(processing_class)
    render, messages = renderer(row, processing_class), row["messages"]
    chunks, mask, previous, behind = [], [], "", 0
    for begin, end in turns_of(messages):
        # The generation prompt belongs to the prompt: the model does not sample it.
        prompt, with_turn = render(messages[:begin], add_generation_prompt=True), render(messages[:end])
        for text, is_assistant in ((prompt, 0), (with_turn, 1)):
            if not text.startswith(previous):
                raise ValueError(
                    f"The chat template does not render the first {begin} messages of row {number} (counted from 0) "
                    "as the beginning of those that follow: it changes earlier turns, so that a rollout is not one "
                    "sequence. For GRPO, use a template that keeps them, such as `trl.chat_template_utils."
                    "get_training_chat_template(tokenizer)`. For SFT, set `expand_turns=True`."
                )
            # Tokenized by turn, as generation does it: a token never spans the border of a turn.
            ids, eos = tokenizer(text[len(previous) :], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
            # The model samples no more than this token; the template may add a newline.
            behind = ids[::-1].index(eos) if is_assistant and eos in ids else 0
            chunks.append(ids)
            mask.append([is_assistant] * (len(ids) - behind) + [0] * behind)
            previous = text
    if not chunks or not chunks[0]:
        raise ValueError(f"Row {number} (counted from 0) has no assistant turn after another message. Filter it out.")
    end = -behind or None  # TRL takes a completion that does not end with this token for a truncated one
    return chunks[0], [*chain(*chunks[1:])][:end], [*chain(*mask[1:])][:end]
