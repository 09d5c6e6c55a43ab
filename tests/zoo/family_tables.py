"""Text of the tables in `docs/families.md` and `docs/vision_families.md`."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    return text.replace("|", "\\|").strip()


def general(reason: str) -> str:
    """A reason without the names of one model's classes and layers."""
    reason = reason.removeprefix("Padding cannot be removed from ")
    reason = reason.partition(" Leave it padded:")[0].rstrip(".")
    reason = re.sub(r"^\w+: ", "", reason)
    reason = re.sub(r"layer `[\w.]+` \(\w+\)", "a layer", reason)
    reason = re.sub(r"^\w+ \(layer \d+\)", "A layer", reason)
    reason = re.sub(r"\(`\w+`, for", "(for", re.sub(r" \(`\w*Conv\w*`\)", "", reason))
    return escaped(reason[0].upper() + reason[1:] + ".")
