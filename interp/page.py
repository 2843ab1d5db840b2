"""One HTML file that needs no network: sections, figures and tables, by mouse and by keyboard, in light and in dark.

:class:`Page` puts figures of :mod:`interp.plots` in one page with one copy of plotly.js, in the light or the dark
template, as the reader's system asks for. :mod:`interp.report` and :mod:`interp.audit_report` fill it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from interp.plots import DARK, LIGHT

EVIDENCE_LINES = 6  # shown before the rest is folded away
LARGE = 1e5  # from which a table writes powers of ten


@dataclass(frozen=True)
class Cell:
    """One head of a grid: ``words``, a line each; ``lost`` in [0, 1], how strong its colour is; what a click shows."""

    name: str
    title: str
    words: Sequence[str]
    lost: float
    figures: Sequence[Any]


class Page:
    """Sections and figures, numbered as they come."""

    def __init__(self) -> None:
        self.sections: list[tuple[str, str]] = []
        self.figures: dict[str, Any] = {}
        self.heads: dict[str, Any] = {}

    def figure(self, figure: Any, caption: str, title: str = "") -> str:
        """A figure's place in the page; ``caption`` is text."""
        name = f"figure-{len(self.figures) + 1}"
        self.figures[name] = plain_figure(figure)
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        height = figure.layout.height
        label = escape(f"Figure: {title or caption}")
        plot = f'<div class="plot" id="{name}" role="group" aria-label="{label}" style="min-height:{height}px"></div>'
        return f"<figure>{heading}{plot}{below}</figure>"

    def grid(self, rows: Sequence[tuple[str, Sequence[Cell]]], chosen: str, panels: Sequence[str]) -> str:
        """A button a head, by layer, and the panel that shows the one chosen; ``panels``: what its figures show."""
        lines = []
        for label, cells in rows:
            buttons = []
            for cell in cells:
                self.heads[cell.name] = {"title": cell.title, "figures": [plain_figure(f) for f in cell.figures]}
                words = "".join(f"<span>{escape(line)}</span>" for line in cell.words)
                buttons.append(
                    f'<td><button type="button" class="cell" data-head="{cell.name}" style="--lost:{cell.lost:.2f}" '
                    f'aria-pressed="{str(cell.name == chosen).lower()}"><b>{cell.name}</b> {words}</button></td>'
                )
            lines.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(buttons)}</tr>')
        head, boxes = self.heads[chosen], []
        for label, figure in zip(panels, head["figures"], strict=True):
            name = f"figure-{len(self.figures) + 1}"
            self.figures[name] = figure
            boxes.append(
                f'<div class="plot" id="{name}" role="group" aria-label="Figure: {label} of the chosen head" '
                f'style="min-height:{figure["layout"]["height"]}px"></div>'
            )
        return (
            '<div class="scroll" role="region" aria-label="Heads" tabindex="0"><table class="heads"><tbody>'
            f"{''.join(lines)}</tbody></table></div>"
            f'<h3 id="chosen-head" aria-live="polite">{escape(head["title"])}</h3>'
            f'<figure class="chosen">{"".join(boxes)}</figure>'
        )

    def section(self, title: str, *content: str) -> None:
        self.sections.append((title, "".join(content)))

    def html(self, title: str, top: str, bottom: str, glossary: Mapping[str, str]) -> str:
        """The whole page. ``title`` and ``glossary`` are text; ``top`` and ``bottom`` stand before and after all."""
        numbered = [(f"section-{i}", title, body) for i, (title, body) in enumerate(self.sections, start=1)]
        links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in numbered)
        body = "".join(f'<section id="{n}"><h2>{escape(title)}</h2>{text}</section>' for n, title, text in numbered)
        themes = {"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()}
        terms = "".join(
            f"<div><dt>{escape(term)}</dt><dd>{escape(means)}</dd></div>" for term, means in glossary.items()
        )
        words = f'<details><summary>Words used here</summary><dl class="list">{terms}</dl></details>'
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{_POLICY}'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>'
            f'<main>{top}<nav aria-label="Contents"><ul>{links}</ul></nav>{words}'
            "<noscript><p>The figures are drawn by a script in this file, which this browser does not run.</p>"
            f"</noscript>{body}{bottom}</main>\n"
            f"<script>{_script_text(get_plotlyjs())}</script>\n"
            f'<script type="application/json" id="themes">{_embedded(themes)}</script>\n'
            f'<script type="application/json" id="figures">{_embedded(self.figures)}</script>\n'
            f'<script type="application/json" id="heads">{_embedded(self.heads)}</script>\n'
            f"<script>{_SCRIPT}</script></body></html>\n"
        )


