"""Renders messages by the chat template, and checks that a rendered prompt begins its row."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import Dataset


if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


__all__ = ["check_turns", "renderer", "tools_of"]

MAX_RENDERED_ROWS = 1000
"""Maximum number of rows of a dataset that [`check_turns`] renders."""

MAX_STREAMED_ROWS = 100
"""Number of rows of a stream, from the first on, that [`check_turns`] renders."""


def renderer(row: dict[str, Any], processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> Callable[..., Any]:
    """A function that renders messages as text (`str`), with the `tools` and `chat_template_kwargs` of the row."""
    kwargs = {"tools": tools_of(row), **(row.get("chat_template_kwargs") or {})}
    return partial(processing_class.apply_chat_template, tokenize=False, **kwargs)


def tools_of(row: dict[str, Any]) -> Any:
    """The tools of a row: a list, or its JSON, as in TRL."""
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def check_turns(
    dataset: Dataset | IterableDataset, processing_class: PreTrainedTokenizerBase | ProcessorMixin, name: str
) -> None:
    """Raise a `ValueError` if the rendered prompt of a turn is not the beginning of the rendered row."""
    if processing_class.chat_template is None:
        return  # TRL raises an error for conversations without a template
    if isinstance(dataset, Dataset):
        step = -(-len(dataset) // MAX_RENDERED_ROWS)  # evenly spaced; -(-a // b) rounds up
        sample = [*dataset.select(range(0, len(dataset), step))]
    else:  # the first rows of a stream; only training reads all of them
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
