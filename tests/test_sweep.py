"""Sweeps: what a file asks for, what is done once, and what survives."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import joblib
import pandas as pd
import psutil
import pytest
import torch
import yaml
from joblib._parallel_backends import ThreadingBackend
from test_training import tiny

import interp.sweep as sweeps
from interp.decisions import score, wilson_interval
from interp.interventions import parse_intervention
from interp.sweep import Run, Sweep, SweepError, read_sweep, run_sweep, sweep_from, write_outcome
from models import training
from models.checkpoint import load_checkpoint, load_record
from models.recipes import RECIPES, Recipe

ROOT = Path(__file__).parents[1]
SMALL = {"n_layers": 1, "n_heads": 2, "d_model": 16, "d_head": 8, "d_mlp": 32}


def small(name: str = "small", steps: int = 6, **changes) -> Recipe:
    return tiny(name=name, steps=steps, **changes)


def grid(**changes) -> Sweep:
    fields = {"recipes": (small(), small("other", batch=4)), "seeds": (0, 1), "digits": (3, 5), "problems": 4}
    return Sweep(**{**fields, "interventions": ("far", "sink-boost=1"), **changes})


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(training, "PROBE_PROBLEMS", 16)


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    runs = folder / "runs"
    return {str(p.relative_to(runs)): (p.read_bytes(), p.stat().st_mtime_ns) for p in runs.rglob("*") if p.is_file()}


def tables_of(folder: Path, name: str) -> list[bytes]:
    return [(folder / f"{name}.{kind}").read_bytes() for kind in ("csv", "parquet", "json")]


# The sweep file


def test_a_file_is_a_grid(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(
        """
recipes:
  - 1digit-rotary2d
  - {base: 1digit-rotary2d, steps: 200, attention: {decay: 1.0}, task: {max_digits: 12}, learning_rate: 1e-3}
  - {base: 1digit-counters, name: two layers, model: {n_layers: 2, attention: {exact_counters: 1}}}
