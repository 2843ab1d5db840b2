"""Many runs: a grid of recipes, seeds, lengths and interventions, of which only what is missing is done.

Everything is kept in one folder, which several sweeps, and the workers of a cluster, may share::

    FOLDER/runs/3f2a91c05d7be840-seed7/     a checkpoint, named by the hash of its recipe, and by its seed
        results.json                        its scores and diagnoses, bound to the bytes of its weights
        failed.json                         or why it has none
    FOLDER/runs/3f2a91c05d7be840-seed7.lock held by the one process that works on it
    FOLDER/NAME.csv, .parquet, .json        the table of NAME.yaml, one row a run, length and intervention; the summary

Each run trains and is scored with one torch thread, and the table is made from these files alone: it is the same
bytes whatever the number of jobs and however often the sweep was stopped. A table holds no times; ``training.json`` of
each run does.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import torch
import yaml
from filelock import FileLock, Timeout
from joblib.externals.loky import get_reusable_executor
from pydantic import Field, ValidationError, model_validator

from interp.compare import UNEDITED
from interp.decisions import score, wilson_interval
from interp.diagnosis import HEALTHY, diagnose
from interp.interventions import InterventionError, parse_intervention
from models.addition import MOST_DIGITS, MOST_PROBLEMS
from models.checkpoint import CheckpointError, first_problem, load_checkpoint, load_record, require_loadable
from models.config import Frozen, InputError
from models.files import remove_asides, write_atomically, write_text
from models.recipes import Recipe, named_recipe
from models.training import Trainer, fast_precision, source_version

if TYPE_CHECKING:
    import pandas as pd

ENGINES = ("processes", "ray", "dask")
MOST_RUNS = 10_000
MOST_ROWS = 10**6
_LARGEST_FILE = 2**20  # bytes of a sweep file
_LONGEST_NAME = 120
_PAUSES = (0, 20, 40)  # seconds before a run is tried alone on a cluster, again and again
_MOST_JOBS = 256  # at once on one machine
_IDLE_BREAKS = 2  # times that workers may die in a row before they have begun anything

COLUMNS = {
    "run": str,
    "recipe": str,
    "seed": int,
    "digits": int,
    "intervention": str,
    "problems": int,
    "exact": float,
    "low": float,
    "high": float,
    "decisions": int,
    "wrong": int,
    "trained_exact": float,
    "diagnosed_at": int,
    "cause": str,
    "proved": bool,
    "proved_by": str,
    "missing": str,
}


class SweepError(InputError):
    """A sweep file that asks for nothing sensible, or an engine that cannot run; says what to do."""


class Sweep(Frozen):
    """The grid.

    ``recipes`` x ``seeds`` are trained; each run is scored on ``problems`` problems of each of ``digits``, as it is and
    under each of ``interventions`` by itself, and diagnosed at ``diagnose`` digits, if that is given.
    """

    recipes: tuple[Recipe, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    digits: tuple[int, ...] = Field(min_length=1)
    problems: int = Field(default=50, ge=1, le=MOST_PROBLEMS)
    interventions: tuple[str, ...] = ()
    diagnose: int | None = Field(default=None, ge=1, le=MOST_DIGITS)

    @model_validator(mode="after")
    def _sensible(self) -> Sweep:
        for what in ("seeds", "digits", "interventions"):
            _refuse_twice(what, getattr(self, what))
        _refuse_twice("recipes", [recipe.name for recipe in self.recipes])
        for n in self.digits:
            if not 1 <= n <= MOST_DIGITS:
                raise ValueError(f"digits must be from 1 to {MOST_DIGITS}, got {n}")
        for seed in self.seeds:
            if not 0 <= seed < 2**63:
                raise ValueError(f"seeds must be from 0 to 2^63 - 1, got {str(seed)[:40]}")
        for name in self.interventions:
            parse_intervention(name)
        for recipe in self.recipes:
            require_loadable(recipe.model, f"recipe {recipe.name!r}")
        rows = len(self.runs) * len(self.digits) * (1 + len(self.interventions))
        if len(self.runs) > MOST_RUNS or rows > MOST_ROWS:
            raise ValueError(
                f"the grid has {len(self.runs)} runs and {rows} rows, more than {MOST_RUNS} and {MOST_ROWS}; cut it up"
            )
        return self

    @property
    def runs(self) -> list[Run]:
        return [Run(recipe, seed) for recipe in self.recipes for seed in self.seeds]


@dataclass(frozen=True)
class Run:
    """One recipe trained with one seed. ``precision="auto"`` is settled by the machine that starts the sweep."""

    recipe: Recipe
    seed: int

    @cached_property
    def trained(self) -> Recipe:
        settled = fast_precision() if self.recipe.precision == "auto" else self.recipe.precision
        return self.recipe.model_copy(update={"precision": settled})

    @cached_property
    def name(self) -> str:
        whole = json.dumps(self.trained.model_dump(), sort_keys=True)
        return f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}-seed{self.seed}"


# The sweep file


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core, less what a grid does not need: no aliases, no tags, no key twice, decimal numbers alone."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.constructor.ConstructorError(None, None, "anchors and aliases are not read", event.start_mark)
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.constructor.ConstructorError(None, None, f"no tag is read, got {event.tag}", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, times in Counter(keys).items():
            if times > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key[:60]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|)$", ["~", "n", ""]),
    ("bool", r"^(?:true|false)$", list("tf")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]{0,18})$", list("-+0123456789")),
    ("float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]{1,3})?$", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _first)


def read_sweep(path: str | Path) -> Sweep:
    """The grid of a YAML file.

    ``recipes``: names, or objects such as ``{base: 1digit-rotary2d, steps: 200, attention: {decay: 1.0}}``, whose
    ``name`` is made of the changes where it is not given. ``seeds`` and ``digits``: a number, a range such as ``0-29``
    or a list of these. ``interventions``: as on the command line, ``window=10``.

    Raises:
        SweepError: the file or a value in it cannot be used; names the value.
    """
    path = Path(path)
    if path.suffix in (".csv", ".parquet", ".json"):
        raise SweepError(f"{path}: the table of a sweep is written under this ending; call the file NAME.yaml")
    if len(os.fsencode(path.stem)) > _LONGEST_NAME:
        raise SweepError(f"{path}: the table takes the file's name, which may have {_LONGEST_NAME} bytes")
    try:
        if path.exists() and not path.is_file():
            raise SweepError(f"{path} is no file; give a sweep as a YAML file")
        if path.stat().st_size > _LARGEST_FILE:
            raise SweepError(f"{path}: {path.stat().st_size} bytes, more than the {_LARGEST_FILE} that are read")
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise SweepError(f"{path}: not readable YAML ({why}); correct the file") from error
    except SweepError:
        raise
    except ValueError as error:  # a date that is none, an integer of too many digits
        raise SweepError(f"{path}: a value cannot be read ({' '.join(str(error).split())[:160]})") from error
    try:
        return sweep_from(found)
    except ValidationError as error:
        raise SweepError(f"{path}: {first_problem(error)}") from error
    except InputError as error:
        raise SweepError(f"{path}: {error}") from error


def sweep_from(found: Any) -> Sweep:
    """:func:`read_sweep` of what the file holds. Raises pydantic's ``ValidationError`` or :class:`SweepError`."""
    if not isinstance(found, dict):
        raise SweepError("a sweep is an object with recipes, seeds and digits")
    given = {str(key): value for key, value in found.items()}
    for name in ("seeds", "digits"):
        if name in given:
            given[name] = _whole_numbers(name, given[name])
    for name in ("recipes", "interventions"):
        if name in given and not isinstance(given[name], list):
            raise SweepError(f"{name} must be a list, got {_shown(given[name])}")
    if "recipes" in given:
        if len(given["recipes"]) > MOST_RUNS:
            raise SweepError(f"recipes must be at most {MOST_RUNS}, got {len(given['recipes'])}")
        given["recipes"] = [_recipe(entry) for entry in given["recipes"]]
    for name in ("problems", "diagnose"):
        if isinstance(given.get(name), bool):
            raise SweepError(f"{name} must be a whole number, got {_shown(given[name])}")
    return Sweep.model_validate(given)


