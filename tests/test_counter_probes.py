"""Counter probes on counters whose counts are known, and the rounding of gates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from interp.counters import PAIRS, column_counters, probe_counters
from interp.decisions import score
from interp.interventions import InterventionError, Scope, hooks_for, parse_intervention
from models.config import AdderConfig, AttentionConfig, InputError
from models.transformer import HookedAdder

RATES = {"first": 1.0, "second": 0.985, "sum": 0.9}  # counts a digit


def counting(gates=None, resets=None):
    """A model whose gates and resets are set by hand, by token id ``[head, counter, vocabulary]``.

    By default counter 0 counts digits one by one and starts again after a separator; counter 1 never starts again.
    """
    model = HookedAdder(AdderConfig(attention=AttentionConfig(scheme="counters", null_key=True), n_heads=2), seed=0)
    vocab = model.task.vocabulary
    separators = torch.zeros(vocab.size)
    separators[[vocab.plus, vocab.equals]] = 1
    gate = torch.zeros(2, 2, vocab.size) + (1 - separators) if gates is None else gates
    reset = torch.stack([separators, torch.zeros(vocab.size)]).expand(2, 2, -1) if resets is None else resets
    tokens: list[torch.Tensor] = []

    def remember(module, arguments):
        tokens.append(arguments[0])

    model.embed.register_forward_pre_hook(remember)
    for block in model.blocks:
        for table, point in ((gate, block.attn.hook_gate), (reset, block.attn.hook_reset)):
            point.add_perma_hook(lambda x, hook, table=table: table.to(x.dtype)[..., tokens[-1]].permute(2, 3, 0, 1))
    return model.eval()


def test_a_counter_of_columns_is_told_from_one_that_only_grows():
    found = probe_counters(counting(), digits=30, problems=40)
    column, total = found.counters[0], found.counters[1]
    assert (column.layer, column.head, column.counter) == (0, 0, 0)
    assert column.column == pytest.approx(1, abs=1e-9)
    assert column.per_digit == pytest.approx((1, 1, 1), abs=1e-9)
    assert column.counts_columns
    assert column.one_a_digit
    assert total.position > 0.99  # it grows with every digit of the sequence
    assert total.position > total.column
    assert not total.counts_columns
    for probe in found.counters:
        assert abs(probe.shuffled) < 0.1
    assert found.to_json()["column_counters"] == 6  # one a head, three layers


def test_which_counters_follow_the_column_is_told_at_training_length():
    expected = torch.tensor([True, False]).expand(3, 2, 2)
    assert torch.equal(column_counters(counting()), expected)


def by_row(rates):
    """Gates that depend on the row are not a function of the token; resets of a row's separator are."""
    model = counting()
    position = {}

    def gate(x, hook):
        rows = position["rows"]
        per_row = torch.tensor(list(rates.values()), dtype=x.dtype)
        digit = position["digit"]
        return torch.where(digit[..., None, None], per_row[rows][..., None, None], torch.zeros_like(x))

    vocab = model.task.vocabulary

    def remember(module, arguments):
        ids = arguments[0]
        separator = (ids == vocab.plus) | (ids == vocab.equals)
        position["rows"] = separator.cumsum(1).clamp(max=2)
        position["digit"] = ~separator

    model.embed.register_forward_pre_hook(remember)
    for block in model.blocks:
        block.attn.hook_gate.add_perma_hook(gate)
    return model


def test_rates_of_rows_and_the_column_where_they_are_half_a_column_apart():
    found = probe_counters(by_row(RATES), digits=60, problems=40).counters[0]
    assert found.per_digit == pytest.approx(tuple(RATES.values()), abs=1e-6)
    pace = np.mean(list(RATES.values()))
    rows = list(RATES.values())
    for pair, (one, other) in PAIRS.items():
        apart = rows[one] - rows[other]
        columns = np.arange(len(found.apart[pair]))
        np.testing.assert_allclose(found.apart[pair], apart * (columns + 1), atol=1e-4)
        assert found.predicted_half_column(pair) == pytest.approx(pace / (2 * abs(apart)), rel=1e-4)
        half = math.ceil(pace / (2 * abs(apart)) - 1e-6)
        assert found.half_column(pair) == (half if half < len(columns) else None)


def test_a_leaky_reset_saturates_and_is_reported_so():
    model = counting()
    vocab = model.task.vocabulary
    leaky = torch.full((2, 2, vocab.size), 0.1)
    leaky[..., [vocab.plus, vocab.equals]] = 1
    model = counting(resets=leaky)
    found = probe_counters(model, digits=60, problems=20).counters[0]
    assert found.saturation == pytest.approx(10, rel=1e-6)
    last = found.per_digit[0]
    assert last < 0.5  # no longer one a digit
    assert probe_counters(counting(), digits=20, problems=5).counters[1].saturation == math.inf


