"""Interventions: no-ops where they must be, and elsewhere what a slow reference says, key by key."""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from stirred import stirred

import interp.passes as passes
from interp.decisions import score
from interp.interventions import (
    NAMES,
    InterventionError,
    RestoreDistances,
    RestoreNumber,
    Scope,
    hooks_for,
    parse_head,
    parse_intervention,
)
from interp.passes import run_problems
from models.addition import LOOKUPS
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.transformer import HookedAdder

MAX_DIGITS = 3  # in training: columns beyond 3, or tokens beyond 11, are far
N_TRAIN = 3 + 1 + 3 + 1 + 4  # keys that the last query of the longest training problem sees
PROBLEMS = ((98765432, 4321), (61, 1234567), (99999999, 1), (40, 7))
EXAMPLES = {
    "far": "far",
    "window": "window=2",
    "first-and-window": "first-and-window=1,3",
    "keep-near": "keep-near",
    "sink-boost": "sink-boost=log",
    "far-zero": "far-zero",
    "drop-best-far": "drop-best-far=2",
    "normalizer": "normalizer=entmax15",
    "ssmax": "ssmax=0.4",
    "temperature": "temperature=adaptive",
    "mass-control": "mass-control",
    "round-gates": "round-gates=column",
    "jitter-gates": "jitter-gates=all",
    "random-control": "random-control",
}


NARROW = (  # these act at training lengths too
    *("window", "first-and-window", "keep-near", "round-gates", "jitter-gates"),
    *("normalizer", "ssmax", "temperature"),
)


@cache
def adder(scheme: str = "rotary2d", sink: bool = True, n_layers: int = 2) -> HookedAdder:
    """Untrained, with peaked attention and no weight left at its initial zero. Leave it as you found it."""
    config = AdderConfig(
        task=TaskConfig(max_digits=MAX_DIGITS),
        attention=AttentionConfig(
            scheme=scheme,
            sink=sink,
            null_key=sink and scheme == "counters",
            decay=0.1 if scheme == "rotary2d" else 0.0,
        ),
        n_layers=n_layers,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    return stirred(HookedAdder(config, seed=1))


def interventions(*names: str, scope: Scope | None = None, seed: int = 0):
    return [parse_intervention(name, scope, seed) for name in names]


def observe(model, problems, edits=(), point="hook_pattern"):
    """What passes a hook, after the edits, per problem: ``[layer, head, query(, key)]`` in float64, padding cut off."""
    seen: dict[tuple[int, int], list[torch.Tensor]] = {}

    def watch(batch):
        def keep(value, hook, layer):
            for i, problem in enumerate(batch.problems):
                seen.setdefault((problems.index(problem), layer), []).append(value[i].detach().clone())

        return [(f"blocks.{n}.attn.{point}", partial(keep, layer=n)) for n in range(model.cfg.n_layers)]

    lengths = {}
    for step in run_problems(model, problems, edits, extra_hooks=watch):
        lengths |= dict(zip(step.indices, step.batch.mask.sum(1).tolist(), strict=True))
    out = []
    for i in range(len(problems)):
        layers = []
        for n in range(model.cfg.n_layers):
            if seen[i, n][0].ndim == 2:
                layers.append(torch.cat(seen[i, n], dim=1)[:, : lengths[i]])
                continue
            width = max(part.shape[-1] for part in seen[i, n])
            fill = -torch.inf if point == "hook_attn_scores" else 0.0
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=fill) for part in seen[i, n]]
            layers.append(torch.cat(parts, dim=1)[:, : lengths[i], : lengths[i]])
        out.append(torch.stack(layers).double().numpy())
    return out


def logits(model, problems, edits=()):
    out = {}
    for step in run_problems(model, problems, edits):
        for i, row, mask in zip(step.indices, step.logits, step.batch.mask, strict=True):
            out[i] = row[mask]
    return [out[i] for i in range(len(problems))]


