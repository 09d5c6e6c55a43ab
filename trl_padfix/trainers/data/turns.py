"""
Makes one training row of each turn of the assistant in a conversation.

The prompt of a row is the conversation before the turn, the completion is the turn, both as the chat template renders
them when the model generates that turn. Templates that drop earlier thinking (Qwen3 and later) render a turn
differently once another turn follows. One row per conversation with an assistant mask is therefore a different
computation. With prefix sharing, and the rows of a conversation in one batch, they cost about as much as one row.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from datasets import Dataset, DatasetDict, Features, IterableDataset
from trl.data_utils import maybe_convert_to_chatml

from .columns import column_names
from .data_warnings import warn_or_raise


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments


__all__ = [
    "check_tool_messages",
    "check_turn_settings",
    "check_turns",
    "expand_datasets",
    "expand_turns",
    "renderer",
    "turns_of",
]

logger = logging.getLogger(__name__)

MAX_RENDERED_ROWS = 1000
"""Maximum number of rows of a dataset that [`check_turns`] renders."""

MAX_STREAMED_ROWS = 100
"""Number of rows of a stream, from the first on, that [`check_turns`] renders."""

ROWS_CHECKED_FOR_TOOLS = 20
"""Number of rows, from the first on, that [`check_tool_messages`] searches for tool calls and answers."""


D = TypeVar("D", Dataset, IterableDataset)


def expand_turns(dataset: D, name: str = "train") -> D:
    """
    Make one row of each turn of the assistant, in the order of the conversations.

    Consecutive messages of the assistant are one turn. Turns without a message before them and conversations without a
    turn are left out; a warning gives their numbers.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Conversations in the column `messages` (or `conversations`). Other columns (`tools`,
            `chat_template_kwargs`) are kept.
        name (`str`, *optional*, defaults to `"train"`):
            Name of the dataset in errors and warnings.

    Returns:
        The dataset with `prompt` and `completion` instead of `messages`. A stream stays one; what is left out of it is
        warned about as it is read.

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
            "Make one of it with `Dataset.from_generator` or `IterableDataset.from_generator`."
        )
    is_stream = isinstance(dataset, IterableDataset)
    columns = sorted(column_names(dataset))
    if images := sorted({"image", "images"} & set(columns)):
        raise ValueError(
            f"The {name} dataset has {images}, which do not say which turn they belong to. Write its rows with "
            "`prompt` and `completion`, each with its own images."
        )
    if "messages" not in columns and "conversations" in columns:
        how = {} if is_stream else {"desc": f"Converting the {name} dataset to messages"}
        dataset = dataset.map(maybe_convert_to_chatml, **how)
        columns = sorted(column_names(dataset))
    if "messages" not in columns:
        raise ValueError(
            f"`expand_turns` makes rows of conversations, and the {name} dataset has columns {sorted(columns)}. Give "
            "a column `messages`, or leave `expand_turns` out: rows with `prompt` and `completion` are rows of one "
            "turn already."
        )
    counts: Counter[str] = Counter(conversations=0 if is_stream else len(dataset))
    said: set[str] = set()
    other_columns = [column for column in columns if column not in ("messages", "prompt", "completion")]

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {column: [] for column in [*other_columns, "prompt", "completion"]}
        for i, messages in enumerate(batch["messages"]):
            for begin, end in _turns(messages or [], counts):
                rows["prompt"].append(messages[:begin])
                rows["completion"].append(messages[begin:end])
                for column in other_columns:
                    rows[column].append(batch[column][i])
        for kind in sorted(counts.keys() & _LEFT_OUT.keys() - said) if is_stream else ():
            said.add(kind)
            logger.warning(f"`expand_turns`: conversations of the {name} stream {_LEFT_OUT[kind]}. Said once.")
        return rows

    types: Any = dataset.features
    # Given, because Arrow would infer null for a column that is empty in the first batch, and fail in a later one.
    features = types and Features(
        {column: types[column] for column in other_columns}
        | dict.fromkeys(("prompt", "completion"), types["messages"])
    )
    # Not from the cache: `expand` also counts what it leaves out, and a cached result would report zeros.
    if is_stream:
        return dataset.map(expand, batched=True, remove_columns=columns, features=features)
    rows: Any = dataset.map(
        expand, batched=True, remove_columns=columns, features=features, load_from_cache_file=False,
        desc=f"Making a row of each turn of the {name} dataset",
    )  # fmt: skip
    _report(counts, len(rows), name)
    return rows


def expand_datasets(datasets: Any, name: str) -> Any:
    """[`expand_turns`] of a dataset, or of each in a mapping."""
    if isinstance(datasets, DatasetDict | dict):
        return {key: expand_turns(dataset, f"{name} ({key})") for key, dataset in datasets.items()}
    return datasets if datasets is None else expand_turns(datasets, name)


def check_turn_settings(config: TrainingArguments) -> None:
    """Raise a `ValueError` if a field of the config contradicts `expand_turns`, which trains on one turn per row."""
    if not getattr(config, "expand_turns", False):
        return
    for field, refused in (("assistant_only_loss", True), ("completion_only_loss", False)):
        if getattr(config, field, None) is refused:
            raise ValueError(
                f"`expand_turns=True` makes a row of each turn and trains on that turn, and `{field}={refused}` asks "
                f"for other tokens. Leave `{field}` out: each turn of the assistant is trained on, and nothing else."
            )


