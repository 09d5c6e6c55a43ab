"""
Makes one training row from each turn of the assistant in a conversation.

The prompt of a row is the conversation before the turn, the completion is the turn, both as the chat template renders
them when the model generates that turn. Templates that drop earlier thinking (Qwen3 and later) render a turn
differently once another turn follows. One row per conversation with an assistant mask is therefore a different
computation. With prefix sharing, and the rows of a conversation in one batch, they cost about as much as one row.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypeVar

from datasets import Dataset, DatasetDict, Features, IterableDataset
from transformers import TrainingArguments
from trl.data_utils import maybe_convert_to_chatml

from .columns import column_names


__all__ = ["check_turn_settings", "expand_datasets", "expand_turns", "turns_of"]

D = TypeVar("D", Dataset, IterableDataset)


def expand_turns(dataset: D, name: str = "train") -> D:
    """
    Make one example for each assistant turn, in the order of the conversations.

    Consecutive assistant messages are one turn. Turns without a message before them and conversations without a turn
    are left out.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Conversations in the column `messages` (or `conversations`). Other columns (`tools`,
            `chat_template_kwargs`) are kept.
        name (`str`, *optional*, defaults to `"train"`):
            Name of the dataset in errors and warnings.

    Returns:
        The dataset with `prompt` and `completion` instead of `messages`. A stream stays a stream and warns as it is
        read.

    Raises:
        ValueError: If it has no conversations, has images, or has no turn to train on.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl_padfix import expand_turns

    >>> talk = [("user", "1+1?"), ("assistant", "2"), ("user", "And 2+2?"), ("assistant", "4")]
    >>> messages = [{"role": role, "content": content} for role, content in talk]
    >>> rows = expand_turns(Dataset.from_list([{"messages": messages}]))
    >>> [(len(row["prompt"]), row["completion"][0]["content"]) for row in rows]
    [(1, '2'), (3, '4')]

    ```
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(
            f"`expand_turns` takes a dataset of `datasets`, and the {name} dataset is a `{type(dataset).__name__}`. "
            "Make one from it with `Dataset.from_generator` or `IterableDataset.from_generator`."
        )
    if "conversations" in (names := column_names(dataset)) and "messages" not in names:
        dataset = dataset.map(maybe_convert_to_chatml)
    columns = sorted(column_names(dataset))
    if images := sorted({"image", "images"} & set(columns)):
        raise ValueError(
            f"The {name} dataset has {images}, which do not say which turn they belong to. Write its rows with "
            "`prompt` and `completion`, each with its own images."
        )
    if "messages" not in columns:
        raise ValueError(
            f"`expand_turns` makes rows from conversations, and the {name} dataset has columns {columns}. "
            "Give a column `messages`, or leave `expand_turns` out: rows with `prompt` and `completion` already have "
            "one turn."
        )
    other_columns = [column for column in columns if column not in ("messages", "prompt", "completion")]

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {column: [] for column in [*other_columns, "prompt", "completion"]}
        for i, messages in enumerate(batch["messages"]):
            for begin, end in turns_of(messages or []):
                if begin > 0:
                    rows["prompt"].append(messages[:begin])
                    rows["completion"].append(messages[begin:end])
                    for column in other_columns:
                        rows[column].append(batch[column][i])
        return rows

    types: Any = dataset.features
    # Passed, because Arrow would infer null for a column that is empty in the first batch, and fail in a later one.
    features = types and Features(
        {column: types[column] for column in other_columns}
        | dict.fromkeys(("prompt", "completion"), types["messages"])
    )
    how: dict[str, Any] = {"batched": True, "remove_columns": columns, "features": features}
    if isinstance(dataset, IterableDataset):
        return dataset.map(expand, **how)
    rows = dataset.map(expand, **how, desc=f"Making a row from each turn of the {name} dataset")
    if not len(rows):
        raise ValueError(
            f"None of the {len(dataset)} conversations of the {name} dataset has an assistant turn after "
            "another message, so there is nothing to train on. A turn is a message with the `role` 'assistant'."
        )
    return rows


def expand_datasets(datasets: Any, name: str) -> Any:
    """[`expand_turns`] of a dataset, or of each in a mapping."""
    if isinstance(datasets, DatasetDict | dict):
        return {key: expand_turns(dataset, f"{name} ({key})") for key, dataset in datasets.items()}
    return datasets if datasets is None else expand_turns(datasets, name)


def check_turn_settings(config: TrainingArguments) -> None:
    """Raise a `ValueError` if a field of the config contradicts `expand_turns`, which trains on one turn per row."""
    for field, refused in (("assistant_only_loss", True), ("completion_only_loss", False)):
        if vars(config).get(field) is refused:
            raise ValueError(
                f"`expand_turns=True` makes a row of each turn and trains on that turn; `{field}={refused}` asks "
                f"for other tokens. Leave `{field}` out: each turn of the assistant is trained on, and nothing else."
            )


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The half-open ranges `(begin, end)` of the assistant's turns in a conversation."""
    runs = groupby(enumerate(messages), key=lambda numbered: numbered[1].get("role") == "assistant")
    turns = [[number for number, _ in run] for is_assistant, run in runs if is_assistant]
    return [(turn[0], turn[-1] + 1) for turn in turns]
