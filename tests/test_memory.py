"""Batches and blocks follow the free memory, and what does not fit is refused before it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import interp.cli as cli
import interp.memory as memory
import interp.passes as passes
from interp.ledger import build_ledger
from interp.memory import MemoryLimit, free_memory
from interp.passes import plan_for
from models.checkpoint import load_checkpoint

FIXTURE = Path(__file__).parents[1] / "fixtures" / "1digit-rotary2d-pressure-seed0"


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FIXTURE)


def test_less_memory_makes_smaller_batches(model, monkeypatch):
    problems = model.task.evaluation_problems(10, 300)
    plans = []
    for free in (10**12, 2 * 10**7, 10**6):
        monkeypatch.setattr(passes, "free_memory", lambda free=free: free)
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        plans.append(plan_for(model, problems).batch)
    assert plans[0] > plans[1] > plans[2] >= 1
    assert set(plans) <= set(passes._BATCHES)


def test_longer_problems_make_smaller_blocks_until_far_keys_are_pooled(model):
    lengths = [[(10**n - 1, 10**n - 1)] for n in (100, 4000, 10_000)]
    assert [plan_for(model, p, every_key=True).query_block for p in lengths] == [32, 16, 8]
    assert [plan_for(model, p).query_block for p in lengths] == [32, 64, 64]


def test_what_does_not_fit_is_refused_by_name(model, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**6)
    with pytest.raises(MemoryLimit, match=r"a pass over 603 tokens takes about \d+ MB and 1 MB are free; take fewer"):
        plan_for(model, [(10**199, 10**199)])
    with pytest.raises(MemoryLimit, match=r"the ledger of 40 problems takes about \d+ MB"):
        build_ledger(model, model.task.evaluation_problems(10, 40))


def test_the_command_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**6)
    with pytest.raises(SystemExit) as stop:
        cli.main(["score", str(FIXTURE), "--digits", "200", "--problems", "2"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert "take fewer digits" in err


def test_free_memory_is_the_least_of_what_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert 0 < free_memory() < 2**50
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_memory() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 3000


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["score", "--digits", "2000", "--problems", "2"],
        ["ablate", "--far", "--digits", "2000", "--problems", "1"],
        ["leak", "--digits", "2000", "--problems", "1"],
        ["score", "--digits", "10000", "--problems", "1"],
    ],
    ids=" ".join,
)
def test_thousands_of_digits_run_on_4_gigabytes(arguments):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); "
        "from interp.cli import main; main(sys.argv[1:])"
    )
    command, *rest = arguments
    line = [sys.executable, "-c", code, command, str(FIXTURE), *rest, "--threads", "1", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-500:]
    found = json.loads(done.stdout)
    assert found["run"]["batch"] == 1
    if command == "score":
        assert found["decisions"] > 2000
        assert found["run"]["far_keys"] == "pooled"
