"""The documentation: made pages are up to date, links lead somewhere, examples run, and the site builds."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import trl_padfix


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ELSEWHERE = {"changelog.md": "CHANGELOG.md", "recipes.md": "recipes/README.md", "security.md": "SECURITY.md"}
"""Pages of the site that `docs/hooks.py` makes from other files."""
ON_THE_PAGE = {"Layout", "pack", "unpack"}
"""Names whose example is on the API page itself."""
RECORDS = {"Padding", "Layout", "PaddingRemoval", "PaddingStats", "ParityReport", "PaddingRemovalError", "ParityError"}
"""What is not called with anything that could be wrong."""


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def make_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.setattr(sys, "argv", ["make_pages.py", "--check"])
    return importlib.import_module("make_pages")


def test_made_pages_are_what_the_code_says(make_pages):
    make_pages.main()


def test_a_page_that_is_not_up_to_date_is_found(make_pages, monkeypatch, tmp_path):
    monkeypatch.setattr(make_pages, "FOLDER", tmp_path)
    with pytest.raises(SystemExit, match=r"options\.md, troubleshooting\.md: not what the code says now"):
        make_pages.main()


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_links_lead_to_pages_and_to_headings():
    count = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            path = ROOT / ELSEWHERE[there.name] if there.name in ELSEWHERE and not there.exists() else there
            assert path.exists(), (page.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert anchor in map(slug, headings), (page.name, target, anchor)
            count += 1
    assert count > 30


def test_examples_of_pages_run():
    attempted = 0
    for page in PAGES:
        failed, tried = doctest.testfile(str(page), module_relative=False)
        assert failed == 0, page.name
        attempted += tried
    assert attempted >= 5


def test_python_on_pages_names_what_there_is():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if ">>>" in block:
                continue
            compile(block, page.name, "exec")
            for names in re.findall(r"^from trl_padfix import ([\w, ]+)", block, re.MULTILINE):
                assert all(hasattr(trl_padfix, name.strip()) for name in names.split(",")), page.name


def test_the_api_page_has_every_public_name_with_its_text():
    listed = re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    # `Padding` is met as `trainer.padding`, and made by nobody else.
    assert {name for _, name in listed} == set(trl_padfix.__all__) - {"__version__"} | {"Padding"}
    for module, name in listed:
        text = inspect.getdoc(getattr(importlib.import_module(module), name))
        assert "```python" in text or name in ON_THE_PAGE, name
        assert "Raises:" in text or name in RECORDS, name
        if (module.startswith("trl_padfix.core") and name not in RECORDS - {"Layout"}) or "Collator" in name:
            assert "shape" in text, name


def test_every_page_is_in_the_navigation_and_every_question_has_an_answer():
    named = re.findall(r"[\w]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert len(named) == len(set(named))
    assert {page.name for page in PAGES} <= set(named)
    questions = re.findall(r"^\| (.*?) \|.*\]\((.*?)\) \|$", (DOCS / "questions.md").read_text(), re.MULTILINE)
    assert len(questions) == 30


def test_workflows_and_forms_are_yaml_and_run_what_there_is():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    assert len(files) >= 7
    loaded = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert loaded["CITATION.cff"]["version"] == trl_padfix.__version__
    assert f"version = {{{trl_padfix.__version__}}}" in (DOCS / "support.md").read_text()
    for text in (path.read_text() for path in files):
        for name in re.findall(r"(?:python|pip install -r|bash) ((?:docs|recipes|tests|\.ci)/\S+)", text):
            assert (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="`pip install -e '.[docs]'`")
def test_the_site_builds_without_a_warning(tmp_path):
    done = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "remove_padding" in (tmp_path / "api.html").read_text()
