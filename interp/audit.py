"""Audit of a causal language model: which heads lose their targets as the context grows, and from what length.

A **case** is a sequence of tokens, the queries whose next token is scored (its decisions), and per decision the keys
that hold what it needs (its targets). Two tasks make cases of any length for any vocabulary. In **induction** random
tokens are repeated once, and a query of the second half needs the token after its previous occurrence (Olsson et al.
2209.11895). In **passkey** a key is planted at a depth among random tokens and asked for at the end (Mohtashami and
Jaggi 2305.16300). Or cases come from a file.

Per head and length: the target's share, leak, gap and N_eff, as in the ledger of the adders; the share of the first
token, of the learned sink where there is one, and of far keys, those further back than the shortest length audited.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import interp.bridge as bridge
from interp.bridge import Block, LanguageModel
from interp.decisions import wilson_interval
from interp.interventions import Head, Scope, parse_intervention
from interp.leak import effective_number, leak_from_masses, share_from_leak
from interp.roles import COLLAPSE
from models.addition import generator
from models.config import InputError

if TYPE_CHECKING:
    import pandas as pd

TASKS = ("induction", "passkey")
FIRST_TOKEN = 0.3  # mean weight on the first token from which a head counts as a sink (Gu et al. 2410.10781)
PERFORMS = 0.3  # mean share on the targets at the shortest length from which a head is one that finds them
HEALTHY = 0.95  # share of decisions right from which there is nothing to explain
REPAIRS = 0.5  # of the wrong decisions, the share that an intervention must repair to be named
KEY_TOKENS = 5  # of a passkey
MOST_CASES, MOST_TOKENS = 10_000, 10**6  # of each length; of a case
MOST_LINES = 100_000  # of a file of cases


@dataclass(frozen=True)
class Case:
    """``tokens``: ids. ``decisions``: positions whose next token is scored. ``targets``: per decision the positions of
    the keys it needs, or None where it needs none; empty where nothing is known of targets.
    """

    tokens: tuple[int, ...]
    decisions: tuple[int, ...]
    targets: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class LengthScore:
    """How the decisions at one length went. ``exact``: share of cases whose every decision is right, with Wilson's
    interval over cases.
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
    ``first_token_share`` where a window leaves the first token to nobody.
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


@dataclass(frozen=True)
class SinkMetric:
    """Share of heads whose mean weight on the first token, over all queries, exceeds a threshold, at the longest
    length, and what evenly spread attention gives there. Heads whose window leaves the first token out are not counted.
    """

    threshold: float
    share_of_heads: float | None
    uniform_value: float


@dataclass(frozen=True)
class Verdict:
    """From what length decisions fail, the heads that have lost their targets, the intervention that repairs most."""

    fails_from: int | None
    heads: tuple[Head, ...]
    repaired_by: str | None
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    model: str
    task: str
    lengths: tuple[LengthScore, ...]
    heads: tuple[HeadRow, ...]
    sink_metric: SinkMetric
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The keys of ``leaksum audit``, less the run."""
        return {
            "model": self.model,
            "task": self.task,
            "lengths": [asdict(row) for row in self.lengths],
            "heads": [asdict(row) for row in self.heads],
            "sink_metric": asdict(self.sink_metric),
            "verdict": {**asdict(self.verdict), "heads": [list(head) for head in self.verdict.heads]},
        }

    def to_frame(self) -> pd.DataFrame:
        """One row a head and length."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.heads])


def induction(vocabulary: int, length: int, n: int, seed: int = 0) -> list[Case]:
    """Random tokens repeated once; tokens are distinct within the half where the vocabulary allows.

    Raises:
        InputError: ``length`` below 4.
    """
    if length < 4:
        raise InputError(f"induction needs at least 4 tokens, got {length}")
    half = length // 2
    cases: list[Case] = []
    for i in range(n):
        rng = generator(seed, f"induction {length}", i)
        tokens = rng.permutation(vocabulary)[:half] if vocabulary >= half else rng.integers(0, vocabulary, half)
        decisions = range(half, 2 * half - 1)
        ids = tuple(int(t) for t in (*tokens, *tokens))
        cases.append(Case(ids, tuple(decisions), tuple((q - half + 1,) for q in decisions)))
    return cases


