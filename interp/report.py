"""A diagnosis as one HTML file that needs no network: the verdict in words, then the figures and tables behind it.

:func:`write_report` puts the figures of :mod:`interp.plots` in one page with one copy of plotly.js, in the light or
the dark template, as the reader's system asks for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from plotly.offline import get_plotlyjs

from interp.diagnosis import ENOUGH, Diagnosis, repairs
from interp.interventions import Head
from interp.papers import Look, Paper, write_papers
from interp.plots import (
    DARK,
    LIGHT,
    gaps_figure,
    leak_figure,
    mistakes_figure,
    profile_figure,
    reach_figure,
    shares_figure,
    views_of,
)
from interp.profile import score_profile
from interp.roles import Role
from interp.shares import Shares
from models.files import write_text
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

MOST_HEADS = 4  # heads shown, of those that matter
MOST_CROWDS = 2  # heads shown where none matters: those with the largest far share
PROFILE_PROBLEMS = 8
MOST_CELLS = 64  # heads in the grid; beyond, those of the first layers
GRID_BINS = 60  # columns of a grid's figures
MOST_PAPERS = 24  # problems with mistakes that are written out
MOST_MISTAKES = 8  # listed below a problem
NAMED_HEADS = 6  # in the verdict's words
EVIDENCE_LINES = 6  # shown before the rest is folded away

# What is shown


def heads_shown(diagnosis: Diagnosis) -> tuple[Head, ...]:
    """The heads that matter, at most four; where none does, the two that give most to far keys."""
    if diagnosis.verdict.heads:
        return diagnosis.verdict.heads[:MOST_HEADS]
    crowds = sorted(diagnosis.roles.roles, key=lambda role: -role.far[1])
    return tuple(role.head for role in crowds[:MOST_CROWDS])


# Words

CAUSES = {
    "none": "There is no failure to explain: every lookup that decides something keeps enough of its share.",
    "dilution": "The leak comes from a crowd. Far keys score no higher than keys at the edge of the trained distances "
    "did and no single one matters, but their number grows with length, and the sum of exp(-gap) over them with it.",
    "aliasing": "The leak comes from a few far keys, not from a crowd: they score about as high as the target itself, "
    "so that each of them takes a share like the target's.",
    "drift": "The leak grows because gaps shrink: scores at distances that training never showed have left the range "
    "that training gave them.",
    "starvation": "The leak is the sink's: it outweighs lookups whose own scores are as in training, and takes the "
    "attention that their targets need.",
    "miscounting": "A learned counter is off by half a column or more, so that a head reads the neighbour of its "
    "target, and the target's share leaks to it.",
    "unexplained": "The decisions are wrong, but no edit that was tried repairs them: the leak is none of those that "
    "the edits below test for.",
}
DRIFTS = {
    "restore-far": "Far keys score higher than anything at the edge of the trained distances did.",
    "restore-targets": "The targets' own scores have fallen since training.",
    "restore-distances": "Token distances grow with the numbers' lengths; counted as in training, the columns that "
    "training had are right again.",
    "restore-sink": "The sink's score has risen above anything it was in training.",
}
EDITS = {
    "far": "all far keys removed",
    "drop-best-far": "the {} best far keys of each query removed",
    "restore-far": "far keys' scores lowered to the highest at the edge of the trained distances",
    "restore-targets": "targets' scores raised by what their median lost since training",
    "restore-sink": "sinks' scores lowered to the highest of training",
    "restore-distances": "numbers counted as no longer than in training, keys in columns beyond removed",
    "restore-number": "only as many of the nearest keys kept as a query saw in training",
    "same-keys-removed": "the same keys removed, at their own distances",
    "sink-boost": "{} added to every sink's score",
    "random-control": "control: as many random keys removed",
    "mass-control": "control: random keys removed that had as much attention",
    "far-zero": "far keys' weights set to 0, the rest not renormalised",
    "window": "keys more than {} away removed",
    "round-gates": "gates rounded to 0 or 1 ({})",
    "jitter-gates": "control: gates moved as far, up or down at random ({})",
}


def edit_words(name: str) -> str:
    """What an edit does, from its name; empty where the name is not known."""
    kind, _, value = name.partition("=")
    return EDITS.get(kind, "").format(value)


def verdict_words(diagnosis: Diagnosis) -> list[str]:
    """The verdict in a few sentences: what it means for the leak, what proved it, and where it acts."""
    verdict, wrong = diagnosis.verdict, diagnosis.score.n_wrong
    trials = {trial.name: trial for trial in diagnosis.trials}
    meaning = CAUSES.get(verdict.cause, "")
    proof = verdict.proof
    if proof:
        meaning += " " + DRIFTS.get(proof.edit, "") if verdict.cause == "drift" else ""
    words = [meaning]
    if proof:
        where = "" if proof.below is None else f"in the columns that training had (0 to {proof.below - 1}) "
        effect = f"{where}the edit {proof.edit} ({edit_words(proof.edit)}) leaves {proof.left} decisions wrong, "
        effect += f"where {proof.wrong} were"
        control = f"the control ({edit_words(proof.control).removeprefix('control: ')})"
        if verdict.proved:
            words.append(f"Proved: {effect}; {control} leaves {proof.control_left}.")
        elif not repairs(proof):
            words.append(f"Not proved: {effect}. That is most of them and not all, so something else has a part.")
        elif proof.wrong < ENOUGH:
            words.append(f"Not proved: {effect}, and that is too few to say ({ENOUGH} are asked for).")
        else:
            words.append(
                f"Not proved: {effect}, but {control} leaves only {proof.control_left}, "
                "so that the repair does not speak for this cause alone."
            )
    elif diagnosis.trials:
        least = min(diagnosis.trials, key=lambda trial: trial.wrong)
        words.append(f"The best of {len(trials)} edits, {least.name}, leaves {least.wrong} of {wrong} decisions wrong.")
    if verdict.heads:
        names = ", ".join(f"{layer}.{head}" for layer, head in verdict.heads[:NAMED_HEADS])
        more = len(verdict.heads) - NAMED_HEADS
        words.append(
            f"It acts in head{'s' * (len(verdict.heads) > 1)} {names}{f' and {more} more' if more > 0 else ''} "
            f"(layer.head{', the most telling first' * (len(verdict.heads) > 1)}): the edit in such a head alone "
            "repairs some of the wrong decisions, or in all other heads leaves some of them wrong."
        )
    elif proof:
        words.append("No head matters by itself: the edit repairs only where it acts in several at once.")
    return words


GLOSSARY = {
    "decision": "One predicted token of the sum, given the right answer so far.",
    "lookup": "What a query must find: the first or the second number's token in the column it decides (first same "
    "column, second same column), the first number's token from the second's (first from second), or what tells the "
    "carry of the column before (carry). Where the number has ended there is nothing to find.",
    "target": "The keys that a lookup is after; the sink where there is nothing to find.",
    "sink": "A learned score that takes part in the softmax and has no value: attention may rest there.",
    "gap": "How far a key's score trails the target's, in nats (natural logarithms).",
    "leak": "The sum of exp(-gap) over all but the target, which keeps the share 1 / (1 + leak).",
    "far": "Farther than training ever showed. Near: the other keys but the target, the query's own (self) and the "
    "separators + and =.",
    "column": "Place value, counted in tokens; 0 is the least significant.",
}


# The page


def write_report(path: Path, model: HookedAdder, diagnosis: Diagnosis, checkpoint: str, *, seed: int = 0) -> None:
    """Write the diagnosis as one HTML file that needs no network.

    Args:
        checkpoint: how the reader knows the model; any text.
        seed: of the problems that the score profile is measured on.

    Raises:
        OSError: ``path`` cannot be written; a file that was there is as it was.
    """
    write_text(path, report_html(model, diagnosis, checkpoint, seed=seed))


def report_html(model: HookedAdder, diagnosis: Diagnosis, checkpoint: str, *, seed: int = 0) -> str:
    """The page that :func:`write_report` writes."""
    within = model.config.task.max_digits
    digits = (min(within, diagnosis.digits), diagnosis.digits)
    views = views_of(heads_shown(diagnosis), diagnosis.trained, diagnosis.longer)
    frames = [Shares(ledger).to_frame() for ledger in (diagnosis.trained, diagnosis.longer)]
    problems = min(PROFILE_PROBLEMS, diagnosis.score.problems)
    drawn = model.task.evaluation_problems(diagnosis.digits, problems, seed)
    profile = score_profile(model, drawn, views[0].head)
    page = _Page()
    chosen = "the heads that matter" if diagnosis.verdict.heads else "the heads that give most to far keys"
    unit = model.config.attention.unit
    page.section(
        "Reach",
        page.figure(
            reach_figure({checkpoint: diagnosis.reach}, within),
            "Share of problems whose every decision is right, against length. Bars are Wilson's 95% intervals over "
            "problems.",
        ),
    )
    page.section(
        "Where decisions go wrong",
        page.figure(
            mistakes_figure(diagnosis.score),
            "A decision is one predicted token of the sum, given the right answer so far. Rows say which numbers "
            "still have a digit in the column. Grey: all right. Blank: no such decision.",
        ),
    )
    page.section(
        "Where attention goes",
        _note(
            f"Shown are {chosen}, each in the lookup in which its target lost most. Far is beyond "
            f"{model.config.trained_distance} {unit}, the most that training showed; where there is nothing to find, "
            "the sink is what should win. The shares of a column add to 1."
        ),
        *(
            page.figure(
                shares_figure(view.head, view.key, frames, digits),
                "",
                title=view.title,
            )
            for view in views
        ),
    )
    infinite = "" if model.config.attention.sink else " Infinite leaks (nothing to find and no sink) are not drawn."
    page.section(
        "How the leak grows",
        _note(
            "A target keeps the share 1 / (1 + leak), so a majority while its leak is below 1. A crowd of n keys that "
            "all trail by a gap g leaks n e<sup>&minus;g</sup>: a majority needs g &gt; ln n. The dashed line is "
            "such a crowd at g = the median gap of training, to the best other key, in nats. Points are medians over "
            f"queries, with quartiles, in bins of n.{infinite}"
        ),
        '<div class="grid">'
        + "".join(page.figure(leak_figure(view, digits), "", title=view.title) for view in views)
        + "</div>",
    )
    page.section(
        "Score against distance",
        page.figure(
            profile_figure(profile),
            f"Scores of keys that a query sees, at {diagnosis.digits} digits ({problems} problems), separators and "
            "the query's own token aside. Content (the score without positions), rotation and decay add to the score: "
            "choose their names in the legend to show them, with Enter or the space bar too.",
            title=f"Head {profile.head[0]}.{profile.head[1]}",
        ),
    )
    page.section(
        "Every head",
        _note(
            "Each cell is a head in the lookup in which its target lost most: the target's mean share as trained, and "
            "now; the stronger its colour, the more it lost. Choose one to see what it does, where its attention goes, "
            "how its leak grows, and how far its target leads the best other key: a majority against n keys that all "
            "trail by a gap g needs g &gt; ln n."
        ),
        page.grid(diagnosis, frames, digits),
    )
    page.section(
        "Problems on paper",
        _note(
            f"Each number is one of the {diagnosis.score.problems} problems, with how many of its decisions are wrong. "
            "Choose one to see it as a person writes it, and which keys the heads "
            f"{', '.join(f'{v.head[0]}.{v.head[1]}' for v in views)} gave most attention to when it went wrong."
        ),
        _papers(model, diagnosis, [view.head for view in views], seed),
    )
    page.section("Interventions", _note("Each edit acts in all heads of the saved checkpoint."), _trials(diagnosis))
    by_head = (
        " Repaired alone: the share of wrong decisions that the proving edit repairs in this head only. Left without: "
        "the share still wrong when it acts in every head but this one."
    )
    page.section(
        "Heads",
        _note(
            f"Shares at {digits[0]} digits, as trained, and at {digits[1]} digits, now."
            + by_head * bool(diagnosis.head_trials)
        ),
        _heads(diagnosis),
    )
    return page.html(_verdict(diagnosis, checkpoint), _made(model, diagnosis, checkpoint, seed), diagnosis)


class _Page:
    """Sections and figures, numbered as they come."""

    def __init__(self) -> None:
        self.sections: list[tuple[str, str]] = []
        self.figures: dict[str, Any] = {}
        self.heads: dict[str, Any] = {}

    def figure(self, figure: Any, caption: str, title: str = "") -> str:
        """A figure's place in the page; ``caption`` is text."""
        name = f"figure-{len(self.figures) + 1}"
        self.figures[name] = _plain_figure(figure)
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        height = figure.layout.height
        label = escape(f"Figure: {title or caption}")
        plot = f'<div class="plot" id="{name}" role="group" aria-label="{label}" style="min-height:{height}px"></div>'
        return f"<figure>{heading}{plot}{below}</figure>"

    def grid(self, diagnosis: Diagnosis, frames: Sequence[pd.DataFrame], digits: tuple[int, int]) -> str:
        """A button a head, and the panel that shows the one chosen."""
        layers, heads = next(iter(diagnosis.longer.lookups.values())).share.shape[:2]
        first = heads_shown(diagnosis)[0]
        roles = {role.head: role for role in diagnosis.roles.roles}
        views = views_of(list(np.ndindex(layers, heads)), diagnosis.trained, diagnosis.longer)
        rows = []
        for layer in range(min(layers, max(1, MOST_CELLS // heads))):
            cells = []
            for view in views[layer * heads : (layer + 1) * heads]:
                index = view.head[1]
                then, now = (float(found.share[layer, index].mean()) for found in (view.trained, view.longer))
                name = f"{layer}.{index}"
                self.heads[name] = {
                    "title": f"{view.title}; {role_words(roles[view.head])}",
                    "figures": [
                        _plain_figure(shares_figure(view.head, view.key, frames, digits, GRID_BINS)),
                        _plain_figure(leak_figure(view, digits)),
                        _plain_figure(gaps_figure(view, digits)),
                    ],
                }
                lost = max(0.0, then - now)
                cells.append(
                    f'<td><button type="button" class="cell" data-head="{name}" style="--lost:{lost:.2f}" '
                    f'aria-pressed="{str(view.head == first).lower()}"><b>{name}</b> '
                    f"<span>{then:.2f} \N{RIGHTWARDS ARROW} {now:.2f}</span></button></td>"
                )
            rows.append(f'<tr><th scope="row">layer {layer}</th>{"".join(cells)}</tr>')
        chosen = self.heads[f"{first[0]}.{first[1]}"]
        boxes = []
        for label, figure in zip(("attention by column", "leak against keys", "gaps"), chosen["figures"], strict=True):
            name = f"figure-{len(self.figures) + 1}"
            self.figures[name] = figure
            boxes.append(
                f'<div class="plot" id="{name}" role="group" aria-label="Figure: {label} of the chosen head" '
                f'style="min-height:{figure["layout"]["height"]}px"></div>'
            )
        return (
            '<div class="scroll" role="region" aria-label="Heads" tabindex="0"><table class="heads"><tbody>'
            f"{''.join(rows)}</tbody></table></div>"
            f'<h3 id="chosen-head" aria-live="polite">{escape(chosen["title"])}</h3>'
            f'<figure class="chosen">{"".join(boxes)}</figure>'
        )

    def section(self, title: str, *content: str) -> None:
        self.sections.append((title, "".join(content)))

    def html(self, top: str, bottom: str, diagnosis: Diagnosis) -> str:
        numbered = [(f"section-{i}", title, body) for i, (title, body) in enumerate(self.sections, start=1)]
        links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in numbered)
        body = "".join(f'<section id="{n}"><h2>{escape(title)}</h2>{text}</section>' for n, title, text in numbered)
        themes = {"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()}
        title = escape(f"leaksum: {diagnosis.verdict.cause} at {diagnosis.digits} digits")
        terms = "".join(
            f"<div><dt>{escape(term)}</dt><dd>{escape(means)}</dd></div>" for term, means in GLOSSARY.items()
        )
        words = f'<details><summary>Words used here</summary><dl class="list">{terms}</dl></details>'
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{_POLICY}'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f'<title>{title}</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>'
            f'<main>{top}<nav aria-label="Contents"><ul>{links}</ul></nav>{words}'
            "<noscript><p>The figures are drawn by a script in this file, which this browser does not run.</p>"
            f"</noscript>{body}{bottom}</main>\n"
            f"<script>{_script_text(get_plotlyjs())}</script>\n"
            f'<script type="application/json" id="themes">{_embedded(themes)}</script>\n'
            f'<script type="application/json" id="figures">{_embedded(self.figures)}</script>\n'
            f'<script type="application/json" id="heads">{_embedded(self.heads)}</script>\n'
            f"<script>{_SCRIPT}</script></body></html>\n"
        )


def role_words(role: Role) -> str:
    """What a head does, in words."""
    does = [f"in training it performs {role.lookup.replace('_', ' ')}" if role.lookup else "it performs no lookup"]
    does += ["rests on the sink"] * role.is_sink_head + ["gives most to far keys now"] * role.is_crowd_head
    return ", ".join(does) + (", which has collapsed" if role.collapsed else "")


def _plain_figure(figure: Any) -> Any:
    figure.update_layout(template=None)  # the page sets one of its own
    return figure.to_plotly_json()


def _papers(model: HookedAdder, diagnosis: Diagnosis, heads: Sequence[Head], seed: int) -> str:
    """A button a problem, and the problems with mistakes as a person writes them."""
    found = diagnosis.score
    problems = model.task.evaluation_problems(diagnosis.digits, found.problems, seed)
    wrong = np.bincount(found.problem, weights=found.wrong, minlength=found.problems).astype(int)
    shown = np.flatnonzero(wrong)[:MOST_PAPERS]
    if not len(shown):
        return "<p>No decision is wrong in any of them.</p>"
    papers = write_papers(model, [problems[i] for i in shown], heads)
    buttons = []
    for i, n in enumerate(wrong.tolist()):
        if i in shown:
            attributes = f'data-problem="{i}" aria-pressed="{str(i == shown[0]).lower()}" class="cell"'
            buttons.append(
                f'<li><button type="button" {attributes} style="--lost:{min(1, 0.2 + n / 20):.2f}">'
                f"<b>{i}</b> <span>{n} wrong</span></button></li>"
            )
        else:
            buttons.append(f'<li class="cell none"><b>{i}</b> <span>{f"{n} wrong" if n else "exact"}</span></li>')
    sheets = [
        f'<article id="problem-{i}"{"" if i == shown[0] else " hidden"}><h3>Problem {i}</h3>{_paper(paper, heads)}'
        "</article>"
        for i, paper in zip(shown, papers, strict=True)
    ]
    return f'<ul class="problems">{"".join(buttons)}</ul><div aria-live="polite">{"".join(sheets)}</div>'


ROWS = ("first number", "second number", "sum")


def _paper(paper: Paper, heads: Sequence[Head]) -> str:
    """Columns stand below one another, the least significant on the right; wrong ones are marked in two ways."""
    width = max(len(text) for row in paper.rows for text in row)
    columns = max(*(len(row) for row in paper.rows), *(column + 1 for column in paper.mistakes))

    def line(sign: str, cells: Sequence[str], marked: bool) -> str:
        spans = []
        for column in reversed(range(columns)):
            text = escape(cells[column] if column < len(cells) else "").rjust(width)
            spans.append(f"<b>{text}</b>" if marked and column in paper.mistakes else text)
        return f"{sign} {''.join(spans)}"

    written = list(paper.rows[2]) + [""] * (columns - len(paper.rows[2]))
    for column, mistake in paper.mistakes.items():
        written[column] = {"<eos>": "\N{WHITE SQUARE}"}.get(mistake.written, mistake.written)[:width]
    marks = ["^".rjust(width) if column in paper.mistakes else "" for column in range(columns)]
    lines = [
        line(" ", paper.rows[0], False),
        line("+", paper.rows[1], False),
        line("=", paper.rows[2], False),
        line("\N{RIGHTWARDS ARROW}", written, True),
        line(" ", marks, True),
    ]
    listed = list(paper.mistakes.values())[:MOST_MISTAKES]
    head = ["column", "right", "written", *(f"head {layer}.{index} looked at" for layer, index in heads)]
    rows = [
        [str(m.column), m.right.strip("<>"), m.written.strip("<>"), *(_looks(m.looks.get(head, ())) for head in heads)]
        for m in listed
    ]
    more = len(paper.mistakes) - len(listed)
    return (
        '<div class="scroll" role="region" aria-label="The problem as written" tabindex="0">'
        f"<pre>{chr(10).join(lines)}</pre></div>"
        + _table("Wrong decisions of this problem", head, rows)
        + (_note(f"{more} more wrong decisions are marked above.") if more else "")
    )


def _looks(looks: Sequence[Look]) -> str:
    return "; ".join(
        f"{look.token} in column {look.column} of the {ROWS[min(look.row, 2)]} ({look.share:.2f})"
        if look.column >= 0
        else f"{look.token} ({look.share:.2f})"
        for look in looks
    )


def _verdict(diagnosis: Diagnosis, checkpoint: str) -> str:
    verdict, found = diagnosis.verdict, diagnosis.score
    known = verdict.cause in ("none", "unexplained")
    status = "" if known else ", proved" if verdict.proved else ", not proved"
    low, high = found.exact_interval
    facts = {
        "problems exact": f"{found.exact:.2f} of {found.problems} (95% interval {low:.2f} to {high:.2f})",
        "decisions wrong": f"{found.n_wrong} of {found.decisions}",
        "first wrong column": "none" if found.first_wrong_column is None else str(found.first_wrong_column),
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict_words(diagnosis))
    lines = [f"<li>{escape(line)}</li>" for line in verdict.evidence]
    first, rest = lines[:EVIDENCE_LINES], lines[EVIDENCE_LINES:]
    more = f"<details><summary>{len(rest)} more</summary><ul>{''.join(rest)}</ul></details>" if rest else ""
    return (
        f'<header class="{"fine" if verdict.cause == "none" else "fails"}">'
        f'<p class="checkpoint">{escape(checkpoint)} at {diagnosis.digits} digits</p>'
        f"<h1>Verdict: {escape(verdict.cause + status)}</h1>{words}<dl>{listed}</dl></header>"
        f'<section id="evidence"><h2>Evidence</h2><ul>{"".join(first)}</ul>{more}</section>'
    )


def _trials(diagnosis: Diagnosis) -> str:
    head = ("edit", "what it does", "wrong", "exact", "repaired", "broken")
    base = diagnosis.score
    rows: list[list[Any]] = [["(none)", "the checkpoint as it is", base.n_wrong, base.exact, None, None]]
    marked = set()
    for trial in diagnosis.trials:
        if diagnosis.verdict.proof and trial.name == diagnosis.verdict.proof.edit:
            marked.add(len(rows))
        rows.append([trial.name, edit_words(trial.name), trial.wrong, trial.exact, trial.repaired, trial.broken])
    note = _note("In bold, the edit that the verdict rests on.") if marked else ""
    return _table("Interventions", head, rows, marked) + note


def _heads(diagnosis: Diagnosis) -> str:
    columns = {
        "lookup": "lookup",
        "share_trained": "target, trained",
        "share": "target, now",
        "sink_trained": "sink, trained",
        "sink": "sink, now",
        "far": "far, now",
        "sink_head": "sink head",
        "crowd_head": "crowd head",
        "collapsed": "collapsed",
        "repaired_alone": "repaired alone",
        "left_without": "left without",
        "decides": "decides",
    }
    if not diagnosis.head_trials:
        columns = {
            key: words for key, words in columns.items() if key not in ("repaired_alone", "left_without", "decides")
        }
    found = diagnosis.to_json()["heads"]
    rows = [[f"{row['layer']}.{row['head']}", *(row.get(key) for key in columns)] for row in found]
    marked = {i for i, row in enumerate(found) if row.get("decides")}
    return _table("Heads", ["head", *columns.values()], rows, marked)


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[Any]], marked: Iterable[int] = ()) -> str:
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
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("_", " ")


def _note(html: str) -> str:
    return f'<p class="note">{html}</p>'


def _made(model: HookedAdder, diagnosis: Diagnosis, checkpoint: str, seed: int) -> str:
    """How to have these numbers again."""
    config, found = model.config, diagnosis.score
    command = (
        f"leaksum diagnose {shlex.quote(checkpoint)} --digits {diagnosis.digits} --problems {found.problems} "
        f"--seed {seed}"
    )
    attention = config.attention
    facts = {
        "command": command,
        "model": f"{config.n_layers} layers of {config.n_heads} heads, d_model {config.d_model}, positions "
        f"{attention.scheme}, decay {attention.decay:g} per column, sink {'yes' if attention.sink else 'no'}",
        "task": f"chunks of {config.task.chunk} cut from the {config.task.cut}, trained on {config.task.min_digits} to "
        f"{config.task.max_digits} digits",
        "run": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.run.items()),
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<section id="made"><h2>How this was made</h2><dl class="list">{listed}</dl></section>'


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
