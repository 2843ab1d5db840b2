"""An audit as one HTML file that needs no network: the verdict, decisions, heads, edits and sinks against length."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from interp.audit import ADDITION, FIRST_TOKEN, Audit, HeadRow, describe, sink_words
from interp.interventions import Head, head_words
from interp.page import Cell, Page, facts, lines, note, table
from interp.plots import head_leak_figure, head_shares_figure, lengths_figure, sinks_figure, trials_figure
from models.files import write_text

MOST_CELLS = 256  # heads in the grid; beyond, those of the layers with the largest losses
MOST_ROWS = 300  # of the table of heads
GLOSSARY = {
    "decision": "One token that must be predicted, given the right ones before it.",
    "target": "The keys that hold what a decision needs, or the learned sink where there is nothing to find. Where "
    "nothing is said of targets, the key with the best score.",
    "gap": "How far the best other key's score trails the target's, in nats; negative where it leads.",
    "leak": "The sum of exp(-gap) over all but the target, which keeps the share 1 / (1 + leak).",
    "N_eff": "How many keys compete with the target in effect, a learned sink left out.",
    "far": "Further back than the shortest length of this audit; of an adder, further than training ever showed.",
    "learned sink": "A score that takes part in the softmax and has no value (null sink).",
    "first token": "A key like any other, on which many heads rest. Its mean weight over all queries is compared with "
    f"{FIRST_TOKEN:g} (Gu et al. 2410.10781); short inputs pass that with even attention.",
    "key head": "Where several query heads share keys, the one whose keys this head reads.",
}


def write_audit_report(path: Path, found: Audit, run: Mapping[str, Any] | None = None) -> None:
    """Write the audit as one HTML file that needs no network.

    Args:
        run: what its numbers depend on, for the last section.

    Raises:
        OSError: ``path`` cannot be written; a file that was there is as it was.
    """
    write_text(path, audit_html(found, run))


def audit_html(found: Audit, run: Mapping[str, Any] | None = None) -> str:
    """The page that :func:`write_audit_report` writes."""
    page = Page()
    first, last = found.lengths[0].length, found.lengths[-1].length
    page.section(
        "Decisions against length",
        page.figure(
            lengths_figure(found),
            "Share of decisions right, and of cases whose every decision is right, with Wilson's 95% intervals over "
            "cases.",
        ),
    )
    courses = _courses(found)
    page.section(
        "Every head",
        note(
            f"Each cell is a head: its share on the target at {first} {found.unit} and at {last}, and at {last} its "
            "share on the first token and on the learned sink, where it has one, and its leak. The stronger its "
            "colour, the more its target lost. Choose one to see it against length; a leak that is infinite, or 0, is "
            "not drawn." + " Of an adder, the lookup in which the target lost most." * (found.task == ADDITION)
        ),
        _grid(page, found, courses),
    )
    page.section("Interventions", *_interventions(page, found))
    page.section(
        "Sinks",
        note(
            "A learned sink and the first token are two things. Short inputs pass the usual threshold with no sink at "
            "all, so what even attention gives the first token stands beside it."
        ),
        page.figure(
            sinks_figure(found), f"At {last} {found.unit}. Heads whose window excludes the first token have none."
        ),
        table(
            "Sinks",
            (found.unit, f"share of heads with over {FIRST_TOKEN:g}", "first token, even attention"),
            [[str(row.length), row.share_of_heads, f"{row.uniform_value:.4f}"] for row in found.sinks],
        ),
    )
    page.section("Heads", *_heads(found, last))
    return page.html(f"leaksum: audit of {found.model}", _verdict(found), _made(found, run or {}), GLOSSARY)


def _courses(found: Audit) -> dict[Head, tuple[float, list[HeadRow]]]:
    """By head what its target's mean share lost from the shortest length to the longest, and its rows by length; of an
    adder in the lookup that lost most.
    """
    by_lookup: dict[tuple[Any, ...], list[HeadRow]] = {}
    for row in sorted(found.heads, key=lambda row: row.length):
        by_lookup.setdefault((row.layer, row.head, row.lookup, row.present), []).append(row)
    courses: dict[Head, tuple[float, list[HeadRow]]] = {}
    for rows in by_lookup.values():
        head, lost = (rows[0].layer, rows[0].head), rows[0].target_share - rows[-1].target_share
        if head not in courses or (len(courses[head][1]), courses[head][0]) < (len(rows), lost):
            courses[head] = lost, rows
    return dict(sorted(courses.items()))


def _shown(courses: Mapping[Head, tuple[float, list[HeadRow]]]) -> list[int]:
    """The layers of the grid: all, or as many of those with the largest losses as fit."""
    layers = sorted({layer for layer, _ in courses})
    fit = max(1, MOST_CELLS // max(1, len(courses) // len(layers)))
    worst = {layer: max(lost for head, (lost, _) in courses.items() if head[0] == layer) for layer in layers}
    return sorted(sorted(layers, key=lambda layer: -worst[layer])[:fit])


def _grid(page: Page, found: Audit, courses: Mapping[Head, tuple[float, list[HeadRow]]]) -> str:
    layers = _shown(courses)
    rows = []
    for layer in layers:
        cells = []
        for head, (lost, course) in courses.items():
            if head[0] != layer:
                continue
            figures = [head_shares_figure(found, course), head_leak_figure(found, course)]
            cells.append(Cell(f"{head[0]}.{head[1]}", _title(course[-1]), _words(course), max(0.0, lost), figures))
        rows.append((f"layer {layer}", cells))
    inside = [head for head in courses if head[0] in layers]
    named = [head for head in found.verdict.heads if head in inside]
    chosen = named[0] if named else max(inside, key=lambda head: courses[head][0])
    grid = page.grid(rows, f"{chosen[0]}.{chosen[1]}", ("attention against length", "leak against length"))
    left = len({layer for layer, _ in courses}) - len(layers)
    more = note(f"{left} more layers, in which targets lost less, are in the JSON.") if left else ""
    return grid + more


def _title(row: HeadRow) -> str:
    title = f"Head {row.layer}.{row.head}"
    if row.lookup is not None:
        return f"{title}, {row.lookup.replace('_', ' ')}{'' if row.present else ' with nothing to find'}"
    return title + (f", key head {row.key_head}" if row.key_head != row.head else "")


def _words(course: Sequence[HeadRow]) -> list[str]:
    then, now = course[0], course[-1]
    leak = f"{now.leak:.2g}" if now.leak != float("inf") else "\N{INFINITY}"
    words = [f"{then.target_share:.2f} \N{RIGHTWARDS ARROW} {now.target_share:.2f}"]
    sinks = {"first": now.first_token_share, "sink": now.null_sink_share}
    return [*words, *(f"{name} {share:.2f}" for name, share in sinks.items() if share is not None), f"leak {leak}"]


def _interventions(page: Page, found: Audit) -> list[str]:
    if not found.trials:
        return ["<p>Nothing fails at these lengths, so no edit was tried; give one to try it anyway.</p>"]
    rows: list[list[Any]] = []
    marked = set()
    for trial in found.trials:
        name = trial.name + head_words(trial.heads)
        if name == found.verdict.repaired_by and trial.length == max(t.length for t in found.trials):
            marked.add(len(rows))
        rows.append([name, trial.length, trial.decisions, trial.before, trial.wrong, trial.repaired, trial.broken])
    head = ("edit", found.unit, "decisions", "wrong without", "wrong with", "repaired", "broken")
    repaired = found.verdict.repaired_by
    none = "None of these repairs half of what is wrong."
    said = f"In bold, the edit that the verdict names: {repaired}." if repaired else none
    caption = "Decisions that an edit leaves wrong, and those that it breaks. Dashed: how many are wrong without one."
    words = note(escape(said)) if found.verdict.fails_from is not None else ""
    return [words, page.figure(trials_figure(found), caption), table("Interventions", head, rows, marked)]


def _heads(found: Audit, last: int) -> list[str]:
    columns = {
        "target_share": "target",
        "leak": "leak",
        "gap": "gap",
        "n_eff": "N_eff",
        "first_token_share": "first token",
        "first_token_importance": "first token, all queries",
        "null_sink_share": "learned sink",
        "far_share": "far",
    }
    rows: list[list[Any]] = []
    marked = set()
    every = [row for row in found.heads if row.length == last]
    for row in every[:MOST_ROWS]:
        if (row.layer, row.head) in found.verdict.heads:
            marked.add(len(rows))
        where: list[Any] = [f"{row.layer}.{row.head}"]
        where.append(f"{row.layer}.{row.key_head}" if row.lookup is None else _title(row).split(", ", 1)[1])
        rows.append([*where, *(getattr(row, key) for key in columns)])
    head = ("head", "lookup" if found.task == ADDITION else "key head", *columns.values())
    cut = f" The first {MOST_ROWS} of {len(every)} rows; all are in the JSON." if len(every) > MOST_ROWS else ""
    bold = " In bold, the heads of the verdict." if marked else ""
    words = f"At {last} {found.unit}, shares as means over decisions, leak, gap and N_eff as medians.{bold}{cut}"
    return [note(words), table("Heads", head, rows, marked)]


def _verdict(found: Audit) -> str:
    verdict, last = found.verdict, found.lengths[-1]
    fails = verdict.fails_from is not None
    title = f"Fails from {verdict.fails_from} {found.unit}" if fails else "No failure at any of these lengths"
    sentences = []
    if fails:
        heads = ", ".join(f"{layer}.{head}" for layer, head in verdict.heads)
        if found.task == ADDITION:
            sentences.append(f"Heads in which the repairing edit matters: {heads or 'none by itself'}.")
        else:
            sentences.append(f"Heads that lose their targets: {heads or 'none'}.")
        sentences.append(
            f"Repaired by {verdict.repaired_by}." if verdict.repaired_by else "No edit that was tried repairs it."
        )
    about = {
        "decisions wrong": f"{last.wrong} of {last.decisions} at {last.length} {found.unit}",
        "cases exact": f"{last.exact:.2f} (95% interval {last.low:.2f} to {last.high:.2f})",
        "first-token sinks": sink_words(found).split(": ", 1)[1],
    }
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<header class="{"fails" if fails else "fine"}">'
        f'<p class="checkpoint">{escape(found.model)}, task {escape(found.task)}</p>'
        f"<h1>{escape(title)}</h1>{words}{facts(about)}</header>{lines(describe(found)[1:-1])}"
    )


def _made(found: Audit, run: Mapping[str, Any]) -> str:
    lengths = ",".join(str(row.length) for row in found.lengths)
    command = ["leaksum", "audit", found.model, "--lengths", lengths]
    command += ["--task", found.task] * (found.task != ADDITION)
    command += [part for name in ("cases", "seed") if name in run for part in (f"--{name}", str(run[name]))]
    about = {
        "command": shlex.join(command),
        "run": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in run.items()) or "not recorded",
    }
    return f'<section id="made"><h2>How this was made</h2>{facts(about, "list")}</section>'
