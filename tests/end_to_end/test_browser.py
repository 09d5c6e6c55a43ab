"""The site in a browser, as narrow as a phone: no page scrolls sideways, and search finds."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest


pytest.importorskip("zensical", reason="`pip install -e '.[docs]'`")
sync_api = pytest.importorskip("playwright.sync_api", reason="`pip install playwright`")

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: `apt-get install chromium`; looked for {BROWSERS}"),
]


def build(folder: Path) -> Path:
    """Build the site, as CI does, from a copy of its sources in `folder`; the folder of its pages."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    for name in ("trl_padfix", "recipes", "README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"):
        (folder / name).symlink_to(ROOT / name)
    for command in (["docs/copied_pages.py"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build/site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, and its address."""
    folder = build(tmp_path_factory.mktemp("site"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def page():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 390, "height": 900})
        browser.close()


# What reaches past the window, and is in no box that scrolls by itself. The page hides what overflows it on a phone.
SIDEWAYS = """() => {
  const scrolls = (e) => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll(".md-content *")].filter(
    (e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement)
  ).slice(0, 3).map((e) => e.outerHTML.slice(0, 200));
}"""


def test_no_page_scrolls_sideways(site, page):
    folder, address = site
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    wrong = {}
    for name in names:
        page.goto(f"{address}/{name}")
        if found := page.evaluate(SIDEWAYS):
            wrong[name] = found
    assert names
    assert wrong == {}
    page.goto(f"{address}/from_trl.html")
    page.add_style_tag(content=".md-content h1 { width: 2000px; }")  # the control
    assert any("<h1" in found for found in page.evaluate(SIDEWAYS))


def test_search_finds(site, page):
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{site[1]}/index.html")
    page.locator("button.md-search__button").click()
    page.keyboard.type("max_tokens_per_batch")
    page.locator("a[role=option][href*='options.html']").first.wait_for(timeout=10_000)
