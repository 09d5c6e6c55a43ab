"""Types that a command line can parse for our fields, and their texts for `--help`."""

from __future__ import annotations

import inspect
import json
import re
from argparse import ArgumentTypeError
from dataclasses import fields
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformers.hf_argparser import string_to_bool

from ..field_names import hint


if TYPE_CHECKING:
    Sharing = bool | Literal["auto"]
    Lengths = int | list[int]
else:
    Lengths = list[int]  # a flag with one value or several; a configuration may have the number itself

    class Sharing:
        """Type of `prefix_sharing`: argparse calls it with the string of the flag."""

        def __new__(cls, value: str) -> bool | str:
            if (word := value.strip().lower()) == "auto":
                return word
            try:
                return string_to_bool(value)
            except ArgumentTypeError:
                raise ArgumentTypeError(f"expected true, false or auto, got {value!r}.") from None


__all__ = ["Implementation", "Lengths", "Sharing", "configuration", "parse_implementation"]

Configuration = TypeVar("Configuration", bound=type)

Implementation = str | dict[str, Any]
"""An attention implementation: its name, or a name for each part of a vision model."""


def configuration(config: Configuration) -> Configuration:
    """
    Class decorator for configurations with our fields.

    Fields without a `help` get the text of their entry in the `Args:` of the docstring. The error for an unknown
    argument names the current or the closest field.
    """
    entries = re.findall(r"^ {4}(\w+) \(.+\):\n((?: {8}.+\n)+)", inspect.cleandoc(config.__doc__ or ""), re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    for field in fields(config):  # type: ignore[arg-type]
        if field.name in texts and "help" not in field.metadata:
            # `metadata` is read-only, and shared with the class that declares the field: replace it, do not update it.
            field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})
    init = config.__init__
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        known = signature.parameters
        if unknown := [f"`{name}`{_owners(name) or hint(name, known)}" for name in kwargs if name not in known]:
            raise TypeError(f"`{config.__name__}` has no field {', '.join(unknown)}.")
        init(self, *args, **kwargs)

    vars(__init__)["__signature__"] = signature  # `getfullargspec` does not look behind `wraps`
    config.__init__ = __init__
    return config


def _owners(name: str) -> str:
    """The configurations that have a field of this name, in parentheses; empty if none has."""
    import trl_padfix

    configs = (getattr(trl_padfix, config) for config in trl_padfix.__all__ if config.endswith("Config"))
    owners = [f"`{config.__name__}`" for config in configs if name in inspect.signature(config).parameters]
    return f" (a field of {', '.join(owners)})" if owners else ""


def parse_implementation(value: Any) -> Implementation | None:
    """Parse an attention implementation from Python, YAML or a flag. In a flag a mapping is a JSON string."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{value!r} looks like a mapping of parts to attention implementations, but is not JSON: {error}. "
                """Write '{"text_config": "sdpa", "vision_config": "eager"}'."""
            ) from error
    names = value.values() if isinstance(value, dict) else [value]
    if value is None or value == "":
        return None
    if not all(isinstance(name, str) for name in names) or not isinstance(value, (str, dict)):
        raise TypeError(
            f"An attention implementation is a name, or a mapping of a model's parts to names; got {value!r}."
        )
    return value
