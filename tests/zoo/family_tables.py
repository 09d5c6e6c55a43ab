"""Records of the families, and the text of their tables in `docs/families.md`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


PAGE = Path(__file__).parents[2] / "docs" / "families.md"
WITH_IMAGES = "## Families with images\n"
"""Begins the second part of the page."""


def parts() -> list[str]:
    """The two parts of the page: families of text, and families with images."""
    text, heading, images = PAGE.read_text().partition(f"\n{WITH_IMAGES}")
    return [text, heading[1:] + images]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").strip()


def general(reason: str) -> str:
    """A reason without the names of one model's layers, without its consequence and without its remedy."""
    reason = reason.removeprefix("Padding cannot be removed from ")
    reason = reason.partition(" Leave it padded:")[0].rstrip(".")
    reason = re.sub(r"^\w+: ", "", reason)
    reason = re.sub(r"layer `[\w.]+` \(\w+\)", "a layer", reason)
    reason = re.sub(r"^\w+ \(layer \d+\)", "A layer", reason)
    reason = re.sub(r"\(`\w+`, for", "(for", re.sub(r" \(`\w*Conv\w*`\)", "", reason))
    reason = re.sub(r" \(`config\.[^)]*\)", "", reason)
    reason = re.split(r", (?:and a|and only|so|which) |\. ", reason)[0]
    return escaped(reason[0].upper() + reason[1:] + ".")


def write(
    record: Path, part: int, names: list[str], outcomes: Callable[[str], Any], table: Callable[[Any], str]
) -> None:
    """Compute a record, or of it the types that follow `--write` on the command line, and its part of the page."""
    if sys.argv[1:2] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write [TYPE ...]")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)
    only = sys.argv[2:]
    recorded = json.loads(record.read_text()) if only and record.exists() else {}
    for name in only or names:
        recorded[name] = outcomes(name)
        print(name, json.dumps(recorded[name]), flush=True)
    recorded = {name: recorded[name] for name in names if name in recorded}
    record.write_text(json.dumps(recorded, indent=1) + "\n")
    found = parts()
    found[part] = table(recorded)
    PAGE.write_text("\n".join(found))