def check_turns(
    dataset: Dataset | IterableDataset, processing_class: PreTrainedTokenizerBase | ProcessorMixin, name: str
) -> None:
    """Raise a `ValueError` if the rendered prompt of a turn is not the beginning of the rendered row."""
    if getattr(processing_class, "chat_template", None) is None:
        return  # TRL raises an error for conversations without a template
    if isinstance(dataset, Dataset):
        step = -(-len(dataset) // MAX_RENDERED_ROWS)  # evenly spaced; -(-a // b) rounds up
        sample = [*dataset.select(range(0, len(dataset), step))]
    else:  # its first rows; all of them are read in training only
        sample = [*dataset.take(MAX_STREAMED_ROWS)]
    differing = []
    for row in sample:
        render = renderer(row, processing_class)
        prompt = render(row["prompt"], add_generation_prompt=True)
        full_text = render(row["prompt"] + row["completion"])
        if not full_text.startswith(prompt):
            differing.append((prompt, full_text))
    if differing:
        prompt, full_text = differing[0]
        index = next((i for i, (a, b) in enumerate(zip(prompt, full_text, strict=False)) if a != b), len(full_text))
        raise ValueError(
            f"The chat template does not render {len(differing)} of {len(sample)} prompts of the {name} dataset as "
            f"the beginning of their rows: after {prompt[max(0, index - 40) : index]!r} the prompt has "
            f"{prompt[index : index + 40]!r} and the row {full_text[index : index + 40]!r}. The model would be "
            "trained with a different prompt than it gets when it generates. Fix the template (a turn must begin with "
            "the generation prompt), or write rows with `prompt` and `completion` as text and leave `expand_turns` "
            "out."
        )


def renderer(row: dict[str, Any], processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> Callable[..., Any]:
    """A function that renders messages as text (`str`), with the `tools` and `chat_template_kwargs` of the row."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools  # TRL takes both
    kwargs = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
    return partial(processing_class.apply_chat_template, tokenize=False, **kwargs)


def check_tool_messages(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    name: str,
    columns: Sequence[str],
    strict: bool = True,
) -> None:
    """
    Warn if the chat template silently drops tool calls, or the answers of tools; with `strict` raise a `ValueError`.

    Tests the first row with tool calls and the first with answers, on the messages of all `columns` together. Streams
    are not checked.
    """
    if not isinstance(dataset, Dataset) or getattr(processing_class, "chat_template", None) is None:
        return
    untested = set(_WITHOUT)
    present = [column for column in columns if column in dataset.column_names]
    if not present:  # rows of text, or of tokens
        return
    present += [column for column in ("tools", "chat_template_kwargs") if column in dataset.column_names]
    rows = dataset.select_columns(present).select(range(min(len(dataset), ROWS_CHECKED_FOR_TOOLS)))
    for number, row in enumerate(rows):
        messages = [message for column in columns if isinstance(row.get(column), list) for message in row[column]]
        render = renderer(row, processing_class)
        for kind in sorted(untested):
            emptied = [_WITHOUT[kind](message) for message in messages]
            if emptied == messages:
                continue
            untested.remove(kind)
            # A template that renders them cannot give the same text without them.
            if render(emptied) == render(messages):
                warn_or_raise(
                    f"Row {number} (counted from 0) of the {name} dataset has {kind}, and the chat template renders "
                    "nothing of them: the model would be trained on answers to messages that it never receives. Take "
                    "a template that renders tools (`chat_template_path` in the configuration), or write them as "
                    "text.",
                    strict,
                )
        if not untested:
            return


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": None} if message.get("tool_calls") else message


def _without_answer(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message["role"] == "tool" and message.get("content") else message


_WITHOUT = {"tool calls": _without_calls, "messages of tools": _without_answer}
"""By kind, the function that empties it in a message."""


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The half-open ranges `(begin, end)` of the assistant's turns in a conversation."""
    turns, begin = [], 0
    for is_assistant, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        length = len(list(run))
        if is_assistant:
            turns.append((begin, begin + length))
        begin += length
    return turns


def _turns(messages: list[dict[str, Any]], counts: Counter[str]) -> list[tuple[int, int]]:
    """[`turns_of`] a conversation, except a turn without a message before it; updates `counts` for [`_report`]."""
    turns = turns_of(messages)
    begins_with_turn = bool(turns) and turns[0][0] == 0
    joined = any(end - begin > 1 for begin, end in turns)
    turns = turns[begins_with_turn:]
    kinds = {"joined": joined, "first": begins_with_turn, "without": not turns}
    counts.update(kind for kind, holds in kinds.items() if holds)
    return turns


_LEFT_OUT = {
    "without": "have no turn of the assistant to train on and are left out",
    "first": "begin with the assistant; that turn has no prompt and is no row",
    "joined": "have consecutive messages of the assistant; they are one turn",
}
"""What is said of conversations that are not used as they are."""


def _report(counts: Counter[str], rows: int, name: str) -> None:
    """Warn about conversations that are not used as they are; raise a `ValueError` if there is no row."""
    conversations = counts["conversations"]
    if not rows:
        raise ValueError(
            f"None of the {conversations} conversations of the {name} dataset has a turn of the assistant behind "
            "another message, so there is nothing to train on. A turn is a message with the `role` 'assistant'."
        )
    for kind, text in _LEFT_OUT.items():
        if counts[kind]:
            logger.warning(
                f"`expand_turns`: {counts[kind]} of {conversations} conversations of the {name} dataset {text}."
            )
