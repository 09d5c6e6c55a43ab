"""Prompts and reference answers of an evaluation set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin
from trl.data_utils import is_conversational, maybe_apply_chat_template, prepare_multimodal_messages

from ..data.chat_templates import tools_of
from ..data.columns import column_names


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


__all__ = ["Prompt", "prompt_of", "require_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it, with its images, and the reference answer of the dataset."""

    text: str
    reference: str
    images: list[Any] = field(default_factory=list)
    is_chat: bool = False
    """Whether a chat template rendered the text, special tokens included."""


def require_prompts(dataset: Dataset | IterableDataset, name: str) -> None:
    """Raise a `ValueError` if a dataset has no columns that separate prompt and answer."""
    columns = column_names(dataset)
    if "messages" not in columns and not ("prompt" in columns and columns & {"completion", "chosen"}):
        raise ValueError(
            f"`predict_with_generate=True` needs prompts, and the {name} dataset has columns {sorted(columns)} only. "
            "Give it `prompt` and `completion` (or `chosen`), or conversations in `messages`, whose last assistant "
            "message is the reference."
        )


def prompt_of(
    row: dict[str, Any], processing_class: PreTrainedTokenizerBase | ProcessorMixin, chat_template: str | None = None
) -> Prompt:
    """
    Read prompt and reference of a row: from `prompt` and `completion` or `chosen`, or else from `messages`.

    `chat_template` renders conversations, by default that of the tokenizer or processor. `image`, `images`, `tools`
    and `chat_template_kwargs` are read as in TRL. In `messages` the reference is the last message of the assistant.

    Raises:
        ValueError: For a conversation without a chat template, or without an answer behind another message.
    """
    images = [row["image"]] if row.get("image") is not None else list(row.get("images") or [])
    if "prompt" in row:
        prompt, answer = row["prompt"], row["completion" if "completion" in row else "chosen"]
    else:
        prompt, answer = row["messages"], []
    is_chat = is_conversational({"prompt": prompt})
    if not is_chat:
        return Prompt(prompt, answer, images)
    if isinstance(processing_class, ProcessorMixin):
        prompt, answer = (prepare_multimodal_messages(m, images=i) for m, i in ((prompt, images), (answer, [])))
    if "prompt" not in row:
        prompt, answer = _last_answer(prompt)
    if processing_class.chat_template is None and chat_template is None:
        raise ValueError(
            f"The data are conversations, and the {type(processing_class).__name__} has no chat template to make "
            "prompts of them with. Set its `chat_template`, or use that of a chat model."
        )
    settings = row.get("chat_template_kwargs")
    rendered = maybe_apply_chat_template(
        {"prompt": prompt, "completion": answer} | ({"chat_template_kwargs": settings} if settings else {}),
        processing_class,
        tools_of(row),
        **({"chat_template": chat_template} if chat_template is not None else {}),
    )
    return Prompt(rendered["prompt"], rendered["completion"], images, is_chat)


def _last_answer(messages: list[dict[str, Any]]) -> tuple[list, list]:
    """A conversation up to its last message of the assistant, and that message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if last == 0:
        raise ValueError(
            f"A conversation has the roles {[message['role'] for message in messages]}: no message of the assistant "
            "follows another, so there is nothing to generate in its place. Drop such rows from the evaluation set."
        )
    return messages[:last], messages[last : last + 1]
