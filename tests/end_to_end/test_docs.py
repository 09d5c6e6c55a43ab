"""The documentation: made pages are up to date, links lead somewhere, examples run, and the site builds."""

import doctest
import importlib
import inspect
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from kit import site

import trl_padfix


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text()
ELSEWHERE = {"changelog.md": "CHANGELOG.md", "recipes.md": "recipes/README.md", "security.md": "SECURITY.md"}
"""Pages of the site that `docs/copied_pages.py` makes from other files."""
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name not in {*ELSEWHERE, "contributing.md"})
ON_THE_PAGE = {"Layout", "pack", "unpack"}
"""Names whose example is on the API page itself."""
RECORDS = {"Padding", "Layout", "PaddingRemoval", "PaddingStats", "ParityReport", "PaddingRemovalError", "ParityError"}
"""What is not called with anything that could be wrong."""


def imported(name: str, monkeypatch):
    """A script of `docs/`."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


def test_made_pages_are_what_the_code_says_and_others_are_found(monkeypatch, tmp_path):
    make_pages = imported("make_pages", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["make_pages.py", "--check"])
    make_pages.main()
    monkeypatch.setattr(make_pages, "FOLDER", tmp_path)
    with pytest.raises(SystemExit, match=r"options\.md: not what the code says now"):
        make_pages.main()


def test_pictures_show_what_is_committed(monkeypatch):
    pictures = imported("make_pictures", monkeypatch)
    assert pictures.stale() == []
    shown = [name for name in pictures.PICTURES if any(f"(images/{name})" in page.read_text() for page in PAGES)]
    assert shown == list(pictures.PICTURES)
    monkeypatch.setattr(pictures, "MEASURED", dict(list(pictures.MEASURED.items())[1:]))
    assert pictures.stale() == ["speed.png"]


def test_every_measured_file_has_a_row_on_speed_with_its_figures():
    rows = re.findall(r"^\| .*\|$", (DOCS / "speed.md").read_text(), re.MULTILINE)
    for path in (DOCS / "bench").glob("*.json"):
        if "compiled" in path.stem:
            continue  # sentences below the table
        variants = json.loads(path.read_text())["variants"]
        speed = [v["speedup"] for v in variants if v["name"] in ("padding_free", "prefix_sharing")]
        assert any(all(f"{s:.1f}x" in row or f"{s:.2f}x" in row for s in speed) for row in rows), path.name


def test_docstrings_are_markdown_on_the_page(monkeypatch):
    pytest.importorskip("griffe", reason="`pip install -e '.[docs]'`")
    as_markdown = imported("griffe_docstrings", monkeypatch).as_markdown
    text = "    Args:\n        x (`torch.Tensor` of shape `(B,)`, *optional*):\n            As in [`Layout`]."
    there = "[`Layout`][trl_padfix.core.layout.layout.Layout]"
    assert as_markdown(text) == (
        f"    Args:\n        x: `torch.Tensor` of shape `(B,)`, *optional*.\n            As in {there}."
    )
    assert as_markdown("[`~trl.DPOConfig`], [text](page.md), [`x`](y)") == "`trl.DPOConfig`, [text](page.md), [`x`](y)"


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


def test_examples_of_pages_run():
    attempted = 0
    for page in PAGES:
        failed, tried = doctest.testfile(str(page), module_relative=False)
        assert failed == 0, page.name
        attempted += tried
    assert attempted


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
    # `Padding` is only met as `trainer.padding`.
    assert {name for _, name in listed} == set(trl_padfix.__all__) - {"__version__"} | {"Padding"}
    for module, name in listed:
        text = inspect.getdoc(getattr(importlib.import_module(module), name))
        assert "```python" in text or name in ON_THE_PAGE, name
        assert "Raises:" in text or name in RECORDS, name
        if (module.startswith("trl_padfix.core") and name not in RECORDS - {"Layout"}) or "Collator" in name:
            assert "shape" in text, name


def test_every_page_is_in_the_navigation_and_every_question_has_an_answer():
    named = re.findall(r"[\w]+\.md", NAVIGATION)
    assert len(named) == len(set(named))
    assert {page.name for page in PAGES} <= set(named)
    questions = re.findall(r"^- \*\*(.*\?)\*\* (.*)$", (DOCS / "questions.md").read_text(), re.MULTILINE)
    assert questions
    assert [question for question, answer in questions if not answer.endswith(")).")] == []  # a link to more


WIDTH = 86
"""Characters of code that are seen on the site, 1,280 pixels wide; what is longer scrolls."""


def test_comments_of_code_are_within_the_width_of_the_page():
    found = 0
    for page in PAGES:
        if page.name in ("api.md", "troubleshooting.md"):  # docstrings; lines that raise, with their error
            continue
        for block in re.findall(r"^```(?:python|bash)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            commented = [line for line in block.splitlines() if re.search(r"(^|\s)# ", line)]
            assert [line for line in commented if len(line) > WIDTH] == [], page.name
            found += len(commented)
    assert found > 40


def test_the_page_of_errors_is_short():
    page = (DOCS / "troubleshooting.md").read_text()
    entries = [row for row in re.findall(r"^\| (.*) \|$", page, re.MULTILINE) if not row.startswith("printed |")]
    assert 30 <= len(entries) <= 60
    assert all(row.count(" | ") == 2 for row in entries)


MOST_WORDS, MOST_PAGES, MOST_ENTRIES = 12_700, 24, 22


def test_the_site_is_short_and_its_navigation_has_few_entries_for_users():
    """All pages that are written or made here."""
    assert len(PAGES) <= MOST_PAGES
    assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_WORDS
    users, maintainers = re.search(
        r"^nav:\n(.*?)^  - For maintainers:\n(.*)", NAVIGATION, re.DOTALL | re.MULTILINE
    ).groups()
    assert 10 < len(re.findall(r"\.md$", users, re.MULTILINE)) <= MOST_ENTRIES
    assert not re.search(r"^  - ", maintainers, re.MULTILINE)  # the last section


def test_workflows_and_forms_are_yaml_and_run_what_there_is():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    loaded = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert loaded["CITATION.cff"]["version"] == trl_padfix.__version__
    assert f"version = {{{trl_padfix.__version__}}}" in (DOCS / "releasing.md").read_text()
    for text in (path.read_text() for path in files):
        for name in re.findall(r"(?:python|pip install -r|bash) ((?:docs|recipes|tests|\.ci)/\S+)", text):
            assert (ROOT / name).exists(), name


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(find_spec("zensical") is None, reason="`pip install -e '.[docs]'`")
def test_the_site_builds_without_a_warning(tmp_path):
    page = (site.build(tmp_path) / "api.html").read_text()
    assert "remove_padding" in page
    assert re.findall(r"\[<code>|<code>[^<]*`", page) == []  # Markdown that is shown raw
