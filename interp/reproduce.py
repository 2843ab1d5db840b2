"""The study's claims on the shipped checkpoints: its figure, ours, the command, and whether the claim holds.

Every figure comes from forward passes over saved checkpoints. A claim is cut into statements that can fail; it is
*held* where all are true of what was measured, *partly* where some are, *not_held* where none is, and *not_run* where a
checkpoint that it needs is not there. The bars below were set before the figures were taken, and are not moved to them.

The study's seeds are not ours: the effect must match, not the digits. Its C3 to C6 are about a model with three digits
a token; here they are asked of the one-digit models that dilute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from interp.counters import HALF, NULL_HEAD, PAIRS, CounterProbe, Counting, probe_counters
from interp.decisions import Score, score
from interp.diagnosis import head_trials
from interp.interventions import parse_intervention
from interp.ledger import Ledger, build_ledger
from interp.roles import COLLAPSE, Role, head_roles
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
KERNELS_PEAK = 0.5  # share of column counters whose kernels peak at a whole lookup, from which they are for lookups
NULL_UNCHANGED = 0.1  # by how much a null key's mean share may move from training to 120 digits and be unchanged
MOST = 0.5  # share of those asked from which most do
HALF_AGREES = 2.0  # factor within which a computed column and the measured one agree
ASKED = 0.05  # difference of rates that training at 10 digits asks to stay below: half a column after 10 digits

BASELINE = ("1digit-rotary-seed0",)
DILUTING = tuple(f"1digit-rotary2d-seed{seed}" for seed in range(3))
PRESSED = tuple(f"1digit-rotary2d-pressure-seed{seed}" for seed in range(3))
THREE_DIGIT = tuple(f"3digit-rotary2d-seed{seed}" for seed in range(3))
ENTMAX = tuple(f"3digit-rotary2d-entmax15-seed{seed}" for seed in range(3))
COUNTING = tuple(f"1digit-counters-seed{seed}" for seed in range(3))
EXACT_COUNTING = tuple(f"1digit-counters-exact-seed{seed}" for seed in range(3))
SWITCHED = tuple(f"1digit-counters-switched-seed{seed}" for seed in range(3))
HALF_EXACT = ("1digit-counters-exact-soft-seed0",)
LOOKUP_PEAKS = (-1, 0, 1)  # the same count, and one to either side
LEDGER_PROBLEMS = 20
COUNTED = 30  # problems behind counter probes
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
        self._counted: dict[int, Counting] = {}

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

    def counting(self, digits: int) -> Counting:
        if digits not in self._counted:
            self._counted[digits] = probe_counters(self.model, digits, COUNTED)
        return self._counted[digits]

    def column_counters(self, digits: int) -> list[CounterProbe]:
        """Of the counters that follow the column in training, what they do at this length."""
        trained = self.counting(self.model.config.task.max_digits).counters
        return [p for p, then in zip(self.counting(digits).counters, trained, strict=True) if then.counts_columns]

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


def _c8(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    pairs = [[s.score(100, problems, edit).exact for s in subjects] for edit in ("", "normalizer=entmax15")]
    margins = []
    for subject in subjects:
        resting = [role.head for role in subject.roles if role.is_sink_head]
        best = [np.median((v.far_max - v.sink)[head]) for v in subject.longer.lookups.values() for head in resting]
        margins.append(float(max(best, default=math.nan)))
    above = " / ".join("(no such head)" if math.isnan(x) else f"{x:+.1f}" for x in margins)
    ours = (
        f"at 100 digits {_shares(pairs[0])} -> {_shares(pairs[1])}; where heads rest on the sink, the best far key is "
        f"above it by {above} at most, in the median"
    )
    helped = [after >= before + PATCH_MOVES for before, after in zip(*pairs, strict=True)]
    return ours, [any(helped), max(pairs[1]) < EXACT, any(x >= 0 for x in margins)]


def _c9(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    groups = [_named(subjects, names) for names in (THREE_DIGIT, ENTMAX)]
    resting = [[role for s in group for role in s.roles if role.is_sink_head] for group in groups]
    collapsed = [sum(role.sink[1] < COLLAPSE * role.sink[0] for role in found) for found in resting]
    reached = [[s.score(200, problems).exact for s in group] for group in groups]
    shares = [n / max(1, len(found)) for n, found in zip(collapsed, resting, strict=True)]
    ours = "; ".join(
        f"{name}: {n} of {len(found)} sink heads collapse, {_shares(exact)} at 200 digits"
        for name, n, found, exact in zip(("softmax", "1.5-entmax"), collapsed, resting, reached, strict=True)
    )
    return ours, [shares[1] < shares[0], float(np.mean(reached[1])) < float(np.mean(reached[0]))]


def _c10(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    followers = [s.column_counters(s.model.config.task.max_digits) for s in subjects]
    of = len(subjects[0].counting(subjects[0].model.config.task.max_digits).counters)
    peaks = Counter(p.kernel_peak for found in followers for p in found)
    shown = ", ".join(f"{peak:+d} in {n}" if peak else f"0 in {n}" for peak, n in peaks.most_common(4))
    exact = [sum(p.one_a_digit for p in found) for found in followers]
    ours = (
        f"{_counts([len(found) for found in followers])} of {of} counters each, {_counts(exact)} of them within 5% of "
        f"one a digit in every row; their kernels peak at query less key {shown}"
    )
    at_lookups = sum(n for peak, n in peaks.items() if peak in LOOKUP_PEAKS)
    return ours, [all(followers), min(exact) > 0, at_lookups >= KERNELS_PEAK * max(1, sum(peaks.values()))]


def _c11(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    nulls = [s.counting(120).null_keys for s in subjects]
    resting = [[null for null in found if null.rests_there] for found in nulls]
    steady = [sum(abs(n.share - n.share_trained) <= NULL_UNCHANGED for n in found) for found in resting]
    first = max(null.first_token_trained for found in nulls for null in found)
    ours = (
        f"{_counts([len(found) for found in resting])} of {len(nulls[0])} heads each; within {NULL_UNCHANGED:g} of it "
        f"at 120 digits {_counts(steady)}; highest mean share of the first token {first:.2f}"
    )
    most = all(n >= MOST * len(found) for n, found in zip(steady, resting, strict=True))
    return ours, [all(resting), most, first < NULL_HEAD]


def _c12(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    lengths = (10, 25, 40, 60, 200)
    exact = {n: [s.score(n, problems).exact for s in subjects] for n in lengths}
    ours = "; ".join(f"{n} digits {_shares(found)}" for n, found in exact.items())
    return ours, [min(exact[10]) >= EXACT, min(exact[25]) >= EXACT, max(exact[40]) >= FAILS, max(exact[200]) < FAILS]


def _c13(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    parts, extended = [], []
    for subject in subjects:
        plain, *rounded = (
            [subject.score(n, problems, edit).exact for n in (25, 40, 60)]
            for edit in ("", "round-gates=column", "round-gates=all")
        )
        cells = [f"{_shares(plain)}", *(f"{_shares(found)}" for found in rounded)]
        parts.append(f"seed {subject.seed}: {cells[0]} -> {cells[1]}, all gates and resets {cells[2]}")
        extended.append(any(after >= was + PATCH_MOVES for was, after in zip(plain, rounded[0], strict=True)))
    return "at 25 / 40 / 60 digits, " + "; ".join(parts), [any(extended), sum(extended) >= MOST * len(subjects)]


def _c14(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    parts, agree, rates = [], [], []
    for subject in subjects:
        trained = subject.column_counters(subject.model.config.task.max_digits)
        longer = subject.column_counters(100)
        pairs = [
            (p.predicted_half_column(pair), now.half_column(pair))
            for p, now in zip(trained, longer, strict=True)
            for pair in PAIRS
        ]
        rates.append(float(np.median([HALF / predicted for predicted, _ in pairs])) if pairs else math.nan)
        reached = [(predicted, actual) for predicted, actual in pairs if actual is not None]
        close = [1 / HALF_AGREES <= (actual + 1) / predicted <= HALF_AGREES for predicted, actual in reached]
        agree.append(sum(close) >= MOST * len(close) if close else False)
        parts.append(
            f"seed {subject.seed}: rates differ by {rates[-1]:.1%} in the median; {len(reached)} of {len(pairs)} pairs "
            f"come half a column apart within 100 digits, {sum(close)} where computed but for a factor {HALF_AGREES:g}"
        )
    beside = [[_beside(s, n) for s in subjects] for n in (10, 60)]
    ours = (
        "; ".join(parts)
        + f"; mean share of the +-1 column, in the head most on its target, {_shares(beside[0])} at 10 digits, "
    )
    ours += f"{_shares(beside[1])} at 60"
    return ours, [all(rate <= ASKED for rate in rates), any(agree), all(b > a for a, b in zip(*beside, strict=True))]


def _beside(subject: Subject, digits: int) -> float:
    """Mean share of the keys beside the target, in the head and lookup that have most on the target in training."""
    views = {name: view for (name, present), view in subject.trained.lookups.items() if present}
    shares = {name: view.share.mean(-1) for name, view in views.items()}
    best = max(shares, key=lambda name: float(shares[name].max()))
    head = np.unravel_index(int(shares[best].argmax()), shares[best].shape)
    return float(subject.ledger(digits).lookups[best, True].beside_share[head].mean())


def _c15(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    switched, mixed = _named(subjects, SWITCHED), _named(subjects, HALF_EXACT)
    trained = [s.score(10, problems).exact for s in switched]
    reached = [s.score(40, problems).exact for s in (*switched, *mixed)]
    counts = {True: 0, False: 0}
    for subject in mixed:
        exact = subject.model.config.attention.exact_counters
        for probe in subject.column_counters(subject.model.config.task.max_digits):
            counts[probe.counter < exact] += 1
    ours = (
        f"switched: {_shares(trained)} at 10 digits, {_shares(reached[:-1])} at 40; one exact and one soft from the "
        f"start: {sum(counts.values())} column counters, {counts[True]} of them exact, {reached[-1]:.2f} at 40"
    )
    broken = sum(share < FAILS for share in trained)
    return ours, [broken >= MOST * len(switched), counts[True] == 0 < counts[False], reached[-1] < FAILS]


def _c17(subjects: Sequence[Subject], problems: int) -> tuple[str, list[bool]]:
    exact = {n: [s.score(n, k).exact for s in subjects] for n, k in ((40, problems), (200, problems), (1000, 5))}
    hard = [s.score(200, 0).exact for s in subjects]
    ours = (
        "; ".join(f"{n} digits {_shares(found)}" for n, found in exact.items())
        + f"; hard carries at 200 {_shares(hard)}"
    )
    return ours, [min(exact[200]) >= EXACT and min(hard) >= EXACT, min(exact[1000]) >= EXACT]


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
            THREE_DIGIT,
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
            "C8",
            "1.5-entmax swapped in at evaluation helps the diluted model partly: its best far keys score as high as "
            "the sink",
            ".51 -> .67",
            DILUTING,
            _c8,
        ),
        Claim(
            "C9",
            "with 1.5-entmax from the start fewer sink heads collapse past the trained range, and reach is worse",
            "6 of 23 against 12 of 23; .07 / .94 / .93",
            (*THREE_DIGIT, *ENTMAX),
            _c9,
        ),
        Claim(
            "C10",
            "counters that follow the position in their own number with correlation above .9, many at one count a "
            "digit, kernels peaking at the same and the next column",
            "13 / 11 / 6",
            COUNTING,
            _c10,
        ),
        Claim(
            "C11",
            "heads with over 30% on the null key, most unchanged from training to 120 digits; none rests on the first "
            "token",
            "18 / 18 / 21",
            COUNTING,
            _c11,
        ),
        Claim(
            "C12",
            "counters are exact in training and nearly so at 25 digits, less at 40 and 60, and fail at 200",
            "1.00 x3; .99 / .99 / .95; .93 / .92 / .24; .74 / .69 / 0; 0",
            COUNTING,
            _c12,
        ),
        Claim(
            "C13",
            "rounding the column counters' gates at evaluation extends reach, on the seeds that use them",
            "seeds 0 and 1 yes, 2 unchanged",
            COUNTING,
            _c13,
        ),
        Claim(
            "C14",
            "a difference of e a digit between the rows' rates is half a column after 1 / (2 e) digits, and the heads "
            "then read the neighbouring digit; training at 10 digits asks for about 5%",
            "computed",
            COUNTING,
            _c14,
        ),
        Claim(
            "C15",
            "switching to exact gates after training breaks most seeds; of one exact and one soft counter a head, the "
            "soft ones count",
            "2 of 3 to reach 0; 12 counters, 0 exact; .39 at 40",
            (*SWITCHED, *HALF_EXACT),
            _c15,
        ),
        Claim(
            "C16",
            "adding 20-40 digit problems to training moves the cliff to about four times the longest training length",
            "40 -> 160",
            ("1digit-rotary-long-seed0",),
            _c16,
        ),
        Claim(
            "C17",
            "open in the study: counters driven from soft to exact, with no soft path left, reach lengths that soft "
            "ones do not",
            "unsolved",
            EXACT_COUNTING,
            _c17,
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
