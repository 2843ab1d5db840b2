"""Docstrings name what they refer to by Sphinx's roles, which editors show; the pages show the name alone."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return ROLE.sub(r"<code>\1</code>", html)