def plain_figure(figure: Any) -> Any:
    """What the page's script draws."""
    figure.update_layout(template=None)  # the page sets one of its own
    return figure.to_plotly_json()


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[Any]], marked: Iterable[int] = ()) -> str:
    """A table; the first cell of a row names it. Wider than the page, it scrolls by itself."""
    text = {i for i in range(len(head)) if any(isinstance(row[i], str) for row in rows)}

    def kind(i: int) -> str:
        return ' class="text"' if i in text else ""

    top = "".join(f'<th scope="col"{kind(i)}>{escape(cell)}</th>' for i, cell in enumerate(head))
    body, mark = [], ' class="marked"'
    for i, row in enumerate(rows):
        cells = "".join(f"<td{kind(j)}>{escape(_cell(cell))}</td>" for j, cell in enumerate(row) if j)
        first = f'<th scope="row" class="text">{escape(_cell(row[0]))}</th>'
        body.append(f"<tr{mark * (i in marked)}>{first}{cells}</tr>")
    return (
        f'<div class="scroll" role="region" aria-label="Table: {escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "\N{EN DASH}"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < LARGE else f"{value:.1e}" if np.isfinite(value) else "\N{INFINITY}"
    return str(value).replace("_", " ")


def note(html: str) -> str:
    """A remark, of HTML."""
    return f'<p class="note">{html}</p>'


def facts(pairs: Mapping[str, str], kind: str = "") -> str:
    """A list of names and values, text."""
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl{kind and f' class={chr(34)}{kind}{chr(34)}'}>{listed}</dl>"


def lines(evidence: Sequence[str]) -> str:
    """The evidence, a line each, all but the first few folded away."""
    items = [f"<li>{escape(line)}</li>" for line in evidence]
    first, rest = items[:EVIDENCE_LINES], items[EVIDENCE_LINES:]
    more = f"<details><summary>{len(rest)} more</summary><ul>{''.join(rest)}</ul></details>" if rest else ""
    return f'<section id="evidence"><h2>Evidence</h2><ul>{"".join(first)}</ul>{more}</section>'


def _script_text(code: str) -> str:
    """JavaScript that may stand inside a script element."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _embedded(value: Any) -> str:
    """JSON that may stand inside a script element: no ``<`` in it, arrays as lists, no number as null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, np.ndarray | np.generic):
            item = item.tolist()
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        if isinstance(item, float):
            return float(f"{item:.6g}") if np.isfinite(item) else None
        return item

    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# Nothing is fetched from anywhere, and the browser sees to it
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:\">"
)

_STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --card: #f4f6f8; --line: #d5dae0; --link: #0060a0;
  --fails: #d55e00; --fine: #009e73; --wrong: #b34700; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #a3adb8; --paper: #15181c;
  --card: #1e2329; --line: #3a424c; --link: #6cbcf0; --wrong: #ff9d4d; } }
