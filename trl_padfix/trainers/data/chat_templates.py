"""Tokenizers, and the text of messages by their chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin


__all__ = ["renderer", "tokenizer_of", "tools_of"]


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> Any:
    """The tokenizer of a processor; a tokenizer itself."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def renderer(row: dict[str, Any], processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> Callable[..., Any]:
    """A function that renders messages as text (`str`), with the `tools` and `chat_template_kwargs` of the row."""
    kwargs = {"tools": tools_of(row), **(row.get("chat_template_kwargs") or {})}
    return partial(processing_class.apply_chat_template, tokenize=False, **kwargs)


def tools_of(row: dict[str, Any]) -> Any:
    """The tools of a row: a list, or its JSON, as in TRL."""
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools
