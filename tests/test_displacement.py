"""One claim by three routes: who is asked, and the patch from a run without far keys against the removal itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import interp.cli as cli
from interp.decisions import score
from interp.displacement import DisplacementError, FromWithoutFar, displacement, empty_queries
from interp.interventions import parse_intervention
from models.checkpoint import load_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
FAR = parse_intervention("far")


def test_queries_with_nothing_to_find_are_those_past_a_number(batch):
    found = empty_queries(batch)
    for i, (a, b) in enumerate(batch.problems):
        first, second = len(str(a)), len(str(b))
        for pos in range(batch.tokens.shape[1]):
            row, column = int(batch.row[i, pos]), int(batch.column[i, pos])
            if batch.decisions[i, pos]:
                expected = int(batch.decision_column[i, pos]) >= min(first, second)
            else:
                expected = row == 1 and column >= first
            assert bool(found[i, pos]) == expected


def test_in_one_layer_the_patch_is_the_removal(make_adder):
    """Nothing lies between the keys and the decision, so a patched decision has the margin without far keys."""
    model = make_adder("rotary2d", True, 1)
    problems = model.task.evaluation_problems(40, 4)
    base, far = score(model, problems), score(model, problems, [FAR])
    assert np.abs(far.margin - base.margin).max() > 0.01
    for which in ("empty", "found"):
        patched = score(model, problems, [FromWithoutFar(which)])
        here = (base.state > 0) == (which == "empty")
        np.testing.assert_allclose(patched.margin[here], far.margin[here], atol=1e-4)
        np.testing.assert_allclose(patched.margin[~here], base.margin[~here], atol=1e-4)


def test_a_patch_of_one_head_leaves_the_others(make_adder):
    model = make_adder("rotary2d", True, 1)
    problems = model.task.evaluation_problems(40, 3)
    heads = [score(model, problems, [FromWithoutFar("found", ((0, head),))]).margin for head in (0, 1)]
    both = score(model, problems, [FromWithoutFar("found", ((0, 0), (0, 1)))]).margin
    np.testing.assert_allclose(both, score(model, problems, [FromWithoutFar("found")]).margin, atol=1e-5)
    assert np.abs(heads[0] - heads[1]).max() > 1e-3


def test_at_training_length_there_is_nothing_to_put_back():
    model = load_checkpoint(FIXTURES / "1digit-rotary2d-seed0")
    problems = model.task.evaluation_problems(9, 6)
    patched = score(model, problems, [FromWithoutFar("empty"), FromWithoutFar("found")])
    np.testing.assert_allclose(patched.margin, score(model, problems).margin, atol=1e-4)


@pytest.mark.slow
def test_a_diluting_seed_displaces_its_sink_and_fails_elsewhere():
    """What the outputs and the probe say of nothing to find is true, and is not what makes decisions wrong."""
    found = displacement(load_checkpoint(FIXTURES / "1digit-rotary2d-seed0"), 100, 8)
    routes = {route.name: route for route in found.routes}
    assert found.displaced
    assert not found.supported
    assert {name: route.supports for name, route in routes.items()} == {"patching": False, "OV": True, "probe": True}
    patched = routes["patching"].measures
    assert patched["all heads, something to find"] > 0.9
    assert abs(patched["all heads, nothing to find"]) < 0.1
    outputs = routes["OV"].measures
    assert outputs["read as a digit, without far keys"] < 0.3 < outputs["read as a digit, now"]
    assert len(found.to_frame()) == sum(len(route.measures) for route in found.routes)


def test_what_cannot_be_asked_is_refused(make_adder, capsys):
    with pytest.raises(DisplacementError, match="this model has none"):
        displacement(make_adder("rotary2d", False), 20, 2)
    passing = str(FIXTURES / "1digit-rotary2d-pressure-seed0")
    with pytest.raises(SystemExit) as stop:
        cli.main(["displacement", passing, "--digits", "12", "--problems", "2", "--json"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert "take more digits" in err or "rest there" in err


@pytest.mark.slow
def test_the_command(capsys):
    failing = str(FIXTURES / "1digit-rotary2d-seed2")
    printed = []
    for flags in (["--json"], []):
        with pytest.raises(SystemExit) as stop:
            cli.main(["displacement", failing, "--digits", "60", "--problems", "6", *flags])
        out, err = capsys.readouterr()
        assert (stop.value.code, err) == (0, "")
        printed.append(out)
    found = json.loads(printed[0])
    assert [route["name"] for route in found["routes"]] == ["patching", "OV", "probe"]
    assert f"{found['wrong']} of {found['decisions']} decisions wrong" in printed[1]
