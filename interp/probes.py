"""Linear probes of the residual stream: what a query knows, and whether a probe trained short still reads it long.

A probe is a multinomial logistic regression, ridge-penalised, on the (standardised) residual stream before a layer, or
after the last. It is trained on problems as training draws them, and read on others: held-out ones of the same lengths,
and longer ones. Accuracies are balanced, means over classes of the share read right, so that guessing gives one over
the number of classes at any length.

===========  ========  ======================================================================================
label        site      classes
===========  ========  ======================================================================================
first_ended  second    at b's chunks: whether the first number has ended
first_ended  decision  at decisions: the same, of the column decided about
carry        decision  whether a carry comes into the column
parity       second    whether the column is even
parity       decision  the same
row          all       which number the token belongs to (a separator opens the next number)
===========  ========  ======================================================================================

A high accuracy may be the probe's own doing. The **control task** (Hewitt and Liang 1909.03368) gives every type, here
the token and its column, a random class; **selectivity** is accuracy less that of the same probe on the control, both
on held-out problems of training length.

Trained long and read long (``refit``), a probe says whether the *knowledge* is there; trained short and read long
(``long``), whether it is still where training put it, which is all that the layers above can use. ``at_wrong`` is the
latter at wrong decisions alone. What a probe finds need not be used: :mod:`interp.patching` asks that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Edit, Hook
from interp.memory import require
from interp.passes import run_problems
from models.addition import Batch, Problem, generator
from models.config import InputError
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

TASKS = (
    ("first_ended", "second"),
    ("first_ended", "decision"),
    ("carry", "decision"),
    ("parity", "second"),
    ("parity", "decision"),
    ("row", "all"),
)
PENALTY = 1e-3  # of squared weights, beside the mean log-loss
MOST_QUERIES = 2000  # that a probe is trained on
_STEPS = 60  # of L-BFGS
Tell = Callable[[str], None]


class ProbeError(InputError):
    """Probes that cannot be trained; says what is missing."""


@dataclass(frozen=True)
class Probe:
    """One label at one site before one layer (``layer`` = number of layers: after the last). Balanced accuracies.

    ``short``: held-out problems of training length. ``control``: of the control task there. ``long``: the same probe
    on longer problems. ``refit``: a probe trained on longer problems, on others of them. ``at_wrong``: share, not
    balanced, that the short probe reads right at wrong decisions (None where there is none, or at other sites).
    """

    label: str
    site: str
    layer: int
    classes: int
    short: float
    control: float
    long: float
    refit: float
    at_wrong: float | None

    @property
    def selectivity(self) -> float:
        return self.short - self.control


@dataclass(frozen=True)
class Probes:
    """All probes; ``wrong``: wrong decisions among ``decisions`` of the longer problems."""

    digits: int
    decisions: int
    wrong: int
    probes: tuple[Probe, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a probe."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> dict[str, Any]:
        return {"digits": self.digits, "decisions": self.decisions, "wrong": self.wrong, "probes": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return [{**asdict(probe), "selectivity": probe.selectivity} for probe in self.probes]

    def plot(self) -> go.Figure:
        """Balanced accuracy by layer, a panel a task: short, control, long, refit."""
        from plotly.subplots import make_subplots

        from interp.plots import BLUE, GREEN, GREY, LIGHT, VERMILLION

        titles = [f"{label.replace('_', ' ')}, {site}" for label, site in TASKS]
        figure = make_subplots(rows=2, cols=3, subplot_titles=titles, shared_yaxes=True)
        lines = {
            "short": (BLUE, "solid", "trained and read short"),
            "control": (GREY, "dot", "control task"),
            "long": (VERMILLION, "solid", "trained short, read long"),
            "refit": (GREEN, "dash", "trained and read long"),
        }
        for i, task in enumerate(TASKS):
            found = [probe for probe in self.probes if (probe.label, probe.site) == task]
            for name, (colour, dash, words) in lines.items():
                figure.add_scatter(
                    x=[probe.layer for probe in found],
                    y=[getattr(probe, name) for probe in found],
                    line={"color": colour, "dash": dash},
                    name=words,
                    legendgroup=name,
                    showlegend=i == 0,
                    row=i // 3 + 1,
                    col=i % 3 + 1,
                )
        figure.update_yaxes(range=[0, 1.04])
        figure.update_xaxes(title="before layer", dtick=1, row=2)
        return figure.update_layout(template=LIGHT, height=520, margin={"t": 90})


@dataclass(frozen=True)
class Linear:
    """A fitted probe: class ``argmax((x - mean) / scale @ weight + bias)``; ``weight`` is ``[d_model, class]``."""

    mean: Float[Tensor, "d_model"]
    scale: Float[Tensor, "d_model"]
    weight: Float[Tensor, "d_model class"]
    bias: Float[Tensor, "class"]

    def logits(self, x: Float[Tensor, "query d_model"]) -> Float[Tensor, "query class"]:
        return (x.double() - self.mean) / self.scale @ self.weight + self.bias

    def read(self, x: Float[Tensor, "query d_model"]) -> Int[Tensor, "query"]:
        return self.logits(x).argmax(-1)


def fit_probe(x: Float[Tensor, "query d_model"], label: Int[Tensor, "query"], classes: int) -> Linear:
    """Logistic regression, every class weighing the same, by L-BFGS from 0: the same data, the same probe.

    Raises:
        ProbeError: a class that does not occur.
    """
    counts = torch.bincount(label, minlength=classes)
    if len(counts) > classes or not counts.all():
        raise ProbeError(
            f"a probe needs queries of all {classes} classes, got {counts.tolist()} of each; take more problems"
        )
    x = x.double()
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    inputs, each = (x - mean) / scale, (len(label) / classes / counts.double())[label]
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(inputs @ weight + bias, label, reduction="none")
        total = (each * loss).mean() + PENALTY * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return Linear(mean, scale, weight.detach(), bias.detach())


def balanced_accuracy(read: Int[Tensor, "query"], label: Int[Tensor, "query"]) -> float:
    """Mean over the classes that occur of the share read right; NaN where there is no query."""
    right = [float((read[label == c] == c).double().mean()) for c in label.unique().tolist()]
    return float(np.mean(right)) if right else float("nan")


def labels(batch: Batch, label: str, site: str) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], int]:
    """The class of every query, which queries are of the site, and the number of classes."""
    if label == "row":
        return batch.row, batch.mask, 3
    at = batch.decisions if site == "decision" else (batch.row == 1) & (batch.column >= 0)
    column = torch.where(batch.decisions, batch.decision_column, batch.column)
    if label == "parity":
        return column % 2, at, 2
    if label == "carry":
        return _carries(batch).long(), at, 2
    lookup = batch.lookups["first_same_column" if site == "decision" else "first_from_second"]
    return (~lookup.present).long(), at, 2


def _carries(batch: Batch) -> Bool[Tensor, "batch pos"]:
    """Whether a carry comes into the column of each decision."""
    found = torch.zeros_like(batch.mask)
    base = 10**batch.task.chunk
    for i, (a, b) in enumerate(batch.problems):
        carry, at = 0, batch.decisions[i].nonzero()[:, 0].tolist()
        for query in at:
            found[i, query] = bool(carry)
            (a, x), (b, y) = divmod(a, base), divmod(b, base)
            carry = int(x + y + carry >= base)
    return found


@dataclass(frozen=True)
class _Sample:
    """Queries of some problems: residual streams ``[layer and last, query, d_model]``, and per task which and what."""

    streams: Float[Tensor, "layer query d_model"]
    at: dict[tuple[str, str], Bool[Tensor, "query"]]
    label: dict[tuple[str, str], Int[Tensor, "query"]]
    kind: Int[Tensor, "query"]  # the type: token and column, as one number
    wrong: Bool[Tensor, "query"]
    decisions: int

    def of(self, task: tuple[str, str], most: int | None = None) -> Int[Tensor, "query"]:
        """Queries of the task; the first ``most``, spread over all."""
        index = self.at[task].nonzero()[:, 0]
        if most is None or len(index) <= most:
            return index
        return index[torch.linspace(0, len(index) - 1, most).long()]


def sample(model: HookedAdder, problems: Sequence[Problem], interventions: Sequence[Edit] = ()) -> _Sample:
    """Run the problems and keep the residual stream of every query. Raises ProblemError: there is no problem."""
    layers = model.cfg.n_layers
    tokens = sum(sum(n.bit_length() for n in (*problem, sum(problem))) // 3 + 5 for problem in problems)
    require(
        tokens * (layers + 1) * model.cfg.d_model * 8, f"the residual streams of {len(problems)} problems", "take fewer"
    )
    kept: dict[int, Tensor] = {}

    def watch(batch: Batch) -> list[Hook]:
        def keep(x: Tensor, hook: HookPoint) -> None:
            kept[hook.layer() + hook.name.endswith("resid_post")] = x

        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(layers)]
        return [(name, keep) for name in [*names, f"blocks.{layers - 1}.hook_resid_post"]]

    parts: list[_Sample] = []
    for step in run_problems(model, problems, interventions, watch):
        batch, real = step.batch, step.batch.mask
        found = {task: labels(batch, *task) for task in TASKS}
        wrong = batch.decisions & (step.logits.argmax(-1) != batch.targets)
        parts.append(
            _Sample(
                streams=torch.stack([kept[layer][real] for layer in range(layers + 1)]),
                at={task: at[real] for task, (_, at, _) in found.items()},
                label={task: label[real] for task, (label, _, _) in found.items()},
                kind=(batch.tokens + batch.column.clamp(min=0) * model.cfg.d_vocab)[real],
                wrong=wrong[real],
                decisions=int(batch.decisions.sum()),
            )
        )
    return _Sample(
        streams=torch.cat([part.streams for part in parts], dim=1),
        at={task: torch.cat([part.at[task] for part in parts]) for task in TASKS},
        label={task: torch.cat([part.label[task] for part in parts]) for task in TASKS},
        kind=torch.cat([part.kind for part in parts]),
        wrong=torch.cat([part.wrong for part in parts]),
        decisions=sum(part.decisions for part in parts),
    )


def probe(
    model: HookedAdder, digits: int = 100, n: int = 20, *, seed: int = 0, tell: Tell = lambda what: None
) -> Probes:
    """Train all probes short, and read them short and on ``n`` problems of ``digits`` digits.

    Short are 10 times as many problems, drawn as training draws them; as many others are held out. ``refit`` is trained
    on ``n`` other problems of ``digits`` digits.

    Raises:
        ProbeError: a class that does not occur in the problems. ProblemError: ``digits`` or ``n`` out of range.
    """
    model.task.evaluation_problems(digits, n, seed)  # refuses what is out of range by its own value
    drawn = model.task.evaluation_problems(digits, 2 * n, seed)
    many = max(10 * n, 100)
    tell("running the problems")
    train, held = (
        sample(model, model.task.training_problems(seed, 0, many, f"probe {part}")) for part in ("train", "held out")
    )
    long, again = (sample(model, part) for part in (drawn[:n], drawn[n:]))
    found = []
    for task in TASKS:
        classes = 3 if task[0] == "row" else 2
        control = _control(train, held, task, classes, seed)
        for layer in range(model.cfg.n_layers + 1):
            tell(f"probes of {task[0].replace('_', ' ')}, {task[1]}, before layer {layer}")
            found.append(_probe(train, held, long, again, task, layer, classes, control))
    return Probes(digits, long.decisions, int(long.wrong.sum()), tuple(found))


def _control(train: _Sample, held: _Sample, task: tuple[str, str], classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random class for every type, of the training queries and the held-out ones."""
    types = int(max(train.kind.max(), held.kind.max())) + 1
    drawn = generator(seed, f"control {task[0]} {task[1]}", 0).integers(0, classes, size=types)
    classes_of = torch.from_numpy(drawn)
    return classes_of[train.kind], classes_of[held.kind]


