"""The ledger against the pattern, and against sums over keys done one by one."""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from stirred import stirred

import interp.passes as passes
from interp.interventions import hooks_for, parse_intervention
from interp.leak import log_slope
from interp.ledger import CLASSES, build_ledger
from models.addition import LOOKUPS, STATES
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.transformer import HookedAdder

PROBLEMS = ((98765432, 4321), (61, 1234567), (999999, 1), (407, 7))
TRIPLES = ((98765432109876, 4321), (61, 12345678901), (999999999999, 1), (40700, 70312))
LAYERS, HEADS = 2, 2
FAR = CLASSES.index("far")

KINDS = {
    "rotary2d": {"scheme": "rotary2d"},
    "rotary, no sink": {"scheme": "rotary", "sink": False},
    "left cut": {"scheme": "rotary2d", "chunk": 3, "cut": "left"},
    "counters": {"scheme": "counters"},
    "right cut": {"scheme": "none", "chunk": 3, "cut": "right"},
}


@cache
def adder(
    scheme: str = "rotary2d", sink: bool = True, chunk: int = 1, cut: str = "right", scale: float = 1.5
) -> HookedAdder:
    """Untrained; three digits in training, so that the problems above have far keys. Leave it as you found it."""
    config = AdderConfig(
        task=TaskConfig(chunk=chunk, cut=cut, max_digits=3),
        attention=AttentionConfig(
            scheme=scheme,
            sink=sink,
            null_key=sink and scheme == "counters",
            decay=0.1 if scheme == "rotary2d" else 0.0,
        ),
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    return stirred(HookedAdder(config, seed=1), scale)


def problems_for(model):
    return PROBLEMS if model.config.task.chunk == 1 else TRIPLES


def run_full(model, problems, names=()):
    """The batch and, by hook name, what passed it: full matrices ``[problem, head, query, key]`` in float64."""
    batch = model.task.encode(problems)
    points = ("hook_attn_scores", "hook_pattern", "hook_sink_scores")
    edits = hooks_for(model, batch, [parse_intervention(name) for name in names])
    with torch.no_grad(), model.hooks(edits):
        _, kept = model.run_with_cache(
            batch.tokens, batch.mask, names_filter=lambda name: name.endswith(points), return_cache_object=False
        )
    return batch, {name: value.double().numpy() for name, value in kept.items()}


def classes_of(model, problem):
    """``[query, key]``: class of each visible key by index into CLASSES, -1 for the future; and the distances."""
    vocab = model.task.vocabulary
    columns, separator = [], []
    for n in (*problem, sum(problem)):
        columns += [*range(len(vocab.chunks(n))), 0]
        separator += [False] * len(vocab.chunks(n)) + [True]
    columns[-1], separator[-1] = len(vocab.chunks(sum(problem))), False  # the end is no separator
    in_columns = model.config.attention.scheme in ("rotary2d", "counters")
    at = np.array(columns) if in_columns else np.arange(len(columns))
    limit = model.config.task.max_columns - 1 if in_columns else model.config.task.max_keys - 1
    distance = np.abs(at[:, None] - at[None, :])
    label = np.where(distance > limit, CLASSES.index("far"), CLASSES.index("near"))
    label[:, separator] = CLASSES.index("separator")
    np.fill_diagonal(label, CLASSES.index("self"))
    return np.where(np.tril(np.ones(label.shape, dtype=bool)), label, -1), distance


def log_mass(scores) -> float:
    scores = [s for s in scores if s > -math.inf]
    if not scores:
        return -math.inf
    top = max(scores)
    return top + math.log(math.fsum(math.exp(s - top) for s in scores))


def each_query(model, ledger, problems, names=()):
    """Every (ledger entry, layer, head, row) with its scores, targets, classes and sink, from full matrices."""
    batch, kept = run_full(model, problems, names)
    labels = [classes_of(model, problem)[0] for problem in problems]
    for (name, present), found in ledger.lookups.items():
        for i, (problem, query) in enumerate(zip(found.problem, found.query, strict=True)):
            targets = {k for k in batch.lookups[name].targets[problem, query].tolist() if k >= 0}
            assert bool(targets) == present
            label = labels[problem][query, : query + 1]
            for layer in range(LAYERS):
                scores = kept[f"blocks.{layer}.attn.hook_attn_scores"][problem, :, query, : query + 1]
                pattern = kept[f"blocks.{layer}.attn.hook_pattern"][problem, :, query]
                sinks = kept.get(f"blocks.{layer}.attn.hook_sink_scores")
                for head in range(HEADS):
                    sink = -math.inf if sinks is None else sinks[problem, head, query]
                    yield found, (layer, head, i), scores[head], pattern[head], targets, label, sink


# The pattern is one route, the scores another


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("double", "tolerance"), [(False, 1e-5), (True, 1e-9)])
def test_the_share_is_the_patterns(kind, double, tolerance):
    model = adder(**KINDS[kind])
    model = copy.deepcopy(model).double() if double else model
    problems = problems_for(model)
    ledger = build_ledger(model, problems, distances=True)
    assert {name for name, _ in ledger.lookups} == set(LOOKUPS)
    assert {present for _, present in ledger.lookups} == {True, False}
    for found, at, _, pattern, targets, label, _ in each_query(model, ledger, problems):
        by_class = [sum(pattern[k] for k in np.flatnonzero(label == c) if k not in targets) for c in range(4)]
        assert found.class_shares[at] == pytest.approx(by_class, abs=tolerance)
        assert found.sink_share[at] == pytest.approx(1 - pattern.sum(), abs=tolerance)
        expected = sum(pattern[k] for k in targets) if found.present else 1 - pattern.sum()
        assert found.share[at] == pytest.approx(expected, abs=tolerance)
        assert found.far_keys[at[2]] == (label == FAR).sum()
        far = [pattern[k] for k in np.flatnonzero(label == FAR) if k not in targets]
        assert found.far_max_share[at] == pytest.approx(max(far, default=0.0), abs=tolerance)


