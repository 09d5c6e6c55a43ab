"""Pages of the site whose text lies elsewhere in the repository; MkDocs calls this."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "recipes.md": "recipes/README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
}


def on_files(files, config):
    """Adds a page for each of [`ELSEWHERE`], whose links lead to pages of the site where there is one."""
    for page, source in ELSEWHERE.items():
        text = re.sub(r"\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)", _link, (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def _link(found: re.Match) -> str:
    text, target, anchor = found.groups()
    if target.startswith(("http:", "https:")):
        return found[0]
    pages = {source: page for page, source in ELSEWHERE.items()}
    page = pages.get(target, target.rpartition("docs/")[2])
    there = page in ELSEWHERE or ("docs/" in target and (ROOT / "docs" / page).exists())
    return f"[{text}]({page}{anchor or ''})" if there else text