def _probe(
    train: _Sample,
    held: _Sample,
    long: _Sample,
    again: _Sample,
    task: tuple[str, str],
    layer: int,
    classes: int,
    control: tuple[Tensor, Tensor],
) -> Probe:
    use, test, read = train.of(task, MOST_QUERIES), held.of(task), long.of(task)
    short = fit_probe(train.streams[layer, use], train.label[task][use], classes)
    null = fit_probe(train.streams[layer, use], control[0][use], classes)
    other = again.of(task, MOST_QUERIES)
    refit = fit_probe(again.streams[layer, other], again.label[task][other], classes)

    def accuracy(fitted: Linear, on: _Sample, at: Tensor, label: Tensor) -> float:
        return balanced_accuracy(fitted.read(on.streams[layer, at]), label[at])

    wrong = read[long.wrong[read]]
    right = short.read(long.streams[layer, wrong]) == long.label[task][wrong]
    return Probe(
        *task,
        layer=layer,
        classes=classes,
        short=accuracy(short, held, test, held.label[task]),
        control=accuracy(null, held, test, control[1]),
        long=accuracy(short, long, read, long.label[task]),
        refit=accuracy(refit, long, read, long.label[task]),
        at_wrong=float(right.double().mean()) if len(wrong) and task[1] == "decision" else None,
    )
