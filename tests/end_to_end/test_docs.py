"""The documentation: links lead somewhere, examples name what there is. `.ci/run` makes pages and builds the site."""

import importlib
import re
from pathlib import Path

import yaml

import trl_padfix


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "index.md": "README.md",
    "recipes.md": "recipes/README.md", "security.md": "SECURITY.md",
}  # fmt: skip
"""Pages of the site that `docs/copied_pages.py` makes from other files."""
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name not in ELSEWHERE)


def imported(name: str, monkeypatch):
    """A script of `docs/`."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


def test_pictures_show_what_is_committed(monkeypatch):
    pictures = imported("make_pictures", monkeypatch)
    assert pictures.stale() == []
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    shown = [name for name in pictures.PICTURES if f"images/{name})" in text]
    assert shown == list(pictures.PICTURES)
    monkeypatch.setattr(pictures, "MEASURED", dict(list(pictures.MEASURED.items())[1:]))
    assert pictures.stale() == ["speed.png"]


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_links_lead_to_pages_and_to_headings():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            path = ROOT / ELSEWHERE[there.name] if there.name in ELSEWHERE and not there.exists() else there
            assert path.exists(), (page.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert anchor in map(slug, headings), (page.name, target, anchor)


def test_python_on_pages_names_what_there_is():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(block, page.name, "exec")
            for names in re.findall(r"^from trl_padfix import ([\w, ]+)", block, re.MULTILINE):
                assert all(hasattr(trl_padfix, name.strip()) for name in names.split(",")), page.name


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: \S+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    # `Padding` is only met as `trainer.padding`.
    assert {*listed} == set(trl_padfix.__all__) - {"__version__"} | {"Padding"}


def test_workflows_and_forms_are_yaml_and_run_what_there_is():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    loaded = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert loaded["CITATION.cff"]["version"] == trl_padfix.__version__
    for text in (path.read_text() for path in files):
        for name in re.findall(r"(?:python|pip install -r|bash) ((?:docs|recipes|tests|\.ci)/\S+)", text):
            assert (ROOT / name).exists(), name
