"""The claims table: what is measured is what other commands measure, and what is missing is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import interp.cli as cli
import interp.reproduce as claims
from interp.decisions import score
from interp.interventions import parse_intervention
from interp.reproduce import CLAIMS, DILUTING, reproduce
from models.checkpoint import load_checkpoint
from models.config import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_a_verdict_is_about_statements():
    verdicts = [claims._verdict(x) for x in ([True, True], [True, False], [False, False], [])]
    assert verdicts == ["held", "partly", "not_held", "not_held"]


def test_a_claim_without_its_checkpoints_is_not_run(tmp_path):
    shutil.copytree(FIXTURES / DILUTING[0], tmp_path / DILUTING[0])
    (found,) = reproduce(["C5"], tmp_path)
    assert (found.id, found.verdict) == ("C5", "not_run")
    assert found.ours == f"not shipped: {DILUTING[1]}, {DILUTING[2]}"


def test_unknown_claims_and_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="no claim is called 'C99'; there are C1, C2"):
        reproduce(["C99"], FIXTURES)
    with pytest.raises(InputError, match="no such directory"):
        reproduce(["C5"], tmp_path / "none")


def test_figures_are_what_the_edits_measure():
    (found,) = reproduce(["C5"], FIXTURES, 4)
    for name, part in zip(DILUTING, found.ours.split("; "), strict=True):
        model = load_checkpoint(FIXTURES / name)
        problems = model.task.evaluation_problems(100, 4)
        edits = ([], [parse_intervention("far")], [parse_intervention("random-control")])
        before, after, control = (score(model, problems, edit).n_wrong for edit in edits)
        assert part == f"seed {name[-1]}: {before} -> {after} (as many random keys: {control})"
    assert found.study == "591 -> 0"
    assert found.command == "leaksum reproduce C5"


def test_a_claim_can_fail(monkeypatch):
    """Keys that are not far are removed in the place of far ones: the errors stay, and the claim is not held."""
    monkeypatch.setattr(claims.Subject, "score", _other_edit(claims.Subject.score))
    (found,) = reproduce(["C5"], FIXTURES, 4)
    assert found.verdict == "not_held"


def _other_edit(real):
    return lambda self, digits, problems, edit="": real(self, digits, problems, edit and "random-control")


def test_the_command_prints_the_interfaces_keys(capsys):
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", "C6", "--fixtures", str(FIXTURES), "--json"])
    torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    (row,) = json.loads(out)["claims"]
    assert list(row) == ["id", "claim", "study", "ours", "command", "verdict"]
    assert row["verdict"] in ("held", "partly", "not_held")


@pytest.mark.parametrize("arguments", [["C99"], ["--fixtures", "nowhere"], ["--problems", "0"]])
def test_bad_input_is_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", *arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)


def test_every_claim_names_the_checkpoints_it_needs():
    assert list(CLAIMS) == [f"C{i}" for i in range(1, 18)]
    assert all(claim.needs and claim.id == name for name, claim in CLAIMS.items())
