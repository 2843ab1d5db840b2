"""Faults injected on purpose (a share of ``tests/faults.py``), random configurations, and what the doctor says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import command, recipe
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interp.decisions import score
from models import training
from models.checkpoint import load_checkpoint, load_record
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.recipes import Recipe
from models.training import Trainer

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "1digit-rotary2d-pressure-seed0"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(training, "PROBE_PROBLEMS", 16)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, memory limits and a tmpfs as Linux has them")
def test_no_fault_loses_or_slips_through():
    """5 kills of training, 5 of sweeps, a full disk, hostile checkpoints, 700 fuzzed files; `make faults` does more."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "faults.py"), "--times", "5", "--cases", "700", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.stdout, done.stderr
    rows = {row["injected"]: row for row in json.loads(done.stdout)}
    assert [row for row in rows.values() if row["lost"]] == []
    assert done.returncode == 0
    for what in ("training", "a sweep"):
        assert rows[f"SIGKILL at a random moment of {what}"]["times"] == 5
    assert rows["hostile or damaged checkpoints"]["times"] >= 30
    assert sum(row["times"] for what, row in rows.items() if what.startswith("fuzzed")) >= 700
    full = "a full disk (tmpfs) while training saves, and when it ends"
    if full not in rows:
        pytest.skip(
            "all faults but one: a full disk takes the right to mount a tmpfs, which this machine does not give"
        )
    assert rows[full]["times"] == 2


def test_a_run_killed_just_when_it_was_done_leaves_nothing(tmp_path):
    saved = []

    def keep(step, loss, exact):
        if step == 3:
            saved.append((tmp_path / "resume.safetensors").read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SAVE_SECONDS", -1.0)
        Trainer(recipe(4), 0, tmp_path, progress=keep).run()
    (tmp_path / "resume.safetensors").write_bytes(saved[0])
    Trainer(recipe(4), 0, tmp_path, resume=True).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "training.json"]


# Random configurations


@st.composite
def recipes(draw) -> Recipe:
    """Small recipes of every scheme, most fields at random."""
    scheme = draw(st.sampled_from(["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"]))
    sink = draw(st.booleans())
    counting = scheme == "counters"
    attention = AttentionConfig(
        scheme=scheme,
        decay=draw(st.floats(0, 2)) if scheme == "rotary2d" else 0,
        rotary_base=draw(st.floats(2, 1e5)),
        separator_column=draw(st.integers(-3, 3)),
        sink=sink,
        null_key=sink and draw(st.booleans()),
        sink_boost=draw(st.floats(-5, 5)) if sink else 0,
        normalizer=draw(st.sampled_from(["softmax", "sparsemax", "entmax15"])),
        scalable=draw(st.booleans()),
        n_counters=draw(st.integers(2, 4)),
        exact_counters=draw(st.integers(0, 2)) if counting else 0,
        kernel_beyond=draw(st.sampled_from(["linear", "constant", "floor"])),
    )
    low = draw(st.integers(1, 4))
    task = TaskConfig(
        chunk=draw(st.sampled_from([1, 3])),
        cut=draw(st.sampled_from(["left", "right"])),
        min_digits=low,
        max_digits=low + draw(st.integers(0, 4)),
    )
    model = AdderConfig(
        task=task,
        attention=attention,
        n_layers=draw(st.integers(1, 2)),
        n_heads=draw(st.integers(1, 3)),
        d_model=draw(st.integers(4, 20)),
        d_head=draw(st.sampled_from([4, 8, 12])),
        d_mlp=draw(st.integers(1, 20)),
    )
    return Recipe(
        name="random",
        about="a test",
        model=model,
        steps=1,
        batch=4,
        micro_batches=draw(st.sampled_from([1, 2, 4])),
        sink_pressure=draw(st.floats(0, 5)) if sink else 0,
        key_pressure=draw(st.floats(0, 5)),
        gate_penalty=draw(st.floats(0, 1)) if counting else 0,
        precision="float32",
    )


@given(recipes(), st.integers(0, 2**63 - 1))
def test_any_valid_recipe_trains_a_step_saves_loads_and_scores_the_same(tmp_path_factory, chosen, seed):
    folder = tmp_path_factory.mktemp("random")
    trainer = Trainer(chosen, seed, folder)
    trainer.run()
    loaded = load_checkpoint(folder)
    problems = loaded.task.evaluation_problems(5, 3)
    ours, theirs = score(trainer.model, problems), score(loaded, problems)
    assert (ours.margin == theirs.margin).all()
    assert (ours.wrong == theirs.wrong).all()
    assert load_record(folder).recipe == chosen
    assert command("score", folder, "--digits", 4, "--problems", 2)[0] == 0


BAD_VALUES = st.sampled_from([-1, 0, 10**9, 1e308, float("nan"), float("inf"), None, "x", "", [], {}, True, "<b>\n"])
FIELDS = [
    *[("model", "task", name) for name in TaskConfig.model_fields],
    *[("model", "attention", name) for name in AttentionConfig.model_fields],
    *[("model", name) for name in AdderConfig.model_fields],
    *[(name,) for name in Recipe.model_fields if name not in ("name", "about")],
    ("model", "surprise"),
    ("surprise",),
]


