"""Look at the built site in a browser: contrast, width, console, pictures, search; on a desktop and a phone, light and
dark.

python -m tools.site_check SITE [--browser /usr/bin/chromium] [--driver /usr/bin/chromedriver]

SITE is the folder that `mkdocs build` wrote; it is served from this machine. Prints a line for each problem:

contrast   text of which a letter is under 4.5 to 1 against what is behind it (3 to 1 where it is large), as WCAG 2.1
           level AA asks
wide       a page that scrolls sideways
console    an error in the browser's console
picture    one without a text, or that did not load
table      one that is wider than its page on a phone
search     a query of :data:`QUERIES` that does not have its page among the first three
box        an error of :data:`PASTED` for which "Find the error" does not show its patch first

Exit code 1: there is one. Needs selenium, Chromium and its driver (`nox -s site_check`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: What people type, and the page that answers it.
QUERIES = {
    "_is_hf_initialized": "patches/offload",
    "Gemma4ClippableLinear is not supported": "patches/",
    "out of memory training": "TRAINING",
    "merge adapter": "MERGING",
    "tokens per second slow": "DECODING",
    "vllm export": "READERS",
    "disable a patch": "SETTINGS",
}
#: What people paste, and the patch that comes first. tests/project/docs/test_errors_box.py compares many more.
PASTED = {
    "TypeError: Params4bit.__new__() got an unexpected keyword argument": "accelerate-hf-initialized",
    "> ValueError: Target module Gemma4ClippableLinear(\n>   (linear)\n> ) is not supported.": "peft-clippable-linear",
    "KeyError: 'base_model.model.model.model.audio_tower.layers.0.feed_forward1.ffw_layer_1'": "peft-keep-dispatch",
}
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("default", "slate")  # of MkDocs Material: light and dark

#: Text with too little contrast. Colours with transparency are laid over those behind them.
CONTRAST = """
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat([1]);
const behind = element => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const style = getComputedStyle(at);
    if (style.backgroundImage !== 'none') return null;
    layers.push(parse(style.backgroundColor));
    if (layers.at(-1)[3] === 1) break;
  }
  return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
};
const light = colour => { const [r, g, b] = colour.map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const found = new Map();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  const box = element.getBoundingClientRect();
  if (box.width < 2 || box.height < 2) continue;
  const style = getComputedStyle(element), page = behind(element);
  if (page === null) continue;
  const ink = over(parse(style.color), page), [a, b] = [light(ink), light(page)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) {
    const kind = element.tagName.toLowerCase() + '.' + element.className + ' ' + style.color;
    if (!found.has(kind)) found.set(kind, `${ratio.toFixed(2)} ${kind} ${JSON.stringify(text.slice(0, 40))}`);
  }
}
return [...found.values()];
"""
PICTURES = """
return [...document.querySelectorAll('article img')].filter(one => !one.alt || !one.complete || !one.naturalWidth)
  .map(one => one.src);
"""
WIDE_TABLES = """
return [...document.querySelectorAll('article table')]
  .filter(one => one.checkVisibility() && one.scrollWidth > one.parentElement.clientWidth + 1)
  .map(one => `${one.rows[0].cells.length} columns, ${one.scrollWidth} pixels`);
"""
#: Pixels by which a page may be wider than the window: browsers round.
TOLERANCE = 1


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the folder is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@contextlib.contextmanager
def opened(browser: str, driver: str, size: tuple[int, int]) -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"):
        options.add_argument(f"--{argument}")
    for argument in ("disable-background-networking", "disable-component-update", "disable-sync"):
        options.add_argument(f"--{argument}")
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield found
    finally:
        found.quit()


def problems_of_page(page: Any, address: str) -> Iterator[str]:
    """What is wrong with one page, light and dark."""
    page.get(address)
    yield from _faint(page)
    # Not window.innerWidth: on a phone it grows with what is too wide.
    width, window = page.execute_script(
        "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
    )
    if width > window + TOLERANCE:
        yield f"wide: {width} pixels in a window of {window}"
    if window < 600:
        for table in page.execute_script(WIDE_TABLES):
            yield f"table: {table}"
    for source in page.execute_script(PICTURES):
        yield f"picture: {source}"
    for entry in page.get_log("browser"):
        yield f"console: {entry['message']:.200}"


def _faint(page: Any) -> Iterator[str]:
    """Text with too little contrast in what is shown now, light and dark."""
    for scheme in SCHEMES:
        page.execute_script("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
        time.sleep(0.4)  # colours fade
        for line in page.execute_script(CONTRAST):
            yield f"contrast, {scheme}: {line}"


def problems_of_search(page: Any, address: str) -> Iterator[str]:
    """Queries that do not lead where they should, and results that are hard to read."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    for query, wanted in QUERIES.items():
        page.get(address)
        page.execute_script("document.querySelector('#__search').click()")
        box = page.find_element(By.CSS_SELECTOR, "input.md-search__input")
        WebDriverWait(page, 10).until(lambda _, box=box: box.is_displayed())
        box.send_keys(query)
        found: list[str] = []
        end = time.monotonic() + 10
        while not found and time.monotonic() < end:
            time.sleep(0.3)
            links = page.find_elements(By.CSS_SELECTOR, "ol.md-search-result__list > li > a")
            found = [link.get_attribute("href").removeprefix(address).partition("?")[0] for link in links[:3]]
        if not any(wanted in one for one in found):
            yield f"search: {query!r} finds {', '.join(found) or 'nothing'}, and not {wanted}"
    yield from _faint(page)


def problems_of_box(page: Any, address: str) -> Iterator[str]:
    """Pasted errors whose patch is not shown first."""
    from selenium.webdriver.common.by import By

    for text, wanted in PASTED.items():
        page.get(f"{address}ERRORS.html")
        page.find_element(By.CSS_SELECTOR, "#pasted-error").send_keys(text)
        links = page.find_elements(By.CSS_SELECTOR, "#error-answer .error a")
        found = [link.text for link in links]
        if found[:1] != [wanted]:
            yield f"box: {text!r} shows {', '.join(found) or 'nothing'}, and not {wanted}"
    yield from _faint(page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    parser.add_argument("--screenshots", type=Path, help="a folder for one of each page and size")
    arguments = parser.parse_args(argv)
    pages = sorted(file.relative_to(arguments.site).as_posix() for file in arguments.site.rglob("*.html"))
    if not pages:
        parser.error(f"{arguments.site} has no pages; build it: nox -s docs")
    found = 0
    with served(arguments.site) as address:
        for size, pixels in SIZES.items():
            with opened(arguments.browser, arguments.driver, pixels) as browser:
                checks = {f"{size} {page}": problems_of_page(browser, f"{address}{page}") for page in pages}
                if size == "desktop":
                    checks["search"] = problems_of_search(browser, address)
                checks[f"{size}, box"] = problems_of_box(browser, address)
                for name, problems in checks.items():
                    for problem in problems:
                        found += 1
                        print(f"{name}: {problem}", flush=True)
                    if arguments.screenshots and name.endswith(".html"):
                        arguments.screenshots.mkdir(parents=True, exist_ok=True)
                        browser.save_screenshot(str(arguments.screenshots / f"{name.replace('/', '-')}.png"))
    print(f"{len(pages)} pages, {len(QUERIES)} queries, {len(PASTED)} pasted errors: {found} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
