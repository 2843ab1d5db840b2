"""Does the crowd displace the sink, and is that read as a digit? One claim, three routes side by side.

Where a number has ended there is nothing to find, and heads that **rest** there have their attention on the sink, which
writes nothing. The claim (the study's, of its failing seed): far keys take the sink's share, what they write is taken
for a digit, and so decisions fail. The routes share no step:

patching  the outputs of resting heads, at queries with nothing to find, from a run without far keys are put into the
          run as it is; so are those of all heads, there, and where there is something to find. What of the margin at
          wrong decisions comes back? The claim needs at least half from resting heads
OV        what a resting head writes at such a query at length, beside what it wrote in training there, and for each
          digit found: how often is it nearer to a digit than to nothing? The claim needs at least half of all, and at
          most a tenth in training
probe     a probe of "the first number has ended", trained short, reads the residual stream at b's chunks: what share of
          ended columns does it still read as ended, and how much comes back without far keys? The claim needs at most
          half after some layer, and at least .9 without far keys
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.decisions import Score, score
from interp.interventions import Edit, Head, Hook, hooks_for, parse_intervention
from interp.ledger import CLASSES, Ledger, build_ledger
from interp.partition import Partition
from interp.passes import run_problems
from interp.probes import MOST_QUERIES, fit_probe, sample
from interp.roles import SINK_HEAD
from models.addition import Batch, Problem
from models.config import InputError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

ENOUGH = 0.5  # of the margin, of queries read as a digit, of ended columns no longer read as ended
SELDOM = 0.1  # of queries read as a digit in training; one less it, of ended columns read as ended without far keys
_SHORT = 100  # problems at training length
_EMPTY = (("first_same_column", False), ("first_from_second", False))
_FAR = parse_intervention("far")
Which = Literal["empty", "found"]
Tell = Callable[[str], None]


class DisplacementError(InputError):
    """A model of which the claim cannot be asked; says why."""


@dataclass(frozen=True)
class Resting:
    """A head that rests on the sink where the first number has ended: shares there in training and now.

    ``digit_trained``, ``digit_now``: share of b's chunks with nothing to find whose output is nearer to a digit's.
    """

    head: Head
    sink_trained: float
    sink_now: float
    far_now: float
    digit_trained: float
    digit_now: float

    @property
    def displaced(self) -> bool:
        return self.sink_now < self.sink_trained / 2


@dataclass(frozen=True)
class Route:
    """One route's measures by name, and whether they support the claim."""

    name: str
    supports: bool
    measures: dict[str, float]


@dataclass(frozen=True)
class Displacement:
    """The claim at one length: resting heads, then patching, OV and probe. ``wrong`` of ``decisions``."""

    digits: int
    decisions: int
    wrong: int
    resting: tuple[Resting, ...]
    routes: tuple[Route, ...]

    @property
    def displaced(self) -> bool:
        """Most resting heads lost more than half of the sink's share."""
        return sum(head.displaced for head in self.resting) * 2 > len(self.resting)

    @property
    def supported(self) -> bool:
        """By all three routes, the sink being displaced."""
        return self.displaced and all(route.supports for route in self.routes)

    def to_frame(self) -> pd.DataFrame:
        """One row a measure: route, measure, value, supports."""
        import pandas as pd

        rows = [
            {"route": route.name, "measure": name, "value": value, "supports": route.supports}
            for route in self.routes
            for name, value in route.measures.items()
        ]
        return pd.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "digits": self.digits,
            "decisions": self.decisions,
            "wrong": self.wrong,
            "resting": [{**asdict(head), "displaced": head.displaced} for head in self.resting],
            "routes": [asdict(route) for route in self.routes],
            "displaced": self.displaced,
            "supported": self.supported,
        }


def empty_queries(batch: Batch) -> Bool[Tensor, "batch pos"]:
    """Queries at which one of the operands has ended: b's chunks past the first, and decisions but those of both."""
    alone = (batch.row == 1) & (batch.column >= 0) & ~batch.lookups["first_from_second"].present
    return alone | (batch.decisions & (batch.state > 0))


