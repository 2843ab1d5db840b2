"""The documentation is built from the docstrings, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [path for package in ("models", "interp") for path in sorted((ROOT / package).glob("[a-z]*.py"))]


def test_every_module_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    modules = {f"{path.parent.name}.{path.stem}" for path in MODULES}
    plumbing = {"models.files", "interp.cli", "interp.memory"}
    assert named == modules - plumbing


@pytest.mark.slow
def test_it_builds_without_a_warning_and_loads_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    page = (tmp_path / "reference" / "measuring" / "index.html").read_text()
    assert "build_ledger" in page
    assert not re.search(r":(attr|class|func|meth|mod):", page)
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?://', page)
