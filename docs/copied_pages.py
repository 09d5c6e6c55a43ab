"""
Writes the pages of the site whose text lies elsewhere in the repository; git ignores them.

    python docs/copied_pages.py && zensical build --strict
"""

from __future__ import annotations

import re
from pathlib import Path


FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "recipes.md": "recipes/README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
}


def write(folder: Path = FOLDER) -> None:
    """Write a page for each of [`ELSEWHERE`], whose links lead to pages of the site where there is one."""
    for page, source in ELSEWHERE.items():
        text = re.sub(r"\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)", _link, (ROOT / source).read_text())
        (folder / page).write_text(text)


def _link(found: re.Match) -> str:
    text, target, anchor = found.groups()
    if target.startswith(("http:", "https:")):
        return found[0]
    pages = {source: page for page, source in ELSEWHERE.items()}
    page = pages.get(target, target.rpartition("docs/")[2])
    there = page in ELSEWHERE or ("docs/" in target and (ROOT / "docs" / page).exists())
    return f"[{text}]({page}{anchor or ''})" if there else text


if __name__ == "__main__":
    write()
