"""Peak memory of one call: by how much it raises the resident set's high-water mark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def in_own_process(script: str, *arguments: object) -> float:
    """What a script prints as JSON on its last line, run with these arguments in a process of its own."""
    command = [sys.executable, script, *map(str, arguments)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(out.stdout.splitlines()[-1]))


def grown(call: Callable[[], object]) -> float:
    """MB by which the process's peak grows over what it held before the call."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    call()
    return (_status("VmHWM") - before) / 1e3


def _status(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1])
