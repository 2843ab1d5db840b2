"""The study's claims on the shipped checkpoints: its figure, ours, the command, and whether the claim holds.

Every figure comes from forward passes over saved checkpoints. A claim is cut into statements that can fail; it is
*held* where all are true of what was measured, *partly* where some are, *not_held* where none is, and *not_run* where a
checkpoint that it needs is not there. The bars below were set before the figures were taken, and are not moved to them.

The study's seeds are not ours: the effect must match, not the digits. Its C3 to C6 are about a model with three digits
a token; here they are asked of the one-digit models that dilute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from interp.decisions import Score, score
from interp.diagnosis import head_trials
from interp.interventions import parse_intervention
from interp.ledger import Ledger, build_ledger
from interp.roles import Role, head_roles
from models.addition import STATES, handmade_problems
from models.checkpoint import load_checkpoint
from models.config import InputError
from models.transformer import HookedAdder

HELD, PARTLY, NOT_HELD, NOT_RUN = "held", "partly", "not_held", "not_run"

EXACT = 0.95  # share of problems exact from which a model counts as exact at a length
FAILS = 0.5  # and below which it counts as failing
ABRUPT = 11  # first wrong column from which a failure starts beyond all columns of training
CONCENTRATED = 0.9  # share of the wrong decisions in one state from which they lie only there
UNCHANGED = 0.05  # by how much a mean attention share may move and count as unchanged
NO_KEY_HIGH = 0.1  # mean share of the best far key below which no single one is high
ALL_REPAIRED = 0.01  # share of the wrong decisions that may be left and count as none
SINK_BELOW = 3.0  # highest median sink score that counts as near 0 (the study's reach 2.5)
TIMES_SINK = 10.0  # how many times its sink's score a lookup's target must score
CLIFF = (2, 6)  # times the longest training length, between which the cliff counts as at about four times
PATCH_MOVES = 0.1  # change of the share of exact problems from which a patch repairs or starves

BASELINE = ("1digit-rotary-seed0",)
DILUTING = tuple(f"1digit-rotary2d-seed{seed}" for seed in range(3))
PRESSED = tuple(f"1digit-rotary2d-pressure-seed{seed}" for seed in range(3))
LEDGER_PROBLEMS = 20
HEAD_PROBLEMS = 10
PATCHES = ("window=10", "sink-boost=log", "sink-boost=2log")


@dataclass(frozen=True)
class Outcome:
    """One claim as measured: a row of ``leaksum reproduce``."""

    id: str
    claim: str
    study: str
    ours: str
    command: str
    verdict: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Claim:
    """What the study says, the checkpoints it needs, and a measurement: figures in words, and which statements hold."""

    id: str
    claim: str
    study: str
    needs: tuple[str, ...]
    measure: Callable[[Sequence[Subject], int], tuple[str, list[bool]]]


class Subject:
    """One checkpoint, with what several claims ask of it measured once."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.model: HookedAdder = load_checkpoint(folder)
        self._scores: dict[tuple[int, int, str], Score] = {}

    @property
    def seed(self) -> str:
        return self.name.rsplit("seed", 1)[-1]

    def score(self, digits: int, problems: int, edit: str = "") -> Score:
        """Under an intervention, if one is named; ``problems=0`` takes the hand-made ones."""
        key = (digits, problems, edit)
        if key not in self._scores:
            edits = [parse_intervention(edit)] if edit else []
            drawn = (
                handmade_problems(digits) if problems == 0 else self.model.task.evaluation_problems(digits, problems)
            )
            self._scores[key] = score(self.model, drawn, edits)
        return self._scores[key]

    def ledger(self, digits: int) -> Ledger:
        return build_ledger(self.model, self.model.task.evaluation_problems(digits, LEDGER_PROBLEMS))

    @cached_property
    def trained(self) -> Ledger:
        return self.ledger(self.model.config.task.max_digits)

    @cached_property
    def longer(self) -> Ledger:
        return self.ledger(100)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return head_roles(self.trained, self.longer).roles

    def performing(self) -> list[Role]:
        """Heads that perform a lookup at training length."""
        return [role for role in self.roles if role.lookup is not None]


def _verdict(statements: Sequence[bool]) -> str:
    return NOT_HELD if not any(statements) else HELD if all(statements) else PARTLY


def _per_seed(subjects: Sequence[Subject], figure: Callable[[Subject], str]) -> str:
    return " / ".join(figure(subject) for subject in subjects)


