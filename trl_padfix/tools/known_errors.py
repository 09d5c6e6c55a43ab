"""The errors of `known_errors.yaml`, which users paste into `doctor --explain`: cause, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml


__all__ = ["KNOWN_ERRORS", "KnownError", "explain"]


@dataclass(frozen=True)
class KnownError:
    """An error and its explanation; `known_errors.yaml` says what each field holds."""

    name: str
    pattern: str
    cause: str
    fix: str
    source: str


KNOWN_ERRORS = [
    KnownError(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
]


def explain(text: str) -> list[KnownError]:
    """The known errors in a text, such as a traceback; none if it holds none."""
    line = " ".join(text.split())
    return [error for error in KNOWN_ERRORS if re.search(error.pattern, line, re.IGNORECASE)]
