from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models import training
from models.checkpoint import CheckpointError, load_checkpoint, load_record
from models.config import AdderConfig, AttentionConfig
from models.recipes import Recipe
from models.training import Trainer, schedule

STEPS = 12


def tiny(**changes) -> Recipe:
    model = AdderConfig(
        attention=AttentionConfig(decay=0.3, sink_boost=4.0), n_layers=1, n_heads=2, d_model=16, d_head=8, d_mlp=32
    )
    base = Recipe(name="tiny", about="a test", model=model, steps=STEPS, batch=8, warmup=3, sink_pressure=4.0)
    return Recipe.model_validate(base.model_dump() | {"precision": "float32"} | changes)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(training, "PROBE_PROBLEMS", 16)
    monkeypatch.setattr(training, "PROBE_EVERY", 5)


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def stop_at(step: int):
    """A progress callback that interrupts the run."""

    def progress(now, loss, exact):
        if now == step:
            raise KeyboardInterrupt

    return progress


def interrupted(folder: Path, step: int, monkeypatch, recipe: Recipe | None = None, seed: int = 3) -> None:
    """A run that saved after every step and was stopped in this one."""
    monkeypatch.setattr(training, "SAVE_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        Trainer(recipe or tiny(), seed, folder, resume=True, progress=stop_at(step)).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One run without any interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "PROBE_PROBLEMS", 16)
        patch.setattr(training, "PROBE_EVERY", 5)
        return Trainer(tiny(), 3, tmp_path_factory.mktemp("whole")).run()


def test_the_same_seed_gives_the_same_bytes(whole, tmp_path):
    torch.manual_seed(77)
    np.random.seed(77)  # noqa: NPY002 (the global state must not matter)
    again = Trainer(tiny(), 3, tmp_path / "again").run()
    other = Trainer(tiny(), 4, tmp_path / "other").run()
    assert weights_of(again) == weights_of(whole)
    assert weights_of(other) != weights_of(whole)
    assert load_record(again).curve == load_record(whole).curve


def test_a_record_says_where_the_checkpoint_comes_from(whole):
    record = load_record(whole)
    assert (record.recipe, record.seed, record.step, record.precision) == (tiny(), 3, STEPS, "float32")
    assert [point.step for point in record.curve] == [5, 10, 12]
    assert record.versions["torch"] == torch.__version__
    assert load_checkpoint(whole).config == tiny().model
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors", "training.json"]


@pytest.mark.parametrize("stops", [(2,), (5,), (6,), (11,), (12,), (1, 4, 5, 10)])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(whole, tmp_path, monkeypatch, stops):
    for step in stops:
        interrupted(tmp_path, step, monkeypatch)
        assert not (tmp_path / "training.json").exists()
    steps = []
    trainer = Trainer(tiny(), 3, tmp_path, resume=True, progress=lambda step, loss, exact: steps.append(step))
    assert trainer.step == stops[-1] - 1  # the step in which it stopped was not saved
    trainer.run()
    assert steps == list(range(stops[-1], STEPS + 1))
    assert weights_of(tmp_path) == weights_of(whole)
    assert load_record(tmp_path).curve == load_record(whole).curve
    assert not (tmp_path / "resume.safetensors").exists()


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)  # as in conftest: the bits depend on it
from models import training
from test_training import tiny
training.PROBE_PROBLEMS, training.PROBE_EVERY, training.SAVE_SECONDS = 16, 5, -1.0
def progress(step, loss, exact):
    print(step, flush=True)
    if step == 7:
        time.sleep(60)
training.Trainer(tiny(), 3, Path({folder!r}), progress=progress).run()
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed_to_the_same_bytes(whole, tmp_path):
    here = Path(__file__).parent
    code = KILLED.format(tests=str(here), root=str(here.parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "7":
                break
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    Trainer(tiny(), 3, tmp_path, resume=True).run()
    assert weights_of(tmp_path) == weights_of(whole)
    assert load_record(tmp_path).curve == load_record(whole).curve


def test_a_finished_run_returns_at_once(whole):
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    for resume in (True, False):
        assert Trainer(tiny(), 3, whole, resume=resume, progress=stop_at(1)).run() == whole
    assert {path.name: path.stat().st_mtime_ns for path in whole.iterdir()} == before


OTHERS = [(tiny(steps=STEPS + 1), 3), (tiny(batch=16), 3), (tiny(name="other"), 3), (tiny(), 4)]


@pytest.mark.parametrize(("recipe", "seed"), OTHERS)
def test_another_run_is_not_overwritten(whole, recipe, seed):
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r"already holds tiny, 12 steps, seed 3; choose another --out"):
            Trainer(recipe, seed, whole, resume=resume)


@pytest.mark.parametrize(("recipe", "seed"), [*OTHERS, (tiny(precision="bfloat16"), 3)])
def test_another_run_is_not_resumed(tmp_path, monkeypatch, recipe, seed):
    interrupted(tmp_path, 3, monkeypatch)
    with pytest.raises(CheckpointError, match="unfinished tiny, 12 steps, seed 3, float32"):
        Trainer(recipe, seed, tmp_path, resume=True)


def test_another_precision_alone_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "fast_precision", lambda: "float32")
    interrupted(tmp_path, 3, monkeypatch, recipe=tiny(precision="auto"))
    monkeypatch.setattr(training, "fast_precision", lambda: "bfloat16")
    with pytest.raises(CheckpointError, match="float32"):
        Trainer(tiny(precision="auto"), 3, tmp_path, resume=True)


