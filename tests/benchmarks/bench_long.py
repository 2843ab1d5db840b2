"""Time and peak memory against length: a ledger over all heads, blockwise, beside the usual way.

``run_with_cache + einops`` keeps every score and weight, as one would write it at first, and reduces them to the
shares of the same classes and the far keys' log-mass, second moment and maximum. Everything runs on one problem, one
thread, in one process, alternating; a figure is the least of its rounds, since noise only adds. Peak memory is the
growth of the resident set's high-water mark, each in a process of its own. Run with ``make bench``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from einops import einsum
from peak import grown, in_own_process

import interp.passes as passes
from interp.ledger import build_ledger
from models.addition import Batch, Problem
from models.checkpoint import load_checkpoint
from models.transformer import HookedAdder

FIXTURE = Path(__file__).parents[2] / "fixtures" / "1digit-rotary2d-pressure-seed0"
LENGTHS = (350, 700, 2000, 4000)
CACHED_UP_TO = 700  # digits; beyond, full matrices take gigabytes
ROUNDS = 2


def problem(digits: int) -> Problem:
    return 10**digits - 1, 10**digits - 7


def forward(model: HookedAdder, digits: int, *, pool_from: int) -> None:
    passes._POOL_FROM, passes._BLOCK = pool_from, 64
    for _ in passes.run_problems(model, [problem(digits)]):
        pass


def ledger(model: HookedAdder, digits: int, *, pool_from: int, block: int = 64) -> None:
    passes._POOL_FROM, passes._BLOCK = pool_from, block
    build_ledger(model, [problem(digits)])


def cached(model: HookedAdder, digits: int) -> dict[str, dict[str, torch.Tensor]]:
    """Per lookup, for the queries that have something to find: what its ledger says, ``[layer, head, query]``."""
    batch = model.task.encode([problem(digits)])
    with torch.no_grad():
        _, cache = model.run_with_cache(
            batch.tokens,
            batch.mask,
            names_filter=lambda name: name.endswith(("hook_attn_scores", "hook_pattern", "hook_sink_scores")),
        )
    classes, positions = classes_of(model, batch), torch.arange(batch.tokens.shape[1])
    causal = positions <= positions[:, None]
    found = {}
    for name, lookup in batch.lookups.items():
        queries = lookup.present[0].nonzero()[:, 0]
        keys = lookup.targets[0, queries]
        target = (keys[..., None] == positions).any(1)
        number = torch.where(batch.column[0] >= 0, batch.row[0], -1)
        beside = ((keys[:, :1] - positions).abs() == 1) & (number == number[keys[:, :1]]) & causal[queries]
        parts = []
        for layer in range(model.cfg.n_layers):
            scores, pattern = cache["attn_scores", layer][0, :, queries], cache["pattern", layer][0, :, queries]
            sink = cache[f"blocks.{layer}.attn.hook_sink_scores"][0, :, queries]
            own, rest = scores.masked_fill(~target, -torch.inf), scores.masked_fill(target, -torch.inf)
            mass = rest.logsumexp(-1)
            far = rest.masked_fill(~classes[-1][queries], -torch.inf)
            shares = [share(pattern, among[queries] & ~target) for among in classes]
            part = {
                "leak": (torch.logaddexp(mass, sink) - own.logsumexp(-1)).exp(),
                "gap": own.logsumexp(-1) - rest.amax(-1),
                "n_eff": (2 * mass - (2 * rest).logsumexp(-1)).exp(),
                "share": share(pattern, target),
                "class_shares": torch.stack(shares, dim=-1),
                "beside_share": share(pattern, beside),
                "far_max": far.amax(-1),
            }
            parts.append(part)
        found[name] = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
    return found


def share(pattern: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    return einsum(pattern, among.float(), "head query key, query key -> head query")


def check(model: HookedAdder, digits: int = 100) -> None:
    """The two ways give the same answers."""
    books = build_ledger(model, [problem(digits)]).lookups
    for name, usual in cached(model, digits).items():
        for key, value in usual.items():
            torch.testing.assert_close(
                torch.tensor(getattr(books[name, True], key)).float(), value, rtol=1e-3, atol=1e-5
            )


def classes_of(model: HookedAdder, batch: Batch) -> list[torch.Tensor]:
    """Self, separator, near, far, as masks ``[query, key]``."""
    vocab, apart = model.task.vocabulary, model.config.attention.separator_column
    column = torch.where(batch.column[0] < 0, apart, batch.column[0])
    itself = torch.eye(len(column), dtype=torch.bool)
    separator = ((batch.tokens == vocab.plus) | (batch.tokens == vocab.equals)) & ~itself
    other = torch.ones_like(itself).tril() & ~itself & ~separator
    far = (column[:, None] - column[None]).abs() > model.config.trained_distance
    return [itself, separator, other & ~far, other & far]


ROUTES: dict[str, Callable[[HookedAdder, int], None]] = {
    "forward, every key": lambda m, n: forward(m, n, pool_from=10**9),
    "forward, far keys pooled": lambda m, n: forward(m, n, pool_from=0),
    "ledger, every key": lambda m, n: ledger(m, n, pool_from=10**9),
    "ledger, far keys pooled": lambda m, n: ledger(m, n, pool_from=0),
    "ledger, full matrices": lambda m, n: ledger(m, n, pool_from=10**9, block=10**6),
    "run_with_cache + einops": cached,
}
FULL = ("ledger, full matrices", "run_with_cache + einops")


def measure_peak(route: str, digits: int) -> float:
    torch.set_num_threads(1)
    model = load_checkpoint(FIXTURE)
    ROUTES[route](model, 5)  # what the first call alone takes
    return grown(lambda: ROUTES[route](model, digits))


def measure(lengths: tuple[int, ...] = LENGTHS, rounds: int = ROUNDS) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds and MB per (route, digits)."""
    model = load_checkpoint(FIXTURE)
    check(model)
    cells = [(route, n) for n in lengths for route in ROUTES if n <= CACHED_UP_TO or route not in FULL]
    seconds = dict.fromkeys(cells, float("inf"))
    for _ in range(rounds):
        for route, n in cells:
            began = time.process_time()
            ROUTES[route](model, n)
            seconds[route, n] = min(seconds[route, n], time.process_time() - began)
    return {cell: (seconds[cell], in_own_process(__file__, *cell)) for cell in cells}


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(measure_peak(sys.argv[1], int(sys.argv[2]))))
        return 0
    torch.set_num_threads(1)
    found = measure()
    print("| one thread, one problem | " + " | ".join(f"{n} digits" for n in LENGTHS) + " |")
    print("|---|" + "---:|" * len(LENGTHS))
    for route in ROUTES:
        row = [found.get((route, n)) for n in LENGTHS]
        print(f"| {route} | " + " | ".join(f"{c[0]:.2f} s, {c[1]:.0f} MB" if c else "" for c in row) + " |")
    time_of = {cell: s for cell, (s, _) in found.items()}
    memory_of = {cell: mb for cell, (_, mb) in found.items()}
    usual = ("run_with_cache + einops", 700)
    checks = {
        "ledger over forward, every key, 2000 digits: at most 2": (
            time_of["ledger, every key", 2000] / time_of["forward, every key", 2000],
            lambda x: x <= 2,
        ),
        "memory at 4000 over 2000 digits, every key: at most 2.3": (
            memory_of["ledger, every key", 4000] / memory_of["ledger, every key", 2000],
            lambda x: x <= 2.3,
        ),
        "memory at 4000 over 2000 digits, pooled: at most 2.3": (
            memory_of["ledger, far keys pooled", 4000] / memory_of["ledger, far keys pooled", 2000],
            lambda x: x <= 2.3,
        ),
        "usual way over ledger, time, every key, 700 digits: at least 3": (
            time_of[usual] / time_of["ledger, every key", 700],
            lambda x: x >= 3,
        ),
        "usual way over ledger, time, pooled, 700 digits: at least 20": (
            time_of[usual] / time_of["ledger, far keys pooled", 700],
            lambda x: x >= 20,
        ),
        "usual way over ledger, memory, every key, 700 digits: at least 20": (
            memory_of[usual] / memory_of["ledger, every key", 700],
            lambda x: x >= 20,
        ),
        "usual way over ledger, memory, pooled, 700 digits: at least 20": (
            memory_of[usual] / memory_of["ledger, far keys pooled", 700],
            lambda x: x >= 20,
        ),
    }
    print()
    for what, (ratio, holds) in checks.items():
        print(f"- {what}: {ratio:.2f}{'' if holds(ratio) else ' (missed)'}")
    return 0 if all(holds(ratio) for ratio, holds in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