def test_left_cut_lookups_have_several_targets():
    batch = adder(**KINDS["left cut"]).task.encode(TRIPLES)
    assert ((batch.lookups["first_same_column"].targets >= 0).sum(-1) == 2).any()


@pytest.mark.parametrize("kind", KINDS)
def test_target_sink_and_classes_add_to_one(kind):
    model = adder(**KINDS[kind])
    for found in build_ledger(model, problems_for(model), distances=True).lookups.values():
        keys = found.class_shares.sum(-1)
        total = found.share + keys + found.sink_share if found.present else found.share + keys
        if not found.present and not model.config.attention.sink:
            total = keys
        np.testing.assert_allclose(total, 1, atol=1e-6)


# Sums over keys, one by one


@pytest.mark.parametrize(
    ("kind", "scale", "names"),
    [(kind, 1.5, ()) for kind in KINDS]
    + [("rotary2d", 1.5, ("far",)), ("rotary2d", 1.5, ("sink-boost=log", "window=2"))]
    + [("rotary2d", 12.0, ()), ("rotary, no sink", 12.0, ())],
)
def test_masses_are_sums_over_keys(kind, scale, names):
    model = adder(**KINDS[kind], scale=scale)
    problems = problems_for(model)
    ledger = build_ledger(model, problems, [parse_intervention(name) for name in names], distances=True)
    seen, spread = 0, 0.0
    for found, at, scores, _, targets, label, sink in each_query(model, ledger, problems, names):
        seen += 1
        own = [s for k, s in enumerate(scores) if k in targets]
        rest = [s for k, s in enumerate(scores) if k not in targets]
        finite = [s for s in scores if s > -math.inf]
        spread = max(spread, max(finite) - min(finite))
        target = log_mass(own) if found.present else sink
        close = {"rel": 1e-5, "abs": 2e-5}
        assert found.target[at] == pytest.approx(target, **close)
        assert found.rest[at] == pytest.approx(log_mass(rest), **close)
        assert found.rest_second[at] == pytest.approx(log_mass([2 * s for s in rest]), **close)
        assert found.rest_max[at] == pytest.approx(max(rest, default=-math.inf), **close)
        assert found.sink[at] == pytest.approx(sink, **close)
        for c in range(len(CLASSES)):
            inside = [s for k, s in enumerate(scores) if k not in targets and label[k] == c]
            assert found.classes[at][c] == pytest.approx(log_mass(inside), **close)
        rivals = [*rest, sink] if found.present else rest
        gaps = [target - s for s in rivals if s > -math.inf]
        leak = math.fsum(math.exp(min(-g, 700)) for g in gaps) if target > -math.inf else math.inf
        assert found.leak[at] == pytest.approx(leak, rel=1e-3 if scale > 2 else 1e-4)
        if target > -math.inf:
            assert found.gap[at] == pytest.approx(target - max(rest), **close)
        weights = np.exp(np.array(rest) - max(rest))
        assert found.n_eff[at] == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-4)
    assert seen > 250
    if scale > 2:
        assert spread > 120  # exp(-120) is 0 in float32


