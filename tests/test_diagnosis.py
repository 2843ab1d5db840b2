"""Verdicts: on planted failures, whose cause is known, and on the shipped checkpoints."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from planted import MISCOUNTS, PLANTS, Plant
from planted_blind import BLIND

import interp.diagnosis
from interp.crowd import crowd_output
from interp.decisions import score
from interp.diagnosis import diagnose
from interp.interventions import Intervention, Scope
from interp.ledger import build_ledger
from interp.roles import head_roles
from models.addition import read_problems
from models.checkpoint import load_checkpoint, load_record

FIXTURES = Path(__file__).parent.parent / "fixtures"
PROBLEMS = Path(__file__).parent / "problems"
DILUTING = [f"1digit-rotary2d-seed{seed}" for seed in range(3)]
PRESSED = [f"1digit-rotary2d-pressure-seed{seed}" for seed in range(3)]
CAUSES = ("aliasing", "drift", "dilution", "starvation", "none")


def test_the_plants_cover_every_cause_in_different_heads_and_lengths():
    frame = pd.DataFrame([{"cause": p.cause, "digits": p.digits, "heads": len(p.heads)} for p in PLANTS])
    assert (frame.groupby("cause").size() >= 4).all()
    assert set(frame["cause"]) == set(CAUSES)
    assert frame["digits"].nunique() >= 3
    assert frame["heads"].nunique() >= 3


@pytest.mark.parametrize("plant", [*PLANTS, *MISCOUNTS, *BLIND], ids=lambda plant: plant.name)
def test_a_plant_touches_nothing_at_training_lengths(plant: Plant):
    model = plant.model()
    assert score(model, model.task.evaluation_problems(10, 10)).n_wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plants", "problems"), [((*PLANTS, *MISCOUNTS), 6), (BLIND, 10)], ids=["planted", "planted blind"]
)
def test_planted_failures_are_told_apart(monkeypatch, capsys, plants, problems):
    monkeypatch.setattr(interp.diagnosis, "HEAD_PROBLEMS", 1)
    rows = []
    for plant in plants:
        model = plant.model()
        found = diagnose(model, plant.digits, problems)
        rows.append({"planted": plant.cause, "found": found.verdict.cause, "plant": plant.name})
    frame = pd.DataFrame(rows)
    matrix = pd.crosstab(frame["planted"], frame["found"])
    right = frame["planted"] == frame["found"]
    with capsys.disabled():
        print(f"\n{matrix.to_string()}\n{right.sum()} of {len(frame)} right")
        print(frame[~right].to_string() if not right.all() else "none wrong")
    assert right.mean() >= 0.9
    assert right.groupby(frame["planted"]).any().all()


@pytest.mark.slow
def test_the_planted_head_is_named():
    (plant,) = (p for p in PLANTS if p.heads == ((1, 0),))
    assert diagnose(plant.model(), plant.digits, 10).verdict.heads == ((1, 0),)


@pytest.mark.slow
@pytest.mark.parametrize("name", DILUTING)
def test_the_diluting_checkpoints_dilute(name):
    model = load_checkpoint(FIXTURES / name)
    found = diagnose(model, 100, 30)
    trials = {trial.name: trial for trial in found.trials}
    assert found.score.n_wrong > 30
    assert trials["far"].wrong < 0.01 * found.score.n_wrong
    assert trials["random-control"].wrong > 0.1 * found.score.n_wrong
    assert (found.verdict.cause, found.verdict.proved, found.verdict.proof.edit) == ("dilution", True, "far")


@pytest.mark.slow
def test_what_nothing_repairs_stays_unexplained():
    found = diagnose(load_checkpoint(FIXTURES / "1digit-nope-seed0"), 20, 20)
    assert found.score.n_wrong > 100
    assert min(trial.wrong for trial in found.trials) > 0.5 * found.score.n_wrong
    assert (found.verdict.cause, found.verdict.heads, found.verdict.proof) == ("unexplained", (), None)


@pytest.mark.slow
def test_plain_rotary_drifts():
    """Counting token distances as in training repairs every column that training had; the same keys removed do not."""
    model = load_checkpoint(FIXTURES / "1digit-rotary-seed0")
    found = diagnose(model, 20, 20)
    verdict, proof = found.verdict, found.verdict.proof
    assert (verdict.cause, verdict.proved) == ("drift", True)
    assert (proof.edit, proof.control, proof.below) == ("restore-distances", "same-keys-removed", 10)
    assert proof.wrong > 50
    assert proof.left <= 0.01 * proof.wrong
    assert proof.control_left > 0.9 * proof.wrong


UNLEARNT = {*(f"1digit-counters-switched-seed{seed}" for seed in range(3)), "1digit-counters-exact-seed2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.name for path in FIXTURES.glob("*digit-*")} - UNLEARNT))
def test_nothing_fails_at_training_length(name):
    found = diagnose(load_checkpoint(FIXTURES / name), 10, 100)
    assert found.score.exact >= 0.99
    assert (found.verdict.cause, found.verdict.heads, found.trials) == ("none", (), ())


@pytest.mark.parametrize("name", sorted(UNLEARNT))
def test_what_did_not_learn_says_so_itself(name):
    """They ship for the claims about them, and fail at training length too."""
    assert load_record(FIXTURES / name).curve[-1].exact < 0.2
    found = diagnose(load_checkpoint(FIXTURES / name), 20, 10).verdict
    assert found.cause != "none"
    assert found.evidence[0].startswith("it fails within its training lengths already (")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESSED)
def test_pressed_checkpoints_add_200_digits_and_hard_carries(name):
    model = load_checkpoint(FIXTURES / name)
    assert score(model, model.task.evaluation_problems(200, 30)).exact >= 0.99
    for digits in (10, 100, 200):
        assert score(model, read_problems(PROBLEMS / f"handmade-{digits}.txt")).exact == 1


def test_crowd_heads_may_exist_and_decide_nothing():
    """The study's C4: removing far keys in a healthy model's crowd heads changes no decision."""
    model = load_checkpoint(FIXTURES / PRESSED[0])
    problems = model.task.evaluation_problems(40, 6)
    for layer in range(3):
        edit = Intervention("far", scope=Scope(only=frozenset((layer, head) for head in range(4))))
        assert score(model, problems, [edit]).n_wrong == 0


def test_roles_name_a_lookup_only_where_the_target_has_most_of_the_attention():
    model = load_checkpoint(FIXTURES / PRESSED[0])
    trained, longer = (build_ledger(model, model.task.evaluation_problems(n, 10)) for n in (10, 30))
    for role in head_roles(trained, longer).roles:
        shares = {name: view.share[role.head].mean() for (name, present), view in trained.lookups.items() if present}
        best = max(shares, key=lambda name: shares[name])
        assert role.lookup == (best if shares[best] >= 0.5 else None)
        assert role.share[0] == pytest.approx(shares[best])


def test_the_far_part_of_the_output_is_what_zeroing_far_weights_removes():
    """Last layer, where nothing reads the change but the unembedding: two routes to one vector's length."""
    model = load_checkpoint(FIXTURES / DILUTING[0])
    problems = model.task.evaluation_problems(30, 4)
    wrote = crowd_output(model, problems)
    zeroed = crowd_output(model, problems, [Intervention("far-zero")])
    assert (wrote.norm >= 0).all()
    assert wrote.norm.max() > 0.01
    assert zeroed.norm.max() == 0
    assert (wrote.norm <= wrote.output_norm * 10).all()
