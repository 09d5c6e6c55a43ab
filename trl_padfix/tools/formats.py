"""Convert rows of other programs (ShareGPT, Alpaca, GSM8K) into rows of TRL's formats."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl.data_utils import is_conversational, maybe_extract_prompt, unpair_preference_dataset

from .reading import reading


__all__ = [
    "ONLINE", "TEXT_ADVICE", "TRAINER_COLUMNS", "rename_message_keys", "rows_for_trainer", "to_dialogues",
    "to_trl_format", "trainer_of",
]  # fmt: skip

ONLINE = ("grpo", "rloo")
"""Trainers that generate the completions of their prompts."""

ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Roles of ShareGPT's messages, and their names in chat templates."""

TEXT_ADVICE = "Text is UTF-8: convert the file, or correct the row."

_PAIRS, _EXTRAS = {"chosen", "rejected"}, {"tools", "chat_template_kwargs"}

TRAINER_COLUMNS: dict[str, tuple[set[str], ...]] = {
    "dpo": (_PAIRS,), "reward": (_PAIRS,), "kto": ({"prompt", "completion"}, _PAIRS),
    "sft": ({"prompt", "completion"}, {"messages"}, {"text"}, _PAIRS), "grpo": ({"prompt"},), "rloo": ({"prompt"},),
}  # fmt: skip
"""For each trainer the sets of columns of which it takes one, in the order in which they are tried."""


def to_trl_format(rows: Dataset) -> Dataset:
    """
    Convert rows of ShareGPT, Alpaca and GSM8K into TRL's formats; other rows stay unchanged.

    ShareGPT (`conversations` of `from` and `value`) and Alpaca (`instruction`, `input`, `output`) become messages;
    Alpaca's `input` follows its instruction. GSM8K's `question` and `answer` become prompts and completions. Columns
    `system`, `tools`, `history`, `kto_tag`, `chosen` and `rejected` are read as axolotl and LLaMA-Factory name them.
    """
    columns = set(rows.column_names)
    if columns >= {"question", "answer"} and not columns & {"prompt", "completion"}:
        return rows.rename_columns({"question": "prompt", "answer": "completion"})
    is_alpaca = "instruction" in columns and ("output" in columns or columns >= _PAIRS)
    if not is_alpaca and "conversations" not in columns and "from" not in _message_keys(rows):
        return rows
    convert = _of_alpaca if is_alpaca else _of_sharegpt
    extras = columns & _EXTRAS

    def converted(row: dict[str, Any]) -> dict[str, Any]:
        label = row.get("kto_tag", row.get("label"))
        return convert(row) | {name: row[name] for name in extras} | ({} if label is None else {"label": label})

    with reading("the data", TEXT_ADVICE):
        return rows.map(converted, remove_columns=rows.column_names, load_from_cache_file=False)


def trainer_of(rows: Dataset) -> str:
    """The trainer that takes rows with these columns; raises a `ValueError` if none does."""
    columns = set(rows.column_names)
    if columns >= _PAIRS:
        return "dpo"
    if columns >= {"prompt", "completion", "label"}:
        return "kto"
    trainer = next(
        (name for name in ("sft", "grpo") if any(names <= columns for names in TRAINER_COLUMNS[name])), None
    )
    if trainer is None:
        raise ValueError(
            f"The dataset has columns {sorted(columns)}. Pairs need `chosen` and `rejected`, texts need `text`, "
            "`messages`, or `prompt` and `completion`, and GRPO needs `prompt`: rename its columns (`stats`: "
            "`--columns`)."
        )
    return trainer