def layout(problem):
    """Kind and column of each token, read off the numbers: separators stand in column 0."""
    a, b = problem
    out = [("digit", c) for c in range(len(str(a)))] + [("separator", 0)]
    out += [("digit", c) for c in range(len(str(b)))] + [("separator", 0)]
    return out + [("digit", c) for c in range(len(str(a + b)) + 1)]


def distances(model, problem):
    at = np.array([column for _, column in layout(problem)])
    at = at if model.config.attention.unit == "columns" else np.arange(len(at))
    return np.abs(at[:, None] - at[None, :])


def causal(problem):
    n = len(layout(problem))
    return np.tril(np.ones((n, n), dtype=bool))


def far_keys(model, problem):
    limit = 3 if model.config.attention.unit == "columns" else N_TRAIN - 1
    digit = np.array([kind == "digit" for kind, _ in layout(problem)])
    return causal(problem) & (distances(model, problem) > limit) & digit


def renormalised(scores, sink, removed):
    scores = np.where(removed, -np.inf, scores)
    both = np.concatenate([scores, sink[..., None]], axis=-1) if sink is not None else scores
    weights = np.exp(both - both.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights[..., : scores.shape[-1]]


def boost_of(problem, factor=1):
    n = np.arange(1, len(layout(problem)) + 1)
    return factor * np.maximum(0, np.log(n / N_TRAIN))


# No-ops


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
def test_a_window_as_long_as_the_sequence_changes_no_bit(scheme):
    model = adder(scheme)
    longest = max(len(layout(problem)) for problem in PROBLEMS)
    plain = logits(model, PROBLEMS)
    for before, after in zip(plain, logits(model, PROBLEMS, interventions(f"window={longest}")), strict=True):
        assert torch.equal(before, after)
    narrow = logits(model, PROBLEMS, interventions("window=1"))
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain, narrow, strict=True))


@pytest.mark.parametrize(
    "name", ["sink-boost=2log", "temperature=yarn", *(name for kind, name in EXAMPLES.items() if kind not in NARROW)]
)
@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
def test_patches_change_no_bit_at_training_lengths(scheme, name):
    model = adder(scheme)
    trained = ((999, 999), (1, 999), (42, 7), (0, 0))
    pairs = zip(logits(model, trained), logits(model, trained, interventions(name)), strict=True)
    assert all(torch.equal(before[:-1], after[:-1]) for before, after in pairs)  # nothing is asked of <eos> itself
    pairs = zip(logits(model, PROBLEMS[:1]), logits(model, PROBLEMS[:1], interventions(name)), strict=True)
    assert not any(torch.equal(before, after) for before, after in pairs)


def test_a_boost_of_zero_changes_nothing():
    pairs = zip(logits(adder(), PROBLEMS), logits(adder(), PROBLEMS, interventions("sink-boost=0")), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs)


# Removing keys


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["far", "window=2"])
def test_removed_keys_get_nothing_and_the_rest_is_renormalised(scheme, sink, layer, name):
    model = adder(scheme, sink)
    scope = Scope(only=frozenset({(layer, 0), (layer, 1)}))  # what enters this layer is then as without the edit
    scores = observe(model, PROBLEMS, point="hook_attn_scores")
    sinks = observe(model, PROBLEMS, point="hook_sink_scores") if sink else [None] * len(PROBLEMS)
    edited = observe(model, PROBLEMS, interventions(name, scope=scope))
    total = 0
    for problem, s, k, pattern in zip(PROBLEMS, scores, sinks, edited, strict=True):
        removed = far_keys(model, problem) if name == "far" else distances(model, problem) > 2
        total += (removed & causal(problem)).sum()
        assert (pattern[layer][:, removed] == 0).all()
        kept = causal(problem) & ~removed
        assert (pattern[layer][:, kept] > 0).all()
        expected = renormalised(s[layer], None if k is None else k[layer], removed)
        np.testing.assert_allclose(pattern[layer], expected, atol=1e-6)
    assert total > 20


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary"])
@pytest.mark.parametrize("block", [64, 5])
def test_far_removes_exactly_the_far_keys(monkeypatch, scheme, block):
    monkeypatch.setattr(passes, "_BLOCK", block)
    model = adder(scheme)
    for problem, scores in zip(
        PROBLEMS, observe(model, PROBLEMS, interventions("far"), "hook_attn_scores"), strict=True
    ):
        removed = np.isneginf(scores) & causal(problem)
        assert (removed == far_keys(model, problem)).all()
        assert np.isneginf(scores[..., ~causal(problem)]).all()
    assert far_keys(model, PROBLEMS[0]).any()


