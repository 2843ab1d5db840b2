"""Which failure it is, and the intervention that proves it.

A diagnosis sees the ledger and what interventions do, never the name of a position scheme. It scores the decisions,
compares the ledger at a training length with the ledger at the failing length, and edits the saved checkpoint:

=============  ========================================================  ==========================================
cause          the edit that must repair the wrong decisions             what it says
=============  ========================================================  ==========================================
miscounting    round-gates: the gates of the column counters, or of all  counters drift apart between the rows, and
               counters and their resets, are rounded to 0 or 1          exact ones would not
aliasing       drop-best-far=K: the few best far keys are removed        a few far keys score like a target
drift          restore-far: far keys' scores are lowered to the highest  scores at untrained distances left the
               at the edge of the trained distances; or                  range that training constrained
               restore-targets: targets' scores are raised by what
               their median lost since training
dilution       far: all far keys are removed, while neither of the       every far key scores as in training, and
               above repairs; or restore-number: only as many of the     there are too many of them
               nearest keys are kept as a query saw in training
starvation     restore-sink: the sink's score is lowered to what         the sink outweighs lookups whose own scores
               training showed, or sink-boost=-X: by X; while            are as in training
               restoring the targets' scores does not repair
=============  ========================================================  ==========================================

They are tried in this order, the more specific first, restored distances last. The cause is *proved* when its edit
leaves under 1% of at least 10 wrong decisions and both matched controls, as many random keys removed and random keys
with as much attention (for rounded gates: gates moved as far at random), leave more than 10%: they may not leave few,
for where the crowd is nearly everything, random keys are the crowd thinned. Where no edit does so, the one that leaves
least names the cause if that is under 10%, and nothing is proved. The heads are found by the same edit, in one head
alone and in all but that head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from interp.counters import PAIRS, has_counters, probe_counters
from interp.decisions import Reach, Score, reach, score
from interp.interventions import (
    Edit,
    Head,
    Intervention,
    RestoreDistances,
    RestoreFar,
    RestoreNumber,
    RestoreSink,
    RestoreTargets,
    Scope,
)
from interp.leak import majority_gap
from interp.ledger import CLASSES, Ledger, build_ledger
from interp.roles import Roles, head_roles
from models.addition import LOOKUPS, STATES, Problem, decimal_string
from models.transformer import HookedAdder

HEALTHY = 0.99  # share of problems exact from which there is no failure to explain (the study's own bar, C2)
LEFT_WRONG = 0.01  # of the wrong decisions, the share that may stay wrong under the proving edit
MOSTLY = 0.1  # the share that may stay wrong under an edit that names the cause without proving it
CONTROL_LEAVES = 0.1  # and the share that must be wrong under the matched control, which thins a crowd too
CONTROLS = ("random-control", "mass-control")  # as many random keys, and random keys with as much attention
ENOUGH = 10  # wrong decisions, without which nothing is proved
FEW_KEYS = (4, 8)  # far keys that aliasing may be about: one per row, or a few periods of a rotation in each
CROWD = 4  # how many times FEW_KEYS a query's far keys must be before dropping few of them tells few from many
EDGE = 0.25  # of the trained distances, the outer share that says what training showed of keys about to be far
COLUMNS = 2  # to either side, over which a target's median score at a column is taken
PARTLY = 0.25  # mean share on a lookup's target from which a head has a part in it, so that its fall can matter
SINK_STEPS = (1, 2, 4, 8)  # by how much the sink is lowered in search of starvation, the smallest that repairs
HEAD_MATTERS = 0.1  # share of the wrong decisions that an edit must repair in one head, or miss without it
LEDGER_LINES = 2  # lookups shown of the head that matters most: those whose target lost most
COUNT_PROBLEMS = 20  # behind what is said of counters
HEAD_PROBLEMS = 16  # failing problems that the head-by-head test runs on


@dataclass(frozen=True)
class Trial:
    """What one edit did: how many decisions are wrong under it, wrong ones it repaired, right ones it broke."""

    name: str
    wrong: int
    exact: float
    repaired: int
    broken: int


@dataclass(frozen=True)
class HeadTrial:
    """An edit in one head alone, and in all but that head; ``wrong`` decisions under neither."""

    head: Head
    wrong: int
    alone: Trial
    without: Trial

    @property
    def repaired_alone(self) -> float:
        """The share of the wrong decisions that the edit repairs in this head alone; 0 where none is wrong."""
        return self.alone.repaired / self.wrong if self.wrong else 0.0

    @property
    def left_without(self) -> float:
        """The share of the wrong decisions that is left by the edit in all other heads; 0 where none is wrong."""
        return self.without.wrong / self.wrong if self.wrong else 0.0

    @property
    def matters(self) -> bool:
        return self.repaired_alone >= HEAD_MATTERS or self.left_without >= HEAD_MATTERS

    def to_json(self) -> dict[str, Any]:
        """One row of ``leaksum ablate --each-head``."""
        layer, head = self.head
        return {
            "layer": layer,
            "head": head,
            "wrong_alone": self.alone.wrong,
            "repaired_alone": self.repaired_alone,
            "wrong_without": self.without.wrong,
            "left_without": self.left_without,
        }


@dataclass(frozen=True)
class Proof:
    """An edit that repairs, and of its controls the one that leaves least: of ``wrong`` decisions, in columns ``below``
    one (all if None), the edit leaves ``left`` and the control ``control_left``.
    """

    edit: str
    control: str
    below: int | None
    wrong: int
    left: int
    control_left: int

    @property
    def share_left(self) -> float:
        return self.left / self.wrong if self.wrong else 1.0


@dataclass(frozen=True)
class Verdict:
    """The cause, the heads it acts in, the evidence in numbers, and the repair that proves it, or fails to."""

    cause: str
    heads: tuple[Head, ...]
    evidence: tuple[str, ...]
    proof: Proof | None
    proved: bool


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``leaksum diagnose`` says of one checkpoint at one length.

    ``trained`` and ``longer`` are the ledgers at the longest training length and at ``digits``.
    """

    digits: int
    score: Score
    reach: Reach
    trained: Ledger
    longer: Ledger
    roles: Roles
    trials: tuple[Trial, ...]
    head_trials: tuple[HeadTrial, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum diagnose``, less the checkpoint."""
        by_head = {t.head: t for t in self.head_trials}
        heads = []
        for row in self.roles.to_json():
            trial = by_head.get((row["layer"], row["head"]))
            causal = {
                "repaired_alone": trial.repaired_alone if trial else None,
                "left_without": trial.left_without if trial else None,
                "decides": trial.matters if trial else False,
            }
            heads.append({**row, **causal})
        return {
            "digits": self.digits,
            "score": {k: v for k, v in self.score.to_json().items() if k != "run"},
            "reach": self.reach.to_json(),
            "heads": heads,
            "interventions": [asdict(t) for t in self.trials],
            "verdict": {
                "cause": self.verdict.cause,
                "heads": [list(head) for head in self.verdict.heads],
                "evidence": list(self.verdict.evidence),
                "proved_by": self.verdict.proof.edit if self.verdict.proof else None,
                "proved": self.verdict.proved,
            },
            "run": self.score.run,
        }


def diagnose(
    model: HookedAdder,
    digits: int,
    problems: int = 50,
    *,
    seed: int = 0,
    progress: Callable[[str], object] = lambda what: None,
) -> Diagnosis:
    """Say why the model fails at ``digits`` digits, and prove it by interventions.

    Args:
        problems: at this length; each shorter length of the reach curve takes as many.
        progress: told what is being run.

    Raises:
        ProblemError: ``digits`` or ``problems`` below 1.
    """
    drawn = model.task.evaluation_problems(digits, problems, seed)
    progress(f"scoring {problems} problems of {digits} digits")
    base = score(model, drawn, seed=seed)
    within = model.config.task.max_digits
    lengths = sorted({n for n in (within, digits // 4, digits // 2) if 1 <= n < digits})
    progress("scoring shorter problems")
    curve = Reach({**reach(model, lengths, problems, seed=seed).scores, digits: base})
    progress("keeping the ledger")
    trained = build_ledger(model, model.task.evaluation_problems(min(within, digits), problems, seed), distances=True)
    longer = build_ledger(model, drawn)
    found = _Investigation(model, drawn, base, trained, longer, seed, progress)
    head_trials: tuple[HeadTrial, ...] = ()
    verdict = Verdict("none", (), (found.failure(),), None, True)
    if base.exact < HEALTHY:
        verdict, head_trials = found.verdict()
        short = curve.scores.get(within)
        if short is not None and short.exact < HEALTHY:
            words = f"{short.exact:.2f} of {short.problems} problems of {within} digits are exact"
            untrained = f"it fails within its training lengths already ({words}): train longer before asking of length"
            verdict = replace(verdict, evidence=(untrained, *verdict.evidence))
    return Diagnosis(
        digits=digits,
        score=base,
        reach=curve,
        trained=trained,
        longer=longer,
        roles=head_roles(trained, longer),
        trials=tuple(found.trials.values()),
        head_trials=head_trials,
        verdict=verdict,
    )


@dataclass(frozen=True)
class _Candidate:
    """A cause, the edit that it predicts to repair, the controls that must not, and the columns that this is about."""

    cause: str
    edit: Edit
    controls: tuple[Edit, ...]
    below: int | None = None  # None: all


class _Investigation:
    """The trials of one diagnosis, each run once, and what follows from them."""

    def __init__(
        self,
        model: HookedAdder,
        problems: Sequence[Problem],
        base: Score,
        trained: Ledger,
        longer: Ledger,
        seed: int,
        progress: Callable[[str], object],
    ):
        self.model, self.problems, self.base, self.seed, self.progress = model, problems, base, seed, progress
        self.trained, self.longer = trained, longer
        self.controls = tuple(Intervention(name, seed=seed) for name in CONTROLS)
        self.trials: dict[str, Trial] = {}
        self.scores: dict[str, Score] = {}

    def verdict(self) -> tuple[Verdict, tuple[HeadTrial, ...]]:
        candidates = self._candidates()
        for control in self.controls:
            self.run(control)
        for candidate in candidates:
            for edit in (candidate.edit, *candidate.controls):
                self.run(edit)
        found = self._cause(candidates)
        head_trials = self._head_trials(found) if found is not None else ()
        heads = tuple(t.head for t in sorted(head_trials, key=lambda t: -t.repaired_alone) if t.matters)
        evidence = [self.failure(), self._where(), *self._trial_lines(candidates), *self._counter_lines()]
        evidence += self._ledger_lines(heads)
        evidence += [
            f"head {t.head[0]}.{t.head[1]}: the edit there alone repairs {t.repaired_alone:.0%}, "
            f"in all other heads it leaves {t.left_without:.0%}"
            for t in head_trials
            if t.matters
        ]
        if found is None:
            return Verdict("unexplained", heads, tuple(evidence), None, False), head_trials
        proof = self.proof(found)
        return Verdict(found.cause, heads, tuple(evidence), proof, proves(proof)), head_trials

    def _candidates(self) -> list[_Candidate]:
        """Causes with the edit that each predicts to repair, the more specific first."""
        ceiling = self._ceiling()
        candidates: list[tuple[str, Edit]] = []
        counting = []
        if has_counters(self.model):
            for which in ("column", "all"):
                edit, control = (Intervention(f"{what}-gates", which, seed=self.seed) for what in ("round", "jitter"))
                counting.append(_Candidate("miscounting", edit, (control,)))
        few = [number for number in FEW_KEYS if self._far_keys() >= CROWD * number]
        candidates += [("aliasing", Intervention("drop-best-far", str(number))) for number in few]
        if self._far_keys() >= 1:
            candidates.append(("drift", RestoreFar(ceiling)))
            candidates.append(("dilution", Intervention("far")))
            candidates.append(("dilution", RestoreNumber(self._trained_number())))
        candidates.append(("drift", RestoreTargets(self._lift())))
        if self.model.config.attention.sink:
            highest = np.maximum.reduce([view.sink.max(-1) for view in self.trained.lookups.values()])
            candidates.append(("starvation", RestoreSink(torch.from_numpy(highest))))
            candidates += [("starvation", Intervention("sink-boost", str(-step))) for step in SINK_STEPS]
        found = [*counting, *(_Candidate(cause, edit, self.controls) for cause, edit in candidates)]
        if RestoreDistances.applies(self.model):
            below = RestoreDistances.columns(self.model)
            found.append(_Candidate("drift", RestoreDistances(), (RestoreDistances(count=False),), below))
        return found

    def _ceiling(self) -> torch.Tensor:
        """Per head the highest score that keys at the edge of the trained distances reached, ``[layer, head]``."""
        at = self.trained.distances
        assert at is not None
        edge = at.maximum[..., int(at.trained_distance * (1 - EDGE)) + 1 : at.trained_distance + 1]
        return torch.from_numpy(edge.max(-1, initial=-np.inf))

    def _lift(self) -> torch.Tensor:
        """What targets' scores lost since training, ``[layer, head, lookup, column]``, 0 where nothing.

        Medians of training against medians of the same lookup here, over columns ``COLUMNS`` to either side, for heads
        that have a part in the lookup.
        """
        columns = int(max(view.column.max() for view in self.longer.lookups.values())) + 1
        lift = np.zeros((self.model.cfg.n_layers, self.model.cfg.n_heads, len(LOOKUPS), columns))
        for i, name in enumerate(LOOKUPS):
            then, now = (ledger.lookups.get((name, True)) for ledger in (self.trained, self.longer))
            if then is None or now is None:
                continue
            part = then.share.mean(-1) >= PARTLY
            usual = np.median(then.target, axis=-1)
            for column in range(columns):
                here = abs(now.column - column) <= COLUMNS
                if here.any():
                    lost = usual - np.median(now.target[..., here], axis=-1)
                    lift[:, :, i, column] = np.where(part & np.isfinite(lost), lost.clip(min=0), 0)
        return torch.from_numpy(lift)

    def _trained_number(self) -> int:
        """How many keys a query saw at the longest training length, in the median."""
        return int(np.median(np.concatenate([view.keys for view in self.trained.lookups.values()])))

    def _far_keys(self) -> float:
        """How many far keys a query sees, in the mean of the lookup that sees the most."""
        return max(float(view.far_keys.mean()) for view in self.longer.lookups.values())

    def run(self, edit: Edit) -> None:
        if edit.name not in self.trials:
            self.progress(f"under {edit.name}")
            after = self.scores[edit.name] = score(self.model, self.problems, [edit])
            self.trials[edit.name] = _trial(edit, self.base, after)

    def _cause(self, candidates: list[_Candidate]) -> _Candidate | None:
        """The first whose edit repairs; else the one that leaves least, if that is little."""
        for candidate in candidates:
            if repairs(self.proof(candidate)):
                return candidate
        least = min(candidates, key=lambda candidate: self.proof(candidate).share_left)
        return least if self.proof(least).share_left <= MOSTLY else None

    def proof(self, candidate: _Candidate) -> Proof:
        where = _within(self.base, candidate.below)
        left = {e.name: int(self.scores[e.name].wrong[where].sum()) for e in (candidate.edit, *candidate.controls)}
        control = min((e.name for e in candidate.controls), key=lambda name: left[name])
        wrong, edit = int(self.base.wrong[where].sum()), candidate.edit.name
        return Proof(edit, control, candidate.below, wrong, left[edit], left[control])

    def _head_trials(self, candidate: _Candidate) -> tuple[HeadTrial, ...]:
        failing = [self.problems[i] for i in np.flatnonzero(~self.base.problem_exact)[:HEAD_PROBLEMS]]
        return head_trials(self.model, failing, candidate.edit, candidate.below, progress=self.progress)

    # Evidence, in words and numbers

    def failure(self) -> str:
        low, high = self.base.exact_interval
        return (
            f"{self.base.n_wrong} of {self.base.decisions} decisions wrong; {self.base.exact:.2f} of "
            f"{self.base.problems} problems exact (95% interval {low:.2f} to {high:.2f})"
        )

    def _where(self) -> str:
        counts = {name: self.base.count(self.base.state == i) for i, name in enumerate(STATES)}
        states = ", ".join(f"{name} {c['wrong']} of {c['decisions']}" for name, c in counts.items() if c["decisions"])
        eos = self.base.count(self.base.eos)
        return (
            f"first wrong column {self.base.first_wrong_column}; wrong by state: {states} "
            f"(ends of sums among them: {eos['wrong']} of {eos['decisions']})"
        )

    def _trial_lines(self, candidates: list[_Candidate]) -> list[str]:
        names = [e.name for c in candidates for e in (c.edit, *c.controls) if e.name not in CONTROLS]
        shown = [name for name in names if not name.startswith("sink-boost")]
        lowered = [trial for name, trial in self.trials.items() if name.startswith("sink-boost")]
        lines = [
            f"{name}: {self.trials[name].wrong} wrong ({self.trials[name].repaired} repaired, "
            f"{self.trials[name].broken} broken)"
            for name in [*shown, *CONTROLS]
        ]
        if lowered:
            best = min(lowered, key=lambda trial: trial.wrong)
            lines.append(f"sink lowered, at best {best.name}: {best.wrong} wrong")
        for candidate in candidates:
            if candidate.below is not None:
                proof = self.proof(candidate)
                lines.append(
                    f"in columns 0 to {candidate.below - 1}, all that training had, {proof.wrong} are wrong; "
                    f"{proof.edit} leaves {proof.left}, {proof.control} {proof.control_left}"
                )
        return lines

    def _counter_lines(self) -> list[str]:
        """Where the counts of two rows come half a column apart, as the training length predicts and as it is."""
        if not has_counters(self.model):
            return []
        digits = max(len(decimal_string(max(problem))) for problem in self.problems)
        lengths = (self.model.config.task.max_digits, digits)
        before, now = (probe_counters(self.model, n, COUNT_PROBLEMS, seed=self.seed).counters for n in lengths)
        of = [i for i, probe in enumerate(before) if probe.counts_columns]
        if not of:
            return [f"none of {len(before)} counters follows the column"]
        predicted = min(before[i].predicted_half_column(pair) for i in of for pair in PAIRS)
        actual = [half for i in of for pair in PAIRS if (half := now[i].half_column(pair)) is not None]
        exact = sum(before[i].one_a_digit for i in of)
        return [
            f"{len(of)} of {len(before)} counters follow the column, {exact} at one a digit; by their rates in "
            f"training the first would drift half a column apart between two rows by column {predicted:.0f}, and "
            + (f"does by column {min(actual)}" if actual else f"none does within {digits} digits")
        ]

    def _ledger_lines(self, heads: tuple[Head, ...]) -> list[str]:
        """The head that matters most, at training length and at this one, where something or nothing is to be found."""
        if not heads:
            return []
        layer, head = heads[0]
        far = CLASSES.index("far")
        lines = []
        for key, now in self.longer.lookups.items():
            if key not in self.trained.lookups:
                continue
            cells, taken = [], []
            for view in (self.trained.lookups[key], now):
                shares = view.share[layer, head], view.class_shares[layer, head, :, far], view.sink_share[layer, head]
                target, crowd, sink = (x.mean() for x in shares)
                n_eff = np.median(view.n_eff[layer, head])
                cells.append(f"target {target:.2f}, far {crowd:.2f}, sink {sink:.2f}, N_eff {n_eff:.0f}")
                taken.append(target)
            scores = [np.median(x[layer, head]) for x in (now.target, now.sink)]
            best = now.far_max_share[layer, head].mean()
            cells[1] += f"; best far key {best:.2f}"
            if key[1]:
                cells[1] += f"; scores: target {scores[0]:.1f}" + (
                    f", sink {scores[1]:.1f}" * bool(np.isfinite(scores[1]))
                )
            what = key[0].replace("_", " ") + ("" if key[1] else " with nothing to find")
            lines.append((taken[1] - taken[0], f"head {layer}.{head}, {what}: in training {cells[0]}; now {cells[1]}"))
        keys = float(np.mean(self.longer.lookups["first_same_column", True].keys))
        bar = f"a majority against all {keys:.0f} keys that a decision sees takes a gap of {majority_gap(keys):.1f}"
        return [line for _, line in sorted(lines)[:LEDGER_LINES]] + [bar]


def repairs(proof: Proof) -> bool:
    """Whether the edit leaves next to none of the wrong decisions."""
    return proof.share_left <= LEFT_WRONG


def proves(proof: Proof) -> bool:
    """Whether the edit repairs and its control does not, on enough wrong decisions to say so."""
    return repairs(proof) and proof.wrong >= ENOUGH and proof.control_left > CONTROL_LEAVES * proof.wrong


def head_trials(
    model: HookedAdder,
    problems: Sequence[Problem],
    edit: Edit,
    below: int | None = None,
    *,
    progress: Callable[[str], object] = lambda what: None,
) -> tuple[HeadTrial, ...]:
    """Transplant an edit head by head: into one head alone, and into all but that head.

    A head whose attention far keys take may matter to no decision. Whether it does is a causal question, and this is
    the answer: activation patching's necessity and sufficiency (Heimersheim and Nanda 2404.15255), with an edit in the
    place of a patch.

    Args:
        below: count decisions in columns below this one alone.
    """
    base = score(model, problems)
    wrong = int(base.wrong[_within(base, below)].sum())
    trials = []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            progress(f"{edit.name} in head {layer}.{head} alone, and in all others")
            one = frozenset({(layer, head)})
            scoped = (replace(edit, scope=scope) for scope in (Scope(only=one), Scope(without=one)))  # type: ignore[type-var]
            alone, without = (_trial(e, base, score(model, problems, [e]), below) for e in scoped)
            trials.append(HeadTrial((layer, head), wrong, alone, without))
    return tuple(trials)


def _within(base: Score, below: int | None) -> np.ndarray:
    """Bool ``[decision]``: the decisions in columns below this one; all where it is None."""
    return np.ones(base.decisions, dtype=bool) if below is None else base.column < below


def _trial(edit: Edit, base: Score, after: Score, below: int | None = None) -> Trial:
    where = _within(base, below)
    return Trial(
        name=edit.name,
        wrong=int(after.wrong[where].sum()),
        exact=after.exact,
        repaired=int((base.wrong & ~after.wrong)[where].sum()),
        broken=int((~base.wrong & after.wrong)[where].sum()),
    )
