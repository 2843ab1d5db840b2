"""A diagnosis as one HTML file that needs no network: the verdict in words, then the figures and tables behind it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interp.diagnosis import ENOUGH, Diagnosis, repairs
from interp.interventions import Head
from interp.page import Cell, Page, facts, lines, note, table
from interp.papers import Look, Paper, write_papers
from interp.plots import (
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
    page = Page()
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
        note(
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
        note(
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
        note(
            "Each cell is a head in the lookup in which its target lost most: the target's mean share as trained, and "
            "now; the stronger its colour, the more it lost. Choose one to see what it does, where its attention goes, "
            "how its leak grows, and how far its target leads the best other key: a majority against n keys that all "
            "trail by a gap g needs g &gt; ln n."
        ),
        _grid(page, diagnosis, frames, digits),
    )
    page.section(
        "Problems on paper",
        note(
            f"Each number is one of the {diagnosis.score.problems} problems, with how many of its decisions are wrong. "
            "Choose one to see it as a person writes it, and which keys the heads "
            f"{', '.join(f'{v.head[0]}.{v.head[1]}' for v in views)} gave most attention to when it went wrong."
        ),
        _papers(model, diagnosis, [view.head for view in views], seed),
    )
    page.section("Interventions", note("Each edit acts in all heads of the saved checkpoint."), _trials(diagnosis))
    by_head = (
        " Repaired alone: the share of wrong decisions that the proving edit repairs in this head only. Left without: "
        "the share still wrong when it acts in every head but this one."
    )
    page.section(
        "Heads",
        note(
            f"Shares at {digits[0]} digits, as trained, and at {digits[1]} digits, now."
            + by_head * bool(diagnosis.head_trials)
        ),
        _heads(diagnosis),
    )
    title = f"leaksum: {diagnosis.verdict.cause} at {diagnosis.digits} digits"
    return page.html(title, _verdict(diagnosis, checkpoint), _made(model, diagnosis, checkpoint, seed), GLOSSARY)


def _grid(page: Page, diagnosis: Diagnosis, frames: Sequence[pd.DataFrame], digits: tuple[int, int]) -> str:
    layers, heads = next(iter(diagnosis.longer.lookups.values())).share.shape[:2]
    first = heads_shown(diagnosis)[0]
    roles = {role.head: role for role in diagnosis.roles.roles}
    views = views_of(list(np.ndindex(layers, heads)), diagnosis.trained, diagnosis.longer)
    rows = []
    for layer in range(min(layers, max(1, MOST_CELLS // heads))):
        cells = []
        for view in views[layer * heads : (layer + 1) * heads]:
            then, now = (float(found.share[view.head].mean()) for found in (view.trained, view.longer))
            figures = [
                shares_figure(view.head, view.key, frames, digits, GRID_BINS),
                leak_figure(view, digits),
                gaps_figure(view, digits),
            ]
            title = f"{view.title}; {role_words(roles[view.head])}"
            words = [f"{then:.2f} \N{RIGHTWARDS ARROW} {now:.2f}"]
            cells.append(Cell(f"{layer}.{view.head[1]}", title, words, max(0.0, then - now), figures))
        rows.append((f"layer {layer}", cells))
    return page.grid(rows, f"{first[0]}.{first[1]}", ("attention by column", "leak against keys", "gaps"))


def role_words(role: Role) -> str:
    """What a head does, in words."""
    does = [f"in training it performs {role.lookup.replace('_', ' ')}" if role.lookup else "it performs no lookup"]
    does += ["rests on the sink"] * role.is_sink_head + ["gives most to far keys now"] * role.is_crowd_head
    return ", ".join(does) + (", which has collapsed" if role.collapsed else "")


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
        + table("Wrong decisions of this problem", head, rows)
        + (note(f"{more} more wrong decisions are marked above.") if more else "")
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
    about = {
        "problems exact": f"{found.exact:.2f} of {found.problems} (95% interval {low:.2f} to {high:.2f})",
        "decisions wrong": f"{found.n_wrong} of {found.decisions}",
        "first wrong column": "none" if found.first_wrong_column is None else str(found.first_wrong_column),
    }
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict_words(diagnosis))
    return (
        f'<header class="{"fine" if verdict.cause == "none" else "fails"}">'
        f'<p class="checkpoint">{escape(checkpoint)} at {diagnosis.digits} digits</p>'
        f"<h1>Verdict: {escape(verdict.cause + status)}</h1>{words}{facts(about)}</header>{lines(verdict.evidence)}"
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
    below = note("In bold, the edit that the verdict rests on.") if marked else ""
    return table("Interventions", head, rows, marked) + below


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
    return table("Heads", ["head", *columns.values()], rows, marked)


def _made(model: HookedAdder, diagnosis: Diagnosis, checkpoint: str, seed: int) -> str:
    """How to have these numbers again."""
    config, found = model.config, diagnosis.score
    command = (
        f"leaksum diagnose {shlex.quote(checkpoint)} --digits {diagnosis.digits} --problems {found.problems} "
        f"--seed {seed}"
    )
    attention = config.attention
    about = {
        "command": command,
        "model": f"{config.n_layers} layers of {config.n_heads} heads, d_model {config.d_model}, positions "
        f"{attention.scheme}, decay {attention.decay:g} per column, sink {'yes' if attention.sink else 'no'}",
        "task": f"chunks of {config.task.chunk} cut from the {config.task.cut}, trained on {config.task.min_digits} to "
        f"{config.task.max_digits} digits",
        "run": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.run.items()),
    }
    return f'<section id="made"><h2>How this was made</h2>{facts(about, "list")}</section>'