def test_an_unfinished_run_is_continued_only_when_asked(tmp_path, monkeypatch):
    interrupted(tmp_path, 3, monkeypatch)
    with pytest.raises(CheckpointError, match="--resume"):
        Trainer(tiny(), 3, tmp_path)


def test_a_spoiled_resume_file_is_refused(tmp_path, monkeypatch):
    interrupted(tmp_path, 7, monkeypatch)
    path = tmp_path / "resume.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for length in (0, 4, 8, 8 + header // 2, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"resume\.safetensors cannot be resumed from"):
            Trainer(tiny(), 3, tmp_path, resume=True)
    about = json.loads(whole[8 : 8 + header])["__metadata__"]
    for key in about:
        path.write_bytes(whole.replace(f'"{key}":'.encode(), f'"{key[:-1]}_":'.encode(), 1))
        with pytest.raises(CheckpointError, match="cannot be resumed from"):
            Trainer(tiny(), 3, tmp_path, resume=True)
    path.write_bytes(whole)
    Trainer(tiny(), 3, tmp_path, resume=True)


def test_a_resume_file_without_optimizer_moments_is_refused(tmp_path, monkeypatch):
    interrupted(tmp_path, 7, monkeypatch)
    path = tmp_path / "resume.safetensors"
    path.write_bytes(path.read_bytes().replace(b"optimizer.", b"0ptimizer."))
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        Trainer(tiny(), 3, tmp_path, resume=True)


# One step


def test_the_first_loss_is_the_models_own(tmp_path):
    losses = []
    recipe = tiny(steps=1, micro_batches=4, sink_pressure=0.0)
    trainer = Trainer(recipe, 3, tmp_path, progress=lambda step, loss, exact: losses.append(loss))
    task = trainer.model.task
    batch = task.encode(task.training_problems(3, 0, recipe.batch))
    with torch.no_grad():
        expected = trainer.model(batch.tokens, return_type="loss").item()
    trainer.run()
    assert losses == [pytest.approx(expected, rel=1e-5)]


def test_parts_of_a_batch_train_like_the_whole(tmp_path):
    models = []
    for parts in (1, 2, 8):
        trainer = Trainer(tiny(steps=3, micro_batches=parts, sink_pressure=0.0), 3, tmp_path / str(parts))
        trainer.run()
        models.append(trainer.model("987+65").detach())
    for other in models[1:]:
        torch.testing.assert_close(models[0], other, atol=1e-3, rtol=1e-3)


def test_the_loss_falls(tmp_path):
    losses = []
    recipe = tiny(steps=60, batch=32, sink_pressure=0.0, learning_rate=1e-2)
    Trainer(recipe, 0, tmp_path, progress=lambda step, loss, exact: losses.append(loss)).run()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])


@pytest.mark.parametrize("pressure", [0.0, 4.0])
def test_sink_pressure_is_one_boost_per_sequence_up_to_b(tmp_path, pressure):
    trainer = Trainer(tiny(sink_pressure=pressure), 3, tmp_path)
    seen = []

    def keep(value, hook):
        if trainer.model.training:
            boost = value - trainer.model.blocks[0].attn.sink[None, :, None]
            torch.testing.assert_close(boost, boost[:, :1, :1].expand_as(boost))
            seen.append(boost[:, 0, 0].detach())

    trainer.model.add_perma_hook("blocks.0.attn.hook_sink_scores", keep)
    trainer.run()
    boosts = torch.cat(seen)
    assert len(boosts) == STEPS * 8
    if pressure:
        assert boosts.min() >= -1e-5
        assert boosts.max() <= pressure + 1e-5
        assert len(boosts.round(decimals=4).unique()) == len(boosts)
        assert boosts.mean().item() == pytest.approx(pressure / 2, abs=0.5)
    else:
        torch.testing.assert_close(boosts, torch.full_like(boosts, 4.0))  # the configuration's


