"""The fields of a configuration: their types, their texts for `--help`, and values of another type than is meant."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformers.hf_argparser import string_to_bool

from .parts import Settings


if TYPE_CHECKING:
    from ..core.attention.backends import Implementation

    Sharing = bool | Literal["auto"]
    ParityCheck = bool | Literal["forward"]
else:

    class Sharing:
        """Type of `prefix_sharing`, called with its text on the command line or in YAML."""

        word = "auto"

        def __new__(cls, value: str) -> bool | str:
            if value.strip().lower() == cls.word:
                return cls.word
            try:
                return string_to_bool(value)
            except ArgumentTypeError:
                raise ArgumentTypeError(f"expected true, false or {cls.word}, got {value!r}.") from None

    class ParityCheck(Sharing):
        """Type of `parity_check`."""

        word = "forward"


__all__ = [
    "ParityCheck",
    "Sharing",
    "check_field_types",
    "check_packing",
    "help_from_docstring",
    "parse_implementation",
    "temporarily_set",
]

Configuration = TypeVar("Configuration", bound=type)

FLAGS = (bool, bool | None, "bool", "bool | None")


def help_from_docstring(config: Configuration) -> Configuration:
    """Class decorator that gives fields without a `help` the text of their entry in the configuration's docstring."""
    entries = re.findall(r"^ {4}(\w+) \(.+\):\n((?: {8}.+\n)+)", inspect.cleandoc(config.__doc__ or ""), re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    for field in fields(config):  # type: ignore[arg-type]
        if field.name in texts and "help" not in field.metadata:
            field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})
    return config


def check_field_types(config: Any) -> None:
    """Raise a `TypeError` for what Python would take for something else: flags in words count as true."""
    if not is_dataclass(config):
        return
    for field in fields(config):
        value = getattr(config, field.name, None)
        if field.type not in FLAGS or value in (None, False, True):
            continue
        # Some of TRL's flags take other values.
        if hasattr(Settings, field.name) or str(value).strip().lower() in ("true", "false"):
            meant = str(value).strip().lower() in ("true", "yes", "on", "1")
            raise TypeError(
                f"`{field.name}={value!r}` is of type `{type(value).__name__}`, and a flag is True or False: Python "
                f"takes {value!r} for {bool(value)}. Write `{field.name}={meant}`."
            )
    given = getattr(config, "model_init_kwargs", None)
    if given is not None and not isinstance(given, (Mapping, str)):
        raise TypeError(
            f"`model_init_kwargs={given!r}` is of type `{type(given).__name__}`, and the keyword arguments of "
            "`from_pretrained` are a dictionary. Write `model_init_kwargs={'dtype': 'bfloat16'}`, for instance."
        )


def parse_implementation(value: Any) -> Implementation | None:
    """Parse an attention implementation, given in Python, in YAML or as a flag, where a mapping is a JSON string."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{value!r} begins as a mapping of parts to attention implementations and is no JSON: {error}. Write "
                """'{"text_config": "sdpa", "vision_config": "eager"}'."""
            ) from error
    names = value.values() if isinstance(value, dict) else [value]
    if value is None or value == "":
        return None
    if not all(isinstance(name, str) for name in names) or not isinstance(value, (str, dict)):
        raise TypeError(
            f"An attention implementation is a name, or a mapping of a model's parts to names; got {value!r}."
        )
    return value


@contextlib.contextmanager
def temporarily_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` until the block ends; nothing happens if it is `None` or has no such attribute."""
    if owner is None or not hasattr(owner, name):
        yield
        return
    is_own, saved = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, saved)
        else:
            delattr(owner, name)


def check_packing(config: Any) -> None:
    """
    Raises:
        ValueError: If `prefix_sharing` is set without `padding_free`, or it or `parity_check` has an unknown value.
    """
    check = getattr(config, "parity_check", True)
    if not isinstance(check, bool) and check != "forward":
        raise ValueError(
            f"`parity_check` is True, False or 'forward' (log-probabilities without their gradient), got {check!r}."
        )
    value = getattr(config, "prefix_sharing", False)
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {value!r}.")
    if value and not config.padding_free:
        raise ValueError(
            f"`prefix_sharing={value}` needs `padding_free=True`: prefixes are shared in the packed row, and without "
            "it there is none. Set both, or neither."
        )