def test_kernel_peak_height_and_width():
    model = counting()
    kernel = model.blocks[1].attn.counters.kernel
    with torch.no_grad():
        kernel.zero_()
        kernel[1, 0, 8 - 1] = 6.0
        kernel[1, 0, 8] = 4.0
    (probe,) = (p for p in probe_counters(model, 12, 5).counters if (p.layer, p.head, p.counter) == (1, 1, 0))
    assert probe.kernel_peak == -1
    assert probe.kernel_height == pytest.approx(6 - 4 / 16)
    assert probe.kernel_width == 2


def test_null_key_shares_are_the_patterns():
    model = counting()
    found = probe_counters(model, digits=25, problems=3)
    batch = model.task.encode(model.task.evaluation_problems(25, 3, 0))
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, batch.mask)
    for null in found.null_keys:
        pattern = cache["pattern", null.layer][:, null.head]
        assert null.share == pytest.approx((1 - pattern.sum(-1))[batch.mask].mean().item(), abs=1e-5)
        assert null.first_token == pytest.approx(pattern[..., 0][batch.mask].mean().item(), abs=1e-5)


def test_probing_needs_counters(adder):
    with pytest.raises(InputError, match="no counters"):
        probe_counters(adder, 10)
    with pytest.raises(InterventionError, match="needs a model with counters"):
        hooks_for(adder, adder.task.encode([(1, 2)]), [parse_intervention("round-gates=all")])


def rates_under(model, name, scope=None):
    batch = model.task.encode(model.task.evaluation_problems(12, 4, 0))
    kept = {}
    keep = [
        (f"blocks.{layer}.attn.hook_{kind}", lambda x, hook: kept.__setitem__(hook.name, x.clone()))
        for layer in range(3)
        for kind in ("gate", "reset")
    ]
    edits = [parse_intervention(name, scope)] if name else []
    with torch.no_grad(), model.hooks([*hooks_for(model, batch, edits), *keep]):
        model(batch.tokens, batch.mask)
    return {name: x[batch.mask] for name, x in kept.items()}


def nearly():
    """Counter 0 counts columns at .97 a digit, counter 1 grows at .6; resets leak a little."""
    vocab = counting().task.vocabulary
    gates = torch.zeros(2, 2, vocab.size)
    gates[:, 0], gates[:, 1] = 0.97, 0.6
    resets = torch.full((2, 2, vocab.size), 0.001)
    gates[..., [vocab.plus, vocab.equals]] = 0.02
    resets[:, 0, [vocab.plus, vocab.equals]] = 0.98
    return counting(gates, resets)


def test_rounding_rounds_the_column_counters_gates_or_everything():
    model = nearly()
    before, column, every = (rates_under(model, name) for name in ("", "round-gates=column", "round-gates=all"))
    for name, rates in before.items():
        assert torch.equal(every[name], rates.round())
        if "reset" in name:
            assert torch.equal(column[name], rates)
        else:
            assert torch.equal(column[name][..., 0], rates[..., 0].round())
            assert torch.equal(column[name][..., 1], rates[..., 1])


def test_the_control_moves_gates_as_far_in_random_directions():
    model = nearly()
    before, moved = (rates_under(model, name) for name in ("", "jitter-gates=all"))
    for name, rates in before.items():
        step = (rates.round() - rates).abs()
        there = moved[name] - rates
        inside = (rates + step <= 1) & (rates - step >= 0)
        torch.testing.assert_close(there.abs()[inside], step[inside], rtol=0, atol=1e-6)
        assert 0.3 < (there[inside] > 0).float().mean() < 0.7
        assert ((moved[name] >= 0) & (moved[name] <= 1)).all()


def test_rounding_stays_in_its_heads():
    model = nearly()
    scope = Scope(only=frozenset({(1, 0)}))
    before, after = rates_under(model, ""), rates_under(model, "round-gates=all", scope)
    changed = {
        (name, head)
        for name in before
        for head in range(2)
        if not torch.equal(before[name][:, head], after[name][:, head])
    }
    assert changed == {("blocks.1.attn.hook_gate", 0), ("blocks.1.attn.hook_reset", 0)}


def test_rounding_exact_gates_changes_no_bit():
    model = counting()
    problems = model.task.evaluation_problems(12, 5, 0)
    plain = score(model, problems)
    rounded = score(model, problems, [parse_intervention("round-gates=all")])
    np.testing.assert_array_equal(plain.margin, rounded.margin)


@pytest.mark.parametrize("name", ["round-gates", "round-gates=", "round-gates=rows", "jitter-gates=1"])
def test_which_gates_must_be_said(name):
    with pytest.raises(InterventionError, match="'column' or 'all'"):
        parse_intervention(name)
