"""Normalizers and temperatures: known answers, laws, and two ways to the same weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stirred import stirred

from interp.interventions import InterventionError, Scope, hooks_for, parse_intervention
from interp.ledger import build_ledger
from models.attention import Blocks
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.normalizers import (
    NORMALIZERS,
    adaptive_temperature,
    entropy,
    renormalized,
    scalable,
    softmax,
    sparsemax,
    yarn_temperature,
)
from models.transformer import HookedAdder

SPARSE = ("sparsemax", "entmax15")
scores = st.lists(st.floats(-20, 20), min_size=1, max_size=12)
sinks = st.none() | st.floats(-20, 20)


def weights(name, values, sink=None):
    sink = None if sink is None else torch.tensor(sink, dtype=torch.float64)
    return NORMALIZERS[name](torch.tensor(values, dtype=torch.float64), sink)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("softmax", [0.0486, 0.3592, 0.5922]), ("sparsemax", [0, 0.25, 0.75]), ("entmax15", [0, 0.3260, 0.6740])],
)
def test_known_weights(name, expected):
    assert weights(name, [-2.0, 0.0, 0.5]).tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("name", "gap"), [("sparsemax", 1.0), ("entmax15", 2.0)])
@pytest.mark.parametrize("others", [1, 7, 3000])
def test_distractors_are_exactly_zero_once_the_gap_is_wide_enough(name, gap, others):
    for wide in (gap + 1e-7, gap + 1, 50.0):
        found = weights(name, [wide, *[0.0] * others])
        assert found[0] == pytest.approx(1, abs=1e-15)
        assert (found[1:] == 0).all()
    assert weights(name, [gap, *[0.0] * others])[1:].max() < 1e-15  # at the edge itself, within rounding
    short = weights(name, [gap - 0.01, *[0.0] * others])
    assert (short[1:] > 0).all()


@given(st.floats(0, 0.999), st.integers(1, 200))
def test_sparsemax_at_a_gap_below_one(gap, others):
    share = float(weights("sparsemax", [gap, *[0.0] * others])[0])
    assert share == pytest.approx((1 + others * gap) / (others + 1), abs=1e-9)


@pytest.mark.parametrize(("keys", "share"), [(10, 0.9401), (100, 0.9951), (1000, 0.99965)])
def test_scalable_softmax_known_shares(keys, share):
    logits = torch.tensor([3.0, *[-2.0] * (keys - 1)], dtype=torch.float64)
    factor = scalable(torch.tensor(keys), 0.43).double()
    assert softmax(logits * factor)[0].item() == pytest.approx(share, abs=5e-5)
    shifted = softmax(logits - 0.43 * math.log(keys))  # a form one finds written, which changes nothing
    torch.testing.assert_close(shifted, softmax(logits))


def test_yarn_scales_logits_by_the_square():
    assert yarn_temperature(torch.tensor(64.0)).item() == pytest.approx(2.00474, abs=5e-6)
    assert yarn_temperature(torch.tensor([0.2, 1.0])).tolist() == [1, 1]


@pytest.mark.parametrize(("keys", "factor"), [(2, 1), (4, 1.7501), (16, 2.2265), (64, 2.4076), (256, 1.7831)])
def test_adaptive_temperature_on_uniform_attention(keys, factor):
    uniform = torch.full((keys,), 1 / keys, dtype=torch.float64)
    spread = entropy(uniform, sink=False)
    assert spread.item() == pytest.approx(math.log(keys))
    assert adaptive_temperature(spread).item() == pytest.approx(factor, abs=1e-3)


@given(scores, sinks, st.floats(-1e6, 1e6))
@pytest.mark.parametrize("name", NORMALIZERS)
def test_weights_are_shares_and_do_not_see_what_all_scores_share(name, values, sink, shift):
    found = weights(name, values, sink)
    assert (found >= 0).all()
    total = float(found.sum())
    assert total == pytest.approx(1, abs=1e-9) if sink is None else total <= 1 + 1e-9
    moved = weights(name, [v + shift for v in values], None if sink is None else sink + shift)
    np.testing.assert_allclose(found, moved, atol=1e-7)


@given(scores, sinks)
@pytest.mark.parametrize("name", SPARSE)
def test_a_sink_is_one_more_score(name, values, sink):
    if sink is not None:
        np.testing.assert_allclose(weights(name, values, sink), weights(name, [*values, sink])[:-1], atol=1e-12)


@given(scores, sinks)
@pytest.mark.parametrize("name", SPARSE)
def test_other_weights_from_softmaxs_weights_alone(name, values, sink):
    pattern = weights("softmax", values, sink)
    found = renormalized(pattern, NORMALIZERS[name], sink is not None)
    np.testing.assert_allclose(found, weights(name, values, sink), atol=1e-5)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_dead_rows_large_scores_and_single_keys(name):
    normalizer = NORMALIZERS[name]
    rows = torch.tensor([[-math.inf] * 3, [0.0, -math.inf, -math.inf], [1e8, 1e8, -1e8], [-1e8, -math.inf, -1e8]])
    rows.requires_grad_()
    found = normalizer(rows, None)
    expected = torch.tensor([[0, 0, 0], [1, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]])
    torch.testing.assert_close(found, expected)
    (found * torch.arange(3.0)).sum().backward()
    assert rows.grad.isfinite().all()
    single = normalizer(torch.tensor([[3.0]]), torch.tensor([-math.inf]))
    assert single.tolist() == [[1.0]]


def adder(**changes):
    config = AdderConfig(
        task=TaskConfig(max_digits=3),
        attention=AttentionConfig(**{"scheme": "rotary2d", "decay": 0.1} | changes),
        n_layers=2,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=16,
    )
    return stirred(HookedAdder(config, seed=1))


def observed(model, batch, *names, scope=None, blocks=None):
    """Scores, sinks and pattern of the first layer, and the logits."""
    kept = {}
    points = [f"blocks.0.attn.hook_{kind}" for kind in ("attn_scores", "sink_scores", "pattern")]
    keep = [(p, lambda x, hook: kept.setdefault(hook.name, []).append(x)) for p in points if p in model.hook_dict]
    edits = [parse_intervention(name, scope) for name in names]
    with torch.no_grad(), model.hooks([*hooks_for(model, batch, edits), *keep]):
        logits = model(batch.tokens, batch.mask, blocks=blocks)
    return [kept[p] for p in points if p in kept], logits


PROBLEMS = ((98765432, 4321), (61, 1234567), (40, 7))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("sink", [True, False])
def test_a_swapped_normalizer_is_the_model_built_with_it(name, sink):
    plain, built = adder(sink=sink), adder(sink=sink, normalizer=name)
    built.load_state_dict(plain.state_dict())
    batch = plain.task.encode(PROBLEMS)
    (*_, (swapped,)), logits = observed(plain, batch, f"normalizer={name}")
    (*_, (own,)), expected = observed(built, batch)
    torch.testing.assert_close(swapped, own, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[batch.mask], expected[batch.mask], rtol=1e-4, atol=1e-4)
    assert (own == 0).float().mean() > 0.5  # it excludes


@pytest.mark.parametrize("name", ["ssmax=0.4", "temperature=0.5", "temperature=yarn"])
def test_scales_multiply_scores_and_the_sink_where_said(name):
    model = adder()
    batch = model.task.encode(PROBLEMS)
    (((before,), (sink,), _), _) = observed(model, batch)
    (((after,), (scaled,), _), _) = observed(model, batch, name)
    keys = batch.mask.cumsum(1).double()
    ratio = (keys / model.config.task.max_keys).clamp(min=1)
    factor = {"ssmax=0.4": 0.4 * keys.log(), "temperature=0.5": 2 + 0 * keys}.get(name, (0.1 * ratio.log() + 1) ** 2)
    allowed = torch.isfinite(before)
    expected = (before * factor[:, None, :, None])[allowed]
    torch.testing.assert_close(after[allowed].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.isneginf(after[~allowed]).all()
    real = batch.mask[:, None].expand(sink.shape)
    wanted = sink if name == "temperature=yarn" else sink * factor[:, None]
    torch.testing.assert_close(scaled[real].double(), wanted[real].double(), rtol=1e-5, atol=1e-6)


def test_adaptive_temperature_sharpens_by_its_polynomial():
    model = adder()
    batch = model.task.encode(PROBLEMS)
    (((scores,), (sink,), (pattern,)), _) = observed(model, batch)
    ((_, _, (found,)), _) = observed(model, batch, "temperature=adaptive")
    full = torch.cat([pattern, 1 - pattern.sum(-1, keepdim=True)], dim=-1).double().clamp(min=1e-30)
    h = -(full * full.log()).sum(-1)
    beta = torch.from_numpy(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], h.numpy())).clamp(min=1)
    beta = torch.where(h > 0.5, beta, 1.0)
    logits = torch.cat([scores, sink[..., None]], dim=-1).double() * beta[..., None]
    expected = torch.softmax(logits, dim=-1)[..., :-1]
    real = batch.mask[:, None, :, None].expand(pattern.shape)
    torch.testing.assert_close(found[real].double(), expected[real], rtol=1e-4, atol=1e-6)
    assert beta.max() > 1.5


@pytest.mark.parametrize("name", [*(f"normalizer={n}" for n in SPARSE), "ssmax=0.4", "temperature=adaptive"])
def test_swaps_stay_in_their_heads_and_blocks_agree(name):
    model = adder()
    batch = model.task.encode(PROBLEMS)
    ((*_, (before,)), _) = observed(model, batch)
    ((*_, (after,)), _) = observed(model, batch, name, scope=Scope(only=frozenset({(0, 1)})))
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.equal(before[:, 1], after[:, 1])
    (_, whole), (_, blocks) = (observed(model, batch, name, blocks=cut) for cut in (None, Blocks(5, 4)))
    torch.testing.assert_close(whole[batch.mask], blocks[batch.mask], rtol=1e-4, atol=1e-4)


def test_what_sparsemax_drops_may_be_brought_back_by_removing_what_beat_it():
    """Edits of scores made before or after the swap both reach it: it reads the weights that are there."""
    model = adder()
    batch = model.task.encode(PROBLEMS)
    one, other = (observed(model, batch, *names)[1] for names in (("far", "normalizer=sparsemax"),) * 2)
    assert torch.equal(one, other)
    turned = observed(model, batch, "normalizer=sparsemax", "far")[1]
    torch.testing.assert_close(one[batch.mask], turned[batch.mask])


def test_scalable_softmax_starts_as_softmax_at_the_longest_training_length():
    plain, model = adder(), adder(scalable=True)
    for block in model.blocks:
        assert block.attn.scale.tolist() == pytest.approx([1 / math.log(model.config.task.max_keys)] * 2)
    batch = model.task.encode(PROBLEMS)
    ((((before,), (sink,), _)), _), ((((after,), (scaled,), _)), _) = (observed(m, batch) for m in (plain, model))
    query = model.config.task.max_keys - 1
    torch.testing.assert_close(after[:, :, query], before[:, :, query], rtol=1e-5, atol=1e-6)
    factor = batch.mask.cumsum(1).double().log() / math.log(model.config.task.max_keys)
    real = batch.mask[:, None].expand(sink.shape)
    torch.testing.assert_close(scaled[real].double(), (sink * factor[:, None])[real].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{"normalizer": "sparsemax"}, {"normalizer": "entmax15"}, {"scalable": True}])
def test_far_keys_of_other_normalizers_are_never_pooled(changes):
    model = adder(**changes)
    batch = model.task.encode([(10**60 - 1, 10**60 - 7)])
    with torch.no_grad():
        every, pooled = (model(batch.tokens, batch.mask, blocks=Blocks(16, 16, pool=p)) for p in (False, True))
    assert torch.equal(every, pooled)


@pytest.mark.parametrize("name", SPARSE)
def test_leaks_of_weights_agree_with_the_softmax_route_where_both_apply(name):
    """From softmax's own weights the ledger gives what it gives from scores; from sparse ones, (1 - p) / p."""
    model = adder()
    books = [build_ledger(model, PROBLEMS, source=source).lookups for source in ("scores", "pattern")]
    for key, by_scores in books[0].items():
        by_weights = books[1][key]
        np.testing.assert_allclose(by_weights.leak, by_scores.leak, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(by_weights.n_eff, by_scores.n_eff, rtol=1e-3)
    swapped = build_ledger(model, PROBLEMS, [parse_intervention(f"normalizer={name}")])
    built = adder(normalizer=name)
    built.load_state_dict(model.state_dict())
    for key, found in swapped.lookups.items():
        np.testing.assert_allclose(build_ledger(built, PROBLEMS).lookups[key].share, found.share, atol=1e-4)
        has = found.share > 0
        np.testing.assert_allclose(found.leak[has], (1 - found.share[has]) / found.share[has], rtol=1e-6)
        assert np.isposinf(found.leak[~has]).all()


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("normalizer=softmin", "'sparsemax' or 'entmax15'"),
        ("normalizer", "'sparsemax' or 'entmax15'"),
        ("ssmax", "above 0"),
        ("ssmax=0", "at least"),
        ("ssmax=-1", "at least"),
        ("temperature=warm", "'yarn' or 'adaptive'"),
        ("temperature=0", "at least"),
        ("temperature=nan", "above 0"),
    ],
)
def test_unusable_values_are_refused(name, word):
    with pytest.raises(InterventionError, match=word):
        parse_intervention(name)


def test_a_normalizer_is_swapped_for_softmax_alone():
    model = adder(normalizer="sparsemax")
    with pytest.raises(InterventionError, match="take a checkpoint with softmax"):
        hooks_for(model, model.task.encode(PROBLEMS), [parse_intervention("normalizer=entmax15")])


def test_sparsemax_is_the_projection_onto_the_simplex():
    """A second route: bisect for the threshold at which the clipped scores add to 1."""
    z = np.random.default_rng(0).normal(size=40) * 2
    low, high = z.min() - 1, z.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(z - middle, 0, None).sum() > 1 else (low, middle)
    np.testing.assert_allclose(sparsemax(torch.from_numpy(z)), np.clip(z - low, 0, None), atol=1e-9)