def _with(found: dict, where: tuple[str, ...], value: object) -> dict:
    first, *rest = where
    return {**found, first: _with(found[first], tuple(rest), value) if rest else value}


def _is_valid(kind: type, found: dict) -> bool:
    try:
        kind.model_validate(found)
    except ValueError:
        return False
    return True


@settings(max_examples=40)
@given(st.sampled_from(FIELDS), BAD_VALUES)
def test_any_invalid_recipe_exits_2(tmp_path_factory, where, value):
    found = _with(recipe(1).model_dump(), where, value)
    assume(not _is_valid(Recipe, found))
    folder = tmp_path_factory.mktemp("invalid")
    entry = {"base": "1digit-rotary2d", "name": "random", **{k: v for k, v in found.items() if k != "name"}}
    grid = {"recipes": [json.loads(json.dumps(entry))], "seeds": 0, "digits": 4}
    (folder / "grid.yaml").write_text(json.dumps(grid))
    status, out, err = command("sweep", folder / "grid.yaml", "--out", folder / "out")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert not (folder / "out").exists()
    if where[0] == "model" and len(where) > 1 and not _is_valid(AdderConfig, found["model"]):
        (folder / "config.json").write_text(json.dumps({"format": 1, "model": found["model"]}))
        status, out, err = command("score", folder)
        assert (status, out, err.count("\n")) == (2, "", 1), err


# The doctor


def checks_of(folder: Path) -> tuple[int, dict[str, dict], str]:
    status, out, err = command("doctor", folder, "--json")
    found = json.loads(out)
    assert found["ok"] == all(check["ok"] is not False for check in found["checks"])
    return status, {check["check"]: check for check in found["checks"]}, err


def test_a_healthy_checkpoint_is_whole_and_as_accurate_as_recorded(monkeypatch):
    monkeypatch.undo()  # the probe as it was recorded
    status, found, err = checks_of(FIXTURE)
    assert (status, err) == (0, "")
    record = load_record(FIXTURE)
    assert found["source"]["found"] == (record.commit or "revision not recorded")
    assert f"seed {record.seed}" in found["recipe"]["found"]
    assert f"torch {record.versions['torch']}" in found["trained with"]["found"]
    assert f"{record.curve[-1].exact:.4f} recorded" in found["accuracy"]["found"]
    assert all(found[name]["ok"] for name in ("weights", "recipe", "steps", "accuracy"))
    status, out, _ = command("doctor", FIXTURE)
    assert status == 0
    assert "accuracy" in out


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return Trainer(recipe(3), 0, tmp_path / "run").run()


def edit(folder: Path, name: str, change) -> None:
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))


def _flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "check", "word"),
    [
        (_flip, "weights", "do not match their digest"),
        (lambda f: (f / "training.json").unlink(), "record", "training.json"),
        (lambda f: edit(f, "training.json", lambda r: r["curve"][-1].update(exact=0.9)), "accuracy", "0.9000 recorded"),
        (lambda f: edit(f, "training.json", lambda r: r.update(step=2)), "steps", "2 of 3"),
        (
            lambda f: edit(f, "config.json", lambda c: c["model"]["attention"].update(decay=0.5)),
            "recipe",
            "attention.decay",
        ),
        (lambda f: edit(f, "training.json", lambda r: r.update(curve=[])), "steps", "0 points"),
    ],
    ids=["flipped bit", "no record", "accuracy", "steps", "configuration", "no curve"],
)
def test_what_is_wrong_with_a_checkpoint_is_named(checkpoint, spoil, check, word):
    assert checks_of(checkpoint)[0] == 0
    spoil(checkpoint)
    status, found, err = checks_of(checkpoint)
    assert (status, err.count("\n")) == (2, 1)
    assert found[check]["ok"] is False
    assert word in found[check]["found"]
    assert check in err


def test_leftovers_and_missing_digests_are_mentioned(checkpoint):
    (checkpoint / "resume.safetensors").write_bytes(b"")
    (checkpoint / ".config.json.abcdefgh").touch()
    status, found, _ = checks_of(checkpoint)
    assert status == 0
    assert found["files"] == {
        "check": "files",
        "ok": None,
        "found": "also .config.json.abcdefgh, resume.safetensors",
    }
    assert found["digest"]["ok"]
    _, shipped, _ = checks_of(FIXTURE)
    assert shipped["digest"] == {"check": "digest", "ok": None, "found": "none recorded"}


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere", ROOT / "README.md"):
        status, out, err = command("doctor", folder)
        assert (status, out, err.count("\n")) == (2, "", 1)


def test_the_probe_does_not_depend_on_the_global_seed():
    model = load_checkpoint(FIXTURE)
    torch.manual_seed(1)
    first = training.in_distribution_accuracy(model, 0)
    torch.manual_seed(2)
    assert training.in_distribution_accuracy(model, 0) == first
