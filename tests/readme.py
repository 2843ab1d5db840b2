"""The README's tables of checkpoints and of claims, measured. ``make readme`` prints them; tests ask that the README
has them."""

from __future__ import annotations

from pathlib import Path

from interp.decisions import reach, score
from interp.reproduce import markdown, reproduce
from models.addition import read_problems
from models.checkpoint import load_checkpoint, load_record

ROOT = Path(__file__).parent.parent
LENGTHS = (10, 20, 40, 100, 200, 500)
PROBLEMS = 20


def rows() -> list[str]:
    """One line a checkpoint: exact match at each length on random problems, and on the hand-made ones of 200 digits."""
    hard = read_problems(ROOT / "tests" / "problems" / "handmade-200.txt")
    lines = [
        f"| checkpoint | steps | {' | '.join(f'{n} digits' for n in LENGTHS)} | hard carries, 200 |",
        f"|---|---:|{'---:|' * (len(LENGTHS) + 1)}",
    ]
    for folder in sorted((ROOT / "fixtures").glob("*digit-*")):
        model = load_checkpoint(folder)
        found = reach(model, LENGTHS, PROBLEMS)
        exact = [f"{found.scores[n].exact:.2f}" for n in LENGTHS]
        exact.append(f"{score(model, hard).exact:.2f}")
        lines.append(f"| `{folder.name}` | {load_record(folder).step} | {' | '.join(exact)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*rows(), "", *markdown(reproduce(fixtures=ROOT / "fixtures"))]))
