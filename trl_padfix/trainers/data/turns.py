"""
Conversations as one row for each turn of the assistant.

A row is what the model sees when it takes that turn: the messages before it as the prompt, the turn as the completion,
each as the chat template renders it at that moment. Templates that drop earlier thinking (Qwen3 and later) render a
turn in another way once another one follows, so that one row for a whole conversation with an assistant mask is
another computation. With prefix sharing and rows that begin alike in one batch the rows cost about what one row does.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from datasets import Dataset, DatasetDict, Features
from trl.data_utils import maybe_convert_to_chatml


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

LOOKED_AT = 1000
"""Most rows of a dataset for which [`check_turns`] renders the chat template."""

LOOKED_FOR_TOOLS = 20
"""First rows of a dataset in which [`check_tool_messages`] looks for tool calls and answers."""


def expand_turns(dataset: Dataset, name: str = "train") -> Dataset:
    """
    One row for each turn of the assistant, in the order of the conversations.

    Messages of the assistant that follow one another are one turn. Turns without a message before them are left out,
    and so are conversations without a turn; a warning says how many.

    Args:
        dataset ([`~datasets.Dataset`]):
            Conversations in the column `messages` (or `conversations`). Other columns (`tools`,
            `chat_template_kwargs`) are kept.
        name (`str`, *optional*, defaults to `"train"`):
            Name of the dataset in messages.

    Returns:
        [`~datasets.Dataset`] with `prompt` and `completion` instead.

    Raises:
        TypeError: If the dataset is a stream: its rows would be checked while the model trains.
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
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`expand_turns` takes a `datasets.Dataset`, and the {name} dataset is a `{type(dataset).__name__}`. Make "
            "one of a stream with `Dataset.from_generator`, or map the stream yourself: a row with `prompt` and "
            "`completion` for each turn."
        )
    columns = dataset.column_names
    if images := sorted({"image", "images"} & set(columns)):
        raise ValueError(
            f"The {name} dataset has {images}, which do not say which turn they belong to. Write its rows with "
            "`prompt` and `completion`, each with its own images."
        )
    if "messages" not in columns and "conversations" in columns:
        dataset = dataset.map(maybe_convert_to_chatml, desc=f"Converting the {name} dataset to messages")
        columns = dataset.column_names
    if "messages" not in columns:
        raise ValueError(
            f"`expand_turns` makes rows of conversations, and the {name} dataset has columns {sorted(columns)}. Give "
            "a column `messages`, or leave `expand_turns` out: rows with `prompt` and `completion` are rows of one "
            "turn already."
        )
    counts: Counter[str] = Counter(conversations=len(dataset))
    others = [column for column in columns if column not in ("messages", "prompt", "completion")]

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {column: [] for column in [*others, "prompt", "completion"]}
        for i, messages in enumerate(batch["messages"]):
            for begin, end in _turns(messages or [], counts):
                rows["prompt"].append(messages[:begin])
                rows["completion"].append(messages[begin:end])
                for column in others:
                    rows[column].append(batch[column][i])
        return rows

    kinds = dataset.features
    features = Features(
        {column: kinds[column] for column in others} | dict.fromkeys(("prompt", "completion"), kinds["messages"])
    )
    rows = dataset.map(
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


def check_turn_settings(config: Any) -> None:
    """Raise a `ValueError` if `expand_turns` is set together with a field that chooses other tokens to train on."""
    if not getattr(config, "expand_turns", False):
        return
    for field, refused in (("assistant_only_loss", True), ("completion_only_loss", False)):
        if getattr(config, field, None) is refused:
            raise ValueError(
                f"`expand_turns=True` makes a row of each turn and trains on that turn, and `{field}={refused}` asks "
                f"for other tokens. Leave `{field}` out: each turn of the assistant is trained on, and nothing else."
            )


def check_turns(dataset: Dataset, processing_class: Any, name: str) -> None:
    """Raise a `ValueError` if the chat template does not render the prompt of a turn as the beginning of its row."""
    if getattr(processing_class, "chat_template", None) is None:
        return  # an error of its own
    chosen = range(0, len(dataset), -(-len(dataset) // LOOKED_AT))
    differing = []
    for row in dataset.select(chosen):
        render = renderer(row, processing_class)
        prompt = render(row["prompt"], add_generation_prompt=True)
        whole = render(row["prompt"] + row["completion"])
        if not whole.startswith(prompt):
            differing.append((prompt, whole))
    if differing:
        prompt, whole = differing[0]
        at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        raise ValueError(
            f"The chat template does not render {len(differing)} of {len(chosen)} prompts of the {name} dataset as "
            f"the beginning of their rows: after {prompt[max(0, at - 40) : at]!r} the prompt has "
            f"{prompt[at : at + 40]!r} and the row {whole[at : at + 40]!r}. The model would be "
            "trained on a turn behind another prompt than it gets in use. Mend the template (a generation prompt must "
            "be what the turn begins with), or write rows with `prompt` and `completion` as text and leave "
            "`expand_turns` out."
        )


def renderer(row: dict[str, Any], processing_class: Any) -> Callable[..., str]:
    """What renders messages of a row as text, by the chat template and with what the row has for it."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    more = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
    return partial(processing_class.apply_chat_template, tokenize=False, **more)


def check_tool_messages(dataset: Any, processing_class: Any, name: str, columns: Sequence[str]) -> None:
    """
    Raise a `ValueError` if the chat template leaves out tool calls, or what tools answered, without a word.

    The first rows are looked at that have any, in the messages of all `columns` in a row. Streams are not.
    """
    if not isinstance(dataset, Dataset) or getattr(processing_class, "chat_template", None) is None:
        return
    unseen = set(_WITHOUT)
    there = [column for column in columns if column in dataset.column_names]
    if not there:  # rows of text, or of tokens
        return
    there += [column for column in ("tools", "chat_template_kwargs") if column in dataset.column_names]
    rows = dataset.select_columns(there).select(range(min(len(dataset), LOOKED_FOR_TOOLS)))
    for number, row in enumerate(rows):
        messages = [message for column in columns if isinstance(row.get(column), list) for message in row[column]]
        render = renderer(row, processing_class)
        for what in sorted(unseen):
            emptied = [_WITHOUT[what](message) for message in messages]
            if emptied == messages:
                continue
            unseen.remove(what)
            if render(emptied) == render(messages):
                raise ValueError(
                    f"Row {number} (counted from 0) of the {name} dataset has {what}, and the chat template renders "
                    "nothing of them: the model would be trained on answers to what it does not see. Take a template "
                    "that renders tools (`chat_template_path` in the configuration), or write them as text."
                )
        if not unseen:
            return


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": None} if message.get("tool_calls") else message


def _without_answer(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message["role"] == "tool" and message.get("content") else message


_WITHOUT = {"tool calls": _without_calls, "messages of tools": _without_answer}


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where the turns of the assistant begin and end in a conversation."""
    found, begin = [], 0
    for is_assistant, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        length = len(list(run))
        if is_assistant:
            found.append((begin, begin + length))
        begin += length
    return found


def _turns(messages: list[dict[str, Any]], counts: Counter[str]) -> list[tuple[int, int]]:
    """[`turns_of`] a conversation that have messages before them."""
    found = turns_of(messages)
    counts["joined"] += any(end - begin > 1 for begin, end in found)
    if found and found[0][0] == 0:
        found = found[1:]
        counts["first"] += 1
    counts["without"] += not found
    return found


def _report(counts: Counter[str], rows: int, name: str) -> None:
    """Warn about conversations that are not trained on as they are; raise a `ValueError` if there is no row."""
    conversations = counts["conversations"]
    if not rows:
        raise ValueError(
            f"None of the {conversations} conversations of the {name} dataset has a turn of the assistant behind "
            "another message, so there is nothing to train on. The `role` of what is trained on is 'assistant'."
        )
    for kind, what in {
        "without": "have no turn of the assistant to train on and are left out",
        "first": "begin with the assistant; that turn has no prompt and is no row",
        "joined": "have messages of the assistant that follow one another; they are one turn",
    }.items():
        if counts[kind]:
            logger.warning(
                f"`expand_turns`: {counts[kind]} of {conversations} conversations of the {name} dataset {what}."
            )