@pytest.mark.parametrize("scheme", ["rotary", "none", "alibi"])
@pytest.mark.parametrize("window", [1, 4, 11])
def test_a_window_is_a_truncated_input(scheme, window):
    model = adder(scheme, n_layers=1)
    batch = model.task.encode(PROBLEMS[:1])
    with torch.no_grad(), model.hooks(hooks_for(model, batch, interventions(f"window={window}"))):
        windowed = model(batch.tokens, batch.mask)[0]
        model.reset_hooks()
    for query in range(len(windowed)):
        with torch.no_grad():
            cut = model(batch.tokens[:, max(0, query - window) : query + 1])[0, -1]
        torch.testing.assert_close(windowed[query], cut, rtol=1e-5, atol=1e-5)


# The random control


def controlled(model, problems, seed=0):
    """Per problem bool ``[query, key]``: what random-control removes; every layer and head agrees."""
    out = []
    edits = interventions("random-control", seed=seed)
    for problem, scores in zip(problems, observe(model, problems, edits, "hook_attn_scores"), strict=True):
        removed = np.isneginf(scores) & causal(problem)
        assert (removed == removed[0, 0]).all()
        assert np.isneginf(scores[..., ~causal(problem)]).all()
        out.append(removed[0, 0])
    return out


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
def test_streaming_attention_keeps_the_first_keys_and_the_last(scheme):
    model = adder(scheme, sink=False)
    (pattern,) = observe(model, PROBLEMS[:1], interventions("first-and-window=1,3"))
    assert np.flatnonzero(pattern[0, 0, 9]).tolist() == [0, 7, 8, 9]
    for query in range(pattern.shape[2]):
        kept = sorted({0, *range(max(0, query - 2), query + 1)})
        assert np.flatnonzero(pattern[0, 1, query]).tolist() == kept
        assert pattern[:, :, query].sum(-1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
def test_keep_near_is_far_without_the_separators(scheme):
    model = adder(scheme)
    far, near = (observe(model, PROBLEMS, interventions(name)) for name in ("far", "keep-near"))
    for problem, one, other in zip(PROBLEMS, far, near, strict=True):
        batch = model.task.encode([problem])
        vocab = model.task.vocabulary
        separator = ((batch.tokens == vocab.plus) | (batch.tokens == vocab.equals))[0].numpy()
        gone = separator[None, :] & ~np.eye(len(separator), dtype=bool)
        assert ((other[0] > 0) == (one[0] > 0) & ~gone).all()


@pytest.mark.parametrize("value", ["", "3", "1,", ",3", "1,0", "-1,3", "1,3,5", "a,b", "1.5,2"])
def test_bad_pairs_are_refused(value):
    with pytest.raises(InterventionError, match="first-and-window takes two whole numbers of tokens"):
        parse_intervention(f"first-and-window={value}")


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary"])
def test_the_control_removes_as_many_keys_as_far_and_no_target(scheme):
    model = adder(scheme)
    for problem, removed in zip(PROBLEMS, controlled(model, PROBLEMS), strict=True):
        far = far_keys(model, problem)
        assert (removed.sum(-1) == far.sum(-1)).all()
        batch = model.task.encode([problem])
        for name in LOOKUPS:
            for query, targets in enumerate(batch.lookups[name].targets[0].tolist()):
                assert not any(removed[query, key] for key in targets if key >= 0)
    big = [far_keys(model, p).sum() > 10 for p in PROBLEMS]
    assert any(big)
    differs = [(r != far_keys(model, p)).any() for p, r in zip(PROBLEMS, controlled(model, PROBLEMS), strict=True)]
    assert all(d for d, b in zip(differs, big, strict=True) if b)


def test_the_control_is_a_function_of_its_seed():
    first, again, other = (controlled(adder(), PROBLEMS, seed) for seed in (0, 0, 1))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize("block", [64, 5])
def test_the_control_ignores_the_batch_and_the_block(monkeypatch, block):
    together = controlled(adder(), PROBLEMS)
    monkeypatch.setattr(passes, "_BLOCK", block)
    for problem, removed in zip(PROBLEMS, together, strict=True):
        assert (controlled(adder(), (problem,))[0] == removed).all()
    monkeypatch.setattr(passes, "_SCORE_BYTES", 2**30)
    backwards = controlled(adder(), PROBLEMS[::-1])[::-1]
    assert all((x == y).all() for x, y in zip(together, backwards, strict=True))


def test_the_control_draws_every_free_key_sooner_or_later():
    problem = PROBLEMS[0]
    often = np.mean([controlled(adder(), (problem,), seed)[0] for seed in range(60)], axis=0)
    query = int(far_keys(adder(), problem).sum(-1).argmax())
    wanted = far_keys(adder(), problem)[query].sum()
    batch = adder().task.encode([problem])
    targets = {k for name in LOOKUPS for k in batch.lookups[name].targets[0, query].tolist() if k >= 0}
    free = [key for key in range(query + 1) if key not in targets]
    assert (often[query, free] > 0).all()
    assert often[query, free].sum() == pytest.approx(wanted)
    assert np.abs(often[query, free] - wanted / len(free)).max() < 0.3


@pytest.mark.parametrize("most", [1, 3])
def test_a_limited_control_removes_at_most_so_many(most):
    edits = interventions(f"random-control={most}")
    for problem, scores in zip(PROBLEMS, observe(adder(), PROBLEMS, edits, "hook_attn_scores"), strict=True):
        removed = (np.isneginf(scores) & causal(problem)).sum(-1)
        assert (removed == np.minimum(far_keys(adder(), problem).sum(-1), most)).all()


# One far key at a time, and weights without renormalisation


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["drop-best-far", "drop-best-far=1", "drop-best-far=3", "drop-best-far=1000"])
def test_the_best_far_keys_are_dropped_per_head(scheme, layer, name):
    model = adder(scheme)
    most = int(name.partition("=")[2] or 1)
    scope = Scope(only=frozenset({(layer, 0), (layer, 1)}))
    plain = observe(model, PROBLEMS, point="hook_attn_scores")
    edited = observe(model, PROBLEMS, interventions(name, scope=scope), "hook_attn_scores")
    for problem, before, after in zip(PROBLEMS, plain, edited, strict=True):
        far = far_keys(model, problem)
        for head in range(2):
            for query in range(len(far)):
                keys = np.flatnonzero(far[query])
                best = keys[np.argsort(-before[layer, head, query, keys])][:most]
                expected = before[layer, head, query].copy()
                expected[best] = -np.inf
                np.testing.assert_array_equal(after[layer, head, query], expected)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary"])
