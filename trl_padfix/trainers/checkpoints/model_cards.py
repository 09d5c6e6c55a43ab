"""Adds padding removal to the model card."""

from __future__ import annotations

from pathlib import Path

from ...core.handle import PaddingRemoval
from ...core.version import __version__


__all__ = ["card_tags", "describe_in_card"]

VERSIONS = "### Framework versions\n\n"
"""Heading of the list of versions in TRL's template."""


def card_tags(handle: PaddingRemoval | None) -> list[str]:
    """Tags of a model trained with this package: its name and the active modes."""
    return ["trl_padfix", *_modes(handle)]


def describe_in_card(path: Path, handle: PaddingRemoval | None) -> None:
    """Add version, mode and attention backend to a card written by TRL."""
    mode = " and ".join(_modes(handle)) or "padded"
    if handle is not None:
        mode += f", attention `{handle.decoder.config._attn_implementation}`"
    line = f"- trl_padfix: {__version__} ({mode})\n"
    text = path.read_text()
    before, heading, after = text.partition(VERSIONS)
    path.write_text(f"{before}{heading}{line}{after}" if heading else f"{text}\n{VERSIONS}{line}")


def _modes(handle: PaddingRemoval | None) -> list[str]:
    if handle is None:
        return []
    return ["padding-free", "prefix-sharing"] if handle.prefix_sharing else ["padding-free"]
