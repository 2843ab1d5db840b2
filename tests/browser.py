"""Pages as a parser and as a browser see them."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Elements, the addresses that they load or link to, text by element, and whether every element is closed."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def assert_drawn(html, run):
    """No complaint in the browser's log, and every figure of the page drawn, without NaN."""
    complaints = [line for line in run.stderr.splitlines() if "CONSOLE" in line or "Uncaught" in line]
    assert complaints == []
    for name in (each for each in Page(html).ids if each.startswith("figure-")):
        plot = run.stdout.split(f'id="{name}"', 1)[1].split("</figure>", 1)[0]
        assert 'class="main-svg"' in plot
        assert "NaN" not in plot


def dump_dom(page, folder):
    """The page after its scripts have run, and the browser's log.

    On a loaded machine Chromium may hang at its start, so a second try is made.
    """
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", page.as_uri()),
    ]
    for attempt in (1, 2):
        command = [BROWSER, f"--user-data-dir={folder / f'profile-{attempt}'}", *flags]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
