"""Counters: the scan against adding in order, kernels against their definition, exact gates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.config import AdderConfig, AttentionConfig
from models.counters import Counters, count


def in_order(gate, reset, mask):
    """Float64, one token after the other."""
    counts, now = [], torch.zeros(gate.shape[0], *gate.shape[2:], dtype=torch.float64)
    for t in range(gate.shape[1]):
        after = (1 - reset[:, t].double()) * now + gate[:, t].double()
        now = torch.where(mask[:, t, None, None], after, now)
        counts.append(now)
    return torch.stack(counts, dim=1)


def rates(length, seed=0, batch=2):
    rng = torch.Generator().manual_seed(seed)
    gate, reset = (torch.sigmoid(3 * torch.randn(batch, length, 2, 2, generator=rng)) for _ in range(2))
    return gate, reset.pow(4)  # mostly small, so that counts grow


def test_the_scan_is_exact_at_3000_tokens():
    gate, reset = rates(3000)
    mask = torch.rand(2, 3000, generator=torch.Generator().manual_seed(1)) < 0.9
    found, expected = count(gate, reset, mask), in_order(gate, reset, mask)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)
    exact = count(gate.round(), reset.round(), mask)
    assert torch.equal(exact.double(), in_order(gate.round(), reset.round(), mask))


def test_counting_without_resets_is_a_running_sum():
    gate = rates(3000)[0]
    found = count(gate, torch.zeros_like(gate), torch.ones(2, 3000, dtype=torch.bool))
    torch.testing.assert_close(found.double(), gate.double().cumsum(1), rtol=1e-6, atol=0)


@given(st.integers(1, 40), st.data())
def test_a_scan_in_two_parts_is_one_scan(length, data):
    split = data.draw(st.integers(1, length))
    gate, reset = rates(length + 1, seed=length)
    mask = torch.rand(2, length + 1, generator=torch.Generator().manual_seed(split)) < 0.8
    first = count(gate[:, :split], reset[:, :split], mask[:, :split])
    second = count(gate[:, split:], reset[:, split:], mask[:, split:], first[:, -1])
    whole = count(gate, reset, mask)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=1e-6)


def test_a_steady_gate_and_reset_saturate_at_their_ratio():
    gate, reset = torch.full((1, 400, 1, 1), 0.9), torch.full((1, 400, 1, 1), 0.1)
    found = count(gate, reset, torch.ones(1, 400, dtype=torch.bool))[0, :, 0, 0]
    expected = 9 * (1 - 0.9 ** torch.arange(1, 401).double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def counters(**changes):
    config = AttentionConfig(scheme="counters", null_key=True, **changes)
    made = Counters(AdderConfig(attention=config, n_heads=2))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng))
    return made


@pytest.mark.parametrize("beyond", ["linear", "constant", "floor"])
def test_kernels_are_piecewise_linear_and_go_on_as_configured(beyond):
    made = counters(kernel_beyond=beyond)
    apart = torch.linspace(-20, 20, 641)
    with torch.no_grad():
        found = made.kernels(apart.expand(1, 2, 2, 1, -1))[0, :, :, 0].double().numpy()
    for head, counter in np.ndindex(2, 2):
        kernel = made.kernel[head, counter].detach().double().numpy()
        expected = np.interp(apart, np.arange(-8, 9), kernel)
        out = abs(apart.numpy()) > 8
        if beyond == "floor":
            expected[out] = -12
        if beyond == "linear":
            slope = np.log1p(np.exp(made.fall[head, counter].item()))
            expected -= slope * np.maximum(abs(apart.numpy()) - 8, 0)
        np.testing.assert_allclose(found[head, counter], expected, atol=2e-6)
        assert found[head, counter, 320 + 16 * 3] == pytest.approx(kernel[8 + 3], abs=1e-6)  # query 3 ahead of the key


def test_kernels_add_up_over_counters_and_look_back_from_the_query():
    made = counters()
    query, key = torch.tensor([[[[5.0, 2.0]]]]).expand(1, 1, 2, 2), torch.tensor([[[[3.0, 2.0]]]]).expand(1, 1, 2, 2)
    with torch.no_grad():
        found = made.added(query, key)[0, :, 0, 0]
    torch.testing.assert_close(found, made.kernel[:, 0, 8 + 2] + made.kernel[:, 1, 8])


def test_a_linear_fall_always_falls():
    made = counters()
    apart = torch.tensor([8.0, 9, 100, 1000])
    with torch.no_grad():
        for side in (apart, -apart):
            assert (made.kernels(side.expand(1, 2, 2, 1, -1)).diff(dim=-1) < 0).all()


def test_exact_counters_are_rounded_to_the_last_bit_and_pass_their_gradient():
    x = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(3))
    soft, made = counters(), counters(exact_counters=1)
    for found, was in zip(made.rates(x), soft.rates(x), strict=True):
        assert set(found[..., 0].flatten().tolist()) == {0.0, 1.0}
        assert torch.equal(found[..., 0], was[..., 0].round())
        assert torch.equal(found[..., 1], was[..., 1])
    gradients = []
    for module in (made, soft):
        sum(rate.sum() for rate in module.rates(x)).backward()
        gradients.append(module.gate_weight.grad)
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(*gradients)


def test_counts_are_full_precision_under_autocast():
    made = counters()
    with torch.autocast("cpu", torch.bfloat16):
        gate, _ = made.rates(torch.randn(1, 5, 64))
    assert gate.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "rotary2d", "exact_counters": 1}, "scheme='counters'"),
        ({"scheme": "counters", "exact_counters": 3}, "at most n_counters=2, got 3"),
        ({"scheme": "counters", "null_key": True, "sink": False}, "null_key"),
        ({"scheme": "counters", "decay": 0.3}, "rotary2d"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**changes)
