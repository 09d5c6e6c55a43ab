"""The documentation: links lead somewhere, examples name what there is. `.ci/run` makes pages and builds the site."""

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

import trl_padfix


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def imported(name: str, monkeypatch):
    """A script of `docs/`."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(name)


def test_pictures_show_what_is_committed(monkeypatch):
    pictures = imported("make_pictures", monkeypatch)
    assert pictures.stale() == []
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    assert all(f"images/{name})" in text for name in pictures.PICTURES)
    monkeypatch.setattr(pictures, "MEASURED", dict(list(pictures.MEASURED.items())[1:]))
    assert pictures.stale() == ["speed.png"]


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def links(page: Path) -> list[tuple[Path, str]]:
    """The links of a page to files, and to headings in them."""
    found = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    return [((page.parent / target).resolve() if target else page, anchor) for target, anchor in found]


def check_links(pages: Iterable[Path]) -> None:
    for page in pages:
        for there, anchor in links(page):
            assert there.exists(), (page.name, there)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                assert anchor in map(slug, headings), (page.name, there, anchor)


def test_links_lead_to_files_and_to_headings():
    others = ("README.md", "CONTRIBUTING.md", "recipes/README.md", "notebooks/README.md")
    check_links([*PAGES, *map(ROOT.joinpath, others)])


def test_links_on_the_site_lead_to_its_pages(monkeypatch, tmp_path):
    script = imported("copied_pages", monkeypatch)
    script.write(tmp_path)
    pages = sorted(tmp_path.rglob("*.md"))
    assert len(pages) == len(PAGES) + len(script.ELSEWHERE)
    check_links(pages)
    assert all(there.is_relative_to(tmp_path) for page in pages for there, _ in links(page))
    assert (tmp_path / "recipes.md", "resume") in links(tmp_path / "options.md")
    assert not all(there.is_relative_to(DOCS) for page in PAGES for there, _ in links(page))  # in the repository


def test_python_on_pages_names_what_there_is():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(block, page.name, "exec")
            for names in re.findall(r"^from trl_padfix import ([\w, ]+)", block, re.MULTILINE):
                assert all(hasattr(trl_padfix, name.strip()) for name in names.split(",")), page.name


def test_the_api_page_has_every_public_name(monkeypatch):
    page = imported("copied_pages", monkeypatch).with_docstrings((DOCS / "api.md").read_text())
    listed = re.findall(r"^::: \S+\.(\w+)$", page, re.MULTILINE)
    # `Padding` is only met as `trainer.padding`.
    assert {*listed} == set(trl_padfix.__all__) - {"__version__"} | {"Padding"}


def test_the_api_page_has_the_arguments_of_our_functions():
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "api.md").read_text(), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).splitlines():
        name, arguments = re.match(r"(\w+)\((.*?)\)(?:  #|$)", line).groups()
        signature = inspect.signature(getattr(trl_padfix, name), eval_str=False)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert str(signature.replace(parameters=plain, return_annotation=signature.empty)).replace("'", '"') == (
            f"({arguments})".replace("=Task", '=<class "trl_padfix.trainers.task.Task">')
        )


def test_workflows_and_forms_are_yaml_and_run_what_there_is():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    loaded = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert loaded["CITATION.cff"]["version"] == trl_padfix.__version__
    for text in (path.read_text() for path in files):
        for name in re.findall(r"(?:python|pip install -r|bash) ((?:docs|recipes|tests|\.ci)/\S+)", text):
            assert (ROOT / name).exists(), name
