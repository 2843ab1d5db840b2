"""Checkpoints kept in training, and what is measured along them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from interp.doctor import examine
from interp.during import during
from interp.shares import leak_growth
from models.checkpoint import load_checkpoint, load_record
from models.config import AdderConfig, AttentionConfig, InputError, TaskConfig
from models.recipes import Recipe, keeping
from models.training import KEPT, Trainer

COUNTING = AttentionConfig(scheme="counters", null_key=True)


def tiny(attention: AttentionConfig | None = None, steps: int = 9) -> Recipe:
    model = AdderConfig(
        task=TaskConfig(max_digits=3),
        attention=attention or AttentionConfig(),
        n_layers=2,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    return Recipe(name="tiny", about="a test", model=model, steps=steps, batch=8, precision="float32")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("during") / "run"
    seen = {}

    def look(step: int, loss: float, exact: float) -> None:
        seen[step] = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}

    trainer = Trainer(keeping(tiny(COUNTING), 4), 1, folder, progress=look)
    trainer.run()
    return folder, seen


def test_kept_weights_are_those_of_the_step(run):
    folder, seen = run
    assert sorted(path.name for path in (folder / KEPT).iterdir()) == ["4", "8"]
    for step in (4, 8):
        kept = folder / KEPT / str(step)
        assert load_record(kept).step == step
        for name, weight in load_checkpoint(kept).state_dict().items():
            assert torch.equal(weight, seen[step][name])


def test_keeping_changes_no_weight(run, tmp_path):
    plain = load_checkpoint(Trainer(tiny(COUNTING), 1, tmp_path / "plain").run()).state_dict()
    for name, weight in load_checkpoint(run[0]).state_dict().items():
        assert torch.equal(weight, plain[name])


def test_a_run_that_is_killed_keeps_the_same(run, tmp_path):
    class Killed(Exception):
        pass

    def kill(step: int, loss: float, exact: float) -> None:
        if step == 6:
            trainer._save()
            raise Killed

    trainer = Trainer(keeping(tiny(COUNTING), 4), 1, tmp_path, progress=kill)
    with pytest.raises(Killed):
        trainer.run()
    Trainer(keeping(tiny(COUNTING), 4), 1, tmp_path, resume=True).run()
    for part in (f"{KEPT}/4", f"{KEPT}/8", "."):
        ours, theirs = ((folder / part / "model.safetensors").read_bytes() for folder in (tmp_path, run[0]))
        assert ours == theirs


def test_each_moment_is_measured_as_a_checkpoint_is(run):
    folder, _ = run
    found = during(folder, digits=6, problems=4, seed=3)
    assert [moment.step for moment in found.moments] == [4, 8, 9]
    frame = found.to_frame()
    for step, path in ((4, folder / KEPT / "4"), (9, folder)):
        alone = leak_growth(load_checkpoint(path), [6], 4, seed=3).to_frame()
        here = frame[frame["step"] == step].reset_index(drop=True).drop(columns="step")
        np.testing.assert_allclose(
            here.select_dtypes("number").to_numpy(float), alone.select_dtypes("number").to_numpy(float), rtol=1e-6
        )
    assert {m.counters for m in found.moments} == {8}
    json.dumps(found.to_json())


def test_the_doctor_takes_a_kept_checkpoint_for_whole(run):
    checks = {check.check: check for check in examine(run[0] / KEPT / "4")}
    assert checks["steps"].ok
    assert "4 of 9" in checks["steps"].found


def test_the_figure_has_every_lookup_against_the_step(run):
    figure = during(run[0], digits=6, problems=4).plot()
    names = {trace.name for trace in figure.data}
    assert {"exact in training lengths", "exact at 6 digits", "counters that follow the column"} <= names
    assert all(list(trace.x) == [4, 8, 9] for trace in figure.data)


def test_the_command(run, leaksum, tmp_path):
    out = tmp_path / "figure.html"
    ask = ["during", str(run[0]), "--digits", "6", "--problems", "4"]
    status, said, _ = leaksum(*ask, "--json", "--figure", out)
    assert status == 0
    found = json.loads(said)
    assert [row["step"] for row in found["steps"]] == [4, 8, 9]
    assert {"lookup", "gap", "leak", "sink_score", "step"} <= set(found["heads"][0])
    assert out.stat().st_size > 10**6
    status, said, _ = leaksum(*ask)
    assert status == 0
    assert "sink score" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["during", "fixtures/1digit-rotary2d-seed0"], "train with --keep-every"),
        (["train", "1digit-rotary2d", "--keep-every", "0"], "keep-every must be at least 1 for 1000 steps, got 0"),
        (["train", "1digit-nope", "--keep-every", "1"], "keep-every must be at least 6"),
        (["train", "induction-llama", "--keep-every", "5"], "leave out --keep-every"),
        (["train", "no-such", "--keep-every", "5"], "no recipe is called 'no-such'"),
    ],
)
def test_bad_input_is_one_line(arguments, says, leaksum, tmp_path):
    if arguments[0] == "train":
        arguments = [*arguments, "--out", str(tmp_path / "run")]
    status, out, err = leaksum(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_keeping_refuses_a_thousand_and_more():
    with pytest.raises(InputError, match="at least 2 for 1001 steps, got 1"):
        keeping(tiny(steps=1001), 1)