def passkey(vocabulary: int, length: int, n: int, seed: int = 0) -> list[Case]:
    """A marker and a key of five tokens at a random depth of random filler, and the marker again at the end.

    The decisions are the key's tokens after the second marker. The marker is nowhere else.

    Raises:
        InputError: a length or vocabulary that a marker and its key do not fit into.
    """
    least = 2 * (KEY_TOKENS + 1)
    if length < least:
        raise InputError(f"passkey needs at least {least} tokens, got {length}")
    if vocabulary < KEY_TOKENS + 2:
        raise InputError(f"passkey needs a vocabulary of at least {KEY_TOKENS + 2} tokens, got {vocabulary}")
    cases: list[Case] = []
    for i in range(n):
        rng = generator(seed, f"passkey {length}", i)
        marker = int(rng.integers(vocabulary))
        others = np.delete(np.arange(vocabulary), marker)
        body = rng.choice(others, size=length - KEY_TOKENS - 1)
        depth = int(rng.integers(0, len(body) - KEY_TOKENS))
        body[depth] = marker
        key = rng.choice(others, size=KEY_TOKENS, replace=False)
        body[depth + 1 : depth + 1 + KEY_TOKENS] = key
        tokens = tuple(int(t) for t in (*body, marker, *key))
        decisions = tuple(range(len(body), len(tokens) - 1))
        cases.append(Case(tokens, decisions, tuple((depth + 1 + j,) for j in range(KEY_TOKENS))))
    return cases