def test_a_class_far_below_the_others_keeps_its_mass():
    model = copy.deepcopy(adder(scale=12.0))
    for found in build_ledger(model, PROBLEMS, distances=True).lookups.values():
        deep = found.classes.max(-1, keepdims=True) - found.classes
        assert deep[np.isfinite(deep)].max() > 104  # below float32's smallest number beside the largest class
        assert np.isfinite(found.rest).all()


def test_self_is_the_query_and_counts_are_of_visible_keys():
    ledger = build_ledger(adder(), PROBLEMS, distances=True)
    batch = adder().task.encode(PROBLEMS)
    for (name, present), found in ledger.lookups.items():
        lookup = batch.lookups[name]
        here = torch.nonzero(lookup.queries & (lookup.present == present))
        assert here.tolist() == np.stack([found.problem, found.query], 1).tolist()
        assert found.keys.tolist() == (found.query + 1).tolist()
        at = here.T
        asked = batch.decisions[at[0], at[1]]
        column = torch.where(asked, batch.decision_column[at[0], at[1]], batch.column[at[0], at[1]])
        assert found.column.tolist() == column.tolist()
        assert found.state.tolist() == batch.state[at[0], at[1]].tolist()


def test_mass_beside_the_target_is_that_of_its_neighbours():
    model = adder()
    batch, kept = run_full(model, PROBLEMS)
    for (name, _), found in build_ledger(model, PROBLEMS, distances=True).lookups.items():
        for i, (problem, query) in enumerate(zip(found.problem, found.query, strict=True)):
            target = int(batch.lookups[name].targets[problem, query, 0])
            row, column = batch.row[problem].tolist(), batch.column[problem].tolist()
            sides = [
                key
                for key in range(query + 1)
                if target >= 0 and row[key] == row[target] and column[key] >= 0 and abs(key - target) == 1
            ]
            for layer in range(LAYERS):
                pattern = kept[f"blocks.{layer}.attn.hook_pattern"][problem, :, query]
                np.testing.assert_allclose(found.beside_share[layer, :, i], pattern[:, sides].sum(-1), atol=1e-5)


# Other routes to the same ledger


FIELDS = ("target", "rest", "rest_second", "rest_max", "classes", "sink", "beside")