seeds: [0-2, 7]
digits: 20
interventions: [far, window=10]
diagnose: 100
"""
    )
    found = read_sweep(path)
    first, second, third = found.recipes
    assert first == RECIPES["1digit-rotary2d"]
    assert second.name == ("1digit-rotary2d steps=200 attention.decay=1.0 task.max_digits=12 learning_rate=0.001")
    attention = first.model.attention.model_copy(update={"decay": 1.0})
    task = first.model.task.model_copy(update={"max_digits": 12})
    changed = {"steps": 200, "learning_rate": 1e-3, "name": second.name}
    model = first.model.model_copy(update={"attention": attention, "task": task})
    assert second == first.model_copy(update={**changed, "model": model})
    assert (third.name, third.model.n_layers, third.model.attention.exact_counters) == ("two layers", 2, 1)
    assert third.model.attention.null_key  # what is not named stays as in the base
    assert (found.seeds, found.digits, found.problems, found.diagnose) == ((0, 1, 2, 7), (20,), 50, 100)
    assert len(found.runs) == 12


def test_a_run_is_named_by_all_that_its_recipe_says():
    recipe = small()
    names = [Run(r, s).name for r, s in ((recipe, 0), (small(batch=4), 0), (small(steps=7), 0), (recipe, 1))]
    assert len(set(names)) == 4
    assert names[0].partition("-seed")[0] == names[3].partition("-seed")[0]
    assert Run(Recipe.model_validate_json(recipe.model_dump_json()), 0).name == names[0]
    hostile = Run(small("../../<b>evil\n"), 0).name
    assert hostile.replace("-", "").isalnum()


GOOD = {"recipes": ["1digit-nope"], "seeds": [0], "digits": [4]}
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nseeds: *c\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipes": ["2digit"]}, ["'2digit'", "leaksum recipes"]),
        ({"recipes": []}, ["recipes"]),
        ({"recipes": "1digit-nope"}, ["recipes must be a list", "1digit-nope"]),
        ({"recipes": [3]}, ["a recipe is a name", "got 3"]),
        ({"recipes": [{"steps": 3}]}, ["name of its base"]),
        ({"recipes": [{"base": "1digit-nope", "steps": 0}]}, ["steps", "got '0'"]),
        ({"recipes": [{"base": "1digit-nope", "stesp": 3}]}, ["stesp"]),
        ({"recipes": [{"base": "1digit-nope", "attention": {"decay": 1.0}}]}, ["decay", "scheme='none'"]),
        ({"recipes": [{"base": "1digit-nope", "attention": 3}]}, ["attention"]),
        ({"recipes": [{"base": "1digit-nope", "model": 3, "attention": {"sink": True}}]}, ["model must be an object"]),
        ({"recipes": [{"base": "1digit-nope", "model": {"n_layers": 10**9}}]}, ["n_layers", "1000000000"]),
        (
            {"recipes": [{"base": "1digit-nope", "name": "big", "model": {"d_model": 8192, "d_mlp": 65536}}]},
            ["'big'", "weights, more than"],
        ),
        ({"recipes": [{"base": "1digit-nope", "name": "two\nlines"}]}, ["printable", "give it a name"]),
        ({"recipes": [{"base": "1digit-nope", "name": "x" * 121}]}, ["120"]),
        ({"recipes": ["1digit-nope", "1digit-nope"]}, ["'1digit-nope' is given 2 times"]),
        ({"recipes": [{"base": "1digit-nope", "learning_rate": float("nan")}]}, ["learning_rate"]),
        ({"seeds": "9-0"}, ["rising ranges", "9-0"]),
        ({"seeds": "0-99999999999"}, ["at most 10000"]),
        ({"seeds": "0-9,12"}, ["seeds", "0-9,12"]),
        ({"seeds": -1}, ["seeds", "-1"]),
        ({"seeds": True}, ["seeds", "True"]),
        ({"seeds": [1.5]}, ["seeds", "1.5"]),
        ({"seeds": [[0]]}, ["seeds", "a list"]),
        ({"seeds": [0, "0-3"]}, ["seeds", "'0' is given 2 times"]),
        ({"seeds": []}, ["seeds"]),
        ({"digits": 0}, ["digits must be from 1", "got 0"]),
        ({"digits": 10**6}, ["digits", "1000000"]),
        ({"problems": 0}, ["problems", "got '0'"]),
        ({"problems": True}, ["problems", "True"]),
        ({"problems": "many"}, ["problems", "many"]),
        ({"interventions": ["fra"]}, ["'fra'"]),
        ({"interventions": ["window=0"]}, ["window"]),
        ({"interventions": [3]}, ["interventions", "got '3'"]),
        ({"interventions": ["far", "far"]}, ["'far' is given 2 times"]),
        ({"diagnose": 0}, ["diagnose", "got '0'"]),
        ({"wall": 3}, ["wall"]),
        ({"seeds": "0-9999", "recipes": ["1digit-nope", "1digit-rotary"]}, ["20000 runs", "cut it up"]),
        ("[1, 2]", ["a sweep is an object"]),
        ("", ["a sweep is an object"]),
        ("recipes: [", ["not readable YAML"]),
        ("[" * 100000, ["not readable YAML"]),
        ("recipes: !!python/object/apply:os.system ['touch mark']", ["not readable YAML"]),
        ("seeds: 2020-13-45", ["seeds must be whole numbers", "2020-13-45"]),
        ("seeds: " + "9" * 5000, ["seeds must be whole numbers"]),
        ("seeds: 0x" + "F" * 5000, ["seeds must be whole numbers", "0xFF"]),
        ("recipes: &a [*a]", ["anchors and aliases are not read"]),
        (BOMB, ["anchors and aliases are not read"]),
        ({"recipes": [{"base": "1digit-nope", "batch": 10**12}]}, ["batch", "1000000000000"]),
        ("problems: !!bool maybe", ["no tag is read"]),
        ("seeds: 0\nseeds: 1", ["'seeds' is given twice"]),
        ("digits: 1:30", ["digits must be whole numbers", "1:30"]),
        ({"recipes": [{"base": "1digit-nope", "steps": True}]}, ["steps must be a number", "got true"]),
        ("recipes: [{base: 1digit-nope, steps: yes}]", ["steps", "'yes'"]),
        (
            {"recipes": [{"base": "1digit-nope", "task": {"max_digits": 5}, "model": {"task": {"max_digits": 7}}}]},
            ["gives task twice"],
        ),
        (b"\xff\xfe", ["not readable YAML"]),
    ],
)
def test_a_bad_sweep_is_refused_in_one_line(leaksum, tmp_path, changes, words):
    path = tmp_path / "sweep.yaml"
    text = changes if isinstance(changes, str | bytes) else yaml.safe_dump({**GOOD, **changes})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = leaksum("sweep", path, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert len(err) < len(str(path)) + 400
    for word in (*words, "sweep.yaml"):
        assert word in err, (word, err)
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.yaml"]  # nothing was begun, nothing was run


def test_files_that_are_not_there_or_too_large(leaksum, tmp_path):
    code, _, err = leaksum("sweep", tmp_path / "none.yaml", "--out", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(2**34)
    code, _, err = leaksum("sweep", tmp_path / "large.yaml", "--out", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "more than" in err


# What is done, and what is not done again


def test_the_table_is_the_scores_of_the_checkpoints(tmp_path):
    sweep = grid(diagnose=5)
    seen = []
    found = run_sweep(sweep, tmp_path, jobs=1, seed=3, progress=seen.append)
    assert (found.runs, found.worked, found.failed) == (4, 4, ())
    assert seen[0] == 0
    assert seen[-1] == 4
    assert seen == sorted(seen)
    assert list(found.to_frame().columns) == list(sweeps.COLUMNS)
    cells = [(r["recipe"], r["seed"], r["digits"], r["intervention"]) for r in found.rows]
    names = ("none", "far", "sink-boost=1")
    assert cells == [(r, s, n, i) for r in ("small", "other") for s in (0, 1) for n in (3, 5) for i in names]
    row = found.rows[cells.index(("other", 1, 5, "far"))]
    at = tmp_path / "runs" / row["run"]
    model, record = load_checkpoint(at), load_record(at)
    assert (record.recipe, record.seed, record.threads) == (sweep.recipes[1], 1, 1)
    expected = score(model, model.task.evaluation_problems(5, 4, seed=3), [parse_intervention("far", seed=3)])
    assert (row["exact"], row["low"], row["high"]) == (expected.exact, *expected.exact_interval)
    assert (row["decisions"], row["wrong"]) == (expected.decisions, expected.n_wrong)
    assert row["trained_exact"] == record.curve[-1].exact
    verdict = sweeps.diagnose(model, 5, 4, seed=3).verdict
    assert (row["diagnosed_at"], row["cause"], row["proved"]) == (5, verdict.cause, verdict.proved)
    paths = write_outcome(found, tmp_path, "grid")
    csv, parquet = pd.read_csv(paths["csv"]), pd.read_parquet(paths["parquet"])
    pd.testing.assert_frame_equal(csv, parquet, check_dtype=False)
    assert len(csv) == len(found.rows)


def test_a_second_call_does_nothing_and_a_wider_grid_only_the_rest(tmp_path):
    first = run_sweep(grid(), tmp_path, jobs=1)
    before = files_of(tmp_path)
    again = run_sweep(grid(), tmp_path, jobs=1)
    assert (again, again.worked) == (first, 0)
    assert files_of(tmp_path) == before
    wider = run_sweep(grid(digits=(3, 5, 6), seeds=(0, 1, 2)), tmp_path, jobs=1)
    assert wider.worked == 6
    after = files_of(tmp_path)
    assert all(after[name] == before[name] for name in before if not name.endswith("results.json"))
    assert [row for row in wider.rows if row["digits"] < 6 and row["seed"] < 2] == list(first.rows)
    assert run_sweep(grid(), tmp_path, jobs=1).worked == 0  # and what else was scored stays
    assert run_sweep(grid(), tmp_path, jobs=1, seed=1).worked == 4  # other problems are another question


def test_scores_hold_for_their_weights_alone(tmp_path):
    run_sweep(grid(seeds=(0,)), tmp_path, jobs=1)
    first, second = (tmp_path / "runs" / run.name for run in grid(seeds=(0,)).runs)
    (first / "results.json").write_text("{")
    assert run_sweep(grid(seeds=(0,)), tmp_path, jobs=1).worked == 1
    weights = first / "model.safetensors"
    spoiled = bytearray(weights.read_bytes())
    spoiled[-2] ^= 1
    weights.write_bytes(spoiled)
    found = run_sweep(grid(seeds=(0,)), tmp_path, jobs=1)
    assert [run["run"] for run in found.failed] == [first.name]
    assert "do not match their digest" in found.failed[0]["reason"]
    assert str(tmp_path) not in found.failed[0]["reason"]
    assert (second / "results.json").exists()


def test_a_failed_run_is_recorded_and_stops_nothing_else(tmp_path, leaksum, monkeypatch):
    sweep = grid(recipes=(small("hot", learning_rate=1e30, clip=1e30), small()))
    found = run_sweep(sweep, tmp_path, jobs=1)
    assert [(run["recipe"], run["seed"]) for run in found.failed] == [("hot", 0), ("hot", 1)]
    assert all("the loss is nan at step" in run["reason"] for run in found.failed)
    hot = [row for row in found.rows if row["recipe"] == "hot"]
    assert len(hot) == 12
    assert all(row["exact"] is None and "the loss is nan" in row["missing"] for row in hot)
    assert {row["recipe"] for row in found.fails} == {"small"}
    assert all(row["seeds"] == 2 for row in found.fails)
    record = json.loads((tmp_path / "runs" / hot[0]["run"] / "failed.json").read_text())
    assert record["reason"] == found.failed[0]["reason"]
    again = run_sweep(sweep, tmp_path, jobs=1)
    assert (again, again.worked) == (found, 2)  # tried again, to the same end
    monkeypatch.setattr("interp.sweep.read_sweep", lambda path: sweep)
    code, out, err = leaksum("sweep", "x.yaml", "--out", tmp_path, "--jobs", 1, "--json")
    assert (code, err.count("\n"), json.loads(out)["done"]) == (0, 2, 2)
    assert "(hot, seed 0) failed: the loss is nan" in err
    assert math.isnan(pd.read_parquet(tmp_path / "x.parquet")["exact"][0])


def test_an_edit_that_does_not_apply_leaves_its_cells_empty(tmp_path):
    bare = small("bare", sink_pressure=0.0)
    model = bare.model.model_copy(
        update={"attention": bare.model.attention.model_copy(update={"sink": False, "sink_boost": 0.0})}
    )
    found = run_sweep(grid(recipes=(bare.model_copy(update={"model": model}),), seeds=(0,)), tmp_path, jobs=1)
    assert found.failed == ()
    empty = {(row["intervention"], row["missing"] is None) for row in found.rows}
    assert empty == {("none", True), ("far", True), ("sink-boost=1", False)}


def test_the_summary_counts_seeds(tmp_path):
    causes = ["dilution"] * 3 + ["unexplained"] + ["none"] * 2
    rows = [
        {"run": f"r{seed}", "recipe": "a", "seed": seed, "digits": digits, "intervention": "none"}
        | {"exact": 1.0 if cause == "none" else 0.5 if digits == 9 else 0.99}
        | {"diagnosed_at": 9, "cause": cause, "proved": cause != "unexplained" and seed != 0}
        for seed, cause in enumerate(causes)
        for digits in (4, 9)
    ]
    short, long = sweeps._fails([*rows, {**rows[0], "seed": 6, "run": "r6", "exact": None, "cause": None}])
    assert (short["digits"], short["seeds"], short["failing"]) == (4, 6, 0)
    low, high = wilson_interval(4, 6)
    assert (long["failing"], long["share"], long["low"], long["high"]) == (4, 4 / 6, low, high)
    found = {row["cause"]: row for row in sweeps._causes(rows)}
    assert [(c, r["seeds"], r["proved"]) for c, r in found.items()] == [
        ("dilution", 3, 2),
        ("none", 2, 2),
        ("unexplained", 1, 0),
    ]
    assert (found["dilution"]["low"], found["dilution"]["high"]) == wilson_interval(3, 6)
    assert found["dilution"]["digits"] == 9


# Workers that die, engines


def dying(times: int, recipe: str = "other"):
    """``work``, in which a worker begins this recipe and dies, so many times."""
    work, left = sweeps.work, [times]

    def worker(task):
        if task.run.recipe.name == recipe and left[0]:
            left[0] -= 1
            task.at.mkdir(parents=True, exist_ok=True)
            (task.at / f"started-{task.token}").touch()
            raise RuntimeError("Killed")
        work(task)

    return worker


def test_a_worker_that_dies_is_replaced(tmp_path, monkeypatch):
    expected = run_sweep(grid(), tmp_path / "whole", jobs=1)
    monkeypatch.setattr(sweeps, "work", dying(1))
    found = run_sweep(grid(), tmp_path / "part", jobs=1)
    assert found == expected
    assert not list((tmp_path / "part").rglob("started-*"))


def test_a_run_that_workers_die_of_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "work", dying(99))
    found = run_sweep(grid(), tmp_path, jobs=1)
    assert [(run["recipe"], run["seed"]) for run in found.failed] == [("other", 0), ("other", 1)]
    assert all("two workers died of it (RuntimeError: Killed)" in run["reason"] for run in found.failed)
    assert sum(row["exact"] is not None for row in found.rows) == 12


def test_an_engine_that_loses_every_worker_is_given_up(tmp_path, monkeypatch):
    def lost(task):
        raise ConnectionError("the cluster is gone")

    monkeypatch.setattr(sweeps, "work", lost)
    with pytest.raises(SweepError, match=r"die before they begin .ConnectionError: the cluster is gone"):
        run_sweep(grid(), tmp_path, jobs=1)


class Counting(ThreadingBackend):
    """A joblib backend of somebody's cluster."""

    tasks = 0

    def submit(self, func, callback=None):
        Counting.tasks += 1
        return super().submit(func, callback)


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_an_engine_is_the_joblib_backend_of_its_name(tmp_path, monkeypatch, engine):
    connected = []

    def connect(address):
        connected.append(address)
        joblib.register_parallel_backend(engine, Counting)
        return sweeps._closing(lambda: connected.append("closed"))

    monkeypatch.setattr(sweeps, f"_{engine}", connect)
    monkeypatch.setitem(joblib.parallel.BACKENDS, engine, Counting)
    Counting.tasks = 0
    found = run_sweep(grid(), tmp_path, jobs=2, engine=engine, address="head:1")
    assert Counting.tasks == 4
    assert connected == ["head:1", "closed"]
    assert found == run_sweep(grid(), tmp_path, jobs=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "slurm"], ["'slurm'", "ray"]),
        (["--engine", "ray"], ["--address"]),
        (["--address", "here:1"], ["--engine ray"]),
        (["--engine", "ray", "--address", "here:1"], ["pip install 'leaksum[ray]'"]),
        (["--engine", "dask", "--address", "here:1"], ["pip install 'leaksum[dask]'"]),
        (["--jobs", "0"], ["0"]),
        ([], ["check the path", "out"]),
    ],
)
def test_bad_engines_are_refused_in_one_line(leaksum, tmp_path, monkeypatch, arguments, words):
    for name in ("ray", "distributed"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GOOD))
    if not arguments:
        (tmp_path / "out").write_text("a file")
    code, out, err = leaksum("sweep", tmp_path / "grid.yaml", "--out", tmp_path / "out", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err, (word, err)


# Processes


TWELVE = {
    "recipes": [
        {"base": "1digit-rotary2d", "name": "tiny", "steps": 60, "batch": 8, "micro_batches": 1, "model": SMALL},
        {"base": "1digit-nope", "name": "nope", "steps": 50, "batch": 8, "micro_batches": 1, "model": SMALL},
    ],
    "seeds": "0-5",
    "digits": [4, 8],
    "problems": 5,
    "interventions": ["far", "sink-boost=1"],
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """Twelve runs, one after the other, without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    write_outcome(run_sweep(sweep_from(TWELVE), folder, jobs=1), folder, "twelve")
    return folder


def started(folder: Path, *more: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "twelve.yaml").write_text(json.dumps(TWELVE))
    arguments = [sys.executable, "-m", "interp.cli", "sweep", str(folder / "twelve.yaml"), "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*arguments, "--jobs", "2", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    workers = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # git, which says what the source is
            workers += [child] if any("popen_loky" in part for part in child.cmdline()) else []
    return workers


def after_runs(number: int, folder: Path, process: subprocess.Popen, seconds: float = 240) -> None:
    """Waits until so many runs are done and the workers are at others."""
    end = time.monotonic() + seconds
    while len(list(folder.glob("runs/*/results.json"))) < number or len(workers_of(process)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_twelve_runs_on_two_processes_interrupted_and_resumed(uninterrupted, tmp_path):
    """Ctrl-C stops all processes with status 130; a killed worker is replaced; the table comes out the same."""
    with started(tmp_path) as process:
        after_runs(3, tmp_path, process)
        workers = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err in ("", "leaksum: interrupted\n")  # and no traceback of any process
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=5)[1] == []
    done = len(list(tmp_path.glob("runs/*/results.json")))
    assert 3 <= done < 12
    assert not (tmp_path / "twelve.csv").exists()
    with started(tmp_path, "--json") as process:
        after_runs(done + 1, tmp_path, process)
        workers_of(process)[0].kill()
        out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["done"] == 12
    assert tables_of(tmp_path, "twelve") == tables_of(uninterrupted, "twelve")
    for at in (uninterrupted / "runs").iterdir():
        if at.is_dir():
            weights = at / "model.safetensors"
            assert weights.read_bytes() == (tmp_path / "runs" / at.name / "model.safetensors").read_bytes()


def test_the_number_of_threads_around_a_sweep_changes_nothing(tmp_path):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = run_sweep(grid(), tmp_path / "two", jobs=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found == run_sweep(grid(), tmp_path / "one", jobs=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the second sweep is a fork")
def test_two_sweeps_share_a_folder(tmp_path):
    """Each run is trained by one of them, and both have the whole table."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            write_outcome(run_sweep(grid(seeds=(0, 1, 2, 3)), tmp_path, jobs=1), tmp_path, "child")
            status = 0
        finally:
            os._exit(status)
    seen: dict[Path, set[int]] = {}
    found = run_sweep(
        grid(seeds=(3, 2, 1, 0)),
        tmp_path,
        jobs=1,
        progress=lambda done: [
            seen.setdefault(path, set()).add(path.stat().st_ino) for path in tmp_path.glob("runs/*/training.json")
        ],
    )
    assert os.waitpid(child, 0)[1] == 0
    assert found.failed == ()
    csv = pd.read_csv(tmp_path / "child.csv").sort_values(["recipe", "seed", "digits", "intervention"])
    mine = found.to_frame().sort_values(["recipe", "seed", "digits", "intervention"])
    assert csv["wrong"].tolist() == mine["wrong"].tolist()
    assert all(len(inodes) == 1 for inodes in seen.values())  # written once
    whole = run_sweep(grid(seeds=(3, 2, 1, 0)), tmp_path / "alone", jobs=1)
    assert whole == found


# Clusters, as the extras bring them


def ray_cluster(attempts=3):
    """A head and two workers of one processor each. Ray gives its agents 30 s to start; a busy machine takes longer."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 * 2**20}
    for attempt in range(attempts):
        cluster = None
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
            return cluster, [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        except Exception:  # Ray raises just that
            if cluster is not None:
                cluster.shutdown()
            if attempt == attempts - 1:
                raise
    raise AssertionError


@pytest.mark.parametrize("name", ["grid.json", "grid.csv", "g" * 121 + ".yaml"])
def test_a_table_never_takes_the_place_of_the_sweep(leaksum, tmp_path, name):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(GOOD))
    code, out, err = leaksum("sweep", path, "--out", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert path.read_text() == yaml.safe_dump(GOOD)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_folder_that_holds_something_else_is_named(tmp_path):
    (run, *_) = grid().runs
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / run.name).write_text("mine")
    with pytest.raises(SweepError, match=f"{run.name} or its .lock"):
        run_sweep(grid(), tmp_path)
    assert (tmp_path / "runs" / run.name).read_text() == "mine"


def test_a_pipe_is_no_sweep(leaksum, tmp_path):
    os.mkfifo(tmp_path / "sweep.yaml")
    code, _, err = leaksum("sweep", tmp_path / "sweep.yaml", "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.skipif("LEAKSUM_RAY" not in os.environ, reason="starts a Ray cluster; `make cluster` runs it")
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_of_two_workers_one_killed_in_the_middle(uninterrupted, tmp_path, monkeypatch):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    patience = {"RAY_raylet_start_wait_time_s": "240", "RAY_agent_register_timeout_ms": "240000"}  # of a busy machine
    for name, value in (environment | patience).items():
        monkeypatch.setenv(name, value)
    cluster, nodes = ray_cluster()
    try:

        def kill(done: int) -> None:
            if done >= 4 and len(nodes) == 2:
                cluster.remove_node(nodes.pop(), allow_graceful=False)

        found = run_sweep(sweep_from(TWELVE), tmp_path, engine="ray", address=cluster.address, progress=kill)
    finally:
        cluster.shutdown()
    assert len(nodes) == 1
    assert found.failed == ()
    write_outcome(found, tmp_path, "twelve")
    assert tables_of(tmp_path, "twelve") == tables_of(uninterrupted, "twelve")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster(tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra `dask`, which `dev` has, is not installed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        found = run_sweep(grid(), tmp_path / "dask", engine="dask", address=cluster.scheduler_address)
    assert found == run_sweep(grid(), tmp_path / "here", jobs=1)