def read_cases(path: str | Path, model: LanguageModel) -> list[Case]:
    """Cases from a file, one JSON object a line.

    ``{"tokens": [ids]}`` or ``{"text": "..."}``, with ``"decisions"`` (all queries where left out) and ``"targets"``:
    per decision the position of the key it needs, a list of them, or null.

    Raises:
        InputError: the file or a line of it cannot be used; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    cases: list[Case] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(cases) == MOST_LINES:
            raise InputError(f"{path}: more than {MOST_LINES} cases; split the file")
        try:
            cases.append(_case(json.loads(line, object_pairs_hook=_once), model))
        except (ValueError, RecursionError) as error:  # of JSON too
            why = " ".join(str(error).split())[:160] or type(error).__name__
            raise InputError(f"{path}, line {number}: {why}") from error
    if not cases:
        raise InputError(f"{path}: no case; give one JSON object a line")
    return cases


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InputError("a key is given twice")
    return found


def _case(found: Any, model: LanguageModel) -> Case:
    if not isinstance(found, dict):
        raise InputError('a case is an object such as {"tokens": [1, 2, 3]}')
    unknown = found.keys() - {"tokens", "text", "decisions", "targets"}
    if unknown:
        raise InputError(f"unknown key {sorted(unknown)[0][:40]!r}; there are tokens, text, decisions, targets")
    if ("tokens" in found) == ("text" in found):
        raise InputError("give either tokens or text")
    if "text" in found:
        if not isinstance(found["text"], str):
            raise InputError("text must be a string")
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer; give tokens")
        tokens = _tokenized(found["text"], model)
        start = model.tokenizer.bos_token_id
        if start is not None and tokens[:2] == (start, start):
            warnings.warn(
                f"{found['text'][:40]!r} begins with two start tokens; leave out the written one", stacklevel=2
            )
    else:
        tokens = _whole_numbers(found["tokens"], "tokens", model.vocabulary)
    if len(tokens) < 2:
        raise InputError(f"a case needs at least 2 tokens, got {len(tokens)}")
    decisions = tuple(range(len(tokens) - 1))
    if "decisions" in found:
        decisions = _whole_numbers(found["decisions"], "decisions", len(tokens) - 1)
        if not decisions or any(b <= a for a, b in pairwise(decisions)):
            raise InputError("decisions must be positions in rising order, at least one")
    if "targets" not in found:
        return Case(tokens, decisions)
    given = found["targets"]
    if not isinstance(given, list) or len(given) != len(decisions):
        raise InputError(f"targets must be a list of {len(decisions)}, one a decision")
    targets: list[tuple[int, ...] | None] = []
    for query, target in zip(decisions, given, strict=True):
        if target is None:
            targets.append(None)
            continue
        keys = _whole_numbers(target if isinstance(target, list) else [target], "targets", query + 1)
        targets.append(keys or None)
    return Case(tokens, decisions, tuple(targets))


def _tokenized(text: str, model: LanguageModel) -> tuple[int, ...]:
    try:
        tokens = tuple(model.tokenizer(text)["input_ids"])
    except Exception as error:  # of the tokenizer's own code
        why = " ".join(str(error).split())[:100]
        raise InputError(
            f"the tokenizer cannot read {text[:40]!r} ({type(error).__name__}: {why}); give tokens"
        ) from error
    if any(token >= model.vocabulary for token in tokens):
        raise InputError(f"the tokenizer gives {max(tokens)}, and the model's ids end at {model.vocabulary - 1}")
    return tokens


def _whole_numbers(values: Any, what: str, below: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise InputError(f"{what} must be a list of whole numbers")
    for value in values:
        if not 0 <= value < below:
            raise InputError(f"{what} must be from 0 to {below - 1} here, got {value if abs(value) < 1e12 else '...'}")
    return tuple(values)


def audit(
    model: LanguageModel,
    lengths: Sequence[int],
    task: str | Path = "induction",
    cases: int = 8,
    *,
    seed: int = 0,
    progress: Callable[[str], object] = lambda what: None,
) -> Audit:
    """Measure decisions and heads at each length, and what repairs the longest.

    Args:
        task: ``induction``, ``passkey``, or a file of cases, whose lengths are then its own.
        cases: of each length.
        progress: told what is being run.

    Raises:
        InputError: a model that fails its self-test, lengths beyond its positions, or an unusable task.
    """
    bridge.self_test(model, seed)
    by_length = _cases(model, lengths, str(task), cases, seed)
    shortest = min(by_length)
    scores, rows, measured = [], [], {}
    for length, drawn in sorted(by_length.items()):
        progress(f"{len(drawn)} cases of {length} tokens")
        found = measured[length] = _measure(model, drawn, far=shortest)
        low, high = wilson_interval(found.exact_cases, len(drawn))
        wrong = int(found.wrong.sum())
        scores.append(LengthScore(length, len(found.wrong), wrong, found.exact_cases / len(drawn), low, high))
        rows += found.rows(model, length)
    verdict = _verdict(model, by_length, scores, rows, measured, progress)
    return Audit(
        model.name, str(task), tuple(scores), tuple(rows), measured[max(by_length)].sinks(max(by_length)), verdict
    )


def _cases(model: LanguageModel, lengths: Sequence[int], task: str, n: int, seed: int) -> dict[int, list[Case]]:
    if not 1 <= n <= MOST_CASES:
        raise InputError(f"cases must be from 1 to {MOST_CASES}, got {n}")
    if task not in TASKS:
        if not Path(task).is_file():
            raise InputError(f"no task is called {task[:60]!r}, and no such file is there; {' or '.join(TASKS)} are")
        found: dict[int, list[Case]] = {}
        for case in read_cases(task, model):
            found.setdefault(len(case.tokens), []).append(case)
        return found
    if not lengths:
        raise InputError("give at least one length")
    most = MOST_TOKENS if model.limit is None else min(model.limit, MOST_TOKENS)
    if max(lengths) > most:
        raise InputError(f"{model.name} has {most} positions, got a length of {max(lengths)}; take shorter ones")
    make = induction if task == "induction" else passkey
    return {length: make(model.vocabulary, length, n, seed) for length in sorted(set(lengths))}


@dataclass
class _Measured:
    """Of one length: ``wrong`` ``[decision]``, the rest ``[layer, head, decision]``, ``first`` ``[layer, head]``."""

    wrong: np.ndarray
    exact_cases: int
    leak: np.ndarray
    gap: np.ndarray
    n_eff: np.ndarray
    first_share: np.ndarray
    null_share: np.ndarray | None
    far_share: np.ndarray
    first: np.ndarray
    windowed: np.ndarray  # [layer], true where a window leaves the first token to nobody

    @property
    def share(self) -> np.ndarray:
        return share_from_leak(self.leak)

    def rows(self, model: LanguageModel, length: int) -> list[HeadRow]:
        share, rows = self.share.mean(-1), []
        for layer, head in np.ndindex(*share.shape):
            at = (layer, head)
            leak, gap, n_eff = (float(np.median(x[at])) for x in (self.leak, self.gap, self.n_eff))
            first = None if self.windowed[layer] else float(self.first_share[at].mean())
            null = None if self.null_share is None else float(self.null_share[at].mean())
            far = float(self.far_share[at].mean())
            row = HeadRow(*at, model.key_head(head), length, float(share[at]), leak, gap, n_eff, first, null, far)
            rows.append(row)
        return rows

    def sinks(self, length: int) -> SinkMetric:
        counted = self.first[~self.windowed]
        share = float((counted > FIRST_TOKEN).mean()) if counted.size else None
        return SinkMetric(FIRST_TOKEN, share, bridge.uniform_first_token(length))


def _measure(model: LanguageModel, cases: Sequence[Case], far: int, edits: Sequence[bridge.Edit] = ()) -> _Measured:
    """Cases of one length, one at a time: memory grows with the length alone."""
    parts, wrong, exact = [], [], 0
    for case in cases:
        book = _Book(case, far, model.n_layers, model.n_heads)
        tokens = torch.tensor([case.tokens])
        logits = model.run(tokens, edits=edits, watches=[book.watch])
        asked = torch.tensor(case.decisions)
        missed = (logits[0, asked].argmax(-1) != tokens[0, asked + 1]).numpy()
        wrong.append(missed)
        exact += int(not missed.any())
        parts.append(book)
    kept = [np.concatenate([part.kept[i] for part in parts], axis=-1) for i in range(len(parts[0].kept))]
    target, rest, second, best, first, far_mass, sink = kept
    others = np.logaddexp(rest, sink)
    total = np.logaddexp(others, target)
    nothing = np.isneginf(target) & np.isneginf(others)  # a query that sees nothing
    with np.errstate(invalid="ignore"):
        shares = [np.where(nothing, 0.0, np.exp(mass - total)) for mass in (first, far_mass, sink)]
        gap = np.where(np.isneginf(target) & np.isneginf(best), np.nan, target - best)
    return _Measured(
        wrong=np.concatenate(wrong),
        exact_cases=exact,
        leak=leak_from_masses(target, others),
        gap=gap,
        n_eff=effective_number(rest, second),
        first_share=shares[0],
        null_share=shares[2] if parts[0].has_sink else None,
        far_share=shares[1],
        first=np.mean([part.first_total / len(part.case.tokens) for part in parts], axis=0),
        windowed=parts[0].windowed,
    )


class _Book:
    """The ledger of one case: log-masses of its decisions' keys, ``[layer, head, decision]`` once it is read."""

    def __init__(self, case: Case, far: int, n_layers: int, n_heads: int):
        self.case, self.far = case, far
        shape = (n_layers, n_heads, len(case.decisions))
        # target, rest, rest's second moment, best of the rest, first token, far keys, sink
        self.kept = [np.full(shape, -np.inf) for _ in range(7)]
        self.first_total = np.zeros(shape[:2])
        self.windowed = np.zeros(n_layers, dtype=bool)
        self.has_sink = False
        self.decisions = np.array(case.decisions)

    def watch(self, block: Block, scores: Tensor, sink: Tensor | None, weights: Tensor) -> None:
        layer, queries = block.layer, block.query
        if block.key.start == 0:
            self.first_total[layer] += weights[0, :, :, 0].sum(-1).double().numpy()
        if block.window is not None and block.window < len(self.case.tokens):
            self.windowed[layer] = True
        here = np.flatnonzero((self.decisions >= queries.start) & (self.decisions < queries.stop))
        if not len(here):
            return
        at = torch.from_numpy(self.decisions[here] - queries.start)
        own = scores[0, :, at].double()
        target = self._targets(here, block, own)
        rest = own.masked_fill(target, -torch.inf)
        apart = block.distance[0, at]
        masses = [
            own.masked_fill(~target, -torch.inf).logsumexp(-1),
            rest.logsumexp(-1),
            (2 * rest).logsumexp(-1),
            rest.amax(-1),
            own[..., 0] if block.key.start == 0 else torch.full(own.shape[:-1], -torch.inf),
            own.masked_fill(apart <= self.far, -torch.inf).logsumexp(-1),
        ]
        if sink is not None:
            self.has_sink = True
            masses.append(sink[0, :, at].double())
        for kept, mass in zip(self.kept, masses, strict=False):
            kept[layer][:, here] = mass.numpy()

    def _targets(self, here: np.ndarray, block: Block, own: Float[Tensor, "head query key"]) -> Tensor:
        """Bool ``[head, query, key]``: the keys that hold what each decision needs; the best where none is known."""
        marked = torch.zeros(len(here), own.shape[-1], dtype=torch.bool)
        unknown = torch.zeros(len(here), dtype=torch.bool)
        for i, decision in enumerate(here):
            keys = self.case.targets[decision] if self.case.targets else None
            if keys is None:
                unknown[i] = True
                continue
            inside = [key - block.key.start for key in keys if key >= block.key.start]
            marked[i, inside] = True
        best = torch.zeros_like(own, dtype=torch.bool).scatter(2, own.argmax(-1, keepdim=True), True)
        return torch.where(unknown[:, None], best, marked)


