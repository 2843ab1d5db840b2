"""The arithmetic of the leak.

Softmax gives the target the share ``1 / (1 + leak)`` with ``leak = sum_j exp(-gap_j)`` over all else, where
``gap_j = score_target - score_j``. Everything here works on logarithms of masses, ``log sum exp(score)``, so nothing
overflows and a leak of 1e-40 is as exact as a leak of 1. Sources: the definitions in the study; the participation
ratio for N_eff (Bell and Dean 1970).
"""

from __future__ import annotations

import math

import numpy as np


def leak_from_masses(target: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """``exp(rest - target)``: what competes, in units of the target. Log-masses of any one shape.

    A target of -inf (nothing holds) has a leak of infinity, also when nothing competes.

    >>> leak_from_masses(np.array([5.0, 5.0]), np.array([5.0, 0.0]))  # as much as the target, and e**-5 of it
    array([1.        , 0.00673795])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isneginf(target), np.inf, np.exp(rest - np.where(np.isneginf(target), 0, target)))


def share_from_leak(leak: np.ndarray) -> np.ndarray:
    """``1 / (1 + leak)``.

    >>> share_from_leak([0.0, 1.0, 3.0])
    array([1.  , 0.5 , 0.25])
    """
    return 1 / (1 + np.asarray(leak, dtype=float))


def effective_number(log_mass: np.ndarray, log_second: np.ndarray) -> np.ndarray:
    """``N_eff = (sum w)**2 / sum w**2`` from ``log sum w`` and ``log sum w**2``; 0 where there is no competitor.

    >>> four_equals = np.zeros(4)
    >>> float(effective_number(np.logaddexp.reduce(four_equals), np.logaddexp.reduce(2 * four_equals)))
    4.0
    """
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(log_mass), 0.0, np.exp(2 * log_mass - log_second))


def majority_gap(n: float) -> float:
    """The gap above which a key keeps a majority against ``n`` equal others: ``ln n``. Raises ValueError below 1.

    >>> round(majority_gap(600), 2)  # of 200 digits
    6.4
    """
    if not n >= 1:
        raise ValueError(f"a crowd has at least 1 key, got {n}")
    return math.log(n)


def log_slope(distance: np.ndarray, gap: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Slope of the gap against ``ln(distance)``, by weighted least squares; NaN with fewer than two distances.

    A crowd's leak, the sum over distances of ``exp(-gap)``, stays bounded as the sequence grows if the slope exceeds 1
    (the sum of ``distance**-slope`` converges) and grows without bound otherwise.

    >>> distance = np.arange(1, 100)
    >>> round(log_slope(distance, 2 * np.log(distance)), 6)
    2.0
    """
    distance, gap = np.asarray(distance, dtype=float), np.asarray(gap, dtype=float)
    weight = np.ones_like(gap) if weight is None else np.asarray(weight, dtype=float)
    use = (distance > 0) & np.isfinite(gap) & (weight > 0)
    if len(np.unique(distance[use])) < 2:
        return math.nan
    x, y, w = np.log(distance[use]), gap[use], weight[use]
    x = x - np.average(x, weights=w)
    return float((w * x * y).sum() / (w * x * x).sum())


def median(values: np.ndarray) -> np.ndarray:
    """Median over queries; the lower of the two middle ones, so that infinities stay infinities and never NaN.

    >>> float(median(np.array([1.0, 2.0, np.inf, np.inf])))
    2.0
    """
    return np.quantile(values, 0.5, axis=-1, method="lower")
