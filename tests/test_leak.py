"""The arithmetic of the leak: closed forms, laws, and two ways to each number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.leak import effective_number, leak_from_masses, log_slope, majority_gap, share_from_leak
from models.normalizers import softmax

scores_strategy = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


def _log_mass(scores) -> float:
    top = max(scores)
    return top + math.log(math.fsum(math.exp(s - top) for s in scores))


def _effective_number(scores, shift: float = 0.0) -> float:
    moved = [s + shift for s in scores]
    return float(effective_number(np.array(_log_mass(moved)), np.array(_log_mass([2 * s for s in moved]))))


# Share and leak


def test_a_sink_as_high_as_the_target_halves_it():
    pattern = softmax(torch.tensor([2.0, 0.0, 0.0]), torch.tensor(2.0))
    assert pattern.tolist() == pytest.approx([0.4404, 0.0596, 0.0596], abs=5e-5)
    leak = leak_from_masses(np.array(2.0), np.array(_log_mass([0.0, 0.0, 2.0])))
    assert float(share_from_leak(leak)) == pytest.approx(float(pattern[0]))
    assert float(leak) == pytest.approx(1 + 2 * math.exp(-2))


@pytest.mark.parametrize(("n", "share"), [(7, 0.5135), (8, 0.4802)])
def test_a_gap_of_two_holds_against_seven_and_loses_to_eight(n, share):
    by_mass = share_from_leak(leak_from_masses(np.array(2.0), np.array(math.log(n))))
    by_softmax = softmax(torch.tensor([2.0, *[0.0] * n]))[0]
    assert float(by_mass) == pytest.approx(share, abs=5e-5)
    assert float(by_mass) == pytest.approx(float(by_softmax))
    assert (majority_gap(n) < 2) == (share > 0.5)


@given(scores_strategy, st.floats(-30, 30), st.floats(-30, 30))
def test_one_over_one_plus_the_leak_is_the_softmax_share(others, target, sink):
    pattern = softmax(torch.tensor([target, *others], dtype=torch.float64), torch.tensor(sink, dtype=torch.float64))
    leak = leak_from_masses(np.array(target), np.array(_log_mass([*others, sink])))
    assert float(share_from_leak(leak)) == pytest.approx(float(pattern[0]), rel=1e-9)


@given(st.integers(1, 10**6))
def test_the_majority_gap_splits_a_crowd_in_half(n):
    share = share_from_leak(leak_from_masses(np.array(majority_gap(n)), np.array(math.log(n))))
    assert float(share) == pytest.approx(0.5)


@pytest.mark.parametrize("n", [0, -3, 0.5, math.nan])
def test_no_crowd_has_no_majority_gap(n):
    with pytest.raises(ValueError, match="at least 1 key"):
        majority_gap(n)


def test_an_absent_target_leaks_without_bound_and_has_no_share():
    target, rest = np.array([-np.inf, -np.inf, 0.0]), np.array([3.0, -np.inf, -np.inf])
    leak = leak_from_masses(target, rest)
    assert leak.tolist() == [np.inf, np.inf, 0.0]
    assert share_from_leak(leak).tolist() == [0.0, 0.0, 1.0]


def test_huge_scores_neither_overflow_nor_warn():
    leak = leak_from_masses(np.array([1e4, 1e4, -1e4, 1e4]), np.array([1e4, -1e4, 1e4, 1e4 - 90]))
    assert leak.tolist() == pytest.approx([1.0, 0.0, np.inf, math.exp(-90)], rel=1e-9)
    assert share_from_leak(leak).tolist() == pytest.approx([0.5, 1.0, 0.0, 1.0])


def test_tiny_leaks_keep_their_digits():
    assert float(leak_from_masses(np.array(100.0), np.array(7.0))) == pytest.approx(math.exp(-93), rel=1e-12, abs=0)


# N_eff


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("score", [0.0, -50.0, 400.0])
def test_equal_competitors_all_count(n, score):
    assert _effective_number([score] * n) == pytest.approx(n, rel=1e-9)


def test_one_dominant_competitor_counts_alone():
    assert _effective_number([20.0, *[0.0] * 100]) == pytest.approx(1.0, abs=1e-6)


def test_no_competitor_counts_nothing():
    assert float(effective_number(np.array(-np.inf), np.array(-np.inf))) == 0


@given(scores_strategy, st.floats(-100, 100))
def test_the_effective_number_lies_between_one_and_n_and_ignores_shifts(scores, shift):
    n_eff = _effective_number(scores)
    assert 1 - 1e-9 <= n_eff <= len(scores) + 1e-9
    assert _effective_number(scores, shift) == pytest.approx(n_eff, rel=1e-9)
    weights = np.exp(np.array(scores) - max(scores))
    assert n_eff == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-9)


# How a leak grows


@given(st.floats(-5, 5), st.floats(-20, 20), st.lists(st.integers(1, 500), min_size=2, max_size=20, unique=True))
def test_a_planted_slope_is_recovered(slope, offset, distances):
    distance = np.array(distances)
    weight = 1 + distance % 5
    assert log_slope(distance, offset + slope * np.log(distance), weight) == pytest.approx(slope, abs=1e-6)


def test_a_weight_is_so_many_repetitions():
    rng = np.random.default_rng(1)
    distance, gap, weight = np.arange(1, 9), rng.normal(size=8), rng.integers(1, 5, size=8)
    repeated = log_slope(np.repeat(distance, weight), np.repeat(gap, weight))
    assert log_slope(distance, gap, weight) == pytest.approx(repeated)
    assert repeated == pytest.approx(np.polyfit(np.log(np.repeat(distance, weight)), np.repeat(gap, weight), 1)[0])


def test_missing_gaps_and_distance_zero_are_left_out():
    distance = np.array([0, 1, 2, 4, 8])
    gap = np.array([99.0, 0.0, np.nan, 2 * math.log(4), np.inf])
    assert log_slope(distance, gap) == pytest.approx(2)


@pytest.mark.parametrize(
    ("distance", "gap", "weight"),
    [
        ([], [], None),
        ([3], [1.0], None),
        ([3, 3], [1.0, 2.0], None),
        ([0, 3], [1.0, 2.0], None),
        ([2, 3], [1.0, math.nan], None),
        ([2, 3], [1.0, 2.0], [1, 0]),
    ],
)
def test_fewer_than_two_distances_have_no_slope(distance, gap, weight):
    assert math.isnan(log_slope(np.array(distance), np.array(gap), weight))


@pytest.mark.parametrize(("slope", "bounded"), [(0.5, False), (1.0, False), (1.5, True)])
def test_a_crowds_leak_is_bounded_when_its_slope_exceeds_one(slope, bounded):
    def leak(n: int) -> float:
        gap = slope * np.log(np.arange(1, n + 1))
        assert log_slope(np.arange(1, n + 1), gap) == pytest.approx(slope)
        return float(leak_from_masses(np.array(0.0), np.log(np.exp(-gap).sum())))

    short, long = leak(1_000), leak(100_000)
    assert long > short
    assert (long < 1.05 * short) == bounded
    if bounded:
        assert long < 2.6124  # zeta(1.5)