def language_edit(name: str, trained: int, scope: Scope, model: LanguageModel) -> bridge.Edit:
    """An intervention of the adders, on a language model: distances are tokens, far is beyond ``trained`` of them.

    Raises:
        InputError: no such intervention, or one that language models do not have.
    """
    found = parse_intervention(name)
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
        raise InputError(f"{found.name} is not among the interventions on language models: {', '.join(edits)}")
    every = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    for layer, head in scope.only | scope.without:
        if (layer, head) not in every:
            raise InputError(f"head {layer}.{head} does not exist: {model.n_layers} layers of {model.n_heads} heads")
    if not scope.only and not scope.without:
        return edits[found.kind]()
    heads = [head for head in every if (not scope.only or head in scope.only) and head not in scope.without]
    return bridge.in_heads(edits[found.kind](), heads, model.n_heads)


def _verdict(
    model: LanguageModel,
    by_length: dict[int, list[Case]],
    scores: Sequence[LengthScore],
    rows: Sequence[HeadRow],
    measured: dict[int, _Measured],
    progress: Callable[[str], object],
) -> Verdict:
    first, last = scores[0], scores[-1]
    at = {(row.layer, row.head, row.length): row for row in rows}
    failing = [score.length for score in scores if score.right < HEALTHY]
    evidence = [f"{score.wrong} of {score.decisions} decisions wrong at {score.length} tokens" for score in scores]
    if not failing:
        return Verdict(None, (), None, tuple(evidence))
    if first.right < HEALTHY:
        evidence.append(f"the shortest length, {first.length} tokens, fails already: take shorter ones to see it begin")
    lost = []
    for layer, head in np.ndindex(model.n_layers, model.n_heads):
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
    repaired = _repair(model, by_length, first.length, last, measured, evidence, progress)
    return Verdict(failing[0], tuple(head for _, head in sorted(lost)), repaired, tuple(evidence))