def _whole_numbers(what: str, given: Any) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in given if isinstance(given, list) else [given]:
        low, dash, high = part.partition("-") if isinstance(part, str) else (str(part), "", "")
        ends = [low.strip(), high.strip()] if dash else [low.strip()]
        if isinstance(part, bool) or not all(e.isascii() and e.isdigit() and len(e) < 20 for e in ends):
            raise SweepError(f"{what} must be whole numbers or ranges such as 0-29, got {_shown(part)}")
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last - first >= MOST_RUNS or len(numbers) > MOST_RUNS:
            raise SweepError(f"{what} must be rising ranges of at most {MOST_RUNS} numbers, got {_shown(part)}")
        numbers += range(first, last + 1)
    return tuple(numbers)


def _recipe(entry: Any) -> Recipe:
    if isinstance(entry, str):
        return named_recipe(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("base"), str):
        raise SweepError(f"a recipe is a name, or an object with the name of its base, got {_shown(entry)}")
    base = named_recipe(entry["base"])
    changes = {str(key): value for key, value in entry.items() if key not in ("base", "name")}
    written = " ".join(_flat(changes))
    name = entry.get("name", f"{base.name} {written}".strip())
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise SweepError(
            f"the name of a recipe is up to {_LONGEST_NAME} printable characters, got {_shown(name)}; give it a name"
        )
    for part in ("task", "attention"):
        if part in changes:
            model = _object(changes.get("model", {}), "model")
            if part in model:
                raise SweepError(f"recipe {name!r} gives {part} twice, once under model; leave one out")
            changes["model"] = {part: changes.pop(part), **model}
    before = base.model_dump()
    _refuse_truth(changes, before)
    try:
        merged = _merged(before, changes) | {"name": name}
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise SweepError(f"recipe {name!r}: {first_problem(error)}") from error


