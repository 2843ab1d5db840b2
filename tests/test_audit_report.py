"""The report of an audit: one file that asks for nothing else, says what was measured, and that a browser draws."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from browser import BROWSER, Page, assert_drawn, dump_dom
from families import tiny

import interp.cli as cli
from interp import audit_report, plots
from interp.audit import Audit, HeadRow, LengthScore, SinkRow, Verdict, audit
from interp.audit_report import audit_html, write_audit_report
from interp.interventions import Scope, parse_intervention

HOSTILE = "<img src=x onerror=alert(1)></script>"
# chooses another head by its keyboard focus, and says whether the panel followed and what was asked of the network
PRESS = """<script>addEventListener("load", () => setTimeout(() => {
  const panels = [...document.querySelectorAll(".chosen .plot")];
  const cells = [...document.querySelectorAll("button[data-head]")];
  const state = () => JSON.stringify(panels.map(panel => panel.data.map(trace => trace.y)));
  const other = cells.find(cell => cell.ariaPressed === "false"), earlier = state();
  other.focus();
  document.activeElement.click();
  setTimeout(() => {
    const title = document.getElementById("chosen-head").textContent, pressed = cells.filter(
      cell => cell.ariaPressed === "true").map(cell => cell.dataset.head);
    document.body.dataset.head = [title.startsWith("Head " + other.dataset.head), state() !== earlier, pressed].join();
    document.body.dataset.asked = performance.getEntriesByType("resource").length;
  }, 500);
}, 500));</script>"""


@pytest.fixture(scope="module", params=["gpt_oss", "adder"])
def found(request, make_adder):
    """Of a model with learned sinks, window and grouped keys, or of an adder; both untrained, so that they fail."""
    edits = [parse_intervention("far", Scope(only=frozenset({(1, 1)})))]
    if request.param == "adder":
        return audit(make_adder(), [3, 6, 12], cases=2, interventions=edits, name=HOSTILE)
    return replace(audit(tiny("gpt_oss"), [12, 24, 48], cases=2, interventions=edits), model=HOSTILE)


@pytest.fixture(scope="module")
def written(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "audit.html"
    write_audit_report(path, found, {"seed": 0, "cases": 2})
    return path


def test_one_file_that_asks_for_nothing_else(written):
    html = written.read_text(encoding="utf-8")
    page = Page(html)
    assert written.stat().st_size < 6e6
    assert [p.name for p in written.parent.iterdir()] == [written.name]
    assert all(re.fullmatch(r"#section-\d+|data:,", address) for address in page.addresses)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in page.text["style"]
    assert page.handlers == []


def test_text_stays_text(found, written):
    html = written.read_text(encoding="utf-8")
    page = Page(html)
    assert HOSTILE not in html
    assert "img" not in page.tags
    assert HOSTILE in page.text["p"]
    assert HOSTILE in page.text["title"]
    assert all(line in page.text["li"] for line in found.verdict.evidence)


def test_what_was_measured_stands_in_it(found, written):
    html = written.read_text(encoding="utf-8")
    page = Page(html)
    last = found.lengths[-1]
    assert page.text["h1"] == f"Fails from {found.verdict.fails_from} {found.unit}"
    assert f"{last.wrong} of {last.decisions} at {last.length} {found.unit}" in page.text["dd"]
    for trial in found.trials:
        name = trial.name + " in 1.1" * (trial.heads is not None)
        before = trial.wrong + trial.repaired - trial.broken
        cells = (trial.length, trial.decisions, before, trial.wrong, trial.repaired, trial.broken)
        row = f"{name.replace('_', ' ')}</th>" + "".join(f"<td>{cell}</td>" for cell in cells)
        assert row in html
    for row in found.sinks:
        assert f"{row.uniform_value:.4f}" in page.text["td"]
    assert f"{found.sinks[-1].uniform_value:.4f}" in page.text["dd"]
    heads = {(row.layer, row.head) for row in found.heads}
    assert html.count("data-head=") == len(heads)


def test_figures_have_the_records_numbers(found, written):
    embedded = dict(
        re.findall(r'id="(figures|heads)">(.*?)</script>', written.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    figures, heads = json.loads(embedded["figures"]), json.loads(embedded["heads"])
    for figure in figures.values():
        axes = [axis for name, axis in figure["layout"].items() if re.fullmatch(r"[xy]axis\d*", name)]
        assert all(axis["title"]["text"] for axis in axes)
    right, exact = figures["figure-1"]["data"]
    assert right["y"] == pytest.approx([row.right for row in found.lengths], rel=1e-5)
    assert exact["y"] == pytest.approx([row.exact for row in found.lengths], rel=1e-5)
    for name, shown in heads.items():
        layer, head = map(int, name.split("."))
        rows = [row for row in found.heads if (row.layer, row.head) == (layer, head)]
        shares = {trace["name"]: trace["y"] for trace in shown["figures"][0]["data"]}
        by_lookup: dict = {}
        for row in rows:
            by_lookup.setdefault((row.lookup, row.present), []).append(row)
        match = [
            each
            for each in by_lookup.values()
            if [row.target_share for row in each] == pytest.approx(shares["target"], rel=1e-5)
        ]
        assert match
        lost = {key: each[0].target_share - each[-1].target_share for key, each in by_lookup.items() if len(each) == 3}
        assert lost[match[0][0].lookup, match[0][0].present] == max(lost.values())
        assert shares["far"] == pytest.approx([row.far_share for row in match[0]], rel=1e-5)
        leak = shown["figures"][1]["data"][0]
        finite = [row.leak for row in match[0]]
        assert [y for y in leak["y"] if y is not None] == pytest.approx(
            [x for x in finite if 0 < x < float("inf")], rel=1e-5
        )


def test_the_same_bytes_again(found, written, tmp_path):
    write_audit_report(tmp_path / "again.html", found, {"seed": 0, "cases": 2})
    assert (tmp_path / "again.html").read_bytes() == written.read_bytes()


def test_large_models_fit_and_nothing_is_dropped_unsaid():
    """32 layers of 32 heads at six lengths: the layers that lost most, and a word on the others."""
    lengths = (128, 256, 512, 1024, 2048, 4096)
    rows = [
        HeadRow(layer, head, head // 4, n, 0.9 - (0.8 * i / 5 if layer == 17 else 0), 0.1, 2, 3, 0.1, None, 0.2, 0.1)
        for i, n in enumerate(lengths)
        for layer in range(32)
        for head in range(32)
    ]
    scores = tuple(LengthScore(n, 100, 0, 1.0, 0.9, 1.0) for n in lengths)
    sinks = tuple(SinkRow(n, 0.5, 0.01) for n in lengths)
    found = Audit("large", "passkey", scores, tuple(rows), sinks, (), Verdict(None, (), None, ("fine",)))
    html = audit_html(found)
    page = Page(html)
    assert len(html) < 6e6
    assert html.count("data-head=") == audit_report.MOST_CELLS
    assert 'data-head="17.0"' in html
    assert "24 more layers, in which targets lost less, are in the JSON" in page.text["p"]
    assert f"The first {audit_report.MOST_ROWS} of 1024 rows" in page.text["p"]
    assert page.text["h1"] == "No failure at any of these lengths"
    assert "Nothing fails at these lengths, so no edit was tried" in page.text["p"]


def test_bars_add_up(found):
    figure = plots.trials_figure(found)
    longest = [trial for trial in found.trials if trial.length == found.lengths[-1].length]
    still, broken = figure.data
    assert [a + b for a, b in zip(still.x, broken.x, strict=True)] == [trial.wrong for trial in longest]
    assert figure.layout.shapes[0].x0 == found.lengths[-1].wrong


def test_the_command_writes_it(tmp_path, capsys):
    tiny("llama").model.save_pretrained(tmp_path / "model")
    out = tmp_path / "new" / "out.html"
    arguments = ["audit", str(tmp_path / "model"), "--lengths", "12,24", "--cases", "2"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--report", str(out), "--json"])
    assert stop.value.code == 0
    fails = json.loads(capsys.readouterr().out)["verdict"]["fails_from"]
    page = Page(out.read_text(encoding="utf-8"))
    assert page.text["h1"] == f"Fails from {fails} tokens"
    assert "--lengths 12,24 --task induction --cases 2 --seed 0" in page.text["dd"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--report", str(tmp_path)])
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
    (said,) = re.findall(r'data-head="(true,true,[^"]*)"', run.stdout)
    assert re.fullmatch(r"true,true,\d+\.\d+", said)
    assert 'data-asked="0"' in run.stdout