def _repair(
    model: LanguageModel,
    by_length: dict[int, list[Case]],
    shortest: int,
    last: LengthScore,
    measured: dict[int, _Measured],
    evidence: list[str],
    progress: Callable[[str], object],
) -> str | None:
    """The intervention that repairs most of the longest length's wrong decisions, if it repairs enough of them."""
    names = ["far", f"first-and-window=4,{shortest}", "temperature=0.8", "temperature=0.6"]
    if measured[last.length].null_share is not None:
        names += ["sink-boost=log", "sink-boost=-2"]
    before = measured[last.length].wrong
    best: tuple[int, str] | None = None
    for name in names:
        progress(f"under {name}")
        edit = language_edit(name, shortest, Scope(), model)
        after = _measure(model, by_length[last.length], far=shortest, edits=[edit]).wrong
        repaired, broken = int((before & ~after).sum()), int((~before & after).sum())
        evidence.append(f"{name} at {last.length} tokens: {repaired} of {last.wrong} repaired, {broken} broken")
        if best is None or repaired - broken > best[0]:
            best = (repaired - broken, name)
    if best is None or best[0] < REPAIRS * last.wrong or not last.wrong:
        evidence.append("none of these repairs half of what is wrong")
        return None
    return best[1]


def describe(found: Audit) -> list[str]:
    """The verdict in words, a line each."""
    verdict = found.verdict
    if verdict.fails_from is None:
        head = f"{found.model}: no failure at any of these lengths"
    else:
        heads = ", ".join(f"{layer}.{head}" for layer, head in verdict.heads) or "none"
        repair = f"repaired by {verdict.repaired_by}" if verdict.repaired_by else "not repaired by any edit tried"
        head = (
            f"{found.model}: fails from {verdict.fails_from} tokens; heads that lose their targets: {heads}; {repair}"
        )
    metric = found.sink_metric
    share = (
        "no head can see the first token" if metric.share_of_heads is None else f"{metric.share_of_heads:.2f} of heads"
    )
    return [
        head,
        *verdict.evidence,
        f"first-token sinks (mean weight over {metric.threshold:g}): {share}; even attention would give "
        f"{metric.uniform_value:.4f}" + (" and pass" if metric.uniform_value > metric.threshold else ""),
    ]