def _flat(changes: dict[str, Any], under: str = "") -> Iterator[str]:
    for key, value in changes.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}={_shown(value)[:_LONGEST_NAME]}"


def _refuse_truth(changes: dict[str, Any], old: dict[str, Any]) -> None:
    """Refuse true and false where a number stands."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _refuse_truth(value, old[key])
        elif isinstance(value, bool) and key in old and not isinstance(old[key], bool):
            raise SweepError(f"{key[:60]} must be a number or a name, got {str(value).lower()}")


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` over ``old``, object by object."""
    return old | {
        key: _merged(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in new.items()
    }


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SweepError(f"{what} must be an object, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value)[:60] if isinstance(value, str) and not value.isprintable() else str(value)[:60]


def _refuse_twice(what: str, values: Sequence[Any]) -> None:
    value, times = Counter(values).most_common(1)[0] if values else (None, 0)
    if times > 1:
        raise ValueError(f"{what}: {str(value)[:60]!r} is given {times} times; leave it in once, or give it a name")


# What a run leaves behind


class Cell(Frozen):
    """One run's score at one length under one intervention; ``missing`` says why there are no numbers."""

    digits: int
    intervention: str
    problems: int
    seed: int
    exact: float | None = None
    low: float | None = None
    high: float | None = None
    decisions: int | None = None
    wrong: int | None = None
    missing: str | None = None


class Finding(Frozen):
    """One run's diagnosis at one length."""

    digits: int
    problems: int
    seed: int
    cause: str
    proved: bool
    proved_by: str | None


class Results(Frozen):
    """``results.json``. They hold for these weights (SHA-256 of the file) and this version of the program alone."""

    weights: str
    version: str
    cells: tuple[Cell, ...] = ()
    findings: tuple[Finding, ...] = ()


class _Failure(Frozen):
    """``failed.json``: why a run is not done, and the call that found it so."""

    reason: str
    token: str


@dataclass(frozen=True)
class _Task:
    """What a worker is handed. ``wait``: for others that work on the run, rather than leave it to them."""

    run: Run
    folder: Path
    evaluation: _Evaluation
    token: str
    parent: int | None
    wait: bool = False

    @property
    def at(self) -> Path:
        return self.folder / "runs" / self.run.name


@dataclass(frozen=True)
class _Evaluation:
    digits: tuple[int, ...]
    problems: int
    interventions: tuple[str, ...]
    diagnose: int | None
    seed: int

    def missing_cells(self, found: Results) -> list[tuple[int, str]]:
        have = {(c.digits, c.intervention) for c in found.cells if (c.problems, c.seed) == (self.problems, self.seed)}
        wanted = [(n, name) for n in self.digits for name in (UNEDITED, *self.interventions)]
        return [cell for cell in wanted if cell not in have]

    def finding(self, found: Results) -> Finding | None:
        key = (self.diagnose, self.problems, self.seed)
        return next((f for f in found.findings if (f.digits, f.problems, f.seed) == key), None)

    def complete(self, found: Results) -> bool:
        return not self.missing_cells(found) and (self.diagnose is None or self.finding(found) is not None)


def _results(at: Path) -> Results:
    """What is known of these weights; nothing where they changed or the file cannot be used."""
    weights = hashlib.sha256((at / "model.safetensors").read_bytes()).hexdigest()
    empty = Results(weights=weights, version=source_version())
    try:
        found = Results.model_validate_json((at / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return found if (found.weights, found.version) == (empty.weights, empty.version) else empty


def _done(task: _Task) -> Results | None:
    """The results of a run, if nothing of it is missing."""
    if not (task.at / "training.json").exists():
        return None
    try:
        record = load_record(task.at)
        found = _results(task.at)
    except (OSError, CheckpointError):
        return None
    if (record.recipe, record.seed) != (task.run.trained, task.run.seed) or not record.curve:
        return None  # somebody changed it; training refuses the folder and says so
    return found if task.evaluation.complete(found) else None


def _failure(task: _Task) -> str | None:
    """The reason, if it was this call that failed."""
    try:
        found = _Failure.model_validate_json((task.at / "failed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.reason if found.token == task.token else None


# The work on one run


class _Orphaned(BaseException):
    """The process that asked for this work is gone."""


def work(task: _Task) -> None:
    """Train, score and diagnose what is missing of a run. What comes of it stands in its folder."""
    if task.parent not in (None, os.getpid()) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the sweep stops its workers
    alive = _watch(task.parent)
    task.at.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{task.at}.lock", timeout=-1 if task.wait else 0)
    try:
        with lock, _one_thread():
            task.at.mkdir(exist_ok=True)
            (task.at / f"started-{task.token}").touch()
            remove_asides(task.at)
            try:
                _train(task, alive)
                _evaluate(task, alive)
                (task.at / "failed.json").unlink(missing_ok=True)
            except Exception as error:
                reason = " ".join((str(error) or type(error).__name__).split()).replace(str(task.at), task.run.name)
                _record_failure(task, reason if isinstance(error, InputError | OSError) else f"{error!r}")
            for mark in task.at.glob("started-*"):
                mark.unlink(missing_ok=True)
    except (Timeout, _Orphaned):
        pass


def _record_failure(task: _Task, reason: str) -> None:
    text = _Failure(reason=" ".join(reason.split())[:400], token=task.token).model_dump_json()
    write_text(task.at / "failed.json", text + "\n")


def _watch(parent: int | None) -> Callable[[], None]:
    """Raises when the parent is gone: a sweep that was killed must not leave workers that go on for hours."""
    mine = os.getpid()
    expected = os.getppid() if parent is None else parent

    def check() -> None:
        if expected not in (mine, os.getppid()):
            raise _Orphaned

    return check


@contextmanager
def _one_thread() -> Iterator[None]:
    """Results depend on the number of threads by rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(task: _Task, alive: Callable[[], None]) -> None:
    run = task.run
    Trainer(run.trained, run.seed, task.at, resume=True, progress=lambda step, loss, exact: alive()).run()


def _evaluate(task: _Task, alive: Callable[[], None]) -> None:
    evaluation, found = task.evaluation, _results(task.at)
    if evaluation.complete(found):
        return
    model = load_checkpoint(task.at)
    common = {"problems": evaluation.problems, "seed": evaluation.seed}
    for digits, name in evaluation.missing_cells(found):
        alive()
        drawn = model.task.evaluation_problems(digits, evaluation.problems, evaluation.seed)
        edits = [] if name == UNEDITED else [parse_intervention(name, seed=evaluation.seed)]
        cell = Cell(digits=digits, intervention=name, **common)
        try:
            scored = score(model, drawn, edits, seed=evaluation.seed, progress=lambda done: alive())
        except InterventionError as error:  # a boost for a model without a sink
            cell = cell.model_copy(update={"missing": str(error)})
        else:
            low, high = scored.exact_interval
            numbers = {"exact": scored.exact, "low": low, "high": high}
            cell = cell.model_copy(update={**numbers, "decisions": scored.decisions, "wrong": scored.n_wrong})
        found = found.model_copy(update={"cells": (*found.cells, cell)})
        write_text(task.at / "results.json", found.model_dump_json(indent=1) + "\n")
    if evaluation.diagnose is not None and evaluation.finding(found) is None:
        verdict = diagnose(
            model, evaluation.diagnose, evaluation.problems, seed=evaluation.seed, progress=lambda what: alive()
        ).verdict
        finding = Finding(
            digits=evaluation.diagnose,
            cause=verdict.cause,
            proved=verdict.proved,
            proved_by=verdict.proof.edit if verdict.proof else None,
            **common,
        )
        found = found.model_copy(update={"findings": (*found.findings, finding)})
        write_text(task.at / "results.json", found.model_dump_json(indent=1) + "\n")


# All runs


@dataclass(frozen=True)
class Outcome:
    """What a sweep came to: the rows of its table, and counts over seeds.

    ``fails``: of each recipe, length and intervention, how many seeds have under 99% of problems exact. ``causes``: of
    each recipe, how many seeds the diagnosis puts down to each cause. Both with Wilson's 95% interval over seeds.
    ``failed``: the runs that are not done, and why.
    """

    rows: tuple[dict[str, Any], ...]
    fails: tuple[dict[str, Any], ...]
    causes: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    runs: int
    worked: int = field(default=0, compare=False)  # runs of which this call found something missing

    def to_frame(self) -> pd.DataFrame:
        """One row a run, length and intervention."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(COLUMNS))

    def to_json(self) -> dict[str, Any]:
        """The summary: all but the rows."""
        return {
            "runs": self.runs,
            "done": self.runs - len(self.failed),
            "fails": list(self.fails),
            "causes": list(self.causes),
            "failed": list(self.failed),
        }


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    *,
    jobs: int | None = None,
    engine: str = "processes",
    address: str | None = None,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> Outcome:
    """Do what is missing of a sweep, and give its table.

    A run that cannot be done is recorded with its reason and stops no other. Workers that die are replaced; a run that
    two workers died of is recorded as failed. Failed runs are tried again by the next call.

    Args:
        folder: of the runs; on a cluster, one that all machines see under this path.
        jobs: at once; by default as many as there are processors, here or on the cluster.
        engine: ``processes`` of this machine, or ``ray`` or ``dask``: workers of the cluster at ``address``.
        seed: of the problems.
        progress: told how many runs are done.

    Raises:
        SweepError: an engine that is not installed, cannot be reached or loses every worker.
        OSError: the folder cannot be written.
    """
    _check_engine(engine, address)
    folder = Path(folder).resolve()
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    evaluation = _Evaluation(sweep.digits, sweep.problems, sweep.interventions, sweep.diagnose, seed)
    parent = os.getpid() if engine == "processes" else None
    token = uuid.uuid4().hex
    tasks = [_Task(run, folder, evaluation, token, parent) for run in sweep.runs]
    for task in tasks:
        if (task.at.exists() and not task.at.is_dir()) or Path(f"{task.at}.lock").is_dir():
            raise SweepError(f"{task.at} or its .lock is not what a sweep leaves there; move it away")
    missing = [task for task in tasks if _done(task) is None]
    progress(len(tasks) - len(missing))
    if missing:
        with _engine(engine, address) as backend:
            _Pool(backend, jobs, len(tasks) - len(missing), progress).do(missing)
    return _outcome(sweep, tasks, len(missing))


def write_outcome(outcome: Outcome, folder: str | Path, name: str) -> dict[str, Path]:
    """Write ``NAME.csv``, ``NAME.parquet`` and the summary ``NAME.json``. Returns their paths by kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(column, kinds[kind]) for column, kind in COLUMNS.items()])
    table = pa.Table.from_pylist(list(outcome.rows), schema=schema)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(outcome.rows)
    paths = {kind: Path(folder) / f"{name}.{kind}" for kind in ("csv", "parquet", "json")}
    write_text(paths["csv"], text.getvalue())
    write_atomically(paths["parquet"], lambda aside: pq.write_table(table, aside))
    write_text(paths["json"], json.dumps(outcome.to_json(), indent=1, allow_nan=False) + "\n")
    return paths


class _Telling(joblib.Parallel):
    """Calls ``tell`` whenever a task is done; joblib has no other hook that all its backends serve."""

    tell: Callable[[], object]

    def print_progress(self) -> None:
        self.tell()


class _Pool:
    """Runs tasks on a joblib backend, and goes on when workers die."""

    def __init__(self, backend: str, jobs: int | None, done: int, progress: Callable[[int], object]):
        self.backend, self.done, self.progress = backend, done, progress
        most = _processors() if backend == "loky" else -1
        self.jobs = most if jobs is None else min(jobs, _MOST_JOBS)

    def do(self, tasks: list[_Task]) -> None:
        """Each task once; those that others were working on are waited for at the end."""
        idle, wait = 0, False
        while tasks:
            broken = self._parallel([replace(task, wait=wait) for task in tasks], self.jobs)
            left = [task for task in tasks if not _settled(task)]
            self.done += len(tasks) - len(left)
            if broken is None:
                if wait and left:  # nothing came of them, and nobody said why
                    raise SweepError(f"{len(left)} runs came to nothing, {left[0].run.name} first; look at its folder")
                tasks, wait = left, True
                continue
            suspects = [task for task in left if (task.at / f"started-{task.token}").exists()]
            idle = 0 if suspects or len(left) < len(tasks) else idle + 1
            if idle > _IDLE_BREAKS:
                raise SweepError(f"the workers die before they begin ({_why(broken)}); look at the engine") from broken
            for task in suspects:
                self._alone(task)
            tasks = [task for task in left if task not in suspects]

    def _alone(self, task: _Task) -> None:
        """In a worker of its own, so that what dies is known."""
        # one job alone would be run in this process, two at once on a cluster with one processor left are refused
        jobs = 2 if self.backend == "loky" and self.jobs != 1 else self.jobs
        for pause in (0,) if self.backend == "loky" else _PAUSES:  # a cluster takes its time to see that a node is gone
            time.sleep(pause)
            broken = self._parallel([replace(task, wait=True)], jobs)
            if broken is None or _settled(task):
                break
        if broken is not None and not _settled(task):
            with FileLock(f"{task.at}.lock"):
                _record_failure(task, f"two workers died of it ({_why(broken)}): killed, or out of memory")
        self.done += 1

    def _parallel(self, tasks: list[_Task], jobs: int) -> Exception | None:
        """The error of the engine, if it broke."""
        try:
            with joblib.parallel_config(backend=self.backend):
                parallel = _Telling(n_jobs=jobs, batch_size=1)
                parallel.tell = lambda: self.progress(self.done + parallel.n_completed_tasks)
                parallel(joblib.delayed(work)(task) for task in tasks)
        except SweepError:
            raise
        except Exception as error:  # each engine has its own; a task itself lets none out
            return error
        finally:  # Ctrl-C too must leave no worker behind, nor may an idle one keep our pipes open
            if self.backend == "loky" and jobs != 1:
                get_reusable_executor().shutdown(wait=True, kill_workers=True)
        return None


def _settled(task: _Task) -> bool:
    return _done(task) is not None or _failure(task) is not None


def _outcome(sweep: Sweep, tasks: list[_Task], worked: int) -> Outcome:
    rows: list[dict[str, Any]] = []
    failed = []
    for task in tasks:
        run, found, reason = task.run, _done(task), _failure(task)
        base = {"run": run.name, "recipe": run.recipe.name, "seed": run.seed}
        if found is None:
            failed.append({**base, "reason": reason or "not done"})
        finding = None if found is None else task.evaluation.finding(found)
        about = {
            "trained_exact": None if found is None else load_record(task.at).curve[-1].exact,
            "diagnosed_at": sweep.diagnose,
            "cause": finding and finding.cause,
            "proved": finding and finding.proved,
            "proved_by": finding and finding.proved_by,
        }
        cells = {
            (c.digits, c.intervention): c
            for c in (found.cells if found else ())
            if (c.problems, c.seed) == (sweep.problems, task.evaluation.seed)
        }
        for digits in sweep.digits:
            for name in (UNEDITED, *sweep.interventions):
                cell = cells.get((digits, name))
                numbers = ("exact", "low", "high", "decisions", "wrong")
                row = {**base, "digits": digits, "intervention": name, "problems": sweep.problems}
                row |= {key: getattr(cell, key, None) for key in numbers} | about
                row["missing"] = cell.missing if cell else f"the run failed: {reason or 'not done'}"
                rows.append({key: row[key] for key in COLUMNS})
    return Outcome(tuple(rows), tuple(_fails(rows)), tuple(_causes(rows)), tuple(failed), len(tasks), worked)


def _fails(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for key, cells in _grouped(rows, ("recipe", "digits", "intervention")):
        known = [row for row in cells if row["exact"] is not None]
        if known:
            failing = sum(row["exact"] < HEALTHY for row in known)
            yield {**key, "seeds": len(known), "failing": failing, **_share(failing, len(known))}


def _causes(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for key, of in _grouped(rows, ("recipe", "diagnosed_at")):
        verdicts = {row["run"]: (row["cause"], row["proved"]) for row in of if row["cause"] is not None}
        counts = Counter(cause for cause, _ in verdicts.values())
        for cause, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
            proved = sum(verdict == (cause, True) for verdict in verdicts.values())
            digits = {"recipe": key["recipe"], "digits": key["diagnosed_at"]}
            yield {**digits, "cause": cause, "seeds": count, "proved": proved, **_share(count, len(verdicts))}


def _grouped(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [(dict(zip(keys, values, strict=True)), group) for values, group in groups.items()]


def _share(count: int, of: int) -> dict[str, float]:
    low, high = wilson_interval(count, of)
    return {"share": count / of, "low": low, "high": high}


# Engines


def _check_engine(name: str, address: str | None) -> None:
    if name not in ENGINES:
        raise SweepError(f"no engine is called {name[:60]!r}; there are {', '.join(ENGINES)}")
    if name == "processes" and address:
        raise SweepError(f"--address {address[:60]!r} is of a cluster; add --engine ray or --engine dask")
    if name != "processes" and not address:
        raise SweepError(f"--engine {name} needs the --address of a cluster that runs")


@contextmanager
def _engine(name: str, address: str | None) -> Iterator[str]:
    """The joblib backend of an engine, connected."""
    if name == "processes" or address is None:
        yield "loky"
        return
    try:
        connection = _ray(address) if name == "ray" else _dask(address)
    except ImportError as error:
        raise SweepError(f"--engine {name} needs {error.name or name}; pip install 'leaksum[{name}]'") from error
    except Exception as error:  # each has its own
        raise SweepError(f"--engine {name}: no cluster at {address[:60]!r} ({_why(error)})") from error
    with connection:
        yield name


def _ray(address: str) -> Any:
    import ray
    from ray.util.joblib import register_ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    register_ray()
    return _closing(ray.shutdown)


def _dask(address: str) -> Any:
    from distributed import Client

    return Client(address, timeout="10s")  # it registers the backend, and is its default


@contextmanager
def _closing(close: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        close()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _why(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
