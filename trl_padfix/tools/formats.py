"""Rows as other programs write them, as rows that TRL's trainers take."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl.data_utils import is_conversational, maybe_extract_prompt, unpair_preference_dataset

from .reading import reading


__all__ = ["TAKES", "as_trl_takes_them", "of_trainer", "rename_message_keys", "to_dialogues", "trainer_of"]

ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Names of roles in ShareGPT's messages, and what chat templates call them."""

_ADVICE = "Text is UTF-8: convert the file, or mend the row."

_PAIRS, _BESIDE = {"chosen", "rejected"}, {"tools", "chat_template_kwargs"}

TAKES: dict[str, tuple[set[str], ...]] = {
    "dpo": (_PAIRS,), "reward": (_PAIRS,), "kto": ({"prompt", "completion"}, _PAIRS),
    "sft": ({"prompt", "completion"}, {"messages"}, {"text"}, _PAIRS), "grpo": ({"prompt"},), "rloo": ({"prompt"},),
}  # fmt: skip
"""Columns that a trainer takes, one of these sets."""


def as_trl_takes_them(rows: Dataset) -> Dataset:
    """
    ShareGPT (`conversations` of `from` and `value`) and Alpaca (`instruction`, `input`, `output`) as messages, and
    `question` and `answer`, as GSM8K has them, as prompts and completions.

    Columns are those that axolotl and LLaMA-Factory name: also `system`, `tools`, `history`, `kto_tag`, and answers in
    `chosen` and `rejected`. Alpaca's `input` stands below its instruction. Other rows are left as they are.
    """
    columns = set(rows.column_names)
    if columns >= {"question", "answer"} and not columns & {"prompt", "completion"}:
        return rows.rename_columns({"question": "prompt", "answer": "completion"})
    is_alpaca = "instruction" in columns and ("output" in columns or columns >= _PAIRS)
    if not is_alpaca and "conversations" not in columns and "from" not in _message_keys(rows):
        return rows
    convert = _of_alpaca if is_alpaca else _of_sharegpt
    kept = columns & _BESIDE

    def converted(row: dict[str, Any]) -> dict[str, Any]:
        label = row.get("kto_tag", row.get("label"))
        return convert(row) | {name: row[name] for name in kept} | ({} if label is None else {"label": label})

    with reading("the data", _ADVICE):
        return rows.map(converted, remove_columns=rows.column_names, load_from_cache_file=False)


def trainer_of(rows: Dataset) -> str:
    """The trainer that rows with these columns are for; a `ValueError` if they are for none."""
    columns = set(rows.column_names)
    if columns >= _PAIRS:
        return "dpo"
    if columns >= {"prompt", "completion", "label"}:
        return "kto"
    found = next((name for name in ("sft", "grpo") if any(names <= columns for names in TAKES[name])), None)
    if found is None:
        raise ValueError(
            f"The dataset has columns {sorted(columns)}. Pairs need `chosen` and `rejected`, texts need `text`, "
            "`messages`, or `prompt` and `completion`, and GRPO needs `prompt`: rename its columns (`--columns`)."
        )
    return found


def of_trainer(rows: Dataset, trainer: str) -> Dataset:
    """
    The rows as a trainer makes them of its data: SFT takes the chosen answers of pairs, KTO each answer, GRPO prompts.
    Columns that it does not take are left out.

    Raises:
        ValueError: If the trainer does not take such data.
    """
    columns = set(rows.column_names)
    taken = next((names for names in TAKES[trainer] if names <= columns), None)
    if taken is None:
        needed = ", or ".join(" and ".join(f"`{name}`" for name in sorted(names)) for names in TAKES[trainer])
        raise ValueError(f"The dataset has columns {sorted(columns)}, and {trainer} needs {needed} (`--columns`).")
    beside = {*_BESIDE, "prompt"} if taken == _PAIRS else _BESIDE
    rows = rows.select_columns([name for name in rows.column_names if name in taken | beside])
    if taken == _PAIRS and trainer == "kto":
        return unpair_preference_dataset(rows.map(maybe_extract_prompt, load_from_cache_file=False))
    return to_dialogues(rows) if taken == _PAIRS and trainer == "sft" else rows


def to_dialogues(rows: Any) -> Any:
    """The chosen side of preference pairs (also of a stream), as completions, chats or texts; other data as it is."""
    columns = set(rows.column_names or next(iter(rows)))
    if "chosen" not in columns:
        return rows
    alone = "messages" if is_conversational(next(iter(rows))) else "text"
    name = "completion" if "prompt" in columns else alone
    kept = columns & {"prompt", *_BESIDE}
    return rows.rename_column("chosen", name).select_columns([name, *sorted(kept)])


def rename_message_keys(rows: Dataset, names: dict[str, str]) -> Dataset:
    """Rows whose messages have other keys; a `ValueError` for one that no message has."""
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

    with reading("the data", _ADVICE):
        return rows.map(convert, remove_columns=rows.column_names, load_from_cache_file=False)


def _message_keys(rows: Dataset) -> set[str]:
    """The keys of the messages of the first row."""
    if not len(rows):
        return set()
    with reading("row 0 (counted from 0) of the data", _ADVICE):
        values = rows[0].values()
    messages = [message for value in values for message in (value if isinstance(value, list) else [value])]
    return {key for message in messages if isinstance(message, dict) for key in message}


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    role = message.get("from", message.get("role"))
    return {"role": ROLES.get(role, role), "content": message.get("value", message.get("content"))}


def _answer(value: Any) -> list[Any]:
    """An answer as messages: a text, a message, or messages."""
    if isinstance(value, list):
        return [_message(message) for message in value]
    return [_message(value) if isinstance(value, dict) else {"role": "assistant", "content": value}]


def _of_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    said = next((row[name] for name in ("conversations", "messages", "prompt") if name in row), None)
    messages = [_message(message) for message in said or []]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if row.keys() >= _PAIRS:
        return {"prompt": messages} | {side: _answer(row[side]) for side in sorted(_PAIRS)}
    if "completion" in row:
        return {"prompt": messages, "completion": _answer(row["completion"])}
    if "kto_tag" in row:
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"messages": messages}


def _of_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    turns = [(role, text) for pair in row.get("history") or [] for role, text in zip(_ASKED, pair, strict=True)]
    asked = row["instruction"]
    if asked is not None and row.get("input"):
        asked = f"{asked}\n{row['input']}"
    if row.get("system"):
        turns.insert(0, ("system", row["system"]))
    prompt = [{"role": role, "content": text} for role, text in [*turns, ("user", asked)]]
    sides = sorted(_PAIRS) if row.keys() >= _PAIRS else ["output"]
    return {"prompt": prompt} | {"completion" if side == "output" else side: _answer(row[side]) for side in sides}


_ASKED = ("user", "assistant")