@pytest.mark.parametrize("layer", [0, 1])
def test_zeroed_far_keys_give_nothing_back(scheme, layer):
    model = adder(scheme)
    scope = Scope(only=frozenset({(layer, 0), (layer, 1)}))
    plain, edited = observe(model, PROBLEMS), observe(model, PROBLEMS, interventions("far-zero", scope=scope))
    for problem, before, after in zip(PROBLEMS, plain, edited, strict=True):
        expected = np.where(far_keys(model, problem), 0.0, before[layer])
        np.testing.assert_array_equal(after[layer], expected)
    assert (plain[0] != edited[0]).any()


# Boosting the sink


@pytest.mark.parametrize("configured", [0.0, 2.5])
@pytest.mark.parametrize("block", [64, 5])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sink-boost=log", boost_of),
        ("sink-boost=2log", partial(boost_of, factor=2)),
        ("sink-boost=1.5", lambda problem: 1.5),
        ("sink-boost=-2", lambda problem: -2.0),
    ],
)
def test_the_sink_rises_by_the_boost(monkeypatch, configured, block, name, expected):
    monkeypatch.setattr(passes, "_BLOCK", block)
    model = adder()
    if configured:
        attention = model.config.attention.model_copy(update={"sink_boost": configured})
        model = HookedAdder(model.config.model_copy(update={"attention": attention}))
        model.load_state_dict(adder().state_dict())
    found = observe(model, PROBLEMS, interventions(name), "hook_sink_scores")
    learned = np.stack([block.attn.sink.detach().numpy() for block in model.blocks])
    for problem, sink in zip(PROBLEMS, found, strict=True):
        whole = np.broadcast_to(learned[:, :, None] + configured + expected(problem), sink.shape)
        np.testing.assert_allclose(sink, whole, atol=1e-5)
    assert model.config.task.max_keys == N_TRAIN