def _c1(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    baseline, fixed, pressed = _named(subjects, BASELINE), _named(subjects, DILUTING), _named(subjects, PRESSED)
    lengths = (11, 12, 15, 20, 40)
    fails = [next((n for n in lengths if s.score(n, problems).exact < FAILS), None) for s in baseline]
    plain = [s.score(200, problems).exact for s in fixed]
    hard = [s.score(200, 0).exact for s in pressed]
    with_pressure = [s.score(200, problems).exact for s in pressed]
    ours = (
        f"plain rotary falls below {FAILS:g} at {fails[0]} digits; decay and sink at 200: {_shares(plain)}; "
        f"with sink pressure, which the study has not: {_shares(with_pressure)} (hand-made carries {_shares(hard)})"
    )
    return ours, [fails[0] is not None and fails[0] <= 40, min(plain) >= EXACT]


def _c2(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    random, hard = ([s.score(200, n).exact for s in subjects] for n in (problems, 0))
    return f"{_shares(random)}; hand-made carries {_shares(hard)}", [x >= EXACT for x in (*random, *hard)]


def _c3(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    scores = [s.score(100, problems) for s in subjects]
    failing = [s for s, found in zip(subjects, scores, strict=True) if found.exact < EXACT]
    parts: list[str] = []
    statements: list[bool] = []  # where no seed fails there is no failure to describe, and the claim is not held
    for subject in failing:
        found = subject.score(100, problems)
        wrong = {name: found.count(found.state == i)["wrong"] for i, name in enumerate(STATES)}
        moved = [role.share[1] - role.share[0] for role in subject.performing()]
        worst = min(moved, default=0.0)
        where = ", ".join(f"{n} {name}" for name, n in wrong.items() if n)
        parts.append(
            f"seed {subject.seed}: first wrong column {found.first_wrong_column}; {where}; "
            f"share on targets moves by {worst:+.2f} at most"
        )
        statements += [
            (found.first_wrong_column or 0) >= ABRUPT,
            wrong["first_ended"] >= CONCENTRATED * found.n_wrong,
            abs(worst) <= UNCHANGED,
        ]
    counts = " / ".join(str(found.n_wrong) for found in scores)
    return f"{counts} of {scores[0].decisions} decisions wrong; " + "; ".join(parts), statements


def _c4(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    crowds, highest, decisive = [], [], []
    for subject in subjects:
        heads = [role.head for role in subject.roles if role.is_crowd_head]
        crowds.append(len(heads))
        best = [view.far_max_share[head].mean() for view in subject.longer.lookups.values() for head in heads]
        highest.append(float(max(best, default=0.0)))
        drawn = subject.model.task.evaluation_problems(100, HEAD_PROBLEMS)
        trials = head_trials(subject.model, drawn, parse_intervention("far"))
        decisive.append(sum(trial.matters for trial in trials))
    failing = [s.score(100, problems).exact < EXACT for s in subjects]
    names = ", ".join(s.name.removeprefix("1digit-rotary2d-") for s in subjects)
    ours = (
        f"{names}: heads with most of their attention on far keys {_counts(crowds)}; mean share of the best far key "
        f"there at most {max(highest):.3f}; heads whose far keys decide anything {_counts(decisive)}"
    )
    only = all((n > 0) == fails for n, fails in zip(decisive, failing, strict=True))
    return ours, [min(crowds) > 0, max(highest) < NO_KEY_HIGH, only and any(failing)]


def _c5(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    pairs = [(s.score(100, problems).n_wrong, s.score(100, problems, "far").n_wrong) for s in subjects]
    controls = [s.score(100, problems, "random-control").n_wrong for s in subjects]
    ours = "; ".join(
        f"seed {s.seed}: {before} -> {after} (as many random keys: {control})"
        for s, (before, after), control in zip(subjects, pairs, controls, strict=True)
    )
    return ours, [after <= ALL_REPAIRED * before for before, after in pairs if before]


def _c6(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    sinks, targets = [], []
    for subject in subjects:
        views = subject.trained.lookups
        per_head = np.median(np.concatenate([view.sink for view in views.values()], axis=-1), axis=-1)
        sinks.append((float(per_head.min()), float(per_head.max())))
        found = [float(np.median(views[str(r.lookup), True].target[r.head])) for r in subject.performing()]
        targets.append((min(found), max(found)))
    ours = "; ".join(
        f"seed {s.seed}: sinks {low:.1f} to {high:.1f}, lookups {least:.1f} to {most:.1f}"
        for s, (low, high), (least, most) in zip(subjects, sinks, targets, strict=True)
    )
    ratio = all(least >= TIMES_SINK * high for (_, high), (least, _) in zip(sinks, targets, strict=True))
    return ours, [max(high for _, high in sinks) <= SINK_BELOW, ratio]


def _c7(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    failing, passing = _named(subjects, DILUTING), _named(subjects, PRESSED)
    rows: list[tuple[str, list[float], list[float]]] = []
    for edit in ("", *PATCHES):
        ill, well = ([s.score(200, problems, edit).exact for s in group] for group in (failing, passing))
        rows.append((edit or "none", ill, well))
    ours = "; ".join(f"{name}: {_shares(a)}, with pressure {_shares(b)}" for name, a, b in rows)
    (_, before, healthy), (_, windowed, still), *boosted = rows
    unharmed = all(after >= was - PATCH_MOVES for after, was in zip(still, healthy, strict=True))
    return ours, [
        all(after >= was + PATCH_MOVES for after, was in zip(windowed, before, strict=True)),
        unharmed,
        all(min(after) < min(healthy) - PATCH_MOVES for _, _, after in boosted),
    ]


def _c16(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    (subject,) = subjects
    trained = subject.model.config.task.max_digits
    lengths = [trained * k for k in (1, 2, 3, 4, 5, 6, 8)]
    exact = {n: subject.score(n, problems).exact for n in lengths}
    cliff = next((n for n in lengths if exact[n] < FAILS), None)
    ours = f"trained up to {trained} digits: " + ", ".join(f"{n}: {share:.2f}" for n, share in exact.items())
    return ours, [exact[trained] >= EXACT, cliff is not None and trained * CLIFF[0] <= cliff <= trained * CLIFF[1]]


def _shares(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _counts(values: Sequence[int]) -> str:
    return " / ".join(map(str, values))


def _named(subjects: Sequence[Subject], names: Sequence[str]) -> list[Subject]:
    return [subject for subject in subjects if subject.name in names]


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "C1",
            "one-digit tokens: the baseline fails at about 40 digits; rotary 2D, decay and sink are exact at 200",
            "~40 -> 1.00 / 1.00 / 1.00",
            (*BASELINE, *DILUTING, *PRESSED),
            _c1,
        ),
        Claim(
            "C2",
            "three-digit right-cut tokens, same fix, exact at 200 digits",
            ".99 / 1.00 / .49",
            tuple(f"3digit-rotary2d-seed{seed}" for seed in range(3)),
            _c2,
        ),
        Claim(
            "C3",
            "decisions wrong at 100 digits start abruptly beyond training, only where the first number has ended; "
            "attention to the target is unchanged",
            "0 / 0 / 591 of 5250, from chunk 17",
            DILUTING,
            _c3,
        ),
        Claim(
            "C4",
            "every model has heads that give most of their attention to far keys, no single one high; only in a "
            "failing model do they decide anything",
            "figure",
            (*DILUTING, *PRESSED),
            _c4,
        ),
        Claim("C5", "removing far keys at evaluation removes all errors", "591 -> 0", DILUTING, _c5),
        Claim("C6", "sink scores against real lookups' scores", "0.7-2.5 against 50-100", DILUTING, _c6),
        Claim(
            "C7",
            "patches at 200 digits: a window at the trained distance repairs the diluted models only; a stronger sink "
            "starves models that did not need it",
            "table of 200-digit accuracy",
            (*DILUTING, *PRESSED),
            _c7,
        ),
        Claim(
            "C16",
            "adding 20-40 digit problems to training moves the cliff to about four times the longest training length",
            "40 -> 160",
            ("1digit-rotary-long-seed0",),
            _c16,
        ),
    )
}


def reproduce(
    ids: Sequence[str] = (),
    fixtures: str | Path = "fixtures",
    problems: int = 150,
    *,
    progress: Callable[[str], object] = lambda what: None,
) -> list[Outcome]:
    """Measure these claims (all when none is named) on the checkpoints in a folder.

    Args:
        problems: random problems at each length; the study took 150.

    Raises:
        InputError: an id that names no claim, no such folder, or ``problems`` below 1.
    """
    if problems < 1:
        raise InputError(f"problems must be at least 1, got {problems}")
    folder = Path(fixtures)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; give the folder that holds the shipped checkpoints")
    for name in ids:
        if name not in CLAIMS:
            raise InputError(f"no claim is called {name[:60]!r}; there are {', '.join(CLAIMS)}")
    subjects: dict[str, Subject] = {}
    outcomes = []
    for claim in (CLAIMS[name] for name in dict.fromkeys(ids or CLAIMS)):
        missing = [name for name in claim.needs if not (folder / name).is_dir()]
        if missing:
            ours, verdict = f"not shipped: {', '.join(missing)}", NOT_RUN
        else:
            progress(f"{claim.id}: {claim.claim}")
            for name in claim.needs:
                subjects.setdefault(name, Subject(folder / name))
            ours, statements = claim.measure([subjects[name] for name in claim.needs], problems)
            verdict = _verdict(statements)
        command = f"leaksum reproduce {claim.id}"
        outcomes.append(Outcome(claim.id, claim.claim, claim.study, ours, command, verdict))
    return outcomes


def markdown(outcomes: Sequence[Outcome]) -> list[str]:
    """The table for the README."""
    lines = ["| claim | the study | here | |", "|---|---|---|---|"]
    for found in outcomes:
        verdict = found.verdict.replace("_", " ")
        lines.append(f"| {found.id}: {found.claim} | {found.study} | {found.ours} | {verdict} |")
    return lines


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``leaksum reproduce --json``."""
    return {"claims": [outcome.to_json() for outcome in outcomes]}
