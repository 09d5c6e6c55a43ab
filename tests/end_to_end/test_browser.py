"""The site in a browser, as wide as a desk and as a phone: nothing scrolls sideways, no word breaks, search finds."""

import functools
import http.server
import shutil
import threading

import pytest
from kit.site import build


pytest.importorskip("zensical", reason="`pip install -e '.[docs]'`")
sync_api = pytest.importorskip("playwright.sync_api", reason="`pip install playwright`")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTHS = {"desk": 1280, "phone": 390}
TERMS = {
    "max_tokens_per_batch": "options.html",
    "remove_padding": "api.html",
    "expand_turns": "rollouts.html",
    "rollout_pairs": "rollouts.html",
    "out of memory": "troubleshooting.html",
    "gpt_bigcode": "families.html",
    "FSDP": "many_gpus.html",
    "flash attention kernels": "attention.html",
    "LLaMA-Factory": "other_stacks.html",
    "negative control": "numbers.html",
    "packing with sdpa mixes samples": "questions.html",
    "Qwen3.5 packing": "questions.html",
}
"""What a reader types, and the page that answers."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: `apt-get install chromium`; looked for {BROWSERS}"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, and its address."""
    folder = build(tmp_path_factory.mktemp("site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS)
def page(browser, request):
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    yield page
    page.close()


# What reaches past the window, and is in no box that scrolls by itself. The page hides what overflows it on a phone.
SIDEWAYS = """() => {
  const scrolls = (e) => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const past = [...document.querySelectorAll(".md-content *")].filter(
    (e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement));
  const more = document.documentElement.scrollWidth - innerWidth;
  return past.slice(0, 3).map((e) => e.outerHTML.slice(0, 200)).concat(more > 0 ? [`${more} pixels to scroll`] : []);
}"""
# Words in cells of tables and in the table of contents that begin on one line and end on another, or leave their box.
# A hyphen or a slash ends a word.
BROKEN = """() => [...document.querySelectorAll(".md-content :is(td, th), .md-nav--secondary a")].flatMap((cell) => {
  const found = cell.matches("a") && cell.scrollWidth > cell.clientWidth + 1 ? [cell.innerText] : [];
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/[\\w.]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
    }
  }
  return found;
})"""


def test_no_page_scrolls_sideways_and_no_word_in_a_table_breaks(site, page):
    folder, address = site
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    assert names
    wrong, cells = {}, 0
    for name in names:
        page.goto(f"{address}/{name}")
        cells += page.locator(".md-content td code").count()
        if found := page.evaluate(SIDEWAYS) + page.evaluate(BROKEN):
            wrong[name] = found
    assert wrong == {}
    assert cells


def test_what_is_wrong_is_seen(site, page):
    page.goto(f"{site[1]}/from_trl.html")
    page.add_style_tag(
        content=".md-content td * { word-break: break-all !important; max-width: 5em; display: block; }"
    )
    assert "padding_free" in page.evaluate(BROKEN)
    assert page.evaluate(SIDEWAYS) == []
    page.add_style_tag(content=".md-content h1 { width: 2000px; }")
    assert any("<h1" in found for found in page.evaluate(SIDEWAYS))


@pytest.mark.parametrize("term", TERMS)
def test_search_finds(site, browser, term):
    page = browser.new_page(viewport={"width": WIDTHS["desk"], "height": 900})
    page.goto(f"{site[1]}/index.html")
    page.locator("button.md-search__button").click()
    page.keyboard.type(term)
    found = []
    for _ in range(100):  # results are drawn again while one types
        page.wait_for_timeout(100)
        links = page.locator("a[role=option]").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        found = list(dict.fromkeys(link.split("/")[-1].split("#")[0] for link in links))[:3]
        if TERMS[term] in found:
            break
    page.close()
    assert TERMS[term] in found
