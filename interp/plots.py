"""Figures: every one a function from results to a plotly figure, whose docstring says what it shows.

Colours are Okabe and Ito's (2008), told apart by colour-blind readers and in print; light and dark are two plotly
templates. :data:`KINDS` are the figures that ``leaksum plot`` draws from a checkpoint, and :func:`save` writes a figure
as a page that works offline, or as an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.interventions import Head, head_words
from interp.leak import median
from interp.ledger import Ledger, LookupLedger, build_ledger
from interp.passes import run_problems
from interp.profile import PARTS, Profile
from models.addition import LOOKUPS, STATES, Problem
from models.attention import Span
from models.config import InputError
from models.counters import REACH
from models.files import write_bytes, write_text
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd

    from interp.audit import Audit, HeadRow
    from interp.decisions import Reach, Score
    from interp.during import During

LookupKey = tuple[str, bool]

MOST_BINS = 160  # columns drawn one by one up to here, in bins of equal width beyond
MOST_CELLS = 300  # tokens of an attention map drawn one by one up to here, in bins beyond
LEAK_BINS = 12  # bins of the number of keys, equal on a log axis
GAP_BINS = 40

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"  # Okabe and Ito (2008)
ORANGE, VERMILLION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
GREY = "#808080"  # seen on white and on black
CLASS_COLOURS = {
    "target": BLUE,
    "sink": ORANGE,
    "self": SKY,
    "near": GREEN,
    "separator": PURPLE,
    "far": VERMILLION,
}  # in the order they are stacked
PART_STYLES = {"content": (GREEN, "solid"), "rotation": (PURPLE, "dash"), "decay": (ORANGE, "dot")}
BESIDE = {"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"}  # a legend of many lines
TRAINED = {"fillcolor": GREY, "opacity": 0.18, "line_width": 0, "layer": "below"}


def _template(ink: str, paper: str, grid: str, line: str, wrong: Sequence[str]) -> Any:
    """A plotly template.

    ``line``: colour of a figure's first line. ``wrong``: colours of a share of wrong decisions, from none through a few
    to the most.
    """
    axis = {"gridcolor": grid, "linecolor": ink, "zeroline": False, "showline": True, "ticks": "outside"}
    axis |= {"tickcolor": ink, "automargin": True, "title": {"standoff": 8}}
    none, few, some, most = wrong
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": [line, VERMILLION, GREEN, PURPLE, ORANGE],
            "xaxis": axis,
            "yaxis": axis,
            "margin": {"l": 60, "r": 16, "t": 48, "b": 56},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "hoverlabel": {"bgcolor": paper, "bordercolor": grid, "font": {"color": ink}},
            "coloraxis": {"colorscale": [[0, none], [1e-6, few], [0.5, some], [1, most]]},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": ink},
        }
    )


LIGHT = _template("#1f2328", "#ffffff", "#e1e5ea", BLUE, ("#e8ecf0", "#fbd0a8", "#d55e00", "#5c1a00"))
DARK = _template("#e4e7eb", "#15181c", "#343b44", SKY, ("#262c33", "#7a3300", "#ee7d22", "#ffe6cc"))


# Which head


@dataclass(frozen=True)
class View:
    """One head and the lookup in which its target lost most, at training length and at the failing length."""

    head: Head
    key: LookupKey
    trained: LookupLedger
    longer: LookupLedger

    @property
    def title(self) -> str:
        return f"Head {self.head[0]}.{self.head[1]}, {lookup_words(self.key)}"


def lookup_words(key: LookupKey) -> str:
    """``("carry", False)`` as "carry with nothing to find", the words of the evidence."""
    return key[0].replace("_", " ") + ("" if key[1] else " with nothing to find")


def views_of(heads: Sequence[Head], trained: Ledger, longer: Ledger) -> list[View]:
    """Of each head the lookup, something to find or not, whose target lost the most of its mean share.

    Lookups of a single column, as that of a carry into column 0, come last: they have no course to show.
    """
    lost = _lost(trained, longer)
    keys = [min(lost, key=lambda key: lost[key][head]) for head in heads]
    return [View(head, key, trained.lookups[key], longer.lookups[key]) for head, key in zip(heads, keys, strict=True)]


def view_of(head: Head, trained: Ledger, longer: Ledger) -> View:
    """:func:`views_of` of one head."""
    return views_of([head], trained, longer)[0]


def most_lost(trained: Ledger, longer: Ledger, key: LookupKey | None = None) -> Head:
    """The head whose target lost the most of its mean share, in this lookup or in any."""
    lost = _lost(trained, longer) if key is None else _changes([key], trained, longer)
    _, layer, head = min((float(x), *at) for values in lost.values() for at, x in np.ndenumerate(values))
    return int(layer), int(head)


def _lost(trained: Ledger, longer: Ledger) -> dict[LookupKey, np.ndarray]:
    both = [key for key in longer.lookups if key in trained.lookups]
    return _changes([key for key in both if np.ptp(longer.lookups[key].column)] or both, trained, longer)


def _changes(keys: Sequence[LookupKey], trained: Ledger, longer: Ledger) -> dict[LookupKey, np.ndarray]:
    """By lookup, how much the mean share of the target changed, ``[layer, head]``."""
    return {key: longer.lookups[key].share.mean(-1) - trained.lookups[key].share.mean(-1) for key in keys}


# Figures


def reach_figure(curves: Mapping[str, Reach], trained_digits: int | None = None) -> go.Figure:
    """Share of problems exact against digits, with Wilson's 95% intervals, of one checkpoint or several.

    ``curves``: by the name in the legend. Lengths up to ``trained_digits`` are shaded, where it is given.
    """
    figure = _figure(340 + 18 * max(0, len(curves) - 3))
    symbols = ("circle", "diamond", "square", "triangle-up", "x", "star")
    every = sorted({digits for curve in curves.values() for digits in curve.scores})
    for i, (name, curve) in enumerate(curves.items()):
        rows = curve.to_json()
        exact = [row["exact"] for row in rows]
        figure.add_scatter(
            x=[row["digits"] for row in rows],
            y=exact,
            error_y={
                "array": [row["high"] - row["exact"] for row in rows],
                "arrayminus": [row["exact"] - row["low"] for row in rows],
                "thickness": 1.5,
                "width": 5,
            },
            mode="lines+markers",
            marker={"size": 9, "symbol": symbols[i % len(symbols)]},
            name=as_text(name) if len(curves) > 1 else "problems exact, 95% interval",
            customdata=[[row["problems"], row["wrong"], row["decisions"]] for row in rows],
            hovertemplate="%{x} digits: %{y:.2f} of %{customdata[0]} problems exact<br>"
            "%{customdata[1]} of %{customdata[2]} decisions wrong<extra></extra>",
            showlegend=True,
        )
    if trained_digits is not None:
        _shade(figure, trained_digits, f"trained: up to {trained_digits} digits")
    wide = every[-1] > 12 * every[0] and every[0] >= (trained_digits or 1)
    if wide:
        figure.update_xaxes(type="log", range=[np.log10(every[0] / 1.15), np.log10(every[-1] * 1.15)])
    else:
        figure.update_xaxes(range=[0, 1.04 * max(every)])
    figure.update_xaxes(title="length of the longer operand (digits)", tickvals=every)
    figure.update_yaxes(title="problems exact (share)", range=[-0.03, 1.06])
    return figure


def lengths_figure(found: Audit) -> go.Figure:
    """Share of decisions right, and of cases exact with Wilson's 95% intervals, against length."""
    rows = found.lengths
    x = [row.length for row in rows]
    figure = _figure(340)
    exact = [row.exact for row in rows]
    figure.add_scatter(
        x=x,
        y=[row.right for row in rows],
        mode="lines+markers",
        marker={"size": 9},
        name="decisions right",
        customdata=[[row.wrong, row.decisions] for row in rows],
        hovertemplate="%{y:.3f} right, %{customdata[0]} of %{customdata[1]} wrong<extra></extra>",
    )
    figure.add_scatter(
        x=x,
        y=exact,
        error_y={
            "array": [row.high - row.exact for row in rows],
            "arrayminus": [row.exact - row.low for row in rows],
            "thickness": 1.5,
            "width": 5,
        },
        mode="lines+markers",
        marker={"size": 9, "symbol": "diamond"},
        line={"dash": "dash"},
        name="cases exact, 95% interval",
        hovertemplate="%{y:.2f} of cases exact<extra></extra>",
    )
    _length_axis(figure, found)
    figure.update_yaxes(title="right (share)", range=[-0.03, 1.06])
    return figure


