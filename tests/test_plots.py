"""Figures: what they draw is what was measured, and what is written needs nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import interp.cli as cli
from interp import plots
from interp.decisions import reach, score
from interp.ledger import build_ledger
from interp.plots import KINDS, QUANTITIES, Request, draw
from interp.profile import score_profile
from interp.shares import leak_growth, shares
from models.checkpoint import load_checkpoint
from models.config import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures"
DILUTING, COUNTING = FIXTURES / "1digit-rotary2d-seed0", FIXTURES / "1digit-counters-seed0"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(DILUTING)


@pytest.fixture(scope="module")
def counting():
    return load_checkpoint(COUNTING)


def request_for(kind, model, counting, **changes):
    chosen = counting if kind in ("counters", "kernels") else model
    return Request({"one": chosen}, (5, 30) if kind == "reach" else (30,), problems=3, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_axes_with_titles_and_data(kind, model, counting):
    figure = draw(kind, request_for(kind, model, counting))
    assert figure.data
    axes = figure.to_plotly_json()["layout"]
    shown = {trace.xaxis or "x" for trace in figure.data} | {trace.yaxis or "y" for trace in figure.data}
    titled = 0
    for short in shown:
        axis = axes[short[0] + "axis" + short[1:]]
        titled += bool(axis.get("title", {}).get("text"))
    assert titled >= 2


def test_reach_draws_each_checkpoint_with_its_intervals(model, counting):
    figure = draw("reach", Request({"a": model, HOSTILE: counting}, (5, 20), problems=4))
    first, second = figure.data
    assert (first.name, second.name) == ("a", "&lt;img src=x onerror=alert(1)&gt;")
    rows = reach(counting, [5, 20], 4).to_json()
    assert list(second.y) == [row["exact"] for row in rows]
    assert list(np.array(second.y) + second.error_y.array) == pytest.approx([row["high"] for row in rows])
    assert list(np.array(second.y) - second.error_y.arrayminus) == pytest.approx([row["low"] for row in rows])


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_heads_are_coloured_by_what_the_cell_says(model, quantity):
    asked = Request({"one": model}, (30,), problems=3, lookup="carry", quantity=quantity)
    figure = draw("heads", asked)
    for trace, digits in zip(figure.data, (10, 30), strict=True):
        found = build_ledger(model, model.task.evaluation_problems(digits, 3)).lookups["carry", True]
        values = QUANTITIES[quantity].of(found)
        np.testing.assert_allclose(trace.z, np.log10(values) if QUANTITIES[quantity].log else values, rtol=1e-6)
        assert trace.text[0][0] == plots._short(values[0, 0])


@pytest.mark.parametrize("digits", [9, 120])
def test_an_attention_map_is_the_pattern(model, digits):
    """Every cell against ``run_with_cache``, tokens one by one and in bins."""
    (problem,) = model.task.evaluation_problems(digits, 1)
    heat, marks = plots.attention_figure(model, problem, (1, 2)).data
    batch = model.task.encode([problem])
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, batch.mask)
    pattern = cache["pattern", 1][0, 2].numpy()
    tokens = len(pattern)
    width = -(-tokens // plots.MOST_CELLS)
    edges = np.arange(0, tokens, width)
    binned = np.add.reduceat(np.add.reduceat(pattern, edges, 1), edges, 0)
    binned /= np.diff([*edges, tokens])[:, None]
    past = np.tril(np.ones_like(binned)) > 0
    np.testing.assert_allclose(heat.z[past] ** 2, binned[past], atol=1e-5)
    assert np.isnan(heat.z[~past]).all()
    assert width == (1 if digits == 9 else 2)
    targets = {
        (query // width, key // width)
        for lookup in batch.lookups.values()
        for query in lookup.present[0].nonzero()[:, 0].tolist()
        for key in lookup.targets[0, query].tolist()
        if key >= 0
    }
    assert {(int(y // width), int(x // width)) for x, y in zip(marks.x, marks.y, strict=True)} == targets


def test_counts_and_kernels_are_the_model_s(counting):
    (problem,) = counting.task.evaluation_problems(7, 1)
    figure = plots.counts_figure(counting, problem, (1, 3))
    batch = counting.task.encode([problem])
    with torch.no_grad():
        _, cache = counting.run_with_cache(batch.tokens, batch.mask)
    for trace in figure.data:
        what, counter = trace.name.split()
        expected = cache[f"blocks.1.attn.hook_{what}"][0, :, 3, int(counter)].numpy()
        np.testing.assert_allclose(trace.y, expected, atol=1e-5)
    assert len(figure.data) == 6
    lines = {(trace.name, trace.xaxis): trace.y for trace in plots.kernels_figure(counting).data}
    kernel = counting.blocks[2].attn.counters.kernel.detach().numpy()
    np.testing.assert_array_equal(lines["head 1, counter 0", "x3"], kernel[1, 0])
    assert len(lines) == 3 * 4 * 2


def test_gaps_are_shares_of_queries_beside_ln_n(model):
    asked = Request({"one": model}, (30,), problems=3, head=(2, 1), lookup="second_same_column")
    bars_then, line_then, bars_now, line_now = draw("gaps", asked).data
    for bars, line, digits in ((bars_then, line_then, 10), (bars_now, line_now, 30)):
        found = asked.ledger(digits).lookups["second_same_column", True]
        assert sum(bars.y) == pytest.approx(1)
        mean = float(np.average(bars.x, weights=bars.y))
        assert mean == pytest.approx(found.gap[2, 1].mean(), abs=bars.width[0])
        assert line.x[0] == pytest.approx(np.log(np.median(found.keys)))


def test_the_head_that_lost_most_is_chosen(model):
    asked = Request({"one": model}, (60,), problems=3)
    view = asked.view()
    lost = {
        (key, head): found.share[head].mean() - asked.ledger(10).lookups[key].share[head].mean()
        for key, found in asked.ledger(60).lookups.items()
        if key in asked.ledger(10).lookups and np.ptp(found.column)
        for head in np.ndindex(*found.share.shape[:2])
    }
    assert (view.key, view.head) == min(lost, key=lost.get)


def test_results_draw_themselves(model):
    problems = model.task.evaluation_problems(12, 3)
    assert score(model, problems).plot().data
    assert reach(model, [5, 12], 3).plot("a", 10).layout.shapes
    assert not reach(model, [5, 12], 3).plot().layout.shapes
    assert sum(bar.y[0] for bar in shares(model, problems).plot((1, 1), "carry").data) == pytest.approx(1, abs=1e-5)
    assert leak_growth(model, [5, 12], 3).plot((1, 1), "carry").data
    assert score_profile(model, problems, (1, 1)).plot().data


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("pie", {}, "no figure is called 'pie'; there are reach"),
        ("shares", {"head": (3, 0)}, r"there is no head 3.0; layers run from 0 to 2, heads from 0 to 7"),
        ("leak", {"lookup": "carrot"}, "no lookup is called 'carrot'"),
        ("heads", {"quantity": "x"}, "no quantity is called 'x'"),
        ("attention", {"head": (0, 8)}, "there is no head 0.8"),
    ],
)
def test_what_is_not_there_is_named(model, counting, kind, changes, says):
    with pytest.raises(InputError, match=says):
        draw(kind, request_for(kind, model, counting, **changes))


@pytest.mark.parametrize("kind", ["counters", "kernels"])
def test_a_model_that_does_not_count_has_no_counters_to_draw(model, kind):
    with pytest.raises(InputError, match="count"):
        draw(kind, Request({"one": model}, (30,)))


def test_a_page_needs_nothing_else_and_takes_names_as_text(model, tmp_path):
    path = tmp_path / "reach.html"
    plots.save(reach(model, [5], 2).plot(HOSTILE), path, HOSTILE)
    text = path.read_text()
    assert "&lt;img src=x" in text
    assert HOSTILE not in text
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', text)
    assert len(text) < 6_000_000
    again = tmp_path / "again.html"
    plots.save(reach(model, [5], 2).plot(HOSTILE), again, HOSTILE)
    assert text == again.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_an_image_is_drawn(suffix, tmp_path):
    out = tmp_path / f"kernels.{suffix}"
    with pytest.raises(SystemExit) as stop:
        cli.main(["plot", "kernels", str(COUNTING), "--out", str(out)])
    assert stop.value.code == 0
    assert out.read_bytes()[:4] == (b"\x89PNG" if suffix == "png" else b"<svg")


def test_an_image_that_cannot_be_drawn_says_what_it_needs(model, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no browser\nhere")

    monkeypatch.setattr(plots.go.Figure, "to_image", broken)
    with pytest.raises(InputError, match=r"RuntimeError: no browser here.*leaksum\[images\]") as raised:
        plots.save(reach(model, [5], 2).plot(), tmp_path / "a.png")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["reach", str(DILUTING), "--out", "a.pdf"], "ends in none of .html, .svg, .png"),
        (["reach", str(DILUTING), "--out", "a.html", "--digits", "x"], "whole numbers"),
        (["shares", str(DILUTING), str(COUNTING), "--out", "a.html"], "takes one checkpoint, got 2"),
        (["reach", str(DILUTING), str(DILUTING), "--out", "a.html"], "is given twice"),
        (["shares", str(DILUTING), "--out", "a.html", "--absent"], "give --lookup too"),
        (["shares", str(DILUTING), "--out", "a.html", "--head", "1"], "head"),
        (["shares", str(DILUTING), "--out", "a.html", "--digits", "20", "--lookup", "x"], "no lookup is called 'x'"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["plot", *arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_one_name_are_told_apart(tmp_path):
    other = tmp_path / DILUTING.name
    other.symlink_to(COUNTING)
    names = cli._distinct([DILUTING, other, COUNTING])
    assert list(names.values()) == [str(DILUTING), str(other), COUNTING.name]


def test_what_is_no_file_is_not_replaced(model, tmp_path):
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(InputError, match="no file"):
        plots.save(reach(model, [5], 2).plot(), tmp_path / "pipe.html")
    assert (tmp_path / "pipe.html").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["circuit", str(DILUTING), "--digits", "3", "--figure", "model.safetensors"], "ends in none of .html"),
        (["circuit", str(DILUTING), str(DILUTING), "--digits", "3"], "is given twice"),
        (["patch", str(DILUTING), "--pairs", "chunk", "--digits", "100000", "--problems", "1"], "take fewer pairs"),
    ],
)
def test_causal_commands_refuse_in_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert says in err
