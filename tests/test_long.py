"""Long sequences: far keys pooled or left out give the numbers that every key one by one gives."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch

import interp.passes as passes
from interp.crowd import crowd_output
from interp.decisions import score
from interp.interventions import RestoreSink, RestoreTargets, Scope, hooks_for, parse_intervention
from interp.ledger import build_ledger
from interp.passes import plan_for
from models.attention import Blocks, Span
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.transformer import HookedAdder

PROBLEMS = ((10**150 - 1, 1), (7**120, 3**201), (10**40 + 77, 9**150), (123456789, 10**90))
FIELDS = ("target", "rest", "rest_second", "rest_max", "classes", "sink", "beside")
EVERY, POOLED = Blocks(16, 16), Blocks(16, 16, pool=True)


@cache
def adder(scheme: str = "rotary2d", sink: bool = True, chunk: int = 1, decay: float = 0.5) -> HookedAdder:
    """Untrained, with scores of some size; trained distance of a few columns. Leave it as you found it."""
    config = AdderConfig(
        task=TaskConfig(chunk=chunk, max_digits=4),
        attention=AttentionConfig(scheme=scheme, sink=sink, decay=decay if scheme == "rotary2d" else 0.0),
        n_layers=2,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    model = HookedAdder(config, seed=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("W_Q", "W_K")):
                weight.mul_(2.0)
            if name.endswith("sink"):
                weight.copy_(torch.linspace(-1, 1, len(weight)))
    return model.eval()


def encoded(model, problems=PROBLEMS):
    batch = model.task.encode(list(problems))
    return batch, (batch.tokens, batch.mask)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_pooling_far_keys_changes_no_output(sink, chunk, dtype, tolerance):
    model = copy.deepcopy(adder(sink=sink, chunk=chunk)).to(dtype)
    batch, inputs = encoded(model)
    with torch.no_grad():
        whole, pooled = model(*inputs), model(*inputs, blocks=POOLED)
    assert (whole - pooled)[batch.mask].abs().max() < tolerance


def spans_of(model, blocks, problems=PROBLEMS[:1]):
    """Per block of the first layer, what a score hook is told."""
    seen = []
    _, inputs = encoded(model, problems)
    hook = ("blocks.0.attn.hook_attn_scores", lambda s, hook: seen.append((Span.of(hook), s.clone())))
    with torch.no_grad():
        model.run_with_hooks(*inputs, blocks=blocks, fwd_hooks=[hook])
    return seen


def test_the_pool_is_one_key_with_the_logarithm_of_the_number_it_stands_for():
    model = adder()
    pooled = 0
    for span, scores in spans_of(model, POOLED):
        assert scores.shape[2:] == (span.query.stop - span.query.start, len(span.positions))
        if not span.pooled:
            assert torch.equal(span.positions, torch.arange(span.query.stop))
            continue
        pooled += 1
        here = span.positions[1:]
        assert (here[1:] > here[:-1]).all()
        missing = span.query.stop - len(here)
        np.testing.assert_allclose(scores[..., 0].exp(), missing, rtol=1e-6)
    assert pooled > 5


def test_pooled_scores_are_zero_within_rounding_and_far():
    model = adder()
    batch, _ = encoded(model, PROBLEMS[:1])
    every = {span.query.start: scores for span, scores in spans_of(model, EVERY)}
    for span, _ in spans_of(model, POOLED):
        if span.pooled:
            missing = torch.ones(span.query.stop, dtype=torch.bool)
            missing[span.positions[1:]] = False
            assert every[span.query.start][..., missing].abs().max() <= 2.0**-24
            apart = batch.column[0, span.query][:, None] - batch.column[0, : span.query.stop][missing]
            assert apart.abs().min() > model.config.trained_distance


@pytest.mark.parametrize("scheme", ["rotary", "none"])
def test_a_scheme_whose_scores_do_not_vanish_is_run_with_every_key(scheme):
    model = adder(scheme)
    _, inputs = encoded(model)
    with torch.no_grad():
        assert torch.equal(model(*inputs, blocks=POOLED), model(*inputs, blocks=EVERY))
    assert not any(span.pooled for span, _ in spans_of(model, POOLED))


@pytest.mark.parametrize(
    ("scheme", "sink"), [("rotary2d", True), ("rotary2d", False), ("rotary", False), ("none", True)]
)
@pytest.mark.parametrize("name", ["far", "window=3", "window=40"])
@pytest.mark.parametrize("size", [(16, 16), (37, 20), (8, 64)])
def test_leaving_out_keys_that_an_edit_removes_is_the_same_to_the_last_bit(scheme, sink, name, size):
    model = adder(scheme, sink=sink)
    batch, inputs = encoded(model)
    edit = parse_intervention(name)
    within = edit.keeps_within(model)
    with torch.no_grad(), model.hooks(hooks_for(model, batch, [edit])):
        every = model(*inputs, blocks=Blocks(*size))
        skipped = model(*inputs, blocks=Blocks(*size, skip_beyond=within))
    assert torch.equal(every, skipped)


def test_leaving_out_keys_leaves_some_out():
    widths = [scores.shape[-1] for _, scores in spans_of(adder(), Blocks(16, 16, skip_beyond=4))]
    assert max(widths) < 0.9 * max(span.query.stop for span, _ in spans_of(adder(), EVERY))


def assert_same(one, other, tolerance=1e-5):
    assert list(one.lookups) == list(other.lookups)
    for key, found in one.lookups.items():
        for name in FIELDS:
            x, y = getattr(found, name), getattr(other.lookups[key], name)
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=f"{key} {name}")
        for name in ("problem", "query", "column", "state", "keys", "far_keys"):
            np.testing.assert_array_equal(getattr(found, name), getattr(other.lookups[key], name), err_msg=name)


def lifted(model):
    return RestoreTargets(torch.full((2, 2, 4, 400), 1.5))


EDITS = {
    "none": lambda model: [],
    "far in one head": lambda model: [parse_intervention("far", Scope(only=frozenset({(0, 1)})))],
    "far in all but one": lambda model: [parse_intervention("far", Scope(without=frozenset({(1, 0)})))],
    "far-zero": lambda model: [parse_intervention("far-zero")],
    "sink-boost": lambda model: [parse_intervention("sink-boost=2log")],
    "targets": lambda model: [lifted(model)],
    "sink": lambda model: [RestoreSink(torch.full((2, 2), -2.0))],
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("chunk", [1, 3])
def test_ledger_and_score_agree_with_every_key_one_by_one(monkeypatch, edit, chunk):
    model = copy.deepcopy(adder(chunk=chunk)).double()
    edits = EDITS[edit](model)
    monkeypatch.setattr(passes, "_BLOCK", 16)
    assert plan_for(model, PROBLEMS, edits).far_keys == "each"
    every = build_ledger(model, PROBLEMS, edits), score(model, PROBLEMS, edits)
    monkeypatch.setattr(passes, "_POOL_FROM", 0)
    assert plan_for(model, PROBLEMS, edits).far_keys == "pooled"
    pooled = build_ledger(model, PROBLEMS, edits), score(model, PROBLEMS, edits)
    assert_same(pooled[0], every[0])
    np.testing.assert_allclose(pooled[1].margin, every[1].margin, atol=1e-6)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none"])
@pytest.mark.parametrize("name", ["far", "window=4"])
def test_ledger_agrees_when_keys_are_left_out(monkeypatch, scheme, name):
    model = adder(scheme)
    edits = [parse_intervention(name), parse_intervention("sink-boost=log")]
    monkeypatch.setattr(passes, "_BLOCK", 16)
    assert plan_for(model, PROBLEMS, edits).far_keys == "skipped"
    skipped = build_ledger(model, PROBLEMS, edits, distances=True)
    monkeypatch.setattr(passes.Plan, "blocks", EVERY)
    every = build_ledger(model, PROBLEMS, edits, distances=True)
    assert_same(skipped, every)
    np.testing.assert_array_equal(skipped.distances.count, every.distances.count)
    np.testing.assert_allclose(skipped.distances.maximum, every.distances.maximum, atol=1e-5)


def test_who_looks_at_keys_one_by_one_gets_them_one_by_one(monkeypatch):
    monkeypatch.setattr(passes, "_BLOCK", 16)
    monkeypatch.setattr(passes, "_POOL_FROM", 0)
    model = adder()
    assert plan_for(model, PROBLEMS).far_keys == "pooled"
    assert plan_for(model, PROBLEMS, every_key=True).far_keys == "each"
    for name in ("random-control", "drop-best-far", "window=300"):
        scoped = parse_intervention(name, Scope(only=frozenset({(0, 0)})))
        assert plan_for(model, PROBLEMS, [scoped]).far_keys == "each"
    both = [parse_intervention("far"), parse_intervention("random-control")]
    assert plan_for(model, PROBLEMS, both).far_keys == "each"
    with model.hooks([("blocks.1.attn.hook_attn_scores", lambda s, hook: s)]):
        assert plan_for(model, PROBLEMS).far_keys == "each"
    pooled, far = crowd_output(model, PROBLEMS), crowd_output(model, PROBLEMS, [parse_intervention("far-zero")])
    assert pooled.norm.max() > 0
    assert far.norm.max() == 0


@pytest.mark.parametrize(
    ("bad", "says"), [({"query": 0}, "at least 1 query"), ({"query": 4, "skip_beyond": -1}, "from 0")]
)
def test_blocks_refuse_what_makes_no_sense(bad, says):
    with pytest.raises(ValueError, match=says):
        Blocks(**bad)
