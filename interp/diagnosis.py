"""Which failure it is, and the intervention that proves it.

A diagnosis scores the decisions, applies interventions to the saved checkpoint, and asks of each how many of the wrong
decisions it repairs. A cause is *proved* when the intervention it predicts repairs the failing decisions and a matched
control (as many random keys removed per query) does not. The heads are found by the same test, head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interp.decisions import Reach, Score, reach, score
from interp.interventions import Head, Intervention, Scope, parse_intervention
from models.addition import STATES, Problem
from models.transformer import HookedAdder

HEALTHY = 0.99  # share of problems exact from which there is no failure to explain (the study's own bar, C2)
LEFT_WRONG = 0.01  # of the wrong decisions, the share that may stay wrong under the predicted intervention
CONTROL_LEAVES = 0.5  # and the share that must be wrong under its matched control
HEAD_MATTERS = 0.1  # share of the wrong decisions repaired in one head alone from which that head is named


@dataclass(frozen=True)
class Trial:
    """What one intervention did to the decisions: how many are wrong under it, and how many wrong ones it repaired."""

    name: str
    scope: Head | None
    wrong: int
    exact: float
    repaired: int
    broken: int


@dataclass(frozen=True)
class Verdict:
    """The cause, the heads it acts in, the evidence in numbers, and the intervention that proves it."""

    cause: str
    heads: tuple[Head, ...]
    evidence: tuple[str, ...]
    proved_by: str | None
    proved: bool


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``leaksum diagnose`` says of one checkpoint at one length."""

    digits: int
    score: Score
    reach: Reach
    trials: tuple[Trial, ...]
    head_trials: tuple[Trial, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum diagnose``, less the checkpoint."""
        wrong = max(self.score.n_wrong, 1)
        return {
            "digits": self.digits,
            "score": {k: v for k, v in self.score.to_json().items() if k != "run"},
            "reach": self.reach.to_json(),
            "heads": [
                {"layer": t.scope[0], "head": t.scope[1], "intervention": t.name, "repaired": t.repaired / wrong}
                for t in self.head_trials
                if t.scope is not None
            ],
            "interventions": [
                {"name": t.name, "wrong": t.wrong, "exact": t.exact, "repaired": t.repaired, "broken": t.broken}
                for t in self.trials
            ],
            "verdict": {
                "cause": self.verdict.cause,
                "heads": [list(head) for head in self.verdict.heads],
                "evidence": list(self.verdict.evidence),
                "proved_by": self.verdict.proved_by,
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
    progress: Any = lambda what: None,
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
    lengths = sorted({n for n in (model.config.task.max_digits, digits // 4, digits // 2) if 1 <= n < digits})
    progress("reach at shorter lengths")
    curve = Reach({**reach(model, lengths, problems, seed=seed).scores, digits: base})
    if base.exact >= HEALTHY:
        healthy = (_share(base, "problems exact"), f"{base.n_wrong} of {base.decisions} decisions wrong")
        return Diagnosis(digits, base, curve, (), (), Verdict("none", (), healthy, None, True))

    failing = np.flatnonzero(~base.problem_exact)
    names = ["far", "random-control", f"window={model.config.trained_distance}"]
    if model.config.attention.sink:
        names += ["sink-boost=log", "sink-boost=2log"]
    trials = []
    for name in names:
        progress(f"under {name}")
        trials.append(_trial(model, drawn, base, parse_intervention(name, seed=seed)))
    by_name = {trial.name: trial for trial in trials}
    far, control = by_name["far"], by_name["random-control"]
    proved = far.wrong < LEFT_WRONG * base.n_wrong and control.wrong > CONTROL_LEAVES * base.n_wrong

    subset = [drawn[i] for i in failing]
    failed = score(model, subset)
    head_trials = []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            progress(f"far-key ablation in head {layer}.{head} alone")
            alone = Intervention("far", scope=Scope(only=frozenset({(layer, head)})))
            head_trials.append(_trial(model, subset, failed, alone, (layer, head)))
    heads = tuple(
        t.scope
        for t in sorted(head_trials, key=lambda t: -t.repaired)
        if t.scope is not None and t.repaired >= HEAD_MATTERS * base.n_wrong
    )
    evidence = (
        f"{base.n_wrong} of {base.decisions} decisions wrong, {_share(base, 'problems exact')}",
        f"first wrong column {base.first_wrong_column}; wrong by state: {_states(base)}",
        f"far-key ablation leaves {far.wrong} wrong ({far.repaired} repaired, {far.broken} broken)",
        f"as many random keys removed: {control.wrong} wrong ({control.repaired} repaired, {control.broken} broken)",
        *(
            f"far-key ablation in head {t.scope[0]}.{t.scope[1]} alone repairs {t.repaired}"
            for t in head_trials
            if t.scope in heads and t.scope
        ),
    )
    verdict = Verdict(
        "dilution" if proved else "unexplained", heads if proved else (), evidence, "far" if proved else None, proved
    )
    return Diagnosis(digits, base, curve, tuple(trials), tuple(head_trials), verdict)


def _trial(
    model: HookedAdder, problems: Sequence[Problem], base: Score, intervention: Intervention, head: Head | None = None
) -> Trial:
    after = score(model, problems, [intervention])
    return Trial(
        name=intervention.name,
        scope=head,
        wrong=after.n_wrong,
        exact=after.exact,
        repaired=int((base.wrong & ~after.wrong).sum()),
        broken=int((~base.wrong & after.wrong).sum()),
    )


def _share(found: Score, what: str) -> str:
    low, high = found.exact_interval
    return f"{found.exact:.2f} of {found.problems} {what} (95% interval {low:.2f} to {high:.2f})"


def _states(found: Score) -> str:
    counts = {name: found.count(found.state == i) for i, name in enumerate(STATES)}
    return ", ".join(f"{name} {c['wrong']} of {c['decisions']}" for name, c in counts.items() if c["decisions"])