def head_shares_figure(found: Audit, rows: Sequence[HeadRow]) -> go.Figure:
    """One head's mean share on its targets, the first token, the learned sink and far keys, against length."""
    figure = _figure(320)
    kinds = {
        "target": ("target_share", BLUE, "circle", "solid"),
        "first token": ("first_token_share", GREEN, "square", "dot"),
        "learned sink": ("null_sink_share", ORANGE, "triangle-up", "dash"),
        "far": ("far_share", VERMILLION, "diamond", "dashdot"),
    }
    for name, (key, colour, symbol, dash) in kinds.items():
        values = [getattr(row, key) for row in rows]
        if all(value is None for value in values):
            continue
        figure.add_scatter(
            x=[row.length for row in rows],
            y=values,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"size": 8, "symbol": symbol},
            name=name,
            hovertemplate=f"{name}: %{{y:.3f}}<extra></extra>",
        )
    _length_axis(figure, found)
    figure.update_yaxes(title="attention (share)", range=[-0.03, 1.06])
    return figure.update_layout(showlegend=True)


def head_leak_figure(found: Audit, rows: Sequence[HeadRow]) -> go.Figure:
    """One head's median leak and N_eff against length; a target keeps a majority while its leak is below 1."""
    figure = _figure(320)
    x = [row.length for row in rows]
    gaps = [[row.gap] for row in rows]
    for name, key, colour, symbol in (("leak", "leak", BLUE, "circle"), ("N_eff", "n_eff", VERMILLION, "diamond")):
        figure.add_scatter(
            x=x,
            y=[value if value > 0 else None for value in (getattr(row, key) for row in rows)],
            mode="lines+markers",
            line={"color": colour},
            marker={"size": 8, "symbol": symbol},
            name=name,
            customdata=gaps,
            hovertemplate=f"{name} %{{y:.3g}}, gap %{{customdata[0]:.1f}}<extra></extra>",
        )
    figure.add_scatter(
        x=x,
        y=[1.0] * len(x),
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 2},
        name="majority lost: leak = 1",
        hoverinfo="skip",
    )
    _length_axis(figure, found)
    figure.update_yaxes(title="leak, N_eff (medians)", type="log", exponentformat="power", nticks=6)
    return figure


def trials_figure(found: Audit) -> go.Figure:
    """Of each edit at the longest length tried, decisions still wrong and decisions that it broke."""
    longest = max(trial.length for trial in found.trials)
    trials = [trial for trial in found.trials if trial.length == longest]
    names = [as_text(trial.name + head_words(trial.heads)) for trial in trials]
    figure = _figure(150 + 26 * len(trials))
    still = [trial.wrong - trial.broken for trial in trials]
    parts = (("still wrong", still, BLUE), ("broken by the edit", [trial.broken for trial in trials], VERMILLION))
    for name, values, colour in parts:
        figure.add_bar(
            x=values,
            y=names,
            orientation="h",
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"%{{y}}: %{{x}} {name}<extra></extra>",
        )
    figure.add_vline(
        x=trials[0].before, line={"color": GREY, "dash": "dash", "width": 2}, showlegend=True, name="without an edit"
    )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title=f"decisions wrong at {longest} {found.unit}, of {trials[0].decisions}")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", title="edit")
    return _when_narrow(figure, yaxis={"title": {"text": ""}, "tickfont": {"size": 11}})