@dataclass(frozen=True)
class FromWithoutFar(Edit):
    """Outputs of ``heads`` (all if None), at queries with nothing to find or with, from a run without far keys."""

    which: Which
    heads: tuple[Head, ...] | None = field(default=None)
    name: str = "from-without-far"

    def hooks(self, model: HookedAdder, partition: Partition) -> list[Hook]:
        batch, kept = partition.batch, {}

        def keep(z: Tensor, hook: HookPoint) -> None:
            kept[hook.layer()] = z

        names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
        clean = [*hooks_for(model, batch, [_FAR]), *((name, keep) for name in names)]
        with torch.no_grad(), model.evaluating(), model.hooks(clean):
            model(batch.tokens, batch.mask)
        empty = empty_queries(batch)
        asks = batch.decisions | ((batch.row == 1) & (batch.column >= 0))
        at = empty if self.which == "empty" else asks & ~empty
        scope = torch.full((model.cfg.n_layers, model.cfg.n_heads), self.heads is None)
        for layer, head in self.heads or ():
            scope[layer, head] = True

        def put(z: Tensor, hook: HookPoint) -> Tensor:
            return torch.where(at[:, :, None, None] & scope[hook.layer()][:, None], kept[hook.layer()], z)

        return [(name, put) for name in names]


def displacement(
    model: HookedAdder, digits: int, n: int = 50, *, seed: int = 0, tell: Tell = lambda what: None
) -> Displacement:
    """Ask the claim of a model at one length, by the three routes.

    Raises:
        DisplacementError: no sink; no head rests on it in training; no decision is wrong.
        ProblemError: ``digits`` or ``n`` out of range.
    """
    if not model.config.attention.sink:
        raise DisplacementError("the claim is about a sink, and this model has none; take one with sink=true")
    problems = model.task.evaluation_problems(digits, n, seed)
    short = model.task.training_problems(seed, 0, _SHORT, "displacement")
    tell("ledgers")
    trained, now = build_ledger(model, short), build_ledger(model, problems)
    heads = _resting_heads(trained)
    if not heads:
        raise DisplacementError(
            f"no head has {SINK_HEAD:g} of its attention on the sink where the first number has ended, in training; "
            "the claim needs heads that rest there"
        )
    tell("patching")
    base = score(model, problems)
    if not base.n_wrong:
        raise DisplacementError(f"no decision of {base.decisions} is wrong at {digits} digits; take more digits")
    without = score(model, problems, [_FAR])
    edits = {
        "resting heads, nothing to find": FromWithoutFar("empty", heads),
        "all heads, nothing to find": FromWithoutFar("empty"),
        "all heads, something to find": FromWithoutFar("found"),
    }
    patched = {name: _came_back(base, without, score(model, problems, [edit])) for name, edit in edits.items()}
    tell("outputs")
    digit = [_as_digit(model, short, part, heads) for part in (short, problems)]
    resting = tuple(
        Resting(head, *_shares(trained, head)[:1], *_shares(now, head), float(digit[0][i]), float(digit[1][i]))
        for i, head in enumerate(heads)
    )
    tell("probes")
    first = next(iter(patched.values()))
    then, here = float(digit[0].mean()), float(digit[1].mean())
    near = float(_as_digit(model, short, problems, heads, [_FAR]).mean())
    routes = (
        Route("patching", first >= ENOUGH, patched),
        Route(
            "OV",
            here >= ENOUGH and then <= SELDOM,
            {
                "read as a digit, training": then,
                "read as a digit, now": here,
                "read as a digit, without far keys": near,
            },
        ),
        _probe_route(model, short, problems),
    )
    return Displacement(digits, base.decisions, base.n_wrong, resting, routes)


def _resting_heads(ledger: Ledger) -> tuple[Head, ...]:
    shares = [ledger.lookups[key].sink_share.mean(-1) for key in _EMPTY if key in ledger.lookups]
    resting = np.argwhere(np.max(shares, axis=0) >= SINK_HEAD) if shares else np.zeros((0, 2), dtype=int)
    return tuple((int(layer), int(head)) for layer, head in resting)