def test_what_a_step_draws_does_not_depend_on_earlier_steps(tmp_path):
    trainer = Trainer(tiny(), 3, tmp_path)
    state = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    direct = trainer._train_step(7)
    again = Trainer(tiny(), 3, tmp_path)
    for step in (1, 2):
        again._train_step(step)
    again.model.load_state_dict(state)
    assert again._train_step(7) == direct


def test_a_loss_that_is_nan_stops_the_run(tmp_path):
    trainer = Trainer(tiny(), 3, tmp_path)
    with torch.no_grad():
        trainer.model.unembed.b_U.fill_(math.nan)
    with pytest.raises(CheckpointError, match="the loss is nan at step 0"):
        trainer.run()
    assert not (tmp_path / "training.json").exists()


def test_weight_decay_spares_embeddings_biases_and_sinks(tmp_path):
    trainer = Trainer(tiny(), 3, tmp_path)
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[id(weight)].rsplit(".", 1)[1] for weight in group["params"]}
        for group in trainer.optimizer.param_groups
    }
    assert groups == {
        0.1: {"W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_U"},
        0.0: {"W_E", "b_in", "b_out", "b_U", "sink"},
    }


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_schedule_warms_up_linearly_and_falls_as_a_cosine(warmup):
    recipe = tiny(steps=100, warmup=warmup)
    rates = np.array([schedule(step, recipe) for step in range(101)])
    cosine = np.cos(np.pi * np.arange(101) / 200) ** 2  # the half-angle form
    np.testing.assert_allclose(rates[warmup:], cosine[warmup:], atol=1e-12)
    np.testing.assert_allclose(rates[:warmup], cosine[:warmup] * np.arange(1, warmup + 1) / max(warmup, 1), atol=1e-12)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_the_optimizer_follows_the_schedule(tmp_path):
    recipe = tiny(learning_rate=1e-3)
    seen = []
    trainer = Trainer(recipe, 3, tmp_path, progress=lambda *_: seen.append(trainer.optimizer.param_groups[1]["lr"]))
    trainer.run()
    assert seen == [pytest.approx(1e-3 * schedule(step, recipe)) for step in range(STEPS)]


def test_in_distribution_accuracy_counts_whole_problems(tmp_path):
    trainer = Trainer(tiny(), 3, tmp_path)
    task = trainer.model.task
    probe = task.training_problems(3, 0, 16, stream="probe")
    assert not set(probe) & set(task.training_problems(3, 0, 16))
    batch = task.encode(probe)
    right = torch.nn.functional.one_hot(batch.targets, trainer.model.cfg.d_vocab).float()
    right[5] = right[5].roll(1, -1)  # one problem wholly wrong
    at = batch.decisions[9].nonzero()[-1]
    right[9, at] = right[9, at].roll(1, -1)  # one wrong in one decision
    right[~batch.decisions] = 0.0  # what is no decision does not count
    trainer.model.forward = lambda tokens, mask: right
    assert trainer.in_distribution_accuracy() == pytest.approx(14 / 16)


# Counters: penalty, pressure on keys, exact gates


def counted(**changes) -> Recipe:
    attention = AttentionConfig(scheme="counters", null_key=True, exact_counters=2)
    model = AdderConfig(attention=attention, n_layers=2, n_heads=2, d_model=16, d_head=8, d_mlp=32)
    base = Recipe(name="counted", about="a test", model=model, steps=STEPS, batch=8, warmup=3, exact_from=1.0)
    return Recipe.model_validate(base.model_dump() | {"precision": "float32"} | changes)


def test_a_ramp_rises_linearly_between_two_shares_of_training():
    found = [training.ramp(done, (0.2, 0.6)) for done in (0, 0.2, 0.3, 0.4, 0.6, 1)]
    assert found == pytest.approx([0, 0, 0.25, 0.5, 1, 1])
    assert [training.ramp(done, (0.0, 0.0)) for done in (0, 0.5)] == [1, 1]
    assert [training.ramp(done, (0.5, 0.5)) for done in (0.4, 0.5)] == [0, 1]


def test_a_cooldown_holds_the_rate_and_then_lowers_it_linearly():
    recipe = counted(steps=100, warmup=10, cooldown=0.6)
    rates = np.array([schedule(step, recipe) for step in range(101)])
    np.testing.assert_allclose(rates[9:61], 1)
    np.testing.assert_allclose(rates[60:], 1 - 0.97 * np.arange(41) / 40, atol=1e-12)