def sinks_figure(found: Audit) -> go.Figure:
    """Each head's mean weight on the first token over all queries, and its share on a learned sink, at the longest
    length, beside what even attention gives the first token and the threshold of a sink head.
    """
    last = found.sinks[-1]
    rows = {(row.layer, row.head): row for row in found.heads if row.length == last.length}
    names = [f"{layer}.{head}" for layer, head in rows]
    figure = _figure(360)
    kinds = (
        ("first token", "first_token_importance", GREEN, "square"),
        ("learned sink", "null_sink_share", ORANGE, "triangle-up"),
    )
    for name, key, colour, symbol in kinds:
        values = [getattr(row, key) for row in rows.values()]
        if all(value is None for value in values):
            continue
        figure.add_scatter(
            x=names,
            y=values,
            mode="markers",
            marker={"size": 9, "symbol": symbol, "color": colour},
            name=name,
            hovertemplate=f"head %{{x}}: %{{y:.3f}} on the {name}<extra></extra>",
        )
    lines = (("sink head: above", last.threshold, "dash"), ("even attention, first token:", last.uniform_value, "dot"))
    for name, value, dash in lines:
        figure.add_scatter(
            x=[names[0], names[-1]],
            y=[value, value],
            mode="lines",
            line={"color": GREY, "dash": dash, "width": 2},
            name=f"{name} {value:.3g}",
            hoverinfo="skip",
        )
    figure.update_xaxes(title="head (layer.head)", type="category", nticks=24)
    figure.update_yaxes(title="mean weight (share)", range=[-0.03, 1.06])
    return figure.update_layout(showlegend=True)


def _length_axis(figure: Any, found: Audit) -> None:
    every = [row.length for row in found.lengths]
    if every[-1] > 4 * every[0]:
        figure.update_xaxes(type="log", range=[np.log10(every[0] / 1.15), np.log10(every[-1] * 1.15)])
    if len(every) <= 8:
        figure.update_xaxes(tickvals=every)
    figure.update_xaxes(title=f"length ({found.unit})")


