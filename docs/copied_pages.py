"""
Writes the sources of the site into `build/pages`: the pages of `docs/`, and those whose text lies elsewhere.

    python docs/copied_pages.py && zensical build --strict

In the repository, links lead to files of the repository. In the copies they lead to pages of the site.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from trl_padfix import _HOME


FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "recipes.md": "recipes/README.md",
    "notebooks.md": "notebooks/README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""Pages of the site, and the files with their text."""
SCRIPTS = ("copied_pages.py", "griffe_docstrings.py", "make_pages.py", "make_pictures.py")
"""Files of `docs/` that make the site and are not on it."""
MEMBERS = {
    "PaddingRemoval": ("of", "disabled", "remove"),
    "PaddingStats": ("pad_fraction", "shared_fraction", "reset"),
    "Layout": ("padded_tokens", "real_tokens", "packed_tokens", "dense_mask", "to"),
    "ParityReport": ("ok", "raise_if_failed"),
    "Padding": ("handle", "stats", "restore"),
    "PaddingRemovalCallback": ("attach", "remove", "stats"),
    "RecordedRollouts": ("rewards",),
}
"""The members of public classes whose docstrings are on the API page of the site."""


def write(folder: Path = ROOT / "build/pages") -> None:
    """Write the sources of all pages into a folder, in place of what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "bench", *SCRIPTS))
    sources = {str(page.relative_to(FOLDER)): page for page in FOLDER.rglob("*.md")}
    for page, source in (sources | {page: ROOT / source for page, source in ELSEWHERE.items()}).items():
        (folder / page).write_text(with_links_of_the_site(source.read_text(), source, page))
    api = folder / "api.md"
    api.write_text(with_docstrings(api.read_text()))


def with_docstrings(text: str) -> str:
    """The API page with the docstrings of the names of each section at its end, as mkdocstrings reads it."""
    homes, sections = _HOME | {"Padding": "trainers.parts.part"}, []
    for section in text.split("\n## "):
        for name in re.findall(r"(?<=[`\n])\w+(?=[`(])", section):
            if module := homes.pop(name, None):  # the first section that names it
                section += f"\n::: trl_padfix.{module}.{name}\n"
                if members := MEMBERS.get(name):
                    section += f"    options: {{inherited_members: true, members: {[*members]}}}\n"
        sections.append(section)
    return "\n## ".join(sections)


def with_links_of_the_site(text: str, source: Path, page: str) -> str:
    """
    A text whose links lead to pages of the site; a link to another file of the repository becomes plain text.

    Args:
        text (`str`):
            Text of `source`.
        source (`Path`):
            File in the repository.
        page (`str`):
            Its page on the site, relative to the first one.
    """
    pages = {ROOT / source: page for page, source in ELSEWHERE.items()}

    def link(found: re.Match) -> str:
        words, target, anchor = found.groups()
        if target.startswith(("http:", "https:")):
            return found[0]
        file = Path(os.path.normpath(source.parent / target))
        if file not in pages and not (file.is_relative_to(FOLDER) and file.exists()):
            return words
        there = pages.get(file) or file.relative_to(FOLDER)
        return f"[{words}]({os.path.relpath(there, Path(page).parent)}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)", link, text)


if __name__ == "__main__":
    write()