def test_the_penalty_is_the_mean_of_rate_times_one_minus_rate(tmp_path):
    """The gradient of the penalised loss less that of the plain one is the penalty's, by another route."""
    grads = {}
    for weight in (0.0, 2.0):
        trainer = Trainer(counted(gate_penalty=weight, micro_batches=1), 3, tmp_path / str(weight))
        trainer.recipe = trainer.recipe.model_copy(update={"clip": 1e9})
        trainer._train_step(0)
        grads[weight] = trainer.model.blocks[0].attn.counters.gate_bias.grad.clone()
    trainer = Trainer(counted(), 3, tmp_path / "other")
    task, model = trainer.model.task, trainer.model
    model.train()
    trainer._round_counters(False)
    batch = task.encode(sorted(task.training_problems(3, 0, 8), key=training._tokens_needed))
    kept = []
    names = [f"blocks.{layer}.attn.hook_{kind}" for layer in range(2) for kind in ("gate", "reset")]
    model.run_with_hooks(batch.tokens, batch.mask, fwd_hooks=[(name, lambda x, hook: kept.append(x)) for name in names])
    gates, resets = (torch.stack(kept[i::2])[:, batch.mask] for i in (0, 1))
    penalty = (gates * (1 - gates)).mean() + (resets * (1 - resets)).mean()
    (expected,) = torch.autograd.grad(2.0 * penalty, model.blocks[0].attn.counters.gate_bias)
    torch.testing.assert_close(grads[2.0] - grads[0.0], expected, rtol=1e-3, atol=1e-7)


def test_key_pressure_boosts_some_keys_in_all_heads(tmp_path):
    trainer = Trainer(counted(key_pressure=6.0, key_pressure_rate=0.25), 3, tmp_path)
    part = trainer.model.task.encode(trainer.model.task.training_problems(3, 0, 64))
    hooks = trainer._key_pressure(np.random.default_rng(0), part, 0.5)
    assert [name for name, _ in hooks] == [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(2)]
    batch, keys = part.tokens.shape
    boosts = [hook(torch.zeros(batch, 2, 3, keys), None) for _, hook in hooks]
    for boost in boosts:
        assert torch.equal(boost, boost[:, :1, :1].expand_as(boost))  # one draw a layer and sequence
        hit = boost[boost > 0]
        assert hit.max() <= 3.0  # half of the pressure, by the ramp
        assert (boost > 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
        assert hit.mean().item() == pytest.approx(1.5, abs=0.1)
    assert not torch.equal(*boosts)


def test_exact_counters_are_exact_when_the_recipe_says(tmp_path):
    trainer = Trainer(counted(exact_from=0.5), 3, tmp_path)
    seen = []
    trainer.progress = lambda *_: seen.append(trainer.model.blocks[1].attn.counters.exact)
    trainer.run()
    whole = [2 if step >= STEPS / 2 else 0 for step in range(STEPS)]
    probed = [5, 10, STEPS]  # accuracy is that of the model as it is evaluated
    assert seen == [2 if step + 1 in probed else exact for step, exact in enumerate(whole)]
    assert load_checkpoint(tmp_path).blocks[0].attn.counters.exact == 2


def test_kernels_learn_at_their_own_rate(tmp_path):
    trainer = Trainer(counted(kernel_rate=10.0), 3, tmp_path)
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    trainer.run()
    rates = {names[id(w)]: group["lr"] for group in trainer.optimizer.param_groups for w in group["params"]}
    usual = rates["blocks.0.attn.W_Q"]
    for name, rate in rates.items():
        assert rate == pytest.approx(usual * (10 if name.endswith("counters.kernel") else 1))
    decays = {
        names[id(w)] for group in trainer.optimizer.param_groups if group["weight_decay"] for w in group["params"]
    }
    assert not any("counters" in name or "null" in name for name in decays)


def test_a_counting_run_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    recipe = counted(gate_penalty=1.0, key_pressure=3.0, sink_pressure=2.0, pressure_ramp=(0.2, 0.8), cooldown=0.5)
    whole = Trainer(recipe, 3, tmp_path / "whole").run()
    interrupted(tmp_path / "part", 7, monkeypatch, recipe)
    Trainer(recipe, 3, tmp_path / "part", resume=True).run()
    assert weights_of(tmp_path / "part") == weights_of(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pressure_ramp": (0.8, 0.2)}, "pressure_ramp must be two shares of training in order, got 0.8 and 0.2"),
        ({"penalty_ramp": (0.0, 1.5)}, "penalty_ramp"),
        ({"cooldown": 1.0}, "cooldown"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        counted(**changes)


def test_a_penalty_on_gates_needs_counters():
    with pytest.raises(ValueError, match="need a model with counters"):
        tiny(gate_penalty=1.0)
