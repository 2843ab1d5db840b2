"""Decisions per second: one teacher-forced pass against greedy generation with the key-value cache.

Both run in one process on the same problems and threads, in the same batches, alternating, and the figure is the ratio
of the medians. Run with ``make bench``.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

from interp.decisions import score
from interp.passes import plan_for
from models.checkpoint import load_checkpoint
from models.transformer import HookedAdder

FIXTURE = Path(__file__).parents[2] / "fixtures" / "1digit-rotary2d-pressure-seed0"
AT_LEAST = 30.0


def generate_all(model: HookedAdder, problems: list[tuple[int, int]], batch: int, digits: int) -> int:
    """Greedy answers to all problems; returns the number of tokens decided."""
    decided = 0
    for start in range(0, len(problems), batch):
        tokens, mask = model.task.prompt(problems[start : start + batch])
        answer = model.generate(tokens, mask, digits + 2)
        decided += int((answer != model.task.vocabulary.pad).sum())
    return decided


def measure(model: HookedAdder, digits: int = 100, n: int = 16, rounds: int = 3) -> dict[str, float]:
    """Decisions per second by either route, and their ratio, at one generation batch size per key."""
    problems = model.task.evaluation_problems(digits, n)
    plan = plan_for(model, problems)
    rates: dict[str, list[float]] = {"score": [], "greedy, one by one": [], f"greedy, batches of {plan.batch}": []}
    for _ in range(rounds):
        for name, work in (
            ("score", lambda: score(model, problems).decisions),
            ("greedy, one by one", lambda: generate_all(model, problems, 1, digits)),
            (f"greedy, batches of {plan.batch}", lambda: generate_all(model, problems, plan.batch, digits)),
        ):
            began = time.perf_counter()
            decided = work()
            rates[name].append(decided / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> int:
    torch.set_num_threads(1)
    model = load_checkpoint(FIXTURE)
    rates = measure(model)
    print("| 100 digits, one thread | decisions per second | score is so many times faster |")
    print("|---|---:|---:|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.0f} | {rates['score'] / rate:.1f} |")
    return 0 if rates["score"] >= AT_LEAST * rates["greedy, one by one"] else 1


if __name__ == "__main__":
    sys.exit(main())