* { box-sizing: border-box; }
html { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 20px 48px; }
header { background: var(--card); border-left: 6px solid var(--fails); border-radius: 6px; padding: 14px 20px; }
header.fine { border-color: var(--fine); }
header p { margin: 6px 0; max-width: 82ch; }
.checkpoint { color: var(--soft); overflow-wrap: anywhere; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 2px 0 8px; }
h2 { font-size: 1.2rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 12px 0 0; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 12px 0 0; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
dl.list { display: block; }
dl.list div { margin-bottom: 8px; }
section { margin-top: 28px; }
ul { margin: 0; padding-left: 1.3em; }
li { overflow-wrap: anywhere; }
details { margin-top: 4px; }
summary { cursor: pointer; color: var(--link); width: fit-content; }
nav { margin-top: 20px; border-block: 1px solid var(--line); padding: 8px 0; font-size: .92rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; padding: 0; }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
figure { margin: 0; min-width: 0; }
.plot { width: 100%; overflow: hidden; }
figcaption, .note { color: var(--soft); font-size: .92rem; max-width: 95ch; margin: 4px 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 8px 24px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th { font-weight: 600; }
tbody th { font-weight: 400; white-space: nowrap; }
.text { text-align: left; }
td.text { min-width: 20ch; }
.marked > * { font-weight: 700; }
.heads td, .heads th { border: 0; padding: 2px; text-align: left; white-space: nowrap; }
.cell { font: inherit; font-size: .85rem; color: var(--ink); border: 1px solid var(--line); border-radius: 4px;
  padding: 4px 8px; min-width: 5.2rem; text-align: left; line-height: 1.3; cursor: pointer;
  background: color-mix(in srgb, var(--fails) calc(var(--lost) * 60%), var(--card)); }
.cell span { display: block; font-variant-numeric: tabular-nums; }
.cell.none { background: none; color: var(--soft); cursor: default; }
.cell[aria-pressed=true] { outline: 3px solid var(--link); outline-offset: -1px; }
.problems { display: flex; flex-wrap: wrap; gap: 4px; list-style: none; padding: 0; }
.problems .cell { min-width: 4.8rem; }
article td.text { min-width: 0; max-width: 26ch; }
pre { font: .9rem/1.35 ui-monospace, monospace; margin: 6px 0; }
pre b { color: var(--wrong); text-decoration: underline; }
@media (max-width: 600px) { main { padding: 12px 12px 32px; } header { padding: 12px 14px; } }
@media print { html { font-size: 12px; } main { max-width: none; padding: 0; }
  nav, .modebar { display: none !important; }
  figure, header, tr { break-inside: avoid; } h2, h3, .note { break-after: avoid; } .grid { display: block; }
  .scroll { overflow: visible; } th, td { padding-right: 8px; } }
"""

_SCRIPT = """
(() => {
  "use strict";
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const themes = read("themes"), figures = read("figures");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 560, PRINTED = 660;  // pixels
  const CONFIG = {displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]]};
  const merge = (into, from) => {
    for (const [key, value] of Object.entries(from)) {
      const nested = value && typeof value === "object" && !Array.isArray(value);
      into[key] = nested ? merge(into[key] ?? {}, value) : value;
    }
    return into;
  };
  // a legend that the keyboard reaches: Enter or the space bar hides and shows what it names
  const openLegend = box => {
    for (const item of box.querySelectorAll(".legend .traces")) {
      const trace = item.__data__?.[0]?.trace;
      if (!trace || trace._isShape || trace.index === undefined) continue;
      const same = box.data.flatMap((other, i) =>
        i === trace.index || (trace.legendgroup && other.legendgroup === trace.legendgroup) ? [i] : []);
      item.setAttribute("tabindex", "0");
      item.setAttribute("role", "button");
      item.setAttribute("aria-label", trace.name);
      item.setAttribute("aria-pressed", String(trace.visible === true));
      item.dataset.trace = trace.index;
      item.onkeydown = event => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        Plotly.restyle(box, {visible: trace.visible === true ? "legendonly" : true}, same).then(() =>
          box.querySelector(`.legend .traces[data-trace="${trace.index}"]`)?.focus());
      };
    }
  };
  const draw = (printing, only) => {
    for (const [id, figure] of Object.entries(figures)) {
      if (only && !only.includes(id)) continue;
      const box = document.getElementById(id);
      const layout = structuredClone(figure.layout);
      layout.template = themes[dark.matches && !printing ? "dark" : "light"];
      layout.width = printing ? PRINTED : box.clientWidth;
      layout.uirevision = "kept";
      const narrow = String(layout.width < NARROW);
      if (narrow === "true") merge(layout, layout.meta?.narrow ?? {});
      if (box.data && box.dataset.narrow !== narrow) Plotly.purge(box);  // a colour bar cannot be turned in place
      box.dataset.narrow = narrow;
      const first = !box.data;
      Plotly.react(box, figure.data, layout, CONFIG);
      if (first) box.on("plotly_afterplot", () => openLegend(box));
      openLegend(box);
    }
  };
  // of a group of buttons one is pressed
  const press = button => {
    for (const other of button.closest("table, ul").querySelectorAll("button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  };
  const heads = read("heads"), boxes = [...document.querySelectorAll(".chosen .plot")].map(box => box.id);
  for (const button of document.querySelectorAll("button[data-head]")) {
    button.onclick = () => {
      press(button);
      const head = heads[button.dataset.head];
      document.getElementById("chosen-head").textContent = head.title;
      boxes.forEach((id, i) => { figures[id] = head.figures[i]; });
      draw(false, boxes);
    };
  }
  for (const button of document.querySelectorAll("button[data-problem]")) {
    button.onclick = () => {
      press(button);
      for (const sheet of document.querySelectorAll("article")) {
        sheet.hidden = sheet.id !== "problem-" + button.dataset.problem;
      }
    };
  }
  let width = 0, closed = [];
  draw(false);
  dark.addEventListener("change", () => draw(false));
  new ResizeObserver(([page]) => {
    const now = Math.round(page.contentRect.width);
    if (width && now !== width) requestAnimationFrame(() => draw(false));
    width = now;
  }).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach(details => { details.open = true; });
    draw(true);
  });
  addEventListener("afterprint", () => {
    closed.forEach(details => { details.open = false; });
    draw(false);
  });
})();
"""
