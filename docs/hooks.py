"""The first page is the README; of the Sphinx roles in docstrings the pages show the name alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?([^<]*)</code>")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_path != "index.md":
        return markdown
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("(docs/images/", "(images/")


def on_page_content(html: str, **_: Any) -> str:
    return ROLE.sub(r"<code>\1</code>", html)
