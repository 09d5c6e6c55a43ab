"""
Docstrings as Markdown, for the API page: mkdocstrings calls this while it reads the code.

TRL's format puts the type of an argument, with its shape, into backticks: in the docstring's text that is Markdown, in
the column of types it would be shown raw. So it opens the description, and the column has the annotation of the code.
Names like [`Layout`] become links where the page has them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe


PAGES = Path(__file__).parents[1] / "build/pages"  # by `copied_pages.py`
LISTED = re.findall(r"^::: (\S+)\.(\w+)$", (PAGES / "api.md").read_text(), re.MULTILINE)
PAGE = {name: f"{module}.{name}" for module, name in LISTED}


def as_markdown(text: str) -> str:
    """The text of a docstring with the types of its arguments in their descriptions, and with links."""
    text = re.sub(r"^( +[\w*, ]+) \((.*`.*?)\):(?= |$)", r"\1: \2.", text, flags=re.MULTILINE)
    return re.sub(r"\[`~?([\w.]+)`\](?!\[|\()", _link, text)


def _link(found: re.Match) -> str:
    name = found[1]
    owner = name.split(".")[0]
    return f"[`{name}`][{PAGE[owner]}]" if owner in PAGE else f"`{name}`"


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: Any, **more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
