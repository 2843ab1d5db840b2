"""The command ``leaksum``. Imports of torch and the models wait until a command needs them."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from interp.interventions import Intervention
    from models.transformer import HookedAdder

app = typer.Typer(
    name="leaksum",
    help="Why a transformer fails on inputs longer than it was trained on, and the proof.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Interventions are written as flags of their own (`--far`, `--window 4`) and are applied in the order given, so they
# become one repeated option before parsing. True where a value follows.
INTERVENTION_FLAGS = {
    "far": False,
    "window": True,
    "first-and-window": True,
    "keep-near": False,
    "sink-boost": True,
    "far-zero": False,
    "drop-best-far": False,
    "normalizer": True,
    "ssmax": True,
    "temperature": True,
    "mass-control": False,
    "round-gates": True,
    "jitter-gates": True,
    "random-control": False,
}

Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="Directory of a checkpoint.", show_default=False)]
Digits = Annotated[str, typer.Option(help="Digits of the longer operand.")]
Problems = Annotated[int, typer.Option(help="Random problems at each length.")]
ProblemsFrom = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Take the problems from a file, one 'a + b' a line.")
]
Interventions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="Repeatable, applied in order; or as flags of their own: "
        + ", ".join(f"--{name}{' VALUE' if value else ''}" for name, value in INTERVENTION_FLAGS.items()),
    ),
]
OnlyHeads = Annotated[list[str] | None, typer.Option(metavar="L.H", help="Only in this head; repeatable.")]
ExceptHeads = Annotated[list[str] | None, typer.Option(metavar="L.H", help="Not in this head; repeatable.")]
FigureFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, help="Draw all in one figure (.html, .svg, .png)."),
]
Report = Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write an offline HTML report.")]
MOST_SEED = 2**63 - 1
LOOKUP_KEYS = ("lookup", "present")  # of an audit's rows, which language models leave empty
PROBE_COLUMNS = ("label", "site", "layer", "short", "control", "selectivity", "long", "refit", "at_wrong")
SHOWN_EFFECT = 0.05  # recovered fraction from which a patch is shown to people; JSON has all
Seed = Annotated[int, typer.Option(help="Seed of the problems.", min=0, max=MOST_SEED)]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: torch's own choice).", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the training recipes."""
    from models.recipes import LANGUAGE_RECIPES, MACHINE_RECIPES, RECIPES

    every: list[Any] = [*RECIPES.values(), *MACHINE_RECIPES.values(), *LANGUAGE_RECIPES.values()]
    rows = [{"name": r.name, "steps": r.steps, "batch": r.batch, "about": r.about} for r in every]
    _emit({"recipes": rows}, as_json, lambda console: _table(console, rows))


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe that `leaksum recipes` lists.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory of the checkpoint.", show_default=False)],
    steps: Annotated[int | None, typer.Option(help="Train for so many steps (default: the recipe's).")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep a checkpoint each so many steps, for `leaksum during` (adders).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run in --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and problems.", min=0, max=MOST_SEED)] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; results depend on it by rounding.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Train a recipe. Resumable after a kill at any moment, to the same weights."""
    from models.config import InputError
    from models.recipes import LANGUAGE_RECIPES, MACHINE_RECIPES, keeping, named_recipe, trainable_recipe

    if keep_every is not None and recipe in {**LANGUAGE_RECIPES, **MACHINE_RECIPES}:
        raise InputError(f"{recipe} keeps no checkpoints on the way; leave out --keep-every")
    if recipe in LANGUAGE_RECIPES:
        _train_language_model(recipe, out, steps, resume, seed, threads, as_json)
        return
    chosen = trainable_recipe(recipe, steps) if keep_every is None else keeping(named_recipe(recipe, steps), keep_every)
    _use_threads(threads)
    from models.machine_training import trainer_of

    with _progress(chosen.steps, recipe) as tell:
        trainer = trainer_of(
            chosen,
            seed,
            out,
            resume=resume,
            progress=lambda step, loss, exact: tell(step, f"loss {loss:.4f}, exact in distribution {exact:.3f}"),
        )
        trainer.run()
    record = trainer.done()
    last = record.curve[-1]
    row = {
        "checkpoint": str(out),
        "recipe": recipe,
        "seed": seed,
        "steps": record.step,
        "loss": last.loss,
        "exact": last.exact,
        "seconds": record.seconds,
    }
    _emit(row, as_json, lambda console: _table(console, [row]))


def _train_language_model(
    name: str, out: Path, steps: int | None, resume: bool, seed: int, threads: int, as_json: bool
) -> None:
    from models.config import InputError
    from models.recipes import LANGUAGE_RECIPES

    if resume:
        raise InputError(f"{name} takes minutes and does not resume; leave out --resume")
    if steps is not None and steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    chosen = LANGUAGE_RECIPES[name].model_copy(update={} if steps is None else {"steps": steps})
    _use_threads(threads)
    from models.language import train_language_model

    with _progress(chosen.steps, name) as tell:
        last = train_language_model(
            chosen, seed, out, lambda step, loss, right: tell(step, f"loss {loss:.4f}, right {right:.3f}")
        )
    row = {"checkpoint": str(out), "recipe": name, "seed": seed, **last}
    _emit(row, as_json, lambda console: _table(console, [row]))


@app.command()
def score(
    checkpoint: Checkpoint,
    digits: Digits = "100",
    problems: Problems = 50,
    problems_from: ProblemsFrom = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Score every decision on its own, given the correct answer so far."""
    _score(checkpoint, digits, problems, problems_from, [], ((), ()), seed, threads, as_json)


@app.command()
def ablate(
    checkpoint: Checkpoint,
    intervention: Interventions = None,
    head: OnlyHeads = None,
    except_head: ExceptHeads = None,
    digits: Digits = "100",
    problems: Problems = 50,
    problems_from: ProblemsFrom = None,
    each_head: Annotated[
        bool, typer.Option("--each-head", help="Also: the last intervention in each head alone, and in all others.")
    ] = False,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """The score under interventions: hooks on the saved checkpoint."""
    from models.config import InputError

    if not intervention:
        flags = ", ".join(f"--{name}" for name in INTERVENTION_FLAGS)
        raise InputError(f"ablate needs an intervention, got none; give at least one of {flags}")
    if each_head and (len(intervention) > 1 or head or except_head):
        raise InputError(
            f"--each-head takes one intervention in all heads, got {', '.join(intervention)}; drop the rest"
        )
    scope = (head or (), except_head or ())
    _score(checkpoint, digits, problems, problems_from, intervention, scope, seed, threads, as_json, each_head)


@app.command()
def reach(
    checkpoint: Checkpoint,
    digits: Digits = "10,20,40,100,200",
    problems: Problems = 50,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Exact match against length, with 95% intervals."""
    lengths = _lengths(digits)
    _use_threads(threads)
    from interp import decisions
    from models.checkpoint import load_any

    model = load_any(checkpoint)
    with _progress(problems * len(lengths), "reach") as tell:
        found = decisions.reach(model, lengths, problems, seed=seed, progress=lambda done: tell(done, ""))
    rows = found.to_json()
    payload = {"checkpoint": str(checkpoint), "reach": rows, "run": found.scores[max(lengths)].run}
    _emit(payload, as_json, lambda console: _table(console, rows))


@app.command()
def location(
    checkpoint: Checkpoint,
    digits: Annotated[str, typer.Option(help="Length, in bits of the longer operand or in symbols.")] = "20",
    problems: Problems = 50,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Where the heads of a Turing machine stand, or which cells of a Neural GPU are right after each step."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp import location as places
    from models.checkpoint import load_machine

    model = load_machine(checkpoint)
    with _progress(problems, "location") as tell:
        found = places.location(model, length, problems, seed=seed, progress=lambda done: tell(done, ""))
    payload = {"checkpoint": str(checkpoint), "digits": length, **found.to_json(), "run": _simple_run(seed)}
    _emit(payload, as_json, lambda console: _table(console, found.summary()))


@app.command()
def compare(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...", help="Checkpoints.", show_default=False)],
    digits: Digits = "10,40,100,200",
    intervene: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="Also under this intervention; repeatable.")
    ] = None,
    problems: Problems = 50,
    handmade: Annotated[
        bool, typer.Option("--handmade", help="All hand-made problems (full carry chains ...) instead of random ones.")
    ] = False,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Checkpoints x lengths x interventions, one table."""
    lengths = _lengths(digits)
    _use_threads(threads)
    from interp import compare as comparison

    edits = _interventions(intervene or (), (), (), seed)
    with _status() as tell:
        cells = comparison.compare(checkpoints, lengths, edits, problems, handmade=handmade, seed=seed, progress=tell)
    rows = [cell.to_json() for cell in cells]
    shown = ("checkpoint", "digits", "intervention", "exact", "low", "high", "wrong", "decisions")
    named = [{**{k: row[k] for k in shown}, "checkpoint": Path(row["checkpoint"]).name} for row in rows]
    _emit({"rows": rows}, as_json, lambda console: _table(console, named))


@app.command()
def shares(
    checkpoint: Checkpoint,
    digits: Digits = "100",
    problems: Problems = 20,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Where attention goes: share of each class of key by head, lookup and column."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp import shares as analysis
    from interp.passes import describe_run

    model = _load(checkpoint)
    drawn = model.task.evaluation_problems(length, problems, seed)
    with _progress(problems, "shares") as tell:
        found = analysis.shares(model, drawn, progress=lambda done: tell(done, ""))
    payload = {
        "checkpoint": str(checkpoint),
        "digits": length,
        "heads": found.to_json(),
        "run": describe_run(model, drawn, seed),
    }

    def show(console: Console) -> None:
        keys = ["lookup", "present", "layer", "head"]
        kinds = ["target", "sink", "self", "near", "far", "separator", "beside"]
        frame: Any = found.to_frame()
        weighted = frame[kinds].multiply(frame["queries"], axis=0).assign(**frame[[*keys, "queries"]])
        total = weighted.groupby(keys, sort=False)[[*kinds, "queries"]].sum()
        rows = total[kinds].div(total["queries"], axis=0).reset_index()
        _table(
            console,
            [{k: str(v) if k in keys else f"{v:.3f}" for k, v in row.items()} for row in rows.to_dict("records")],
        )

    _emit(payload, as_json, show)


@app.command()
def leak(
    checkpoint: Checkpoint,
    digits: Digits = "10,40,100",
    problems: Problems = 20,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How the leak of each head's lookups grows with length."""
    lengths = _lengths(digits)
    _use_threads(threads)
    from interp import shares as analysis
    from interp.passes import describe_run

    model = _load(checkpoint)
    with _progress(problems * len(lengths), "leak") as tell:
        found = analysis.leak_growth(model, lengths, problems, seed=seed, progress=lambda done: tell(done, ""))
    drawn = model.task.evaluation_problems(max(lengths), problems, seed)
    run = describe_run(model, drawn, seed, every_key=True)  # at the longest length, whose distances are kept
    payload = {"checkpoint": str(checkpoint), **found.to_json(), "run": run}

    def show(console: Console) -> None:
        keep = [
            "layer",
            "head",
            "lookup",
            "present",
            "digits",
            "share",
            "far_share",
            "sink_share",
            "leak",
            "gap",
            "n_eff",
        ]
        rows: Any = found.to_frame().sort_values(["layer", "head", "lookup", "present", "digits"])[keep]
        _table(console, rows.to_dict("records"))

    _emit(payload, as_json, show)


@app.command()
def counters(
    checkpoint: Checkpoint,
    digits: Digits = "120",
    problems: Problems = 50,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """What each counter counts, how exactly, and how much attention rests on the null keys."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp.counters import PAIRS, probe_counters
    from interp.passes import describe_run

    model = _load(checkpoint)
    with _status() as tell:
        tell(f"counting {problems} problems of {length} digits")
        found = probe_counters(model, length, problems, seed=seed)
    run = describe_run(model, model.task.evaluation_problems(length, problems, seed), seed)
    payload = {"checkpoint": str(checkpoint), **found.to_json(), "run": run}

    def show(console: Console) -> None:
        rows = []
        for probe in found.counters:
            halves = [h for pair in PAIRS if (h := probe.half_column(pair)) is not None] if probe.counts_columns else []
            rates = " ".join(f"{rate:.3f}" for rate in probe.per_digit)
            rows.append(
                {"counter": f"{probe.layer}.{probe.head}.{probe.counter}"}
                | {
                    name: f"{getattr(probe, name):.2f}"
                    for name in ("column", "row", "position", "from_end", "shuffled")
                }
                | {"per digit, by row": rates, "column counter": "yes" if probe.counts_columns else "no"}
                | {"half a column off at": min(halves, default=None)}
                | {"kernel peak": probe.kernel_peak, "height": probe.kernel_height, "width": probe.kernel_width}
            )
        console.print(
            f"{sum(p.counts_columns for p in found.counters)} of {len(found.counters)} counters follow the column, "
            f"{sum(p.one_a_digit for p in found.counters)} of them at one a digit in every row; correlations:"
        )
        _table(console, rows)
        console.print("\nmean share of the null key and of the first token, in training and now")
        _table(
            console,
            [{k: f"{v:.3f}" if isinstance(v, float) else v for k, v in n.to_json().items()} for n in found.null_keys],
        )

    _emit(payload, as_json, show)


@app.command()
def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Directory in Hugging Face format, a hub id, or a checkpoint.", show_default=False
        ),
    ],
    lengths: Annotated[
        str | None,
        typer.Option(
            help="One number or a list: tokens, of a checkpoint digits (default: 64,128,256,512; of a checkpoint "
            "10,40,100)."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="induction (the default), passkey, or a file of cases, one JSON object a line; of a checkpoint "
            "addition, always."
        ),
    ] = None,
    cases: Annotated[int, typer.Option(help="Cases of each length.", min=1)] = 8,
    intervention: Interventions = None,
    head: OnlyHeads = None,
    except_head: ExceptHeads = None,
    report: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Which heads of a model lose their targets as the context grows, from what length, and what repairs it."""
    from models.checkpoint import is_checkpoint
    from models.config import InputError

    own = is_checkpoint(model)
    sizes = _lengths(lengths or ("10,40,100" if own else "64,128,256,512"), what="lengths")
    if (head or except_head) and not intervention:
        raise InputError("--head and --except-head say where an intervention acts; give one too, such as --far")
    edits = _interventions(intervention or (), head or (), except_head or (), seed)
    _use_threads(threads)
    from interp.audit import audit as run_audit
    from interp.audit import describe
    from interp.bridge import load_language_model

    loaded = _load(Path(model)) if own else load_language_model(model)
    with _status() as tell, warnings.catch_warnings(record=True) as warned:
        found = run_audit(loaded, sizes, task, cases, interventions=edits, name=model, seed=seed, progress=tell)
        if report:
            from interp.audit_report import write_audit_report

            tell("writing the report")
            write_audit_report(report, found, {**_simple_run(seed), "cases": cases})
    for warning in dict.fromkeys(str(w.message) for w in warned if w.category is UserWarning):
        sys.stderr.write(f"leaksum: {' '.join(warning.split())}\n")
    payload = {**found.to_json(), "run": {**_simple_run(seed), "cases": cases, "batches": list(found.batches)}}

    def show(console: Console) -> None:
        verdict, *evidence = describe(found)
        console.print(verdict, style="bold", markup=False)
        for line in evidence:
            indented = textwrap.fill(line, console.width, initial_indent="  - ", subsequent_indent="    ")
            console.print(indented, markup=False)
        console.print()
        _table(console, [asdict(row) for row in found.lengths])
        console.print()
        _table(console, [{k: v for k, v in asdict(row).items() if own or k not in LOOKUP_KEYS} for row in found.heads])

    _emit(payload, as_json, show)


@app.command()
def diagnose(
    checkpoint: Checkpoint,
    digits: Digits = "100",
    problems: Problems = 50,
    report: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Which failure, which heads, and the proof."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp import diagnosis

    model = _load(checkpoint)
    with _status() as tell:
        found = diagnosis.diagnose(model, length, problems, seed=seed, progress=tell)
        if report:
            from interp.report import write_report

            tell("writing the report")
            write_report(report, model, found, str(checkpoint), seed=seed)
    _emit({"checkpoint": str(checkpoint), **found.to_json()}, as_json, lambda console: _print_diagnosis(console, found))


@app.command()
def plot(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="reach, mistakes, heads, shares, leak, gaps, profile, attention, counters or kernels.",
            show_default=False,
        ),
    ],
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...", help="Checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="FILE.html, .svg or .png.", show_default=False)],
    digits: Annotated[str, typer.Option(help="Digits of the longer operand; reach takes a list.")] = "100",
    head: Annotated[str | None, typer.Option(metavar="L.H", help="Default: where the target lost most.")] = None,
    lookup: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the one whose target lost most.")] = None,
    absent: Annotated[bool, typer.Option("--absent", help="Queries for which --lookup has nothing to find.")] = False,
    quantity: Annotated[str, typer.Option(help="Of heads: share, sink, far, leak, gap or n_eff.")] = "share",
    problems: Problems = 20,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Draw a figure from a checkpoint, as a page that works offline or as an image."""
    lengths = _lengths(digits, one=kind != "reach")
    _use_threads(threads)
    from interp import plots
    from interp.interventions import parse_head
    from models.config import InputError

    if absent and lookup is None:
        raise InputError("--absent says which queries of a lookup; give --lookup too")
    plots.check_format(out)
    models = {name: _load(path) for path, name in _distinct(checkpoints).items()}
    asked = plots.Request(
        models, lengths, problems, seed, None if head is None else parse_head(head), lookup, absent, quantity
    )
    with _status() as tell:
        tell(f"drawing {kind}")
        figure = plots.draw(kind, asked)
        plots.save(figure, out, f"leaksum: {kind} of {', '.join(models)}")
    row = {"kind": kind, "out": str(out), "bytes": out.stat().st_size}
    _emit(row, as_json, lambda console: _table(console, [row]))


@app.command()
def patch(
    checkpoint: Checkpoint,
    pairs: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="What differs between the two runs: chunk (the first number's chunk), carry (into the column), length "
            "(far columns).",
        ),
    ] = "chunk",
    failing: Annotated[
        bool, typer.Option("--failing", help="Of length pairs, only decisions that are wrong in the long problem.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Instead: zero, mean and resample ablation of every head.")
    ] = False,
    other: Annotated[
        Path | None,
        typer.Option("--from", metavar="CKPT", help="Instead: where a passing seed's heads look, in this one's."),
    ] = None,
    digits: Digits = "10",
    problems: Annotated[int, typer.Option(help="Pairs, or problems.")] = 16,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """What carries the answer: states of one run put into another, by layer, head, role and lookup."""
    from models.config import InputError

    (length,) = _lengths(digits, one=True)
    if ablate and other:
        raise InputError("--ablate and --from are two analyses, got both; leave one out")
    if failing and (ablate or other):
        raise InputError("--failing is about length pairs; leave it out, or leave out --ablate and --from")
    _use_threads(threads)
    model = _load(checkpoint)
    payload: dict[str, Any] = {"checkpoint": str(checkpoint), "digits": length}
    with _status() as tell:
        if ablate:
            from interp.ablation import ablate_heads

            payload |= ablate_heads(model, length, problems, seed=seed, tell=tell).to_json()
        elif other:
            from interp.across import patch_attention

            found = patch_attention(model, _load(other), length, problems, seed=seed, tell=tell)
            payload |= {"from": str(other), **found.to_json()}
        else:
            from interp.pairs import build_pairs
            from interp.patching import patch as run_patching

            drawn = build_pairs(model, pairs, length, problems, seed=seed, failing=failing, progress=tell)
            payload |= run_patching(model, drawn, tell=tell).to_json()
    payload["run"] = _simple_run(seed)

    def show(console: Console) -> None:
        if ablate or other:
            console.print(f"{payload['wrong']} of {payload['decisions']} decisions wrong as it is")
            _table(console, payload["heads" if ablate else "swaps"])
            return
        console.print(
            f"margin {payload['clean_margin']:.2f} in the clean runs, {payload['corrupt_margin']:.2f} in the corrupt; "
            f"patches that recover at least {SHOWN_EFFECT} of the difference, or lose as much:"
        )
        rows = [row for row in payload["patches"] if abs(row["recovered"]) >= SHOWN_EFFECT]
        for row in rows:
            row["head"] = "-" if row["head"] is None else f"{row['layer']}.{row['head']}"
        _table(console, rows or [{"sweep": "none"}])

    _emit(payload, as_json, show)


@app.command()
def probe(
    checkpoint: Checkpoint,
    digits: Digits = "100",
    problems: Problems = 20,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """What the residual stream says by linear probes trained at training length, there and at length."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp.probes import probe as run_probes

    model = _load(checkpoint)
    with _status() as tell:
        found = run_probes(model, length, problems, seed=seed, tell=tell)
    payload = {"checkpoint": str(checkpoint), **found.to_json(), "run": _simple_run(seed)}

    def show(console: Console) -> None:
        console.print(f"balanced accuracy; {found.wrong} of {found.decisions} decisions wrong at {length} digits")
        _table(console, [{k: row[k] for k in PROBE_COLUMNS} for row in payload["probes"]])

    _emit(payload, as_json, show)


@app.command()
def circuit(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...", help="Checkpoints.", show_default=False)],
    pairs: Annotated[str, typer.Option(metavar="KIND", help="chunk, carry, or both.")] = "both",
    digits: Digits = "10",
    problems: Annotated[int, typer.Option(help="Pairs of each kind.")] = 12,
    figure: FigureFile = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """The path from the operands to the answer, edge by edge, by path patching."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp.circuit import circuit_figure, find_circuit
    from interp.pairs import build_pairs

    names = _distinct(checkpoints)
    if figure:
        from interp.plots import check_format

        check_format(figure)
    found: dict[tuple[Path, str], Any] = {}
    with _status() as tell:
        for checkpoint in checkpoints:
            model = _load(checkpoint)
            for kind in ("chunk", "carry") if pairs == "both" else (pairs,):
                drawn = build_pairs(model, kind, length, problems, seed=seed, progress=tell)
                found[checkpoint, kind] = find_circuit(model, drawn, tell=tell)
    if figure:
        from interp.plots import save

        named = {f"{names[path]}, {kind}": each for (path, kind), each in found.items()}
        save(circuit_figure(named), figure, f"leaksum: circuits of {', '.join(names.values())}")
    rows = [{"checkpoint": str(path), **each.to_json()} for (path, _), each in found.items()]

    def show(console: Console) -> None:
        for row in rows:
            console.print(
                f"{row['checkpoint']}, {row['pairs']} pairs of {length} digits; the nodes alone keep "
                f"{row['faithfulness']:.2f} of the margin",
                style="bold",
                markup=False,
            )
            for kept in (row["nodes"], row["edges"]):
                _table(console, kept or [{"nothing": "above the bar"}])
                console.print()

    _emit({"circuits": rows, "run": _simple_run(seed)}, as_json, show)


@app.command()
def displacement(
    checkpoint: Checkpoint,
    digits: Digits = "100",
    problems: Problems = 50,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Does the crowd displace the sink, and is that read as a digit? By patching, by outputs, by a probe."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp.displacement import displacement as ask

    model = _load(checkpoint)
    with _status() as tell:
        found = ask(model, length, problems, seed=seed, tell=tell)
    payload = {"checkpoint": str(checkpoint), **found.to_json(), "run": _simple_run(seed)}

    def show(console: Console) -> None:
        console.print(
            f"{found.wrong} of {found.decisions} decisions wrong; the sink is {'' if found.displaced else 'not '}"
            f"displaced; the claim is {'' if found.supported else 'not '}supported by all three routes",
            style="bold",
        )
        _table(console, [{**row, "head": "{}.{}".format(*row["head"])} for row in payload["resting"]])
        console.print()
        rows: Any = found.to_frame().to_dict("records")
        _table(console, [{**row, "supports": "yes" if row["supports"] else "no"} for row in rows])

    _emit(payload, as_json, show)


@app.command()
def during(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run trained with --keep-every.")],
    digits: Digits = "40",
    problems: Problems = 20,
    figure: FigureFile = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Leak, gaps, sink and counters against the training step."""
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp.during import during as measure

    if figure:
        from interp.plots import check_format

        check_format(figure)
    with _status() as tell:
        found = measure(checkpoint, length, problems, seed=seed, tell=tell)
    if figure:
        from interp.plots import save

        save(found.plot(), figure, f"leaksum: {checkpoint.name} during training")
    payload = {"checkpoint": str(checkpoint), **found.to_json(), "run": _simple_run(seed)}

    def show(console: Console) -> None:
        console.print(f"problems exact at {length} digits, and in training lengths")
        _table(console, [{k: v for k, v in row.items() if v is not None} for row in payload["steps"]])
        courses = found.courses()
        for value in ("gap", "sink_score", "leak"):
            console.print(
                f"\n{value.replace('_', ' ')}, median over queries, in the head that performs each lookup in the end"
            )
            rows: dict[int, dict[str, Any]] = {moment.step: {"step": moment.step} for moment in found.moments}
            for (lookup, (layer, head)), mine in courses.items():
                for step, number in zip(mine["step"], mine[value], strict=True):
                    rows[step][f"{lookup} {layer}.{head}"] = float(number)
            _table(console, list(rows.values()))

    _emit(payload, as_json, show)


@app.command()
def reproduce(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Claims, as C5 (default: all).")] = None,
    fixtures: Annotated[Path, typer.Option(help="Folder of the shipped checkpoints.")] = Path("fixtures"),
    problems: Problems = 150,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """The study's claims on the shipped checkpoints: its figure, ours, and whether the claim holds."""
    _use_threads(threads)
    from interp import reproduce as claims

    with _status() as tell:
        found = claims.reproduce(ids or (), fixtures, problems, progress=tell)

    def show(console: Console) -> None:
        for outcome in found:
            console.print(f"{outcome.id} {outcome.verdict.replace('_', ' ')}: {outcome.claim}", style="bold")
            for what, text in (("study", outcome.study), ("here", outcome.ours)):
                line = textwrap.fill(f"{what}: {text}", console.width, initial_indent="  ", subsequent_indent="    ")
                console.print(line, markup=False)

    _emit(claims.to_json(found), as_json, show)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The grid.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the runs and of the table.", show_default=False)],
    jobs: Annotated[int | None, typer.Option(help="Runs at once (default: one a processor).", min=1)] = None,
    engine: Annotated[str, typer.Option(help="processes, ray or dask.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Of the cluster, with ray or dask.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train what is missing of a grid, score and diagnose it, and count which seeds fail and why."""
    from interp.sweep import read_sweep, run_sweep, write_outcome

    grid = read_sweep(file)
    with _progress(len(grid.runs), file.stem) as tell:
        found = run_sweep(
            grid, out, jobs=jobs, engine=engine, address=address, seed=seed, progress=lambda done: tell(done, "")
        )
    files = {kind: str(path) for kind, path in write_outcome(found, out, file.stem).items()}
    for run in found.failed:
        sys.stderr.write(f"leaksum: {_line('{run} ({recipe}, seed {seed}) failed: {reason}'.format(**run))}\n")

    def show(console: Console) -> None:
        console.print(f"{found.runs - len(found.failed)} of {found.runs} runs done; {files['csv']}", markup=False)
        for title, rows in (("seeds under 99% exact", found.fails), ("seeds by diagnosis", found.causes)):
            if rows:
                console.print(f"\n{title}, with 95% intervals")
                _table(console, list(rows))

    _emit({"files": files, **found.to_json()}, as_json, show)


@app.command()
def doctor(checkpoint: Checkpoint, threads: Threads = None, as_json: AsJson = False) -> None:
    """Whether a checkpoint is whole, where it comes from, and whether its recorded accuracy still holds."""
    _use_threads(threads)
    from interp.doctor import examine
    from models.config import InputError

    found = examine(checkpoint)
    rows = [asdict(check) for check in found]
    bad = [check for check in found if check.ok is False]
    words = {True: "yes", False: "NO", None: "-"}
    _emit(
        {"checkpoint": str(checkpoint), "ok": not bad, "checks": rows},
        as_json,
        lambda console: _table(console, [{**row, "ok": words[row["ok"]]} for row in rows]),
    )
    if bad:
        raise InputError(f"{checkpoint}: {bad[0].check}: {bad[0].found}")


def _score(
    checkpoint: Path,
    digits: str,
    problems: int,
    problems_from: Path | None,
    names: Sequence[str],
    scope: tuple[Sequence[str], Sequence[str]],
    seed: int,
    threads: int | None,
    as_json: bool,
    each_head: bool = False,
) -> None:
    (length,) = _lengths(digits, one=True)
    _use_threads(threads)
    from interp import decisions
    from models.checkpoint import load_any

    model = load_any(checkpoint)
    interventions = _interventions(names, *scope, seed)
    drawn = _problems(model, length, problems, problems_from, seed)
    with _progress(len(drawn), "scoring") as tell:
        found = decisions.score(model, drawn, interventions, seed=seed, progress=lambda done: tell(done, ""))
    payload: dict[str, Any] = {"checkpoint": str(checkpoint), "digits": None if problems_from else length}
    if interventions:
        payload["interventions"] = [i.name for i in interventions]
    payload |= found.to_json()
    if each_head:
        from interp.diagnosis import head_trials

        with _status() as tell_head:
            trials = head_trials(model, drawn, interventions[0], progress=tell_head)
        payload |= {"wrong_before": trials[0].wrong, "heads": [trial.to_json() for trial in trials]}
    _emit(payload, as_json, lambda console: _print_score(console, payload))


# From text to values


def _lengths(text: str, one: bool = False, what: str = "digits") -> list[int]:
    from models.config import InputError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= 1 for part in parts):
        raise InputError(f"{what} must be whole numbers from 1 up, separated by commas, got {text[:60]!r}")
    if one and len(parts) > 1:
        raise InputError(f"this command takes one number of digits, got {text[:60]!r}; `leaksum reach` takes several")
    return [int(part) for part in parts]


def _load(checkpoint: Path) -> HookedAdder:
    from models.checkpoint import load_checkpoint

    return load_checkpoint(checkpoint)


def _distinct(checkpoints: Sequence[Path]) -> dict[Path, str]:
    """What each checkpoint is called in a figure: its folder's name, or its whole path where two have the same."""
    from models.config import InputError

    if len(set(checkpoints)) < len(checkpoints):
        twice = next(path for path in checkpoints if list(checkpoints).count(path) > 1)
        raise InputError(f"{twice} is given twice; give each checkpoint once")
    names = [path.name for path in checkpoints]
    return {path: path.name if path.name and names.count(path.name) == 1 else str(path) for path in checkpoints}


def _problems(model: Any, digits: int, n: int, path: Path | None, seed: int) -> list[Any]:
    from models.addition import read_problems
    from models.config import InputError
    from models.location import TuringMachine

    if path and isinstance(model, TuringMachine):
        raise InputError("a Turing machine copies symbols and takes no file of sums; leave out --problems-from")
    return read_problems(path) if path else model.task.evaluation_problems(digits, n, seed)


def _interventions(
    names: Sequence[str], heads: Sequence[str], except_heads: Sequence[str], seed: int
) -> list[Intervention]:
    from interp.interventions import Scope, parse_head, parse_intervention

    scope = Scope(frozenset(map(parse_head, heads)), frozenset(map(parse_head, except_heads)))
    return [parse_intervention(name, scope, seed) for name in names]


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _simple_run(seed: int) -> dict[str, Any]:
    """What a number may depend on, of analyses that run in one batch."""
    import torch

    return {"seed": seed, "threads": torch.get_num_threads(), "torch": torch.__version__}


# Output


def _emit(payload: dict[str, Any], as_json: bool, show: Callable[[Console], None]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_plain(payload), allow_nan=False) + "\n")
    else:
        from rich.console import Console

        show(Console(highlight=False))


def _plain(value: Any) -> Any:
    """JSON as INTERFACE has it: infinities as "inf" and "-inf", what does not apply (NaN) as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    return value


def _table(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, value in rows[0].items():
        text = isinstance(value, str)
        justify: Any = "left" if text else "right"
        table.add_column(name.replace("_", " "), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=500)).maximum
        )
    console.print(table)


def _text(value: Any) -> str:
    from rich.markup import escape

    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else escape(str(value))


def _print_score(console: Console, payload: dict[str, Any]) -> None:
    names = payload.get("interventions")
    console.print(f"{payload['checkpoint']}{' under ' + ', then '.join(names) if names else ''}", markup=False)
    console.print(
        f"exact {payload['exact']:.3f} of {payload['problems']} problems "
        f"(95% interval {payload['exact_low']:.3f} to {payload['exact_high']:.3f}); "
        f"{payload['wrong']} of {payload['decisions']} decisions wrong"
    )
    if payload["first_wrong_column"] is not None:
        console.print(f"first wrong column: {payload['first_wrong_column']} (0 is the least significant)")
    rows = [{"state": name, **counts} for name, counts in payload["by_state"].items()]
    _table(console, [*rows, {"state": "eos", **payload["eos"]}])
    if "heads" in payload:
        console.print(f"\nin one head alone, and in all others; {payload['wrong_before']} wrong without it")
        _table(console, payload["heads"])


def _print_diagnosis(console: Console, found: Any) -> None:
    verdict = found.verdict
    status = "" if verdict.cause in ("none", "unexplained") else ", proved" if verdict.proved else ", not proved"
    console.print(f"verdict at {found.digits} digits: {verdict.cause}{status}", style="bold")
    for line in verdict.evidence:
        indented = textwrap.fill(line, console.width, initial_indent="  - ", subsequent_indent="    ")
        console.print(indented, markup=False)
    console.print()
    _table(console, found.reach.to_json())
    if found.trials:
        console.print()
        before = {"intervention": "(none)", "wrong": found.score.n_wrong, "exact": found.score.exact}
        _table(console, [before | {"repaired": None, "broken": None}, *(asdict(trial) for trial in found.trials)])


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on standard error; nothing when that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield status.update


# Entry point


def expand_flags(arguments: Sequence[str]) -> list[str]:
    """``--far`` and ``--window 4`` as ``--intervention far`` and ``--intervention window=4``, in their places."""
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in INTERVENTION_FLAGS:
            out.append(argument)
            continue
        if INTERVENTION_FLAGS[name] and not equals:
            value = next(rest, "")
        out += ["--intervention", f"{name}={value}" if INTERVENTION_FLAGS[name] or equals else name]
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 2 bad input (one line on standard error), 130 interrupted."""
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["ablate"], ["audit"]):
        arguments = expand_flags(arguments)
    try:
        status = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
            sys.exit(2)
        _fail(error.format_message() + _offending(error, arguments), 2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _fail(
            f"{error.filename or 'a file'}: {error.strerror or error}; check the path, the rights and the space left", 2
        )
    except ValueError as error:
        from models.config import InputError

        if not isinstance(error, InputError):
            raise
        _fail(str(error), 2)
    sys.exit(status if isinstance(status, int) else 0)


def _offending(error: Any, arguments: Sequence[str]) -> str:
    """The value that an option could not take, if the error is about one."""
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in getattr(getattr(error, "param", None), "opts", ()):
            following = value if equals else next(iter(arguments[i + 1 :]), "")
            return f", got {following[:60]!r}"
    return ""


def _fail(message: str, status: int) -> None:
    sys.stderr.write(f"leaksum: {_line(message)}\n")
    sys.exit(status)


def _line(message: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(message.split()))


if __name__ == "__main__":
    main()