def assert_same(one, other, tolerance=1e-5):
    assert list(one.lookups) == list(other.lookups)
    for key, found in one.lookups.items():
        for name in FIELDS:
            x, y = getattr(found, name), getattr(other.lookups[key], name)
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        for name in ("problem", "query", "column", "state", "keys"):
            np.testing.assert_array_equal(getattr(found, name), getattr(other.lookups[key], name))
    np.testing.assert_array_equal(one.distances.count, other.distances.count)
    np.testing.assert_allclose(one.distances.maximum, other.distances.maximum, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(one.distances.gap, other.distances.gap, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [(), ("far", "sink-boost=log")])
def test_blocks_and_batches_do_not_matter(monkeypatch, kind, names):
    model = adder(**KINDS[kind])
    if names and not model.config.attention.sink:
        names = names[:1]
    edits = [parse_intervention(name) for name in names]
    whole = build_ledger(model, problems_for(model), edits, distances=True)
    monkeypatch.setattr(passes, "_BLOCK", 6)
    assert passes.plan_for(model, problems_for(model)).query_block == 3
    assert_same(whole, build_ledger(model, problems_for(model), edits, distances=True))
    monkeypatch.setattr(passes, "_SCORE_BYTES", 1)
    assert passes.plan_for(model, problems_for(model)).batch == 1
    assert_same(whole, build_ledger(model, problems_for(model), edits, distances=True))


@pytest.mark.parametrize("kind", ["rotary2d", "rotary, no sink"])
def test_the_pattern_is_another_source_of_the_same_ledger(kind):
    model = copy.deepcopy(adder(**KINDS[kind])).double()
    scores, pattern = (build_ledger(model, PROBLEMS, source=source, distances=True) for source in ("scores", "pattern"))
    for key, found in scores.lookups.items():
        other = pattern.lookups[key]
        np.testing.assert_allclose(other.share, found.share, atol=1e-9)
        np.testing.assert_allclose(other.class_shares, found.class_shares, atol=1e-9)
        np.testing.assert_allclose(other.n_eff, found.n_eff, rtol=1e-6)
        if found.present:
            np.testing.assert_allclose(other.leak, found.leak, rtol=1e-6)
            np.testing.assert_allclose(other.gap, found.gap, atol=1e-6)
            np.testing.assert_allclose((1 - found.share) / found.share, found.leak, rtol=1e-6)
    np.testing.assert_array_equal(pattern.distances.count, scores.distances.count)
    np.testing.assert_allclose(pattern.distances.gap, scores.distances.gap, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", ["scores", "pattern"])
def test_half_precision_is_summed_in_float32(dtype, source):
    model = copy.deepcopy(adder(scale=4.0)).to(dtype)
    ledger = build_ledger(model, PROBLEMS, source=source, distances=True)
    largest = 0.0
    for found, at, scores, pattern, targets, _, _ in each_query(model, ledger, PROBLEMS):
        largest = max(largest, abs(scores).max())
        rest = [k for k in range(len(scores)) if k not in targets]
        if source == "scores":
            assert found.rest[at] == pytest.approx(log_mass(scores[rest]), rel=1e-5, abs=1e-5)
            assert found.rest_second[at] == pytest.approx(log_mass(2 * scores[rest]), rel=1e-5, abs=1e-5)
        else:
            assert np.exp(found.rest[at]) == pytest.approx(pattern[rest].sum(), abs=1e-5)
        assert not np.isnan(found.share[at])
    assert largest > 12  # exp(12) is infinite in float16


# What is not there


@pytest.mark.parametrize("names", [("far",), ("window=1",), ("window=1", "far", "random-control")])
def test_removed_classes_have_no_mass_and_no_nan(names):
    ledger = build_ledger(adder(), PROBLEMS, [parse_intervention(name) for name in names], distances=True)
    for found in ledger.lookups.values():
        assert np.isneginf(found.classes[..., FAR]).all()
        assert (found.class_shares[..., FAR] == 0).all()
        for name in (*FIELDS, "leak", "share", "gap", "n_eff", "sink_share", "class_shares", "beside_share"):
            assert not np.isnan(getattr(found, name)).any(), name


def test_wholly_removed_keys_leave_no_nan():
    model = copy.deepcopy(adder())
    for layer in range(LAYERS):
        model.add_hook(
            f"blocks.{layer}.attn.hook_attn_scores", lambda scores, hook: torch.full_like(scores, -torch.inf)
        )
    ledger = build_ledger(model, PROBLEMS, distances=True)
    for found in ledger.lookups.values():
        for name in ("rest", "rest_second", "rest_max", "classes", "beside"):
            assert np.isneginf(getattr(found, name)).all()
        assert (found.sink_share == 1).all()
        assert (found.n_eff == 0).all()
        assert (found.share == (0 if found.present else 1)).all()
        assert (found.leak == (np.inf if found.present else 0)).all()


def test_nothing_to_find_has_the_sink_as_its_target():
    model = adder()
    ledger = build_ledger(model, PROBLEMS, distances=True)
    count = 0
    for found, at, scores, _, _, _, sink in each_query(model, ledger, PROBLEMS):
        if not found.present:
            count += 1
            assert found.leak[at] == pytest.approx(sum(math.exp(s - sink) for s in scores), rel=1e-4)
            assert found.target[at] == found.sink[at]
            assert found.share[at] == pytest.approx(found.sink_share[at])
    assert count > 50


def test_nothing_to_find_and_no_sink_has_no_share():
    model = adder(**KINDS["rotary, no sink"])
    absent = [found for found in build_ledger(model, PROBLEMS, distances=True).lookups.values() if not found.present]
    assert absent
    for found in absent:
        assert np.isposinf(found.leak).all()
        assert (found.share == 0).all()
        assert (found.sink_share == 0).all()


def test_lookups_that_do_not_occur_are_left_out():
    ledger = build_ledger(adder(), [(12, 34)], distances=True)
    assert ("first_from_second", False) not in ledger.lookups  # every chunk of b has its chunk of a
    assert ("first_from_second", True) in ledger.lookups
    assert ("first_from_second", True) in build_ledger(adder(), [(1, 34)], distances=True).lookups
    assert ("first_from_second", False) in build_ledger(adder(), [(1, 34)], distances=True).lookups


# Distance


@pytest.mark.parametrize("kind", KINDS)
def test_gaps_at_each_distance_are_means_over_pairs(kind):
    model = adder(**KINDS[kind])
    problems = problems_for(model)
    ledger = build_ledger(model, problems, distances=True)
    batch, kept = run_full(model, problems)
    gaps: dict[tuple[int, int, int, int], list[float]] = {}
    for problem, numbers in enumerate(problems):
        label, distance = classes_of(model, numbers)
        for query in range(len(label)):
            sets = [{k for k in batch.lookups[n].targets[problem, query].tolist() if k >= 0} for n in LOOKUPS]
            rivals = [
                k for k in range(query + 1) if label[query, k] >= CLASSES.index("near") and k not in set().union(*sets)
            ]
            for i, targets in enumerate(sets):
                for layer in range(LAYERS) if targets else ():
                    for head in range(HEADS):
                        scores = kept[f"blocks.{layer}.attn.hook_attn_scores"][problem, head, query]
                        target = log_mass(scores[sorted(targets)])
                        for k in rivals:
                            gaps.setdefault((i, layer, head, distance[query, k]), []).append(target - scores[k])
    for at in np.ndindex(ledger.distances.count.shape):
        assert ledger.distances.count[at] == len(gaps.get(at, []))
        if at in gaps:
            assert ledger.distances.gap[at] == pytest.approx(np.mean(gaps[at]), rel=1e-4, abs=1e-4)
        else:
            assert math.isnan(ledger.distances.gap[at])
    assert max(at[-1] for at in gaps) > ledger.distances.trained_distance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [(), ("far",)])
def test_the_highest_score_at_each_distance_is_a_maximum_over_pairs(kind, names):
    model = adder(**KINDS[kind])
    problems = problems_for(model)
    ledger = build_ledger(model, problems, [parse_intervention(name) for name in names], distances=True)
    batch, kept = run_full(model, problems, names)
    top: dict[tuple[int, int, int], float] = {}
    for problem, numbers in enumerate(problems):
        label, distance = classes_of(model, numbers)
        for query in range(len(label)):
            lookups = [batch.lookups[n] for n in LOOKUPS]
            if not any(lookup.queries[problem, query] for lookup in lookups):
                continue
            targets = {k for lookup in lookups for k in lookup.targets[problem, query].tolist()}
            for k in range(query + 1):
                if label[query, k] < CLASSES.index("near") or k in targets:
                    continue
                for layer, head in np.ndindex(LAYERS, HEADS):
                    score = kept[f"blocks.{layer}.attn.hook_attn_scores"][problem, head, query, k]
                    at = (layer, head, distance[query, k])
                    top[at] = max(top.get(at, -math.inf), score)
    for at in np.ndindex(ledger.distances.maximum.shape):
        assert ledger.distances.maximum[at] == pytest.approx(top.get(at, -math.inf), rel=1e-5, abs=1e-5)
    beyond = ledger.distances.maximum[..., ledger.distances.trained_distance + 1 :]
    assert np.isneginf(beyond).all() if names else np.isfinite(beyond).any()


def test_slopes_are_fits_beyond_the_trained_distance():
    ledger = build_ledger(adder(), PROBLEMS, distances=True)
    distance = np.arange(ledger.distances.gap.shape[-1])
    fitted = 0
    for i, name in enumerate(LOOKUPS):
        for layer in range(LAYERS):
            for head in range(HEADS):
                far = (distance > 3) & (ledger.distances.count[i, layer, head] > 0)
                if far.sum() < 2:
                    assert math.isnan(ledger.distances.slopes()[name][layer, head])
                    continue
                fitted += 1
                count, gap = (x[i, layer, head][far] for x in (ledger.distances.count, ledger.distances.gap))
                by_polyfit = np.polyfit(np.log(distance[far]), gap, 1, w=np.sqrt(count))[0]
                assert ledger.distances.slopes()[name][layer, head] == pytest.approx(by_polyfit)
                assert log_slope(distance[far], gap, count) == pytest.approx(by_polyfit)
    assert fitted > 0


def test_a_frame_has_a_row_per_query_and_head():
    ledger = build_ledger(adder(), PROBLEMS, distances=True)
    frame = ledger.to_frame()
    assert len(frame) == sum(found.target.size for found in ledger.lookups.values())
    shares = frame[["share", "self", "separator", "near", "far"]].sum(axis=1) + frame["sink"].where(frame.present, 0)
    np.testing.assert_allclose(shares, 1, atol=1e-6)
    for (name, present), found in ledger.lookups.items():
        for layer in range(LAYERS):
            for head in range(HEADS):
                rows = frame[
                    (frame.lookup == name)
                    & (frame.present == present)
                    & (frame.layer == layer)
                    & (frame["head"] == head)
                ]
                np.testing.assert_array_equal(rows.leak, found.leak[layer, head])
                np.testing.assert_array_equal(rows["query"], found.query)
                np.testing.assert_array_equal(rows["problem"], found.problem)
                assert set(rows.state) <= {*STATES, ""}