def test_the_log_boost_is_never_negative_and_does_not_know_the_answers_length():
    learned = np.stack([block.attn.sink.detach().numpy() for block in adder().blocks])[:, :, None]
    long, short = observe(adder(), PROBLEMS[1:2] + PROBLEMS[3:], interventions("sink-boost=log"), "hook_sink_scores")
    assert (long - learned >= 0).all()
    assert (long - learned)[..., N_TRAIN:].min() > 0
    np.testing.assert_array_equal(long[..., : short.shape[-1]], short)


def test_a_boost_that_is_a_crowd_starves_every_key():
    for pattern in observe(adder(), PROBLEMS, interventions("sink-boost=1000")):
        assert pattern.max() == 0


# Scope and composition


@pytest.mark.parametrize("name", ["far", "window=2", "sink-boost=3", "far-zero", "drop-best-far", "random-control"])
@pytest.mark.parametrize(
    ("n_layers", "scope", "touched"),
    [
        (1, Scope(only=frozenset({(0, 1)})), (0, 1)),
        (1, Scope(without=frozenset({(0, 0)})), (0, 1)),
        (2, Scope(only=frozenset({(1, 0)})), (1, 0)),
        (2, Scope(only=frozenset({(1, 0), (1, 1)}), without=frozenset({(1, 1)})), (1, 0)),
    ],
)
def test_only_heads_in_scope_change(name, n_layers, scope, touched):
    model = adder(n_layers=n_layers)
    plain, edited = observe(model, PROBLEMS), observe(model, PROBLEMS, interventions(name, scope=scope))
    for layer in range(n_layers):
        for head in range(2):
            same = all((x[layer, head] == y[layer, head]).all() for x, y in zip(plain, edited, strict=True))
            assert same == ((layer, head) != touched)


def test_an_empty_scope_is_every_head_and_an_emptied_one_is_none():
    model = adder()
    every = frozenset((layer, head) for layer in range(2) for head in range(2))
    assert Scope().mask(model).all()
    assert Scope(only=every).mask(model).all()
    assert not Scope(without=every).mask(model).any()
    pairs = zip(
        logits(model, PROBLEMS),
        logits(model, PROBLEMS, interventions("far", scope=Scope(without=every))),
        strict=True,
    )
    assert all(torch.equal(before, after) for before, after in pairs)


