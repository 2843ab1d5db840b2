"""Audit: which heads lose their targets as the context grows, from what length, and what repairs it.

A language model is measured on cases (:mod:`interp.cases`), each a sequence of tokens with its decisions and the keys
that they need. An adder is measured on its own task, addition, whose lengths are digits: its decisions are those of
``leaksum score``, its lookups and their numbers those of ``leaksum leak``, its verdict that of ``leaksum diagnose``.

Per head and length: the target's share, leak, gap and N_eff, as in the ledger of the adders; the share of the first
token, of the learned sink where there is one, and of far keys, those further back than the shortest length audited.
Three things are kept apart that are all called sinks: a learned **null sink**, which takes part in the softmax and has
no value (``null_sink_share``); the **first token**, a key like others that heads come to rest on
(``first_token_share``, and ``first_token_importance`` as Gu et al. 2410.10781 define it); and a **biased key 0**, a
learned key that stands before the first token, which no family here has: the self-test refuses a model with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import interp.bridge as bridge
from interp.bridge import Block, LanguageModel
from interp.cases import TASKS, Case, induction, passkey, read_cases
from interp.decisions import Score, score, wilson_interval
from interp.interventions import Head, Intervention, head_words, parse_intervention
from interp.leak import effective_number, leak_from_masses, share_from_leak
from interp.memory import free_memory, require
from interp.passes import run_problems
from interp.roles import COLLAPSE
from models.config import InputError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

    from models.addition import Batch, Problem

ADDITION = "addition"
FIRST_TOKEN = 0.3  # mean weight on the first token from which a head counts as a sink (Gu et al. 2410.10781)
PERFORMS = 0.3  # mean share on the targets at the shortest length from which a head is one that finds them
HEALTHY = 0.95  # share of decisions right from which there is nothing to explain
REPAIRS = 0.5  # of the wrong decisions, the share that an intervention must repair to be named
MOST_CASES, MOST_TOKENS = 10_000, 10**6  # of each length; of a case
BATCHES = (64, 32, 16, 8, 4, 2, 1)  # cases run together
_KEPT_BYTES = 3 * 7 * 8  # a decision's floats per head; thrice, while parts are joined


@dataclass(frozen=True)
class LengthScore:
    """How the decisions at one length went, in tokens, or of an adder in digits.

    ``exact``: share of cases whose every decision is right, with Wilson's interval over cases.
    """

    length: int
    decisions: int
    wrong: int
    exact: float
    low: float
    high: float

    @property
    def right(self) -> float:
        """Share of decisions."""
        return 1 - self.wrong / self.decisions


@dataclass(frozen=True)
class HeadRow:
    """One head at one length. Leak, gap and N_eff are medians over decisions, shares are means.

    Without targets the best other key is taken for one. ``null_sink_share`` is None where there is no learned sink, and
    the first token's where a window leaves it to nobody. ``first_token_importance`` is its mean weight over all
    queries. ``lookup`` and ``present``: which lookup of an adder, as in ``leaksum leak``; None of a language model,
    whose heads have one each.
    """

    layer: int
    head: int
    key_head: int
    length: int
    target_share: float
    leak: float
    gap: float
    n_eff: float
    first_token_share: float | None
    null_sink_share: float | None
    far_share: float
    first_token_importance: float | None
    lookup: str | None = None
    present: bool | None = None


@dataclass(frozen=True)
class SinkRow:
    """Share of heads whose mean weight on the first token, over all queries, exceeds a threshold, and what evenly
    spread attention gives there. Heads whose window leaves the first token out are not counted; None: all are.
    """

    length: int
    share_of_heads: float | None
    uniform_value: float
    threshold: float = FIRST_TOKEN


@dataclass(frozen=True)
class EditTrial:
    """What an edit, or several in order, did at a length: of its decisions, wrong ones repaired, right ones broken.

    ``heads``: those that it acts in; None: all.
    """

    name: str
    heads: tuple[Head, ...] | None
    length: int
    decisions: int
    wrong: int
    repaired: int
    broken: int

    @property
    def before(self) -> int:
        """Decisions that are wrong without it."""
        return self.wrong + self.repaired - self.broken


@dataclass(frozen=True)
class Verdict:
    """From what length decisions fail, the heads that have lost their targets, the intervention that repairs most."""

    fails_from: int | None
    heads: tuple[Head, ...]
    repaired_by: str | None
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """``batches``: how many cases ran together, pass by pass, of the first measurement; no number depends on it beyond
    rounding.
    """

    model: str
    task: str
    lengths: tuple[LengthScore, ...]
    heads: tuple[HeadRow, ...]
    sinks: tuple[SinkRow, ...]
    trials: tuple[EditTrial, ...]
    verdict: Verdict
    batches: tuple[int, ...] = ()

    @property
    def unit(self) -> str:
        """What lengths are counted in."""
        return "digits" if self.task == ADDITION else "tokens"

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum audit``, less the run."""
        last = self.sinks[-1]
        metric = {
            "threshold": last.threshold,
            "share_of_heads": last.share_of_heads,
            "uniform_value": last.uniform_value,
        }
        return {
            "model": self.model,
            "task": self.task,
            "lengths": [asdict(row) for row in self.lengths],
            "heads": [asdict(row) for row in self.heads],
            "sink_metric": {**metric, "by_length": [asdict(row) for row in self.sinks]},
            "interventions": [asdict(trial) for trial in self.trials],
            "verdict": asdict(self.verdict),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row a head, length and, of adders, lookup."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.heads])


def audit(
    model: LanguageModel | HookedAdder,
    lengths: Sequence[int],
    task: str | Path | None = None,
    cases: int = 8,
    *,
    interventions: Sequence[Intervention] = (),
    name: str = "adder",
    seed: int = 0,
    progress: Callable[[str], object] = lambda what: None,
) -> Audit:
    """Measure decisions and heads at each length, and what repairs the longest.

    Args:
        lengths: in tokens; of an adder, digits of the longer operand.
        task: ``induction`` (the default of language models), ``passkey``, or a file of cases, whose lengths are then
            its own; ``addition``, of adders, which have no other.
        cases: of each length.
        interventions: also tried, in this order and together, at every length, each in the heads of its scope.
        name: what an adder is called; language models have a name.
        progress: told what is being run.

    Raises:
        InputError: a model that fails its self-test, lengths beyond its positions, an unusable task, or an
            intervention that does not apply to the model.
    """
    if not 1 <= cases <= MOST_CASES:
        raise InputError(f"cases must be from 1 to {MOST_CASES}, got {cases}")
    if isinstance(model, HookedAdder):
        return _audit_adder(model, lengths, task, cases, interventions, name, seed, progress)
    bridge.self_test(model, seed)
    by_length = _cases(model, lengths, "induction" if task is None else str(task), cases, seed)
    return _Audited(model, by_length, str(task or "induction"), interventions, seed, progress).audit()


def _cases(model: LanguageModel, lengths: Sequence[int], task: str, n: int, seed: int) -> dict[int, list[Case]]:
    if task == ADDITION:
        raise InputError(f"addition is the task of leaksum's own checkpoints; {model.name} takes {', '.join(TASKS)}")
    if task not in TASKS:
        if not Path(task).is_file():
            raise InputError(f"no task is called {task[:60]!r}, and no such file is there; {' or '.join(TASKS)} are")
        found: dict[int, list[Case]] = {}
        for case in sorted(read_cases(task, model), key=lambda case: len(case.tokens)):
            found.setdefault(len(case.tokens), []).append(case)
        return found
    if not lengths:
        raise InputError("give at least one length")
    most = MOST_TOKENS if model.limit is None else min(model.limit, MOST_TOKENS)
    if max(lengths) > most:
        raise InputError(f"{model.name} has {most} positions, got a length of {max(lengths)}; take shorter ones")
    make = induction if task == "induction" else passkey
    return {length: make(model.vocabulary, length, n, seed) for length in sorted(set(lengths))}


# A language model


class _Audited:
    """One audit of a language model: its cases, and far keys those beyond the shortest of them."""

    def __init__(
        self,
        model: LanguageModel,
        by_length: dict[int, list[Case]],
        task: str,
        interventions: Sequence[Intervention],
        seed: int,
        progress: Callable[[str], object],
    ):
        self.model, self.by_length, self.task, self.progress = model, by_length, task, progress
        self.shortest = min(by_length)
        self.interventions = interventions
        self.edits = [language_edit(each, self.shortest, model) for each in interventions]
        if self.edits:  # what does not apply is said before anything is measured
            model.run(torch.zeros(1, 2, dtype=torch.long), edits=self.edits)
        self.batches: list[int] = []
        self.measured = self._measure(by_length, (), self.batches)
        self.trials: list[EditTrial] = []

    def _measure(
        self, by_length: dict[int, list[Case]], edits: Sequence[bridge.Edit], batches: list[int] | None = None
    ) -> dict[int, _Measured]:
        cases = [case for drawn in by_length.values() for case in drawn]
        results = iter(_run(self.model, cases, self.shortest, edits, self.progress, batches))
        return {length: _Measured([next(results) for _ in drawn]) for length, drawn in by_length.items()}

    def audit(self) -> Audit:
        scores = tuple(
            LengthScore(
                length,
                len(found.wrong),
                int(found.wrong.sum()),
                found.exact_cases / found.cases,
                *wilson_interval(found.exact_cases, found.cases),
            )
            for length, found in self.measured.items()
        )
        rows = tuple(row for length, found in self.measured.items() for row in found.rows(self.model, length))
        sinks = tuple(found.sinks(length) for length, found in self.measured.items())
        if self.edits:
            heads = _acted(self.interventions, self.model.n_layers, self.model.n_heads)
            self._try(_together(self.interventions), heads, self.by_length, self.edits)
        verdict = self._verdict(scores, rows)
        return Audit(self.model.name, self.task, scores, rows, sinks, tuple(self.trials), verdict, tuple(self.batches))

    def _try(
        self,
        name: str,
        heads: tuple[Head, ...] | None,
        by_length: dict[int, list[Case]],
        edits: Sequence[bridge.Edit],
    ) -> None:
        self.progress(f"under {name}")
        for length, found in self._measure(by_length, edits).items():
            before = self.measured[length].wrong
            self.trials.append(_edit_trial(name, heads, length, before, found.wrong))

    def _verdict(self, scores: Sequence[LengthScore], rows: Sequence[HeadRow]) -> Verdict:
        first, last = scores[0], scores[-1]
        at = {(row.layer, row.head, row.length): row for row in rows}
        failing = [score.length for score in scores if score.right < HEALTHY]
        evidence = [f"{score.wrong} of {score.decisions} decisions wrong at {score.length} tokens" for score in scores]
        if not failing:
            return Verdict(None, (), None, (*evidence, *map(_trial_words, self.trials)))
        if first.right < HEALTHY:
            evidence.append(
                f"the shortest length, {first.length} tokens, fails already: take shorter ones to see it begin"
            )
        lost = []
        for layer, head in np.ndindex(self.model.n_layers, self.model.n_heads):
            then, now = (at[layer, head, length] for length in (first.length, last.length))
            if then.target_share >= PERFORMS and now.target_share < COLLAPSE * then.target_share:
                lost.append((now.target_share - then.target_share, (layer, head)))
                evidence.append(
                    f"head {layer}.{head}: share on its targets {then.target_share:.2f} at {first.length} tokens, "
                    f"{now.target_share:.2f} at {last.length}; far keys {now.far_share:.2f}, gap {then.gap:.1f} -> "
                    f"{now.gap:.1f}, N_eff {then.n_eff:.0f} -> {now.n_eff:.0f}"
                )
        if not lost:
            evidence.append(
                f"no head with {PERFORMS:g} of its attention on targets at {first.length} tokens lost half of it"
            )
        for name in self._repairs():
            edit = language_edit(parse_intervention(name), self.shortest, self.model)
            self._try(name, None, {last.length: self.by_length[last.length]}, [edit])
        evidence += map(_trial_words, self.trials)
        repaired = _repair(self.trials, last)
        if repaired is None:
            evidence.append("none of these repairs half of what is wrong")
        return Verdict(failing[0], tuple(head for _, head in sorted(lost)), repaired, tuple(evidence))

    def _repairs(self) -> list[str]:
        """The edits that are tried where a model fails."""
        names = ["far", f"first-and-window=4,{self.shortest}", "temperature=0.8", "temperature=0.6"]
        names += [f"ssmax={1 / np.log(self.shortest):.3g}"] * (self.shortest > 1)  # 1 at the shortest length
        if self.measured[self.shortest].null_share is not None:
            names += ["sink-boost=log", "sink-boost=-2"]
        return names


def _edit_trial(
    name: str, heads: tuple[Head, ...] | None, length: int, before: np.ndarray, after: np.ndarray
) -> EditTrial:
    counts = (len(before), int(after.sum()), int((before & ~after).sum()), int((~before & after).sum()))
    return EditTrial(name, heads, length, *counts)


def _repair(trials: Sequence[EditTrial], last: LengthScore) -> str | None:
    """The edit that repairs most of the longest length's wrong decisions, less what it breaks, if that is enough."""
    there = [trial for trial in trials if trial.length == last.length]
    best = min(there, key=lambda trial: trial.wrong, default=None)
    if best is None or not last.wrong or last.wrong - best.wrong < REPAIRS * last.wrong:
        return None
    return best.name + head_words(best.heads)


def _together(interventions: Sequence[Intervention]) -> str:
    return ", then ".join(each.name for each in interventions)


def _acted(interventions: Sequence[Intervention], n_layers: int, n_heads: int) -> tuple[Head, ...] | None:
    """The heads that any of them acts in; None for all."""
    every = list(np.ndindex(n_layers, n_heads))
    scopes = [each.scope for each in interventions]
    found = [h for h in every if any((not x.only or h in x.only) and h not in x.without for x in scopes)]
    return None if len(found) == len(every) else tuple((int(layer), int(head)) for layer, head in found)


def _trial_words(trial: EditTrial) -> str:
    wrong = trial.wrong + trial.repaired - trial.broken
    return (
        f"{trial.name}{head_words(trial.heads)} at {trial.length}: {trial.repaired} of {wrong} wrong decisions "
        f"repaired, {trial.broken} broken"
    )


@dataclass(frozen=True)
class _Result:
    """Of one case: ``wrong`` ``[decision]``; ``kept`` ``[layer, head, decision]``: log-masses of its targets, of the
    rest, the rest's second moment, the best of the rest, the first token, far keys, the sink; ``first`` ``[layer,
    head]``: mean weight on the first token over all queries; ``windowed`` ``[layer]``: a window leaves it to nobody.
    """

    wrong: np.ndarray
    kept: tuple[np.ndarray, ...]
    first: np.ndarray
    windowed: np.ndarray
    has_sink: bool


class _Measured:
    """Cases of one length: ``wrong`` ``[decision]``, the rest ``[layer, head, decision]``, ``first`` ``[layer,
    head]``, ``windowed`` ``[layer]``.
    """

    def __init__(self, results: Sequence[_Result]):
        self.cases = len(results)
        self.wrong = np.concatenate([result.wrong for result in results])
        self.exact_cases = sum(not result.wrong.any() for result in results)
        masses = zip(*(result.kept for result in results), strict=True)
        target, rest, second, best, first, far, sink = (np.concatenate(mass, axis=-1) for mass in masses)
        others = np.logaddexp(rest, sink)
        total = np.logaddexp(others, target)
        nothing = np.isneginf(total)  # a query that sees nothing
        with np.errstate(invalid="ignore"):
            shares = [np.where(nothing, 0.0, np.exp(mass - total)) for mass in (first, far, sink)]
            self.gap = np.where(np.isneginf(target) & np.isneginf(best), np.nan, target - best)
        self.leak = leak_from_masses(target, others)
        self.share = share_from_leak(self.leak)
        self.n_eff = effective_number(rest, second)
        self.first_share, self.far_share = shares[0], shares[1]
        self.null_share = shares[2] if results[0].has_sink else None
        self.first = np.mean([result.first for result in results], axis=0)
        self.windowed = results[0].windowed

    def rows(self, model: LanguageModel, length: int) -> list[HeadRow]:
        rows = []
        for at in np.ndindex(*self.first.shape):
            layer, head = at
            windowed = self.windowed[layer]
            rows.append(
                HeadRow(
                    layer,
                    head,
                    model.key_head(head),
                    length,
                    target_share=float(self.share[at].mean()),
                    leak=float(np.median(self.leak[at])),
                    gap=float(np.median(self.gap[at])),
                    n_eff=float(np.median(self.n_eff[at])),
                    first_token_share=None if windowed else float(self.first_share[at].mean()),
                    null_sink_share=None if self.null_share is None else float(self.null_share[at].mean()),
                    far_share=float(self.far_share[at].mean()),
                    first_token_importance=None if windowed else float(self.first[at]),
                )
            )
        return rows

    def sinks(self, length: int) -> SinkRow:
        counted = self.first[~self.windowed]
        share = float((counted > FIRST_TOKEN).mean()) if counted.size else None
        return SinkRow(length, share, bridge.uniform_first_token(length))


def _run(
    model: LanguageModel,
    cases: Sequence[Case],
    far: int,
    edits: Sequence[bridge.Edit] = (),
    progress: Callable[[str], object] = lambda what: None,
    batches: list[int] | None = None,
) -> list[_Result]:
    """Every case, in order; several at once, the shorter ones padded."""
    results: dict[int, _Result] = {}
    for indices in _batches(model, cases):
        batch = [cases[i] for i in indices]
        longest = max(len(case.tokens) for case in batch)
        progress(f"{len(results) + 1} to {len(results) + len(batch)} of {len(cases)} cases, up to {longest} tokens")
        if batches is not None:
            batches.append(len(batch))
        results |= zip(indices, _run_together(model, batch, far, edits), strict=True)
    return [results[i] for i in range(len(cases))]


def _run_together(
    model: LanguageModel, batch: Sequence[Case], far: int, edits: Sequence[bridge.Edit]
) -> Iterator[_Result]:
    sizes = torch.tensor([len(case.tokens) for case in batch])
    longest = int(sizes.max())
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, case in zip(tokens, batch, strict=True):
        row[: len(case.tokens)] = torch.tensor(case.tokens)
    asked = torch.tensor(sorted({query for case in batch for query in case.decisions}))
    book = _Book(batch, far, model.n_layers, model.n_heads)
    mask = torch.arange(longest) < sizes[:, None]
    logits = model.run(tokens, mask, edits=edits, watches=[book.watch], asked=asked)
    guesses = torch.zeros_like(tokens).index_copy_(1, asked, logits.argmax(-1))
    missed = (guesses[book.row, book.query] != tokens[book.row, book.query + 1]).numpy()
    return book.close(missed)


def _batches(model: LanguageModel, cases: Sequence[Case]) -> Iterator[list[int]]:
    """Cases by length, so that little is padded, as many at once as one block of scores and the memory allow."""
    order = sorted(range(len(cases)), key=lambda i: len(cases[i].tokens))
    while order:
        for size in BATCHES:
            batch = [cases[i] for i in order[:size]]
            tokens = max(len(case.tokens) for case in batch)
            needed = _pass_bytes(model, batch)
            scores = bridge.BLOCKS[-1] * model.n_heads * tokens * 4 * len(batch)
            if size == 1 or (2 * needed <= free_memory() and scores <= bridge.BLOCK_BYTES):
                break
        require(needed, f"a pass over {tokens} tokens", "take shorter inputs, or fewer decisions of each")
        yield order[:size]
        order = order[size:]


def _pass_bytes(model: LanguageModel, batch: Sequence[Case]) -> int:
    """About what a pass takes: the residual stream and what a layer makes of it, blocks of scores, logits, the book."""
    config, tokens = model.config, max(len(case.tokens) for case in batch)
    width = 12 * int(config.hidden_size) + 3 * int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    decisions = sum(len(case.decisions) for case in batch)
    asked = len({query for case in batch for query in case.decisions})
    scores = max(bridge.BLOCK_BYTES, bridge.BLOCKS[-1] * model.n_heads * tokens * 4 * len(batch))
    return (
        4 * len(batch) * (tokens * width + 2 * asked * model.vocabulary)
        + 8 * scores
        + _KEPT_BYTES * decisions * model.n_layers * model.n_heads
    )


class _Book:
    """The ledger of cases that run together. ``row``, ``query`` ``[decision]``: where each decision of them stands."""

    def __init__(self, cases: Sequence[Case], far: int, n_layers: int, n_heads: int):
        self.cases, self.far = cases, far
        self.row: Int[Tensor, "decision"] = torch.tensor([i for i, case in enumerate(cases) for _ in case.decisions])
        self.query: Int[Tensor, "decision"] = torch.tensor([query for case in cases for query in case.decisions])
        self.targets = [
            keys for case in cases for keys in (case.targets or (None,) * len(case.decisions))
        ]  # of each decision
        shape = (n_layers, n_heads, len(self.query))
        self.kept = [np.full(shape, -np.inf) for _ in range(7)]
        self.first_total = np.zeros((n_layers, n_heads, len(cases)))
        self.window: list[int | None] = [None] * n_layers
        self.has_sink = False

    def watch(self, block: Block, scores: Tensor, sink: Tensor | None, weights: Tensor) -> None:
        layer, queries = block.layer, block.query
        if block.key.start == 0:
            self.first_total[layer] += weights[..., 0].sum(-1).T.double().numpy()
        self.window[layer] = block.window
        self.has_sink = sink is not None
        here = torch.nonzero((self.query >= queries.start) & (self.query < queries.stop)).flatten()
        if not len(here):
            return
        row, at = self.row[here], self.query[here] - queries.start
        own = scores[row, :, at].double()  # [decision, head, key]
        target = self._targets(here, block, own)
        rest = own.masked_fill(target, -torch.inf)
        apart = block.query_position[row, at, None] - block.key_position[row]
        masses = [
            own.masked_fill(~target, -torch.inf).logsumexp(-1),
            rest.logsumexp(-1),
            (2 * rest).logsumexp(-1),
            rest.amax(-1),
            own[..., 0] if block.key.start == 0 else torch.full(own.shape[:-1], -torch.inf),
            own.masked_fill((apart <= self.far)[:, None], -torch.inf).logsumexp(-1),
        ]
        if sink is not None:
            masses.append(sink[row, :, at].double())
        for kept, mass in zip(self.kept, masses, strict=False):
            kept[layer][:, here.numpy()] = mass.T.numpy()

    def _targets(self, here: Tensor, block: Block, own: Float[Tensor, "decision head key"]) -> Tensor:
        """Bool ``[decision, head, key]``: the keys that hold what each needs; the best where none is known."""
        marked = torch.zeros(len(here), own.shape[-1], dtype=torch.bool)
        unknown = torch.zeros(len(here), dtype=torch.bool)
        for i, decision in enumerate(here.tolist()):
            keys = self.targets[decision]
            if keys is None:
                unknown[i] = True
            else:
                marked[i, [key - block.key.start for key in keys if key >= block.key.start]] = True
        if not unknown.any():
            return marked[:, None].expand(own.shape)
        best = torch.zeros_like(own, dtype=torch.bool).scatter(2, own.argmax(-1, keepdim=True), True)
        return torch.where(unknown[:, None, None], best, marked[:, None])

    def close(self, wrong: np.ndarray) -> Iterator[_Result]:
        """A result a case, in order. ``wrong``: bool ``[decision]``."""
        for i, case in enumerate(self.cases):
            own, tokens = (self.row == i).numpy(), len(case.tokens)
            windowed = np.array([window is not None and window < tokens for window in self.window])
            kept = tuple(mass[..., own] for mass in self.kept)
            yield _Result(wrong[own], kept, self.first_total[..., i] / tokens, windowed, self.has_sink)


def language_edit(found: Intervention, trained: int, model: LanguageModel) -> bridge.Edit:
    """An intervention of the adders, on a language model: distances are tokens, far is beyond ``trained`` of them.

    Raises:
        InputError: one that language models do not have, or a head that the model has not.
    """
    value = found.value
    edits: dict[str, Callable[[], bridge.Edit]] = {
        "far": lambda: bridge.far(trained),
        "window": lambda: bridge.far(int(str(value))),
        "first-and-window": lambda: bridge.first_and_window(*map(int, str(value).split(","))),
        "sink-boost": lambda: bridge.sink_boost(value if value in ("log", "2log") else float(str(value)), trained),
        "ssmax": lambda: bridge.scalable_softmax(float(str(value))),
    }
    if found.kind == "temperature" and value not in ("yarn", "adaptive"):
        edits["temperature"] = lambda: bridge.temperature(float(str(value)))
    if found.kind not in edits:
        raise InputError(
            f"{found.name} is not among the interventions on language models: {', '.join({**edits, 'temperature': 0})}"
        )
    every = list(np.ndindex(model.n_layers, model.n_heads))
    for layer, head in sorted(found.scope.only | found.scope.without):
        if (layer, head) not in every:
            raise InputError(
                f"head {layer}.{head} does not exist in {model.name}; layers run from 0 to {model.n_layers - 1}, heads "
                f"from 0 to {model.n_heads - 1}"
            )
    edit = edits[found.kind]()
    if not found.scope.only and not found.scope.without:
        return edit
    heads = [head for head in every if (not found.scope.only or head in found.scope.only)]
    return bridge.in_heads(edit, [head for head in heads if head not in found.scope.without], model.n_heads)


# An adder


def _audit_adder(
    model: HookedAdder,
    lengths: Sequence[int],
    task: str | Path | None,
    problems: int,
    interventions: Sequence[Intervention],
    name: str,
    seed: int,
    progress: Callable[[str], object],
) -> Audit:
    from interp.diagnosis import HEALTHY as HEALTHY_ADDER
    from interp.diagnosis import diagnose
    from interp.shares import leak_growth

    if task not in (None, ADDITION):
        raise InputError(f"{name} adds numbers and has no other task, got {str(task)[:60]!r}; leave out --task")
    if not lengths:
        raise InputError("give at least one length")
    digits = sorted(set(lengths))
    drawn = {n: model.task.evaluation_problems(n, problems, seed) for n in digits}
    base: dict[int, Score] = {}
    trials: list[EditTrial] = []
    for n in digits:
        progress(f"scoring {problems} problems of {n} digits")
        base[n] = score(model, drawn[n], seed=seed)
        if interventions:
            after = score(model, drawn[n], interventions).wrong
            heads = _acted(interventions, model.cfg.n_layers, model.cfg.n_heads)
            trials.append(_edit_trial(_together(interventions), heads, n, base[n].wrong, after))
    progress("keeping the ledger")
    growth = leak_growth(model, digits, problems, seed=seed)
    sink = model.config.attention.sink
    first, even = {}, {}
    for n in digits:
        progress(f"first tokens at {n} digits")
        first[n], even[n] = _first_tokens(model, drawn[n])
    rows, sinks = [], []
    for found in growth.to_frame().to_dict("records"):
        n, at = int(found["digits"]), (int(found["layer"]), int(found["head"]))
        lookup = growth.ledgers[n].lookups[found["lookup"], found["present"]]
        places = zip(lookup.problem, lookup.query, strict=True)
        row = HeadRow(
            *at,
            key_head=at[1],
            length=n,
            target_share=found["share"],
            leak=found["leak"],
            gap=found["gap"],
            n_eff=found["n_eff"],
            first_token_share=float(np.mean([first[n][problem][(*at, query)] for problem, query in places])),
            null_sink_share=found["sink_share"] if sink else None,
            far_share=found["far_share"],
            first_token_importance=float(np.mean([weights[at].mean() for weights in first[n]])),
            lookup=found["lookup"],
            present=bool(found["present"]),
        )
        rows.append(row)
    for n in digits:
        importance = np.mean([weights.mean(-1) for weights in first[n]], axis=0)
        sinks.append(SinkRow(n, float((importance > FIRST_TOKEN).mean()), even[n]))
    scores = tuple(
        LengthScore(n, each.decisions, each.n_wrong, each.exact, *each.exact_interval) for n, each in base.items()
    )
    failing = [each.length for each in scores if each.exact < HEALTHY_ADDER]
    evidence = [f"{each.wrong} of {each.decisions} decisions wrong at {each.length} digits" for each in scores]
    evidence += map(_trial_words, trials)
    matter: tuple[Head, ...] = ()
    repaired = None
    if failing:
        found_cause = diagnose(model, failing[-1], problems, seed=seed, progress=progress)
        verdict = found_cause.verdict
        n = failing[-1]
        trials += [
            EditTrial(trial.name, None, n, base[n].decisions, trial.wrong, trial.repaired, trial.broken)
            for trial in found_cause.trials
        ]
        matter = verdict.heads
        repaired = verdict.proof.edit if verdict.proof else None
        proof = ", proved" if verdict.proved else ""
        evidence += [f"diagnosed at {n} digits: {verdict.cause}{proof}", *verdict.evidence]
    fails_from = failing[0] if failing else None
    verdict_found = Verdict(fails_from, matter, repaired, tuple(evidence))
    return Audit(name, ADDITION, scores, tuple(rows), tuple(sinks), tuple(trials), verdict_found)


def _first_tokens(model: HookedAdder, problems: Sequence[Problem]) -> tuple[list[np.ndarray], float]:
    """Per problem the weight of every query on the first token, ``[layer, head, query]``, and the mean that even
    attention gives.
    """
    found: dict[int, np.ndarray] = {}
    books: list[dict[int, list[Tensor]]] = []

    def watch(batch: Batch) -> list[tuple[str, Callable[..., Any]]]:
        book: dict[int, list[Tensor]] = {}
        books.append(book)

        def keep(pattern: Tensor, hook: Any) -> None:
            book.setdefault(hook.layer(), []).append(pattern.detach()[..., 0].double())

        return [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]

    for step in run_problems(model, problems, (), watch, every_key=True):
        book = books.pop()
        weights = torch.stack([torch.cat(book[layer], dim=2) for layer in sorted(book)], dim=1)
        for row, (index, mask) in enumerate(zip(step.indices, step.batch.mask, strict=True)):
            assert bool(mask[0])  # padding is on the right, so that key 0 is the first token
            found[index] = weights[row][..., : int(mask.sum())].numpy()
    even = float(np.mean([bridge.uniform_first_token(each.shape[-1]) for each in found.values()]))
    return [found[i] for i in range(len(problems))], even


# Words


def describe(found: Audit) -> list[str]:
    """The verdict in words, a line each."""
    verdict = found.verdict
    if verdict.fails_from is None:
        head = f"{found.model}: no failure at any of these lengths"
    else:
        heads = ", ".join(f"{layer}.{head}" for layer, head in verdict.heads) or "none"
        what = "heads in which the edit matters" if found.task == ADDITION else "heads that lose their targets"
        repair = f"repaired by {verdict.repaired_by}" if verdict.repaired_by else "not repaired by any edit tried"
        head = f"{found.model}: fails from {verdict.fails_from} {found.unit}; {what}: {heads}; {repair}"
    return [head, *verdict.evidence, sink_words(found)]


def sink_words(found: Audit) -> str:
    """How many heads rest on the first token at the longest length, and what even attention would give."""
    last = found.sinks[-1]
    share = "no head can see it" if last.share_of_heads is None else f"{last.share_of_heads:.2f} of heads"
    passes = " and pass" if last.uniform_value > FIRST_TOKEN else ""
    return (
        f"first-token sinks at {last.length} {found.unit} (mean weight over {FIRST_TOKEN:g}): {share}; even attention "
        f"would give {last.uniform_value:.4f}{passes}"
    )
