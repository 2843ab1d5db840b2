"""The HTML report: one file that asks for nothing else, and that a browser draws without a complaint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import BROWSER, Page, assert_drawn, dump_dom

import interp.cli as cli
import interp.diagnosis as diagnosis
from interp import papers, plots, report
from models.checkpoint import load_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
HOSTILE = "<img src=x onerror=alert(1)>"
# presses Enter on the first part of the profile's legend, chooses another head and another problem, and says what came
PRESS = """<script>addEventListener("load", () => setTimeout(() => {
  const box = [...document.querySelectorAll(".plot")].find(plot => plot.data.some(trace => trace.name === "content"));
  const item = [...box.querySelectorAll(".legend .traces")].find(i => i.getAttribute("aria-label") === "content");
  const shown = () => String(box.data.find(trace => trace.name === "content").visible ?? true);
  const before = shown();
  item.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  const panel = document.querySelector(".chosen .plot"), cells = [...document.querySelectorAll("button[data-head]")];
  const state = () => JSON.stringify(panel.data.map(trace => trace.y));
  const other = cells.find(cell => cell.ariaPressed === "false"), earlier = state();
  other.click();
  const problems = [...document.querySelectorAll("button[data-problem]")];
  problems.at(-1)?.click();
  setTimeout(() => {
    document.body.dataset.pressed = before + " to " + shown();
    const title = document.getElementById("chosen-head").textContent, moved = state() !== earlier;
    const pressed = cells.filter(cell => cell.ariaPressed === "true").map(cell => cell.dataset.head);
    document.body.dataset.head = [title.startsWith("Head " + other.dataset.head + ","), moved, pressed.length].join();
    const open = [...document.querySelectorAll("article:not([hidden])")].map(sheet => sheet.id);
    const asked = problems.at(-1)?.dataset.problem;
    document.body.dataset.open = asked === undefined ? "none" : open.join() === "problem-" + asked;
  }, 500);
}, 500));</script>"""


@cache
def diagnosed(cause):
    """A model and its diagnosis: one that fails by dilution, or one that does not fail."""
    name, digits = {
        "dilution": ("1digit-rotary2d-seed0", 100),
        "none": ("1digit-rotary2d-pressure-seed0", 20),
    }[cause]
    model = load_checkpoint(FIXTURES / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "HEAD_PROBLEMS", 1)
        return model, diagnosis.diagnose(model, digits, 16)


@pytest.fixture(scope="module", params=["dilution", "none"])
def case(request):
    return request.param, *diagnosed(request.param)


@pytest.fixture(scope="module")
def written(case, tmp_path_factory):
    _, model, found = case
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_report(path, model, found, HOSTILE)
    return path


def test_one_file_that_asks_for_nothing_else(case, written):
    html = written.read_text(encoding="utf-8")
    page = Page(html)
    assert written.stat().st_size < 6e6
    assert [p.name for p in written.parent.iterdir()] == [written.name]
    assert all(re.fullmatch(r"#section-\d+|data:,", address) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    style = page.text["style"]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in html
    assert page.handlers == []


def test_says_the_verdict_first_and_keeps_names_as_text(case, written):
    cause, _, found = case
    html = written.read_text(encoding="utf-8")
    page = Page(html)
    assert found.verdict.cause == cause
    assert cause in page.text["h1"]
    assert page.text["h1"] == f"Verdict: {cause}" + (", proved" if cause == "dilution" else "")
    assert HOSTILE not in html
    assert HOSTILE in page.text["p"]
    assert "img" not in page.tags
    assert all(line in page.text["li"] for line in found.verdict.evidence)
    order = ["<h1>", ">Evidence<", *(f"<h2>{name}" for name in ("Reach", "Where decisions", "Where attention"))]
    order += [f"<h2>{name}" for name in ("How the leak", "Score against", "Interventions", "Heads")]
    places = [html.index(mark) for mark in order]
    assert places == sorted(places)
    if cause == "dilution":
        assert "all far keys removed" in page.text["p"]
        assert all(f"{layer}.{head}" in page.text["p"] for layer, head in found.verdict.heads[: report.NAMED_HEADS])


def test_every_axis_has_a_title_and_every_number_is_json(written):
    found = re.search(r'id="figures">(.*?)</script>', written.read_text(encoding="utf-8"), re.DOTALL)
    figures = json.loads(found.group(1))
    assert len(figures) >= 5
    for figure in figures.values():
        axes = {name: axis for name, axis in figure["layout"].items() if re.fullmatch(r"[xy]axis\d*", name)}
        shared = {name for name, axis in axes.items() if axis.get("matches") and axis.get("showticklabels") is False}
        assert len(axes) >= 2
        assert all(axes[name]["title"]["text"] for name in axes.keys() - shared)


def test_the_same_bytes_again(case, written, tmp_path):
    _, model, found = case
    report.write_report(tmp_path / "again.html", model, found, HOSTILE)
    assert (tmp_path / "again.html").read_bytes() == written.read_bytes()


def test_shares_stack_to_one_and_mistakes_add_up(case):
    _, _, found = case
    figure = plots.mistakes_figure(found.score)
    wrong, decisions = (figure.data[0].customdata[..., i].astype(int).sum() for i in (1, 2))
    assert (wrong, decisions) == (found.score.n_wrong, found.score.decisions)
    head = report.heads_shown(found)[0]
    view = plots.view_of(head, found.trained, found.longer)
    frames = [report.Shares(ledger).to_frame() for ledger in (found.trained, found.longer)]
    bars = plots.shares_figure(head, view.key, frames, (10, found.digits)).data
    for side in ("x", "x2"):
        np.testing.assert_allclose(sum(bar.y for bar in bars if (bar.xaxis or "x") == side), 1, atol=1e-9)


@pytest.mark.parametrize("columns", [1, 160, 161, 1001])
def test_column_bins_are_few_and_cover_every_column(columns):
    width, edges = plots.column_bins(np.arange(columns))
    assert len(edges) <= plots.MOST_BINS
    assert edges[-1] < columns <= edges[-1] + width
    assert width == 1 or columns > plots.MOST_BINS


def test_leak_by_keys_is_the_median_in_each_bin():
    rng = np.random.default_rng(0)
    keys, leak = rng.integers(5, 400, 3000), rng.exponential(size=3000)
    leak[keys > 390] = np.inf
    n, low, middle, high = plots.leak_by_keys(keys, leak)
    assert len(n) <= plots.LEAK_BINS
    assert (np.diff(n) > 0).all()
    assert ((low <= middle) & (middle <= high)).all()
    assert not np.isnan(middle).any()
    (one,) = zip(*plots.leak_by_keys(np.array([7, 7, 7]), np.array([1.0, 2.0, 9.0])), strict=True)
    assert one == (7, 1, 2, 2)


@pytest.mark.parametrize(
    ("cause", "edit"),
    [
        ("aliasing", "drop-best-far=4"),
        ("drift", "restore-far"),
        ("drift", "restore-targets"),
        ("drift", "restore-distances"),
        ("starvation", "sink-boost=-1"),
        ("unexplained", None),
    ],
)
@pytest.mark.parametrize("proved", [True, False])
def test_words_for_every_cause(cause, edit, proved):
    _, found = diagnosed("dilution")
    proved = proved and edit is not None
    control, below = ("same-keys-removed", 10) if edit == "restore-distances" else ("random-control", None)
    repair = edit and diagnosis.Proof(edit, control, below, 40, 0, 40 if proved else 1)
    verdict = replace(found.verdict, cause=cause, proof=repair, proved=proved)
    meaning, proof, *_ = words = report.verdict_words(replace(found, verdict=verdict))
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in words)
    assert meaning.startswith(report.CAUSES[cause])
    assert meaning.endswith(report.DRIFTS.get(edit, ""))
    assert proof.startswith("Proved: " if proved else "Not proved: " if edit else "The best of ")
    assert edit is None or edit in proof
    assert ("in the columns that training had (0 to 9)" in proof) == (edit == "restore-distances")


def test_few_wrong_decisions_prove_nothing():
    _, found = diagnosed("dilution")
    repair = diagnosis.Proof("far", "random-control", None, 9, 0, 9)
    assert not diagnosis.proves(repair)
    assert diagnosis.proves(replace(repair, wrong=10))
    words = report.verdict_words(replace(found, verdict=replace(found.verdict, proof=repair, proved=False)))
    assert "where 9 were, and that is too few to say (10 are asked for)" in words[1]


def test_the_command_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "HEAD_PROBLEMS", 1)
    checkpoint, out = FIXTURES / "1digit-rotary2d-pressure-seed0", tmp_path / "new" / "out.html"
    with pytest.raises(SystemExit) as stop:
        cli.main(["diagnose", str(checkpoint), "--digits", "12", "--problems", "2", "--report", str(out), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["cause"] == "none"
    assert "Verdict: none" in Page(out.read_text(encoding="utf-8")).text["h1"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["diagnose", str(checkpoint), "--report", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium binary: chromium, chromium-browser or google-chrome")
def test_a_browser_draws_it_without_a_complaint(written, tmp_path):
    page = tmp_path / "page.html"
    html = written.read_text(encoding="utf-8")
    page.write_text(html.replace("</body>", PRESS + "</body>"), encoding="utf-8")
    run = dump_dom(page, tmp_path)
    assert_drawn(html, run)
    assert 'data-pressed="legendonly to true"' in run.stdout
    assert 'data-head="true,true,1"' in run.stdout
    assert f'data-open="{"true" if "<article" in html else "none"}"' in run.stdout


def test_problems_stand_as_on_paper(case):
    """The wrong digits marked are those of a pass of its own, and every column stands below its own."""
    cause, model, found = case
    problems = model.task.evaluation_problems(found.digits, found.score.problems)
    wrong = np.bincount(found.score.problem, weights=found.score.wrong, minlength=len(problems)).astype(int)
    shown = np.flatnonzero(wrong)
    assert bool(len(shown)) == (cause == "dilution")
    head = report.heads_shown(found)[0]
    for index, paper in zip(shown, papers.write_papers(model, [problems[i] for i in shown], [head]), strict=True):
        first, second = problems[index]
        texts = ["".join(reversed(row)) for row in paper.rows]
        assert texts == [str(first), str(second), str(first + second)]
        missed = found.score.column[(found.score.problem == index) & found.score.wrong]
        assert sorted(paper.mistakes) == sorted(missed.tolist())
        batch = model.task.encode([problems[index]])
        with torch.no_grad():
            logits, cache = model.run_with_cache(batch.tokens, batch.mask)
        for column, mistake in paper.mistakes.items():
            query = int((batch.decisions[0] & (batch.decision_column[0] == column)).nonzero()[0, 0])
            assert mistake.written == model.task.vocabulary.text(int(logits[0, query].argmax()))
            assert mistake.right == model.task.vocabulary.text(int(batch.targets[0, query]))
            pattern = cache["pattern", head[0]][0, head[1], query]
            assert mistake.looks[head][0].share == pytest.approx(float(pattern.max()), abs=1e-5)
        lines = report._paper(paper, [head]).split("<pre>")[1].split("</pre>")[0].splitlines()
        plain = [re.sub("<.*?>", "", line) for line in lines]
        assert {len(line.rstrip()) for line in plain[:4]} == {2 + len(texts[2])}
        assert {len(plain[4]) - 1 - i for i, c in enumerate(plain[4]) if c == "^"} == set(paper.mistakes)