@pytest.mark.parametrize("name", ["far", "sink-boost=log", "far-zero", "drop-best-far=2", "random-control"])
def test_an_edit_of_all_heads_is_the_edits_of_each_head(name):
    each = [parse_intervention(name, Scope(only=frozenset({(layer, head)}))) for layer in range(2) for head in range(2)]
    pairs = zip(logits(adder(), PROBLEMS, interventions(name)), logits(adder(), PROBLEMS, each), strict=True)
    assert all(torch.equal(whole, parts) for whole, parts in pairs)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        (("window=2", "window=5"), ("window=2",)),
        (("window=5", "window=2"), ("window=2",)),
        (("sink-boost=1", "sink-boost=0.5"), ("sink-boost=1.5",)),
        (("sink-boost=log", "sink-boost=log"), ("sink-boost=2log",)),
        (("far", "far"), ("far",)),
        (("sink-boost=2", "far"), ("far", "sink-boost=2")),
        (("drop-best-far=1", "drop-best-far=2"), ("drop-best-far=3",)),
        (("drop-best-far=1000",), ("far",)),
        (("far", "drop-best-far=1"), ("far",)),
    ],
)
def test_interventions_compose(several, one):
    pairs = zip(
        logits(adder(), PROBLEMS, interventions(*several)), logits(adder(), PROBLEMS, interventions(*one)), strict=True
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_far_and_its_control_remove_both():
    model = adder()
    edits = interventions("random-control", "far")
    both = observe(model, PROBLEMS, edits, "hook_attn_scores")
    for problem, scores, random in zip(PROBLEMS, both, controlled(model, PROBLEMS), strict=True):
        removed = np.isneginf(scores) & causal(problem)
        assert (removed == (random | far_keys(model, problem))).all()


def test_hooks_come_in_the_order_given():
    model = adder()
    batch = model.task.encode(PROBLEMS)
    parts = [hooks_for(model, batch, interventions(name)) for name in ("sink-boost=1", "far", "window=2")]
    whole = hooks_for(model, batch, interventions("sink-boost=1", "far", "window=2"))
    assert [name for name, _ in whole] == [name for part in parts for name, _ in part]
    found = score(model, PROBLEMS, interventions("sink-boost=1", "far", "window=2"))
    assert found.interventions == ("sink-boost=1", "far", "window=2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [64, 5])
def test_no_mass_above_the_diagonal_and_no_nan(monkeypatch, name, block):
    monkeypatch.setattr(passes, "_BLOCK", block)
    model = adder("counters") if "gates" in name else adder()
    for problem, pattern in zip(PROBLEMS, observe(model, PROBLEMS, interventions(EXAMPLES[name])), strict=True):
        assert (pattern[..., ~causal(problem)] == 0).all()
        assert np.isfinite(pattern).all()
        assert (pattern.sum(-1) <= 1 + 1e-6).all()
        assert pattern.sum() > 1


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_interventions_do_not_depend_on_the_block(monkeypatch, name):
    model = adder("counters") if "gates" in name else adder()
    whole = logits(model, PROBLEMS, interventions(name))
    monkeypatch.setattr(passes, "_BLOCK", 5)
    monkeypatch.setattr(passes, "_SCORE_BYTES", 1)
    for x, y in zip(whole, logits(model, PROBLEMS, interventions(name)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# Names and errors


def _is_one_line(error) -> bool:
    text = str(error.value)
    return bool(text) and "\n" not in text and len(text) < 400


@pytest.mark.parametrize(
    "name", ["far", "window=4", "sink-boost=log", "sink-boost=2log", "sink-boost=1.5", "drop-best-far=2"]
)
def test_a_name_is_what_it_was_parsed_from(name):
    assert parse_intervention(name).name == name
    assert set(EXAMPLES) == set(NAMES)


@pytest.mark.parametrize("name", ["", "fra", "Far", "far ", "--far", "window 4", "x" * 500, "far\nwindow=1"])
def test_unknown_names_are_refused(name):
    with pytest.raises(InterventionError, match="no intervention is called") as error:
        parse_intervention(name)
    assert _is_one_line(error)


@pytest.mark.parametrize("kind", ["far", "far-zero"])
@pytest.mark.parametrize("value", ["", "1", "log"])
def test_values_that_nothing_takes_are_refused(kind, value):
    with pytest.raises(InterventionError, match="takes no value") as error:
        parse_intervention(f"{kind}={value}")
    assert _is_one_line(error)


@pytest.mark.parametrize("name", ["window", "window=", "sink-boost", "sink-boost="])
def test_missing_values_are_refused(name):
    with pytest.raises(InterventionError, match="must be") as error:
        parse_intervention(name)
    assert _is_one_line(error)


@pytest.mark.parametrize(
    "value", ["0", "00", "-1", "+1", "1.5", "nan", "inf", "1e999", "1e2", "٤", "²", "log", "4 ", "9" * 300 + "x"]
)
def test_bad_windows_are_refused(value):
    with pytest.raises(InterventionError, match="window must be at least 1") as error:
        parse_intervention(f"window={value}")
    assert _is_one_line(error)


@pytest.mark.parametrize("kind", ["drop-best-far", "random-control"])
@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "nan", "inf", "1e999", "٤", "²", "log", "9" * 300 + "x"])
def test_bad_numbers_of_keys_are_refused(kind, value):
    with pytest.raises(InterventionError, match=f"{kind} takes a number of keys from 1 up") as error:
        parse_intervention(f"{kind}={value}")
    assert _is_one_line(error)


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "1e999", "-1e999", "٤", "²", "1_000", "3log", "Log", "x" * 500]
)
def test_bad_boosts_are_refused(value):
    with pytest.raises(InterventionError, match="sink-boost must be a finite number") as error:
        parse_intervention(f"sink-boost={value}")
    assert _is_one_line(error)