def rows_for_trainer(rows: Dataset, trainer: str) -> Dataset:
    """
    Select and convert the columns that a trainer takes.

    From pairs SFT takes the chosen answers, KTO each answer, and GRPO the prompts.

    Raises:
        ValueError: If the trainer does not take such data.
    """
    columns = set(rows.column_names)
    taken = next((names for names in TRAINER_COLUMNS[trainer] if names <= columns), None)
    if taken is None:
        needed = ", or ".join(
            " and ".join(f"`{name}`" for name in sorted(names)) for names in TRAINER_COLUMNS[trainer]
        )
        raise ValueError(
            f"The dataset has columns {sorted(columns)}, and {trainer} needs {needed}: rename its columns (`stats`: "
            "`--columns`)."
        )
    extras = {*_EXTRAS, "prompt"} if taken == _PAIRS else _EXTRAS
    rows = rows.select_columns([name for name in rows.column_names if name in taken | extras])
    if taken == _PAIRS and trainer == "kto":
        return unpair_preference_dataset(rows.map(maybe_extract_prompt, load_from_cache_file=False))
    return to_dialogues(rows) if taken == _PAIRS and trainer == "sft" else rows


def to_dialogues(rows: Any) -> Any:
    """The chosen side of preference pairs, as completions, chats or texts; other data stays unchanged."""
    columns = set(rows.column_names or next(iter(rows)))  # a stream may not name its columns
    if "chosen" not in columns:
        return rows
    alone = "messages" if is_conversational(next(iter(rows))) else "text"
    name = "completion" if "prompt" in columns else alone
    extras = columns & {"prompt", *_EXTRAS}
    return rows.rename_column("chosen", name).select_columns([name, *sorted(extras)])


def rename_message_keys(rows: Dataset, names: dict[str, str]) -> Dataset:
    """Rename keys of messages; raises a `ValueError` for a key that no message has."""
    if not names:
        return rows
    keys = _message_keys(rows)
    if missing := sorted(names.keys() - keys):
        raise ValueError(
            f"The data has no column {missing}; it has {sorted(rows.column_names)}"
            + (f", and messages have {sorted(keys)}." if keys else ".")
        )

    def renamed(message: Any) -> Any:
        return {names.get(key, key): value for key, value in message.items()} if isinstance(message, dict) else message

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [renamed(message) for message in value] if isinstance(value, list) else renamed(value)
            for name, value in row.items()
        }

    with reading("the data", TEXT_ADVICE):
        return rows.map(convert, remove_columns=rows.column_names, load_from_cache_file=False)


def _message_keys(rows: Dataset) -> set[str]:
    """The keys of the messages of the first row."""
    if not len(rows):
        return set()
    with reading("row 0 (counted from 0) of the data", TEXT_ADVICE):
        values = rows[0].values()
    messages = [message for value in values for message in (value if isinstance(value, list) else [value])]
    return {key for message in messages if isinstance(message, dict) for key in message}


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    role = message.get("from", message.get("role"))
    return {"role": ROLES.get(role, role), "content": message.get("value", message.get("content"))}


def _answer(value: Any) -> list[Any]:
    """Messages of an answer, which may be a text, a message, or messages."""
    if isinstance(value, list):
        return [_message(message) for message in value]
    return [_message(value) if isinstance(value, dict) else {"role": "assistant", "content": value}]


def _of_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    conversation = next((row[name] for name in ("conversations", "messages", "prompt") if name in row), None)
    messages = [_message(message) for message in conversation or []]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if row.keys() >= _PAIRS:
        return {"prompt": messages} | {side: _answer(row[side]) for side in sorted(_PAIRS)}
    if "completion" in row:
        return {"prompt": messages, "completion": _answer(row["completion"])}
    if "kto_tag" in row:  # the tag judges the last message
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"messages": messages}


def _of_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    turns = [(role, text) for pair in row.get("history") or [] for role, text in zip(_TURN, pair, strict=True)]
    question = row["instruction"]
    if question is not None and row.get("input"):
        question = f"{question}\n{row['input']}"
    if row.get("system"):
        turns.insert(0, ("system", row["system"]))
    prompt = [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]
    sides = sorted(_PAIRS) if row.keys() >= _PAIRS else ["output"]
    return {"prompt": prompt} | {"completion" if side == "output" else side: _answer(row[side]) for side in sides}


_TURN = ("user", "assistant")
"""Roles of a pair in Alpaca's `history`."""
