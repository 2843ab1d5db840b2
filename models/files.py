"""Files are written aside and renamed, so that a reader sees the old one or the new one and never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path in the same folder, flush it to disk, and rename it to ``path``.

    Raises:
        OSError: the disk is full or the folder cannot be written; ``path`` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.chmod(0o644)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """:func:`write_atomically` for UTF-8 text."""
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """:func:`write_atomically` for bytes."""
    write_atomically(path, lambda aside: aside.write_bytes(content))


def remove_asides(folder: Path) -> None:
    """Remove what :func:`write_atomically` leaves where it is killed. Only for who works in the folder alone."""
    for aside in folder.glob(".*.*.????????"):
        aside.unlink(missing_ok=True)