@pytest.mark.parametrize("value", ["1e39", "-1e39", "1e300"])
def test_a_boost_beyond_float32_is_refused_or_swamps(value):
    try:
        edits = interventions(f"sink-boost={value}")
    except InterventionError:
        return
    assert np.isfinite(np.concatenate([x.ravel() for x in observe(adder(), PROBLEMS, edits)])).all()


def test_a_window_with_leading_zeros_or_beyond_any_sequence_is_a_window():
    plain = logits(adder(), PROBLEMS)
    for name in ("window=1000000000000000000000", "window=0000000000012"):
        pairs = zip(plain, logits(adder(), PROBLEMS, interventions(name)), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.0", "a.b", "1,2", "٤.1", "1.9999", " 1.0"])
def test_heads_are_written_layer_dot_head(text):
    with pytest.raises(InterventionError, match=r"LAYER\.HEAD") as error:
        parse_head(text)
    assert _is_one_line(error)
    assert parse_head("12.3") == (12, 3)


@pytest.mark.parametrize("side", ["only", "without"])
@pytest.mark.parametrize("head", [(2, 0), (0, 2), (-1, 0)])
@pytest.mark.parametrize("name", ["far", "sink-boost=1"])
def test_heads_that_do_not_exist_are_refused(side, head, name):
    with pytest.raises(InterventionError, match=r"does not exist: 2 layers of 2 heads") as error:
        logits(adder(), PROBLEMS, interventions(name, scope=Scope(**{side: frozenset({head})})))
    assert _is_one_line(error)


def test_a_boost_without_a_sink_is_refused():
    with pytest.raises(InterventionError, match="needs a model with a sink") as error:
        logits(adder(sink=False), PROBLEMS, interventions("sink-boost=1"))
    assert _is_one_line(error)


def test_errors_are_input_errors_with_their_values():
    with pytest.raises(ValueError, match="got '0'"):
        parse_intervention("window=0")
    with pytest.raises(ValueError, match="got 'nan'"):
        parse_intervention("sink-boost=nan")
    assert math.isfinite(float(parse_intervention("sink-boost=-1e3").value))


@pytest.mark.parametrize("chunk", [1, 3])
def test_restored_distances_are_those_of_the_problem_cut_to_its_trained_columns(chunk):
    """Two routes: the edit on the long problem, and the problem's low columns by themselves."""
    config = AdderConfig(
        task=TaskConfig(max_digits=MAX_DIGITS, chunk=chunk),
        attention=AttentionConfig(scheme="rotary", sink=False),
        n_layers=2,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    model = HookedAdder(config, seed=3).eval()
    base = 10**MAX_DIGITS
    longer = [(98765432, 4321), (55777, 1234567), (999999999, 40)]
    cut = [tuple(n % base for n in problem) for problem in longer]
    assert all(len(str(n)) == MAX_DIGITS or n == longer[2][1] for problem in cut for n in problem)
    below = RestoreDistances.columns(model)
    edited, alone = score(model, longer, [RestoreDistances()]), score(model, cut)
    within = (edited.column < below) & (edited.problem < 2)
    same = (alone.column < below) & (alone.problem < 2)
    np.testing.assert_allclose(edited.margin[within], alone.margin[same], atol=1e-5)
    far_off = score(model, longer, [RestoreDistances(count=False)])
    assert abs(far_off.margin[within] - alone.margin[same]).max() > 1e-3


def test_restored_distances_change_no_bit_at_training_lengths():
    model = adder("rotary", sink=False)
    problems = ((123, 45), (9, 999), (1, 1))
    for count in (True, False):
        before, after = score(model, problems), score(model, problems, [RestoreDistances(count=count)])
        np.testing.assert_array_equal(before.margin, after.margin)


@pytest.mark.parametrize("scheme", ["rotary2d", "none"])
def test_restored_distances_need_rotation_by_position(scheme):
    with pytest.raises(InterventionError, match="restore-distances needs rotation by token position"):
        score(adder(scheme), PROBLEMS, [RestoreDistances()])


def test_restored_distances_act_in_their_heads_alone():
    model = adder("rotary", sink=False, n_layers=1)
    one, every = (RestoreDistances(scope=s) for s in (Scope(only=frozenset({(0, 1)})), Scope()))
    plain, scoped, whole = (observe(model, PROBLEMS, edits) for edits in ([], [one], [every]))
    for before, here, everywhere in zip(plain[:3], scoped[:3], whole[:3], strict=True):  # the last one is short
        np.testing.assert_array_equal(here[0, 0], before[0, 0])
        np.testing.assert_array_equal(here[0, 1], everywhere[0, 1])
        assert abs(here[0, 1] - before[0, 1]).max() > 1e-3


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
@pytest.mark.parametrize("most", [1, 4, 1000])
def test_as_many_keys_as_in_training_are_the_nearest(scheme, most):
    model = adder(scheme, sink=False)
    for problem, pattern in zip(PROBLEMS, observe(model, PROBLEMS, [RestoreNumber(most)]), strict=True):
        batch = model.task.encode([problem])
        vocab = model.task.vocabulary
        separator = ((batch.tokens == vocab.plus) | (batch.tokens == vocab.equals))[0].numpy()
        at = batch.column[0].numpy() if model.config.attention.unit == "columns" else np.arange(len(separator))
        for query in range(len(separator)):
            distance = {k: abs(int(at[query] - at[k])) for k in range(query + 1) if not separator[k]}
            ranked = sorted(distance.values())
            last = ranked[min(most, len(ranked)) - 1]
            kept = {k for k in range(query + 1) if separator[k] or distance[k] <= last}
            assert set(np.flatnonzero(pattern[0, 0, query])) == kept


def test_as_many_keys_as_there_are_change_no_bit():
    model = adder()
    before, after = score(model, PROBLEMS), score(model, PROBLEMS, [RestoreNumber(10_000)])
    np.testing.assert_array_equal(before.margin, after.margin)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary"])
def test_the_mass_control_takes_as_much_attention_as_far_keys_had_and_no_target(scheme):
    model = adder(scheme, sink=False, n_layers=1)
    before = observe(model, PROBLEMS)
    after = observe(model, PROBLEMS, interventions("mass-control"))
    compared = 0
    for problem, old, new in zip(PROBLEMS, before, after, strict=True):
        far = far_keys(model, problem)
        batch = model.task.encode([problem])
        for head, query in np.ndindex(*old.shape[1:3]):
            gone = {k for k in range(query + 1) if old[0, head, query, k] > 0 and new[0, head, query, k] == 0}
            targets = {k for name in LOOKUPS for k in batch.lookups[name].targets[0, query].tolist()}
            assert not gone & targets
            wanted = old[0, head, query][far[query]].sum()
            taken = [old[0, head, query, k] for k in gone]
            free = sum(old[0, head, query, k] for k in range(query + 1) if k not in targets)
            if not far[query].any():
                assert not gone
            elif free > wanted + 1e-6:
                assert sum(taken) >= wanted - 1e-6  # the last one drawn may be more than was lacking
                assert sum(taken) - max(taken) < wanted + 1e-6
                compared += 1
    assert compared > 20