def _shares(ledger: Ledger, head: Head) -> tuple[float, float]:
    """Sink's and far keys' mean share where the first number has ended."""
    found = [ledger.lookups[key] for key in _EMPTY if key in ledger.lookups]
    sink = np.concatenate([x.sink_share[head] for x in found]).mean()
    far = np.concatenate([x.class_shares[head][..., CLASSES.index("far")] for x in found]).mean()
    return float(sink), float(far)


def _came_back(base: Score, clean: Score, patched: Score) -> float:
    """Recovered fraction of the margin at decisions that are wrong as it is."""
    at = base.wrong
    apart = (clean.margin - base.margin)[at].sum()
    return float((patched.margin - base.margin)[at].sum() / apart) if apart else float("nan")


def _as_digit(
    model: HookedAdder,
    short: Sequence[Problem],
    problems: Sequence[Problem],
    heads: Sequence[Head],
    interventions: Sequence[Edit] = (),
) -> Float[np.ndarray, "head"]:
    """Share of b's chunks with nothing to find whose head output is nearer to a digit's mean than to nothing's.

    Means are over b's chunks of problems of training length: by the first number's token found there, and of none.
    """
    known, asked = _outputs(model, short, heads), _outputs(model, problems, heads, interventions)
    z, label = known
    values = label.unique().tolist()
    means = torch.stack([z[:, label == value].mean(1) for value in values], dim=1)  # [head, value, d_head]
    nearest = torch.cdist(asked[0], means).argmin(-1)[:, asked[1] < 0]
    return np.asarray((nearest != values.index(-1)).double().mean(-1).numpy())


def _outputs(
    model: HookedAdder, problems: Sequence[Problem], heads: Sequence[Head], interventions: Sequence[Edit] = ()
) -> tuple[Float[Tensor, "head query d_head"], Int[Tensor, "query"]]:
    """Outputs of heads at b's chunks, and the token that stands in a's same column, -1 for none."""
    kept: dict[int, Tensor] = {}

    def watch(batch: Batch) -> list[Hook]:
        def keep(z: Tensor, hook: HookPoint) -> None:
            kept[hook.layer()] = z

        return [(f"blocks.{layer}.attn.hook_z", keep) for layer in sorted({layer for layer, _ in heads})]

    outputs, labels = [], []
    for step in run_problems(model, problems, interventions, watch):
        lookup = step.batch.lookups["first_from_second"]
        target = lookup.targets[..., 0]
        token = torch.where(target >= 0, step.batch.tokens.gather(1, target.clamp(min=0)), -1)
        outputs.append(torch.stack([kept[layer][:, :, head][lookup.queries] for layer, head in heads]))
        labels.append(token[lookup.queries])
    return torch.cat(outputs, dim=1), torch.cat(labels)


def _probe_route(model: HookedAdder, short: Sequence[Problem], problems: Sequence[Problem]) -> Route:
    task = ("first_ended", "second")
    train = sample(model, short)
    use = train.of(task, MOST_QUERIES)
    measures: dict[str, float] = {}
    read: dict[str, list[float]] = {"now": [], "without far keys": []}
    runs = {"now": sample(model, problems), "without far keys": sample(model, problems, [_FAR])}
    for layer in range(1, model.cfg.n_layers + 1):
        fitted = fit_probe(train.streams[layer, use], train.label[task][use], 2)
        for name, found in runs.items():
            at = found.of(task)
            at = at[found.label[task][at] == 1]
            share = float((fitted.read(found.streams[layer, at]) == 1).double().mean())
            measures[f"ended read as ended after layer {layer - 1}, {name}"] = share
            read[name].append(share)
    pairs = zip(read["now"], read["without far keys"], strict=True)
    return Route("probe", any(now <= ENOUGH and without >= 1 - SELDOM for now, without in pairs), measures)