def mistakes_figure(found: Score) -> go.Figure:
    """Share of decisions wrong by column and by which numbers have ended; the ends of sums are a row of their own."""
    rows = [*STATES, "eos"]
    labels = {"both": "both present", "neither": "neither (carry)", "eos": "end of sum"}
    row = np.where(found.eos, len(STATES), found.state)
    width, edges = column_bins(found.column)
    shape = (len(rows), len(edges))
    decisions, wrong = np.zeros(shape), np.zeros(shape)
    np.add.at(decisions, (row, found.column // width), 1)
    np.add.at(wrong, (row, found.column // width), found.wrong)
    with np.errstate(invalid="ignore"):
        share = wrong / decisions
    where = np.broadcast_to(np.array([_column_words(first, width) for first in edges]), shape)
    figure = _figure(330)
    figure.add_heatmap(
        x=edges + (width - 1) / 2,
        y=[labels.get(name, name.replace("_", " ")) for name in rows],
        z=share,
        customdata=np.stack([where, wrong.astype(int).astype(str), decisions.astype(int).astype(str)], axis=-1),
        hovertemplate="%{customdata[0]}, %{y}<br>%{customdata[1]} of %{customdata[2]} decisions wrong<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        ygap=3,
    )
    most = float(np.nanmax(share)) or 1.0
    colorbar = {"title": {"text": "wrong (share of decisions)", "side": "right"}, "thickness": 12, "len": 1.0}
    figure.update_layout(coloraxis={"cmin": 0, "cmax": most, "colorbar": colorbar}, margin={"t": 36})
    figure.update_xaxes(title=_column_axis(width), range=[-0.5, edges[-1] + width - 0.5], showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", title="numbers present")
    flat = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "title": {"side": "top"}}
    return _when_narrow(figure, coloraxis={"colorbar": flat}, margin={"t": 70}, yaxis={"title": {"text": ""}})


def shares_figure(
    head: Head,
    key: LookupKey,
    frames: Sequence[pd.DataFrame],
    digits: Sequence[int] | None = None,
    most_bins: int = MOST_BINS,
) -> go.Figure:
    """Who gets a head's attention by column, stacked to 1: one panel a length, the last the widest.

    ``frames`` are :meth:`interp.shares.Shares.to_frame`; ``digits``, if given, are the lengths that axes name.
    """
    panels = len(frames)
    widths = [0.27] * (panels - 1) + [1 - 0.27 * (panels - 1)]
    figure = make_subplots(rows=1, cols=panels, shared_yaxes=True, column_widths=widths, horizontal_spacing=0.03)
    lengths = [""] * panels if digits is None else [f", {n} digits" for n in digits]
    for side, (frame, length) in enumerate(zip(frames, lengths, strict=True), start=1):
        here = (frame["lookup"] == key[0]) & (frame["present"] == key[1])
        rows = frame[here & (frame["layer"] == head[0]) & (frame["head"] == head[1])]
        column, queries = rows["column"].to_numpy(), rows["queries"].to_numpy()
        width, edges = column_bins(column, most_bins)
        count = np.bincount(column // width, weights=queries, minlength=len(edges))
        use = count > 0
        for name, colour in CLASS_COLOURS.items():
            total = np.bincount(column // width, weights=queries * rows[name].to_numpy(), minlength=len(edges))
            figure.add_bar(
                x=edges[use] + (width - 1) / 2,
                y=total[use] / count[use],
                width=width,
                name=name,
                legendgroup=name,
                showlegend=side == panels,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate="%{y:.3f}",
                row=1,
                col=side,
            )
        words = (_column_axis(width) if side == panels else "column") + length
        figure.update_xaxes(title=words, range=[-0.5, edges[-1] + width - 0.5], col=side)
    figure.update_yaxes(range=[0, 1])
    figure.update_yaxes(title="attention (share)", col=1)
    figure.update_layout(
        _layout(340), barmode="stack", bargap=0, hovermode="x unified", legend={"traceorder": "normal"}
    )
    if panels != 2:
        return figure
    return _when_narrow(
        figure,
        height=560,
        xaxis={"domain": [0, 1]},
        xaxis2={"domain": [0, 1], "title": {"text": f"column{lengths[1]}"}},
        yaxis={"domain": [0.6, 1]},
        yaxis2={"domain": [0, 0.42], "showticklabels": True, "title": {"text": "attention (share)"}},
    )


def leak_figure(view: View, digits: tuple[int, int]) -> go.Figure:
    """Leak against the number of keys n that a query sees, median and quartiles in bins of n, at both lengths.

    A key keeps a majority as long as the leak is below 1. ``n exp(-g)`` is the leak of n keys that all trail by g, the
    median gap at training length: it reaches 1 at ``n = exp(g)``, so that a majority needs ``g > ln n``.
    """
    figure = _figure(400)
    styles = (("as trained", "circle"), ("now", "diamond"))
    drawn = []
    for found, length, (words, symbol) in zip((view.trained, view.longer), digits, styles, strict=True):
        n, low, middle, high = leak_by_keys(found.keys, found.leak[view.head])
        drawn += [low, middle, high]
        figure.add_scatter(
            x=n,
            y=middle,
            error_y={"array": high - middle, "arrayminus": middle - low, "thickness": 1, "width": 3},
            mode="lines+markers",
            marker={"size": 8, "symbol": symbol},
            name=f"{length} digits, {words}",
            hovertemplate="n = %{x:.0f}: leak %{y:.3g}<extra></extra>",
        )
    keys = np.concatenate([view.trained.keys, view.longer.keys])
    ends = np.array([keys.min(), keys.max()], dtype=float)
    figure.add_scatter(
        x=ends,
        y=[1.0, 1.0],
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 2},
        name="majority lost: leak = 1",
        hoverinfo="skip",
    )
    gap = float(np.quantile(view.trained.gap[view.head], 0.5, method="lower"))
    if np.isfinite(gap):
        drawn.append(ends * np.exp(-gap))
        lost = float(np.exp(gap))
        against = " < ln n" if lost <= ends[0] else " > ln n" if lost >= ends[1] else ""
        figure.add_scatter(
            x=ends,
            y=ends * np.exp(-gap),
            mode="lines",
            line={"color": GREY, "dash": "dash", "width": 2},
            name=f"n e<sup>\N{MINUS SIGN}g</sup>, g = {gap:.1f}{against}",
            hoverinfo="skip",
        )
        if not against:
            figure.add_scatter(
                x=[lost],
                y=[1.0],
                mode="markers",
                marker={"symbol": "x", "size": 10, "color": GREY},
                name=f"g > ln n up to n = {lost:.0f}",
                hoverinfo="skip",
            )
    values = np.concatenate([*drawn, [1.0]])
    values = np.log10(values[np.isfinite(values) & (values > 0)])
    bottom, top = int(np.floor(values.min())), int(np.ceil(values.max() + 0.01))
    decades = range(bottom, top + 1, max(1, round((top - bottom) / 8)))
    figure.update_xaxes(title="keys the query sees, n (tokens)", type="log", tickvals=_ticks(*ends))
    figure.update_yaxes(
        title="leak (ratio to the target's mass)",
        type="log",
        range=[bottom - 0.1, top],
        tickvals=[10.0**d for d in decades],
        ticktext=[f"{10.0**d:g}" if abs(d) <= 3 else f"10<sup>{d}</sup>" for d in decades],
    )
    return _when_narrow(figure, height=440)


def profile_figure(profile: Profile) -> go.Figure:
    """A head's score against distance, mean and one standard deviation to either side, and the parts it is made of."""
    distance = np.flatnonzero(profile.count > 0)
    mean, spread = profile.mean[:, distance], profile.spread[:, distance]
    score = PARTS.index("score")
    figure = _figure(400)
    figure.add_scatter(
        x=distance,
        y=mean[score],
        mode="lines",
        line={"width": 2.5},
        name="score, mean",
        customdata=np.stack([spread[score], profile.count[distance]], axis=-1),
        hovertemplate="%{y:.2f} ± %{customdata[0]:.2f} (%{customdata[1]:,.0f} pairs)",
    )
    figure.add_scatter(
        x=np.concatenate([distance, distance[::-1]]),
        y=np.concatenate([mean[score] + spread[score], (mean[score] - spread[score])[::-1]]),
        fill="toself",
        fillcolor="rgba(60,150,210,0.3)",
        line={"width": 0},
        name="score, ±1 standard deviation",
        hoverinfo="skip",
    )
    for name, (colour, dash) in PART_STYLES.items():
        figure.add_scatter(
            x=distance,
            y=mean[PARTS.index(name)],
            mode="lines",
            line={"color": colour, "dash": dash, "width": 2},
            name=name,
            visible="legendonly",
            hovertemplate="%{y:.2f}",
        )
    far = profile.trained_distance
    _shade(figure, far, f"trained: up to {far} {profile.unit}")
    figure.update_xaxes(title=f"distance from query to key ({profile.unit})", range=[0, max(distance[-1], 1)])
    figure.update_yaxes(title="score (nats)", zeroline=True, zerolinecolor=GREY, zerolinewidth=1)
    figure.update_layout(hovermode="x unified")
    return _when_narrow(figure, height=460)


def gaps_figure(view: View, digits: tuple[int, int]) -> go.Figure:
    """How the gaps to the best other key are distributed, at both lengths, and what a majority against all keys takes.

    The dotted lines stand at ``ln n``, n being the median number of keys that a query sees at that length: with every
    key trailing by g, the target keeps a majority if ``g > ln n``.
    """
    figure = _figure(380)
    sides = ((view.trained, digits[0], "as trained", BLUE), (view.longer, digits[1], "now", VERMILLION))
    gaps = [found.gap[view.head] for found, *_ in sides]
    finite = np.concatenate([gap[np.isfinite(gap)] for gap in gaps])
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)  # none: bars of no height
    edges = np.linspace(low, max(high, low + 1e-3), GAP_BINS + 1)
    for gap, (found, length, words, colour) in zip(gaps, sides, strict=True):
        share = np.histogram(gap[np.isfinite(gap)], edges)[0] / len(gap)
        n = float(np.median(found.keys))
        figure.add_bar(
            x=(edges[1:] + edges[:-1]) / 2,
            y=share,
            width=np.diff(edges),
            marker={"color": colour, "line": {"width": 0}},
            opacity=0.6,
            name=f"{length} digits, {words}",
            hovertemplate="gap %{x:.2f}: %{y:.3f} of the queries<extra></extra>",
        )
        figure.add_scatter(
            x=[np.log(n)] * 2,
            y=[0, 1],
            mode="lines",
            line={"color": colour, "dash": "dot", "width": 2},
            name=f"ln n, n = {n:.0f} keys",
            hoverinfo="skip",
        )
        figure.data[-1].update(yaxis="y2")
    figure.update_layout(
        barmode="overlay", bargap=0, yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    )
    figure.update_xaxes(title="gap to the best other key (nats)")
    figure.update_yaxes(title="queries (share)", rangemode="tozero")
    return figure


@dataclass(frozen=True)
class Quantity:
    """What a grid of heads is coloured by: words, unit, ``[layer, head]`` of a lookup, and whether decades matter."""

    words: str
    unit: str
    of: Callable[[LookupLedger], np.ndarray]
    log: bool = False


QUANTITIES: dict[str, Quantity] = {
    "share": Quantity("target's share, mean", "share", lambda found: found.share.mean(-1)),
    "sink": Quantity("sink's share, mean", "share", lambda found: found.sink_share.mean(-1)),
    "far": Quantity("far keys' share, mean", "share", lambda found: found.class_shares[..., -1].mean(-1)),
    "leak": Quantity("leak, median", "ratio to the target's mass", lambda found: median(found.leak), log=True),
    "gap": Quantity("gap to the best other key, median", "nats", lambda found: median(found.gap)),
    "n_eff": Quantity("N_eff, median", "keys", lambda found: median(found.n_eff), log=True),
}


def heads_figure(
    key: LookupKey, trained: LookupLedger, longer: LookupLedger, digits: tuple[int, int], quantity: str = "share"
) -> go.Figure:
    """Every head as a cell, coloured by one quantity of one lookup: training length beside the failing length.

    Args:
        quantity: one of :data:`QUANTITIES`.
    """
    what = QUANTITIES[_one_of(QUANTITIES, quantity, "quantity")]
    values = [what.of(found) for found in (trained, longer)]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = [np.log10(x) if what.log else x for x in values]
    shown = [np.where(np.isfinite(x), x, np.nan) for x in shown]
    layers, heads = values[0].shape
    names = [f"{n} digits, {words}" for n, words in zip(digits, ("as trained", "now"), strict=True)]
    figure = make_subplots(rows=1, cols=2, subplot_titles=names, horizontal_spacing=0.06, shared_yaxes=True)
    for side, (colour, value) in enumerate(zip(shown, values, strict=True), start=1):
        figure.add_heatmap(
            x=[str(head) for head in range(heads)],
            y=[str(layer) for layer in range(layers)],
            z=colour,
            text=[[_short(x) for x in row] for row in value],
            texttemplate="%{text}" if heads <= 12 else None,
            hovertemplate="head %{y}.%{x}: %{text}<extra></extra>",
            coloraxis="coloraxis",
            xgap=2,
            ygap=2,
            row=1,
            col=side,
        )
    ends = np.concatenate([x.ravel() for x in shown])
    low, high = (0.0, 1.0) if what.unit == "share" else (float(np.nanmin(ends)), float(np.nanmax(ends)))
    bar = {"title": {"text": f"{what.words} ({what.unit})", "side": "right"}, "thickness": 12}
    if what.log:
        decades = range(int(np.floor(low)), int(np.ceil(high)) + 1, max(1, round((high - low) / 6)))
        bar |= {"tickvals": list(decades), "ticktext": [f"{10.0**d:g}" for d in decades]}
    colours = {"colorscale": "Cividis", "cmin": low, "cmax": max(high, low + 1e-9), "colorbar": bar}
    figure.update_layout(_layout(160 + 60 * layers), coloraxis=colours, margin={"t": 84})
    figure.update_layout(title=_title(lookup_words(key).capitalize()))
    figure.update_xaxes(title="head", type="category", showgrid=False, ticks="", showline=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, ticks="", showline=False)
    figure.update_yaxes(title="layer", col=1)
    return figure


def attention_figure(model: HookedAdder, problem: Problem, head: Head) -> go.Figure:
    """One head's attention on one problem: queries down, keys across, targets marked.

    Longer than :data:`MOST_CELLS` tokens, a cell is a bin of tokens: the share that a query of the bin gives to all
    keys of the other bin, averaged over its queries. Colours grow with the square root of the share.
    """
    layer, index = check_head(model, head)
    batch = model.task.encode([problem])
    tokens = batch.tokens.shape[1]
    width = -(-tokens // MOST_CELLS)
    bins = -(-tokens // width)
    shares = np.zeros((bins, bins))

    def watch(_: Any) -> list[tuple[str, Callable[..., Any]]]:
        def keep(pattern: Any, hook: Any) -> None:
            span = Span.of(hook)
            queries = np.arange(span.query.start, span.query.stop) // width
            keys = span.positions.numpy() // width
            np.add.at(shares, (queries[:, None], keys[None]), pattern[0, index].float().numpy())

        return [(f"blocks.{layer}.attn.hook_pattern", keep)]

    for _ in run_problems(model, [problem], extra_hooks=watch, every_key=True):
        pass
    shares /= np.minimum(width, tokens - width * np.arange(bins))[:, None]
    at = np.arange(bins) * width
    words = [_token_words(model, batch, int(first), min(int(first) + width, tokens)) for first in at]
    shares[np.arange(bins)[:, None] < np.arange(bins)] = np.nan  # the future
    figure = _figure(760)
    figure.add_heatmap(
        x=at + (width - 1) / 2,
        y=at + (width - 1) / 2,
        z=np.sqrt(shares),
        customdata=np.dstack(
            [
                np.broadcast_to(np.array(words)[:, None], shares.shape),
                np.broadcast_to(np.array(words)[None], shares.shape),
                np.vectorize(_short, otypes=[str])(shares),
            ]
        ),
        hovertemplate="query %{customdata[0]}<br>key %{customdata[1]}<br>share %{customdata[2]}<extra></extra>",
        hoverongaps=False,
        colorscale=[[0, "#ffffff"], [0.25, "#cfe3f1"], [0.6, BLUE], [1, "#002b49"]],
        zmin=0,
        zmax=1,
        colorbar={
            "title": {"text": "attention (share)", "side": "right"},
            "thickness": 12,
            "tickvals": [0, 0.1**0.5, 0.3**0.5, 0.6**0.5, 1],
            "ticktext": ["0", "0.1", "0.3", "0.6", "1"],
        },
    )
    pairs: dict[tuple[int, int], None] = {}
    for lookup in batch.lookups.values():
        where = lookup.present[0].nonzero()[:, 0]
        for query, targets in zip(where.tolist(), lookup.targets[0, where].tolist(), strict=True):
            for target in targets:
                if target >= 0:
                    pairs[query // width, target // width] = None
    if pairs:
        query, target = np.array(list(pairs)).T
        figure.add_scatter(
            x=target * width + (width - 1) / 2,
            y=query * width + (width - 1) / 2,
            mode="markers",
            marker={"symbol": "square-open", "size": max(3, min(12, 560 // bins)), "color": VERMILLION},
            name="target of some lookup",
            hoverinfo="skip",
            showlegend=True,
        )
    unit = "token" if width == 1 else f"token, in bins of {width}"
    ticks: dict[str, Any] = {}
    if tokens <= 45:
        ticks = {"tickvals": list(range(tokens)), "ticktext": [_token_text(model, batch, i) for i in range(tokens)]}
    figure.update_xaxes(title=f"key ({unit})", range=[-0.5, bins * width - 0.5], showgrid=False, tickangle=0, **ticks)
    figure.update_yaxes(
        title=f"query ({unit})",
        range=[bins * width - 0.5, -0.5],
        showgrid=False,
        scaleanchor="x",
        constrain="domain",
        **ticks,
    )
    figure.update_xaxes(constrain="domain")
    figure.update_layout(title=_title(f"Head {layer}.{index}"), margin={"t": 84}, width=820)
    return figure


def counts_figure(model: HookedAdder, problem: Problem, head: Head) -> go.Figure:
    """What a head's counters have counted at each token of one problem (above), and its gates and resets (below)."""
    from interp.counters import require_counters

    require_counters(model)
    layer, index = check_head(model, head)
    batch = model.task.encode([problem])
    kept: dict[str, np.ndarray] = {}

    def watch(_: Any) -> list[tuple[str, Callable[..., Any]]]:
        def keep(values: Any, hook: Any) -> None:
            kept[hook.name.rsplit("_", 1)[-1]] = values[0, :, index].float().numpy()  # [pos, counter]

        return [(f"blocks.{layer}.attn.hook_{what}", keep) for what in ("count", "gate", "reset")]

    for _ in run_problems(model, [problem], extra_hooks=watch):
        pass
    tokens = len(kept["count"])
    words = [_token_words(model, batch, i, i + 1) for i in range(tokens)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.62, 0.38], vertical_spacing=0.05)
    figure.update_layout(_layout(520), title=_title(f"Head {layer}.{index}"), legend=BESIDE)
    for counter in range(kept["count"].shape[1]):
        colour = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)[counter % 6]
        shared = {"x": np.arange(tokens), "customdata": words, "legendgroup": str(counter)}
        mode = "lines+markers" if tokens <= 120 else "lines"
        for what, row, dash, symbol in (
            ("count", 1, "solid", "circle"),
            ("gate", 2, "solid", "circle"),
            ("reset", 2, "dot", "x"),
        ):
            figure.add_scatter(
                **shared,
                line={"color": colour, "width": 2, "dash": dash},
                marker={"size": 5, "symbol": symbol},
                y=kept[what][:, counter],
                mode=mode,
                name=f"{what} {counter}",
                hovertemplate=f"%{{customdata}}<br>{what} {counter}: %{{y:.3f}}<extra></extra>",
                row=row,
                col=1,
            )
    for position in (batch.column[0] < 0).nonzero()[:, 0].tolist():
        figure.add_vline(x=position, line={"color": GREY, "dash": "dash", "width": 1})
    ticks: dict[str, Any] = {}
    if tokens <= 60:
        ticks = {"tickvals": list(range(tokens)), "ticktext": [_token_text(model, batch, i) for i in range(tokens)]}
    figure.update_xaxes(title="token (position in the sequence)", row=2, tickangle=0, **ticks)
    figure.update_yaxes(title="count (digits)", row=1)
    figure.update_yaxes(title="gate, reset", range=[-0.05, 1.05], row=2)
    return figure


def kernels_figure(model: HookedAdder) -> go.Figure:
    """What each kernel adds to a score, by the difference of counts; a panel a layer, a colour a head."""
    from interp.counters import require_counters

    require_counters(model)
    layers = model.cfg.n_layers
    titles = [f"layer {i}" for i in range(layers)]
    figure = make_subplots(rows=1, cols=layers, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    figure.update_layout(_layout(420), legend=BESIDE)
    apart = np.arange(-REACH, REACH + 1)
    colours = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
    dashes = ("solid", "dot", "dash", "dashdot")
    for layer, block in enumerate(model.blocks):
        kernels = block.attn.counters.kernel.detach().float().numpy()
        for head, counter in np.ndindex(*kernels.shape[:2]):
            figure.add_scatter(
                x=apart,
                y=kernels[head, counter],
                mode="lines",
                line={"color": colours[head % 6], "dash": dashes[counter % 4], "width": 2},
                name=f"head {head}, counter {counter}",
                legendgroup=f"{head} {counter}",
                showlegend=layer == 0,
                hovertemplate=f"head {layer}.{head}, counter {counter}<br>%{{x:+d}}: %{{y:.2f}}<extra></extra>",
                row=1,
                col=layer + 1,
            )
    figure.update_xaxes(dtick=4)
    figure.update_xaxes(title="query's count less key's (digits)", col=(layers + 1) // 2)
    figure.update_yaxes(title="added to the score (nats)", col=1)
    return figure


def during_figure(found: During) -> go.Figure:
    """A run as it went: problems exact, and of the head that performs each lookup in the end the gap, the sink's score
    and the leak (medians over queries), against the training step. Grey: the logarithm of the keys a query sees,
    which the gap has to exceed."""
    steps = [moment.step for moment in found.moments]
    panels = ("problems exact", "gap (nats)", "sink score (nats)", "leak")
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.035)
    figure.update_layout(_layout(820))
    exact = {
        "exact in training lengths": ("solid", [m.trained_exact for m in found.moments]),
        f"exact at {found.digits} digits": ("dash", [m.exact for m in found.moments]),
    }
    if found.moments[0].counters:
        exact["counters that follow the column"] = ("dot", [m.counting / m.counters for m in found.moments])
    for name, (dash, values) in exact.items():
        figure.add_scatter(
            x=steps, y=values, mode="lines", name=name, line={"color": GREY, "dash": dash, "width": 2}, row=1, col=1
        )
    colours = dict(zip(LOOKUPS, (BLUE, VERMILLION, GREEN, PURPLE), strict=True))
    for (lookup, (layer, head)), mine in found.courses().items():
        for row, value in enumerate(("gap", "sink_score", "leak"), start=2):
            figure.add_scatter(
                x=mine["step"],
                y=mine[value],
                mode="lines+markers",
                name=f"{lookup_words((lookup, True))}, head {layer}.{head}",
                legendgroup=lookup,
                showlegend=row == 2,
                line={"color": colours[lookup], "width": 2},
                marker={"size": 5},
                row=row,
                col=1,
            )
    figure.add_scatter(
        x=steps,
        y=[float(np.log(found.to_frame()["keys"].mean()))] * len(steps),
        mode="lines",
        name="ln of the keys a query sees",
        line={"color": GREY, "dash": "dashdot", "width": 1.5},
        row=2,
        col=1,
    )
    for row, name in enumerate(panels, start=1):
        figure.update_yaxes(title=name, row=row, col=1)
    figure.update_yaxes(range=[-0.03, 1.03], row=1, col=1)
    figure.update_yaxes(exponentformat="none", row=3, col=1)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, row=4, col=1)
    figure.update_xaxes(title="training step", row=4, col=1)
    return figure


def column_bins(column: np.ndarray, most: int = MOST_BINS) -> tuple[int, np.ndarray]:
    """Width of a bin of columns and the first column of each, at most so many of them."""
    columns = int(column.max()) + 1
    width = -(-columns // most)
    return width, np.arange(0, columns, width)


def leak_by_keys(keys: np.ndarray, leak: np.ndarray) -> tuple[np.ndarray, ...]:
    """Median n, and lower quartile, median and upper quartile of the leak, in bins of n that are equal on a log axis.

    Quantiles are the lower of two values, so that an infinite leak stays infinite and never becomes NaN.
    """
    edges = np.geomspace(keys.min(), keys.max() + 1, LEAK_BINS + 1)
    which = np.clip(np.searchsorted(edges, keys, side="right") - 1, 0, LEAK_BINS - 1)
    rows = []
    for i in np.unique(which):
        quartiles = np.quantile(leak[which == i], [0.25, 0.5, 0.75], method="lower")
        rows.append((np.median(keys[which == i]), *quartiles))
    return tuple(np.array(rows).T)


def check_head(model: HookedAdder, head: Head) -> Head:
    """The head, if the model has it.

    Raises:
        InputError: it has not.
    """
    layer, index = head
    if not (0 <= layer < model.cfg.n_layers and 0 <= index < model.cfg.n_heads):
        raise InputError(
            f"there is no head {layer}.{index}; layers run from 0 to {model.cfg.n_layers - 1}, "
            f"heads from 0 to {model.cfg.n_heads - 1}"
        )
    return head


def _one_of(known: Mapping[str, Any], name: str, what: str) -> str:
    if name not in known:
        raise InputError(f"no {what} is called {name[:60]!r}; there are {', '.join(known)}")
    return name


def _title(text: str) -> dict[str, Any]:
    return {"text": as_text(text), "x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 15}}


def as_text(text: str) -> str:
    """Text as plotly shows it: what it would read as markup is written out."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _short(x: float) -> str:
    """A number in a cell."""
    if not np.isfinite(x):
        return "\N{INFINITY}" if x > 0 else "\N{EN DASH}"
    return f"{x:.2f}" if x == 0 or 0.005 <= abs(x) < 100 else f"{x:.0e}" if abs(x) < 0.005 else f"{x:.3g}"


def _token_text(model: HookedAdder, batch: Any, position: int) -> str:
    return model.task.vocabulary.text(int(batch.tokens[0, position])).strip("<>")


def _token_words(model: HookedAdder, batch: Any, first: int, stop: int) -> str:
    """A token, or a bin of them, as a reader finds it: text, position, row and column."""
    if stop > first + 1:
        return f"tokens {first} to {stop - 1}"
    row, column = int(batch.row[0, first]), int(batch.column[0, first])
    where = f"row {row}, column {column}" if column >= 0 else "separator"
    return f"{_token_text(model, batch, first)!r} at {first} ({where})"


def _layout(height: int) -> dict[str, Any]:
    return {"template": LIGHT, "height": height}


def _figure(height: int) -> Any:
    return go.Figure(layout=_layout(height))


def _when_narrow(figure: Any, **layout: Any) -> Any:
    """What the page changes in the layout where the figure is narrow."""
    return figure.update_layout(meta={"narrow": layout})


def _shade(figure: Any, end: float, name: str) -> None:
    figure.add_vrect(x0=0, x1=end, name=name, showlegend=True, **TRAINED)


def _column_axis(width: int) -> str:
    return "column (0 = least significant" + (f"; bins of {width})" if width > 1 else ")")


def _column_words(first: int, width: int) -> str:
    return f"column {first}" if width == 1 else f"columns {first} to {first + width - 1}"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 ... within these, for a logarithmic axis."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [t for d in decades for t in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= t <= high]


# From a checkpoint to a figure


@dataclass(frozen=True)
class Request:
    """What ``leaksum plot`` is asked for.

    ``models``: by name; most figures take one. ``digits``: lengths; all figures but reach take the last alone.
    ``head``, ``lookup``: by default where the target lost the most of its share since training. ``absent``: the
    queries for which the lookup has nothing to find.
    """

    models: Mapping[str, HookedAdder]
    digits: Sequence[int] = (100,)
    problems: int = 20
    seed: int = 0
    head: Head | None = None
    lookup: str | None = None
    absent: bool = False
    quantity: str = "share"
    _ledgers: dict[int, Ledger] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> HookedAdder:
        if len(self.models) > 1:
            raise InputError(f"this figure takes one checkpoint, got {len(self.models)}; only reach takes several")
        return next(iter(self.models.values()))

    @property
    def lengths(self) -> tuple[int, int]:
        """Training length and the length asked for."""
        return min(self.model.config.task.max_digits, self.digits[-1]), self.digits[-1]

    def drawn(self, digits: int) -> list[Problem]:
        return self.model.task.evaluation_problems(digits, self.problems, self.seed)

    def ledger(self, digits: int) -> Ledger:
        if digits not in self._ledgers:
            self._ledgers[digits] = build_ledger(self.model, self.drawn(digits))
        return self._ledgers[digits]

    def view(self) -> View:
        """The head and lookup asked for, or those in which the target lost most."""
        trained, longer = (self.ledger(n) for n in self.lengths)
        key = self.key(trained, longer)
        head = check_head(self.model, self.head) if self.head else most_lost(trained, longer, key)
        if key is None:
            return view_of(head, trained, longer)
        return View(head, key, trained.lookups[key], longer.lookups[key])

    def key(self, trained: Ledger, longer: Ledger) -> LookupKey | None:
        if self.lookup is None:
            return None
        key = _one_of(dict.fromkeys(LOOKUPS), self.lookup, "lookup"), not self.absent
        if key not in trained.lookups or key not in longer.lookups:
            raise InputError(f"no query performs {lookup_words(key)} at both lengths; choose another --lookup")
        return key


@dataclass(frozen=True)
class Kind:
    """One kind of figure: what it shows, in a line, and how it comes about."""

    about: str
    draw: Callable[[Request], go.Figure]


def _reach(asked: Request) -> go.Figure:
    from interp.decisions import reach

    curves = {
        name: reach(model, sorted(set(asked.digits)), asked.problems, seed=asked.seed)
        for name, model in asked.models.items()
    }
    return reach_figure(curves, max(model.config.task.max_digits for model in asked.models.values()))


def _mistakes(asked: Request) -> go.Figure:
    from interp.decisions import score

    return mistakes_figure(score(asked.model, asked.drawn(asked.digits[-1]), seed=asked.seed))


def _shares(asked: Request) -> go.Figure:
    from interp.shares import Shares

    view = asked.view()
    frames = [Shares(asked.ledger(n)).to_frame() for n in asked.lengths]
    return _named(shares_figure(view.head, view.key, frames, asked.lengths), view.title)


def _leak(asked: Request) -> go.Figure:
    view = asked.view()
    return _named(leak_figure(view, asked.lengths), view.title)


def _gaps(asked: Request) -> go.Figure:
    view = asked.view()
    if not np.isfinite([*view.trained.gap[view.head], *view.longer.gap[view.head]]).any():
        raise InputError(f"{view.title} has no finite gap; choose another --lookup")
    return _named(gaps_figure(view, asked.lengths), view.title)


def _profile(asked: Request) -> go.Figure:
    from interp.profile import score_profile

    head = asked.view().head if asked.head is None else check_head(asked.model, asked.head)
    found = score_profile(asked.model, asked.drawn(asked.digits[-1]), head)
    return _named(profile_figure(found), f"Head {head[0]}.{head[1]}, {asked.digits[-1]} digits")


def _heads(asked: Request) -> go.Figure:
    view = asked.view()
    return heads_figure(view.key, view.trained, view.longer, asked.lengths, asked.quantity)


def _attention(asked: Request) -> go.Figure:
    (problem,) = asked.model.task.evaluation_problems(asked.digits[-1], 1, asked.seed)
    return attention_figure(asked.model, problem, asked.head or asked.view().head)


def _counters(asked: Request) -> go.Figure:
    (problem,) = asked.model.task.evaluation_problems(asked.digits[-1], 1, asked.seed)
    return counts_figure(asked.model, problem, asked.head or (0, 0))


KINDS: dict[str, Kind] = {
    "reach": Kind("problems exact against length, of several checkpoints", _reach),
    "mistakes": Kind("wrong decisions by column and by which numbers have ended", _mistakes),
    "heads": Kind("every head, coloured by one quantity of a lookup, in training and now", _heads),
    "shares": Kind("where a head's attention goes, by column, in training and now", _shares),
    "leak": Kind("a lookup's leak against the number of keys, with g > ln n", _leak),
    "gaps": Kind("how a lookup's gaps are distributed, in training and now", _gaps),
    "profile": Kind("a head's score against distance, and its parts", _profile),
    "attention": Kind("a head's attention on one problem, targets marked", _attention),
    "counters": Kind("what a head's counters count on one problem, with gates and resets", _counters),
    "kernels": Kind("what each kernel of counts adds to the score", lambda asked: kernels_figure(asked.model)),
}


def draw(kind: str, asked: Request) -> go.Figure:
    """A figure of one of :data:`KINDS`.

    Raises:
        InputError: no such kind, head, lookup or quantity, or several checkpoints where one is taken.
    """
    return KINDS[_one_of(KINDS, kind, "figure")].draw(asked)


FORMATS = (".html", ".svg", ".png")
IMAGE_WIDTH = 960


def check_format(path: Path) -> None:
    """Refuse a file whose ending is none of :data:`FORMATS`.

    Raises:
        InputError: it is none.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"{path.name[:60]!r} ends in none of {', '.join(FORMATS)}; a figure is one of these")


def save(figure: go.Figure, path: Path, title: str = "leaksum") -> None:
    """Write a figure by its file's ending: a page that works offline, or an image (which needs kaleido and Chromium).

    Raises:
        InputError: another ending, or no kaleido or browser to draw with.
        OSError: the file cannot be written; what was there is as it was.
    """
    check_format(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is there and no file; choose another")
    if path.suffix == ".html":
        from html import escape

        config = {"displaylogo": False, "responsive": True}
        page = figure.to_html(include_plotlyjs=True, full_html=True, config=config, div_id="figure")
        head = (
            f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
        )
        write_text(path, page.replace("<html>", '<html lang="en">', 1).replace("<head>", f"<head>{head}", 1))
        return
    try:
        image = figure.to_image(path.suffix[1:], width=figure.layout.width or IMAGE_WIDTH, scale=2)
    except Exception as error:  # whatever kaleido and the browser it starts make of it
        why = " ".join(str(error).split())[:120]
        raise InputError(
            f"{path.name[:60]!r} could not be drawn ({type(error).__name__}: {why}); images need "
            "`pip install 'leaksum[images]'` and Chromium or Chrome, --out FILE.html needs neither"
        ) from error
    write_bytes(path, image)


def _named(figure: Any, title: str) -> go.Figure:
    """With a title of its own, above the legend, which may take two lines."""
    more = 36 if len({trace.name for trace in figure.data if trace.showlegend is not False}) < 4 else 56
    top = (figure.layout.margin.t or 48) + more
    return figure.update_layout(title=_title(title), margin={"t": top}, height=figure.layout.height + more)
