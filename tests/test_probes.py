"""Probes find a planted bit and not the control, and read what the task says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from wired import wired

import interp.cli as cli
from interp.probes import TASKS, Linear, ProbeError, balanced_accuracy, fit_probe, labels, probe, sample
from models.addition import AdditionTask
from models.config import TaskConfig

FIXTURE = Path(__file__).parents[1] / "fixtures" / "1digit-rotary2d-pressure-seed0"
BIT = 27  # a direction of the residual stream that nothing else uses


def planted(until: int | None = None):
    """The wired model with a bit before layer 1, at b's chunks: has the first number ended? Up to a column, if any."""
    model = wired()
    where = {}

    def remember(tokens, hook):
        batch = where["batch"]
        ended, at, _ = labels(batch, "first_ended", "second")
        shown = at & (ended == 1) if until is None else at & (ended == 1) & (batch.column < until)
        out = tokens.clone()
        out[..., BIT] = torch.where(shown, 1.0, 0.0)
        return out

    model.blocks[1].hook_resid_pre.add_perma_hook(remember)
    encode = model.task.encode

    def remembered(problems):
        where["batch"] = encode(problems)
        return where["batch"]

    model.task.encode = remembered
    return model


def by(found, label, site, layer):
    return next(p for p in found.probes if (p.label, p.site, p.layer) == (label, site, layer))


@pytest.fixture(scope="module")
def found():
    return probe(planted(), 30, 6)


def test_the_planted_bit_is_found_where_it_is(found):
    for layer, accuracy in ((0, 0.5), (1, 1.0), (2, 1.0)):
        bit = by(found, "first_ended", "second", layer)
        assert bit.short == pytest.approx(accuracy, abs=0.12)
        assert bit.long == pytest.approx(accuracy, abs=0.12)
        assert bit.refit == pytest.approx(accuracy, abs=0.12)
    assert by(found, "first_ended", "second", 1).short > 0.99


def test_the_control_is_not_found(found):
    bit = by(found, "first_ended", "second", 1)
    assert bit.control < 0.8
    assert bit.selectivity > 0.2
    assert by(found, "first_ended", "second", 0).selectivity < 0.1
    assert by(found, "parity", "second", 1).short < 0.65


def test_a_bit_that_ends_with_training_is_not_read_long():
    bit = by(probe(planted(until=10), 60, 6), "first_ended", "second", 1)
    assert bit.short > 0.99
    assert bit.long < 0.75


@pytest.mark.parametrize("chunk", [1, 3])
def test_labels_are_the_schoolbooks(chunk):
    batch = AdditionTask(TaskConfig(chunk=chunk)).encode([(987, 45), (6, 12345), (999999, 1), (5005, 5005)])
    base = 10**chunk
    carry, at, _ = labels(batch, "carry", "decision")
    parity, _, _ = labels(batch, "parity", "decision")
    ended, asked, _ = labels(batch, "first_ended", "second")
    for i, (a, b) in enumerate(batch.problems):
        columns = batch.decision_column[i, at[i]].tolist()
        assert carry[i, at[i]].tolist() == [int(a % base**c + b % base**c >= base**c) for c in columns]
        assert parity[i, at[i]].tolist() == [c % 2 for c in columns]
        assert ended[i, asked[i]].tolist() == [
            int(c >= batch.lengths[i, 0]) for c in batch.column[i, asked[i]].tolist()
        ]
    assert labels(batch, "row", "all")[2] == 3


def test_logistic_regression_is_at_its_optimum():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(300, 5)))
    label = torch.from_numpy((x[:, 0].numpy() + rng.normal(size=300) > 0.3).astype(int))
    fitted = fit_probe(x, label, 2)

    def loss(weight, bias):
        logits = Linear(fitted.mean, fitted.scale, weight, bias).logits(x)
        each = (len(label) / 2 / torch.bincount(label).double())[label]
        losses = torch.nn.functional.cross_entropy(logits, label, reduction="none")
        return float((each * losses).mean() + 1e-3 * weight.square().sum())

    best = loss(fitted.weight, fitted.bias)
    for _ in range(50):
        step = torch.from_numpy(rng.normal(size=(6, 2))) * 0.05
        assert loss(fitted.weight + step[:5], fitted.bias + step[5]) > best - 1e-6
    assert balanced_accuracy(fitted.read(x), label) > 0.7


def test_balanced_accuracy_is_a_mean_over_classes():
    assert balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])) == 0.5
    assert np.isnan(balanced_accuracy(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)))


def test_streams_are_those_of_the_cache(adder):
    problems = [(12, 345), (6, 7)]
    kept = sample(adder, problems)
    for streams, problem in zip((kept.streams[:, :7], kept.streams[:, 7:]), ((6, 7), (12, 345)), strict=True):
        batch = adder.task.encode([problem])  # shorter problems first
        with torch.no_grad():
            _, cache = adder.run_with_cache(batch.tokens)
        expected = [cache["resid_pre", 0], cache["resid_pre", 1], cache["resid_post", 1]]
        torch.testing.assert_close(streams, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_a_class_that_does_not_occur_is_refused():
    with pytest.raises(ProbeError, match="all 2 classes"):
        fit_probe(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long), 2)


def test_probes_are_a_table_and_a_figure(found):
    frame = found.to_frame()
    assert len(frame) == len(TASKS) * 3
    assert len(found.plot().data) == len(TASKS) * 4
    assert set(found.to_json()) == {"digits", "decisions", "wrong", "probes"}


def test_the_command(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["probe", str(FIXTURE), *map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    code, out, err = run("--digits", 12, "--problems", 4, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["probes"]) == len(TASKS) * 4
    for arguments, words in ((("--digits", "1"), "a probe needs"), (("--problems", "0"), "problems must be")):
        code, out, err = run(*arguments, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
