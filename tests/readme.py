"""The README's tables of checkpoints, of claims and of ways to address, measured. ``make readme`` prints them and draws
the figure; tests ask that the README has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from interp.compare import Comparison, compare
from interp.decisions import Reach, score
from interp.plots import reach_figure, save
from interp.reproduce import markdown, reproduce
from models.addition import read_problems
from models.checkpoint import load_checkpoint, load_record

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
FIGURE = ROOT / "docs" / "images" / "addressing.png"
LENGTHS = (10, 20, 40, 100, 200, 500)
PROBLEMS = 20
ADDRESSED = {10: 20, 20: 20, 40: 20, 100: 20, 200: 20, 500: 5, 1000: 2}  # problems at each length: long ones are slow
WAYS = {
    "1digit-nope-seed0": "no positions (NoPE)",
    "1digit-rotary-seed0": "rotation by token",
    "1digit-alibi-seed0": "ALiBi",
    "1digit-fire-seed0": "FIRE",
    "1digit-cope-seed0": "CoPE",
    "1digit-coupling-seed0": "position coupling",
    "1digit-rotary2d-seed0": "rotation by row and column, decay, sink",
    "1digit-rotary2d-pressure-seed0": "the same under sink pressure",
    "1digit-counters-seed0": "learned counters",
    "1digit-counters-exact-seed0": "counters, gates exact, key pressure",
    "binary-neural-gpu-seed0": "Neural GPU (binary, lengths in bits)",
    "copy-ntm-seed0": "Neural Turing Machine (copies, lengths in symbols)",
}


def rows() -> list[str]:
    """One line a checkpoint: exact match at each length on random problems, and on the hand-made ones of 200 digits."""
    hard = read_problems(ROOT / "tests" / "problems" / "handmade-200.txt")
    lines = [
        f"| checkpoint | steps | {' | '.join(f'{n} digits' for n in LENGTHS)} | hard carries, 200 |",
        f"|---|---:|{'---:|' * (len(LENGTHS) + 1)}",
    ]
    for folder in sorted(FIXTURES.glob("*digit-*")):
        exact = [_cell(cell) for cell in compare([folder], LENGTHS, problems=PROBLEMS)]
        exact.append(f"{score(load_checkpoint(folder), hard).exact:.2f}")
        lines.append(f"| `{folder.name}` | {load_record(folder).step} | {' | '.join(exact)} |")
    return lines


def addressing() -> dict[str, list[Comparison]]:
    """Every way to address that ships, at every length."""
    there = [name for name in WAYS if (FIXTURES / name).exists()]
    return {
        name: [cell for n, problems in ADDRESSED.items() for cell in compare([FIXTURES / name], [n], problems=problems)]
        for name in there
    }


def addressing_rows(found: dict[str, list[Comparison]]) -> list[str]:
    """One line a way to address: what it takes, and exact match at each length."""
    lines = [
        f"| checkpoint | addresses by | weights | steps | minutes | {' | '.join(map(str, ADDRESSED))} |",
        f"|---|---|---:|---:|---:|{'---:|' * len(ADDRESSED)}",
    ]
    for name, cells in found.items():
        record = cells[0].record
        about = f"| `{name}` | {WAYS[name]} | {cells[0].parameters} | {record.step} | {record.seconds / 60:.0f} |"
        lines.append(f"{about} {' | '.join(map(_cell, cells))} |")
    return lines


def draw(found: dict[str, list[Comparison]]) -> None:
    """The figure: exact match against length, one curve a way to address."""
    curves = {WAYS[name]: Reach({c.digits: c.score for c in cells if c.score}) for name, cells in found.items()}
    save(reach_figure(curves, trained_digits=10), FIGURE)


def _cell(cell: Comparison) -> str:
    return f"{cell.score.exact:.2f}" if cell.score else "-"


def main(which: Sequence[str]) -> None:
    """Print the tables asked for (``checkpoints``, ``addressing``, ``claims``), all by default."""
    if not which or "checkpoints" in which:
        print("\n".join([*rows(), ""]), flush=True)
    if not which or "addressing" in which:
        found = addressing()
        print("\n".join([*addressing_rows(found), ""]), flush=True)
        draw(found)
    if not which or "claims" in which:
        print("\n".join(markdown(reproduce(fixtures=FIXTURES))))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
