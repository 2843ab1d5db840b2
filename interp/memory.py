"""How much memory there is to use: the machine's, the container's, and the process's own limit."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from models.config import InputError

_CGROUP = Path("/sys/fs/cgroup")


class MemoryLimit(InputError):
    """What was asked for does not fit into memory; says how much it takes, how much there is and what to do."""


def free_memory() -> int:
    """Bytes that this process may still take: the least of what the machine, its container and its limit leave."""
    process = psutil.Process()
    free = [psutil.virtual_memory().available]
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(limit - used)
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            free.append(soft - process.memory_info().vms)
    return max(0, min(free))


def require(needed: int, what: str, remedy: str) -> None:
    """Refuse what would take more than half of the free memory.

    Raises:
        MemoryLimit: it would.
    """
    free = free_memory()
    if needed > free // 2:
        raise MemoryLimit(f"{what} takes about {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free; {remedy}")


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None where there is none (``max``, or no cgroup)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
