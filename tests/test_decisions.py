"""Scores: teacher-forced against greedy, against plain logits, and free of how the pass was cut up."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import interp.passes as passes
from interp.decisions import Z95, reach, score, wilson_interval
from interp.passes import plan_for, run_problems
from models.addition import STATES, ProblemError
from models.checkpoint import load_checkpoint
from models.config import AdderConfig, AttentionConfig
from models.transformer import HookedAdder

FIXTURE = Path(__file__).parents[1] / "fixtures" / "1digit-rotary2d-pressure-seed0"
TIE = 1e-4
MIXED = ((987, 45), (6, 12345), (40, 0), (999, 1), (12, 90817), (5, 5))
SCORE_KEYS = {"checkpoint", "digits", "problems", "decisions", "wrong", "exact", "exact_low", "exact_high"} | {
    "first_wrong_column",
    "by_state",
    "eos",
    "by_column",
    "run",
}  # INTERFACE.md, `score`


@pytest.fixture(scope="module")
def trained() -> HookedAdder:
    return load_checkpoint(FIXTURE)


@pytest.fixture(scope="module")
def noisy(trained) -> HookedAdder:
    """The trained model with a fifth of each weight's spread added as noise: it errs on some decisions, not all."""
    return _noisy(trained, 0.2)


@pytest.fixture(scope="module")
def untrained() -> HookedAdder:
    config = AdderConfig(attention=AttentionConfig(decay=0.3), n_layers=2, n_heads=2, d_model=16, d_head=8, d_mlp=32)
    return _noisy(HookedAdder(config, seed=1), 0.5)


def _noisy(model: HookedAdder, size: float) -> HookedAdder:
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            spread = weight.std() if weight.numel() > 1 and weight.std() > 0 else torch.tensor(1.0)
            weight += size * spread * torch.randn(weight.shape, generator=rng)
    return model.eval()


def _predictions(model, problems):
    """Per problem the teacher-forced choices and the right tokens, end included, one problem at a time."""
    out = []
    for problem in problems:
        batch = model.task.encode([problem])
        with torch.no_grad():
            logits = model(batch.tokens, batch.mask)[batch.decisions]
        out.append((logits, batch.targets[batch.decisions]))
    return out


# Two routes to one number


@pytest.mark.parametrize("digits", [5, 10, 25])
@pytest.mark.parametrize("which", ["trained", "noisy", "untrained"])
def test_teacher_forced_exact_match_is_greedy_exact_match(request, which, digits):
    model = request.getfixturevalue(which)
    problems = model.task.evaluation_problems(digits, 8, seed=1)
    found = score(model, problems)
    forced = _predictions(model, problems)
    greedy = model.generate(*model.task.prompt(problems), max_new_tokens=digits + 4)
    compared = 0
    for i, (logits, right) in enumerate(forced):
        best = logits.topk(2).values
        if (best[:, 0] - best[:, 1]).min() < TIE:
            continue
        compared += 1
        chosen = logits.argmax(-1)
        wrong = torch.nonzero(chosen != right).flatten()
        upto = int(wrong[0]) + 1 if len(wrong) else len(right)  # the first error included
        assert greedy[i, :upto].tolist() == chosen[:upto].tolist()
        exact = torch.equal(greedy[i, : len(right)], right)  # a batch that ends early is shorter
        assert exact == found.problem_exact[i]
        assert (found.wrong[found.problem == i] == (chosen != right).numpy()).all()
    assert compared >= 5


def test_the_models_above_cover_right_and_wrong(trained, noisy, untrained):
    problems = trained.task.evaluation_problems(10, 8, seed=1)
    assert score(trained, problems).n_wrong == 0
    assert 0 < score(noisy, problems).n_wrong < score(noisy, problems).decisions
    assert score(untrained, problems).exact == 0


def test_margins_are_those_of_plain_logits(noisy):
    problems = noisy.task.evaluation_problems(12, 6, seed=2)
    found = score(noisy, problems)
    for i, (logits, right) in enumerate(_predictions(noisy, problems)):
        values = logits.double().numpy()
        own = values[np.arange(len(values)), right.numpy()]
        other = [np.delete(row, r).max() for row, r in zip(values, right.numpy(), strict=True)]
        here = found.problem == i
        np.testing.assert_allclose(found.margin[here], own - other, atol=1e-4)
        assert found.column[here].tolist() == list(range(len(right)))
        assert (found.wrong[here] == (found.margin[here] < 0)).all()


# Counts


def test_counts_by_state_end_and_column_add_up(noisy):
    problems = noisy.task.evaluation_problems(12, 6, seed=3)
    found = score(noisy, problems)
    counts = found.to_json()
    assert counts["wrong"] > 0
    for key in ("decisions", "wrong"):
        assert sum(state[key] for state in counts["by_state"].values()) == counts[key]
        assert sum(column[key] for column in counts["by_column"]) == counts[key]
    assert counts["decisions"] == sum(len(str(a + b)) + 1 for a, b in problems)
    assert counts["eos"]["decisions"] == counts["problems"] == len(problems)
    assert counts["eos"]["wrong"] == found.wrong[found.eos].sum()
    assert [column["column"] for column in counts["by_column"]] == list(range(len(counts["by_column"])))
    mean = sum(c["margin"] * c["decisions"] for c in counts["by_column"]) / counts["decisions"]
    assert mean == pytest.approx(found.margin.mean())


def test_states_are_those_read_off_the_numbers(untrained):
    found = score(untrained, MIXED)
    order = [(i, column) for i, (a, b) in enumerate(MIXED) for column in range(len(str(a + b)) + 1)]
    assert list(zip(found.problem.tolist(), found.column.tolist(), strict=True)) == order
    for problem, column, state, eos in zip(found.problem, found.column, found.state, found.eos, strict=True):
        a, b = MIXED[problem]
        first, second = column < len(str(a)), column < len(str(b))
        expected = {(1, 1): "both", (0, 1): "first_ended", (1, 0): "second_ended", (0, 0): "neither"}[first, second]
        assert STATES[state] == expected
        assert eos == (column == len(str(a + b)))


def test_the_first_wrong_column_is_the_least_significant_wrong_one(noisy, trained):
    problems = noisy.task.evaluation_problems(12, 6, seed=3)
    found = score(noisy, problems)
    firsts = [
        int(torch.nonzero(logits.argmax(-1) != right)[0])
        for logits, right in _predictions(noisy, problems)
        if (logits.argmax(-1) != right).any()
    ]
    assert found.first_wrong_column == min(firsts)
    assert score(trained, problems[:2]).first_wrong_column is None


def test_json_has_the_keys_of_the_interface(noisy):
    found = score(noisy, MIXED, seed=7)
    counts = found.to_json()
    assert set(counts) == SCORE_KEYS - {"checkpoint", "digits"}
    assert set(counts["by_state"]) == {"both", "first_ended", "second_ended", "neither"}
    assert all(set(x) == {"decisions", "wrong"} for x in (*counts["by_state"].values(), counts["eos"]))
    assert all(set(x) == {"column", "decisions", "wrong", "margin"} for x in counts["by_column"])
    assert counts["run"]["seed"] == 7
    rows = reach(noisy, [3], 2).to_json()
    assert set(rows[0]) == {"digits", "problems", "exact", "low", "high", "decisions", "wrong"}


def test_a_frame_has_a_row_per_decision(noisy):
    found = score(noisy, MIXED)
    frame = found.to_frame()
    assert list(frame.columns) == ["problem", "column", "state", "eos", "wrong", "margin"]
    assert len(frame) == found.decisions
    by_state = frame.groupby("state").wrong.agg(["size", "sum"])
    for name, counts in found.to_json()["by_state"].items():
        if counts["decisions"]:
            assert by_state.loc[name].tolist() == [counts["decisions"], counts["wrong"]]
    assert (~frame.groupby("problem").wrong.any()).mean() == found.exact


def test_reach_is_the_score_at_each_length(noisy):
    found = reach(noisy, [4, 9, 4], 5, seed=6)
    assert list(found.scores) == [4, 9]
    for digits, row in zip(found.scores, found.to_json(), strict=True):
        alone = score(noisy, noisy.task.evaluation_problems(digits, 5, seed=6))
        assert (row["digits"], row["problems"], row["exact"], row["wrong"]) == (digits, 5, alone.exact, alone.n_wrong)
        assert (row["low"], row["high"]) == wilson_interval(round(5 * alone.exact), 5)
    assert found.to_frame().digits.tolist() == [4, 9]


# Intervals


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
        (1, 1, 0.2065, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_intervals_are_the_known_ones(right, n, low, high):
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_contain_the_share_and_solve_the_score_test(counts):
    right, n = counts
    low, high = wilson_interval(right, n)
    assert 0 <= low <= right / n <= high <= 1
    for bound in (low, high):  # the bound is the share at which the observed one is z standard errors off
        assert abs(right / n - bound) == pytest.approx(Z95 * (bound * (1 - bound) / n) ** 0.5, abs=1e-7)
    assert wilson_interval(n - right, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(("right", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_a_share_of_nothing_has_no_interval(right, n):
    with pytest.raises(ValueError, match=f"got {right} of {n}"):
        wilson_interval(right, n)


def test_the_bootstrap_draws_whole_problems_and_repeats_itself(noisy):
    problems = noisy.task.evaluation_problems(12, 10, seed=3)
    found = score(noisy, problems)
    low, high = found.wrong_interval(seed=4)
    assert (low, high) == found.wrong_interval(seed=4)
    assert low < found.n_wrong / found.decisions < high
    frame = found.to_frame().groupby("problem").wrong.agg(["sum", "size"]).to_numpy()
    rng = np.random.default_rng(99)  # another stream: the same law, not the same draws
    shares = []
    for _ in range(2000):
        drawn = frame[rng.choice(len(frame), len(frame))]
        shares.append(drawn[:, 0].sum() / drawn[:, 1].sum())
    assert (low, high) == pytest.approx(np.quantile(shares, [0.025, 0.975]), abs=0.25 * (high - low))


def test_problems_that_are_all_alike_have_an_interval_of_no_width(noisy):
    problem = next(p for p in noisy.task.evaluation_problems(12, 6, seed=3) if score(noisy, [p]).n_wrong)
    found = score(noisy, [problem] * 4)
    share = found.n_wrong / found.decisions
    assert found.wrong_interval() == pytest.approx((share, share))


# How the pass is cut up does not matter


@pytest.mark.parametrize(("score_bytes", "block"), [(1, 64), (1, 4), (2**30, 7), (2**30, 10_000)])
def test_scores_do_not_depend_on_the_plan(noisy, monkeypatch, score_bytes, block):
    noisy = copy.deepcopy(noisy).double()  # in float32 a logit of 20 is only good to 1e-5
    problems = [*noisy.task.evaluation_problems(12, 5, seed=3), *MIXED]
    before, plan = score(noisy, problems), plan_for(noisy, problems)
    monkeypatch.setattr(passes, "_SCORE_BYTES", score_bytes)
    monkeypatch.setattr(passes, "_BLOCK", block)
    assert plan_for(noisy, problems) != plan or block == 10_000
    after = score(noisy, problems)
    np.testing.assert_allclose(after.margin, before.margin, rtol=1e-9, atol=1e-9)
    for name in ("problem", "column", "state", "eos"):
        assert (getattr(after, name) == getattr(before, name)).all()
    assert (after.wrong == before.wrong)[np.abs(before.margin) > TIE].all()


def test_scores_do_not_depend_on_the_order_of_the_problems(noisy):
    problems = [*noisy.task.evaluation_problems(12, 5, seed=3), *MIXED]
    order = np.random.default_rng(0).permutation(len(problems))
    before, after = score(noisy, problems), score(noisy, [problems[i] for i in order])
    for new, old in enumerate(order):
        margins = after.margin[after.problem == new], before.margin[before.problem == old]
        np.testing.assert_allclose(*margins, rtol=1e-5, atol=1e-5)


def test_a_pass_yields_every_problem_once_and_counts_up(untrained):
    told: list[int] = []
    steps = list(run_problems(untrained, MIXED, progress=told.append))
    assert sorted(i for step in steps for i in step.indices) == list(range(len(MIXED)))
    assert all(step.batch.problems == tuple(MIXED[i] for i in step.indices) for step in steps)
    assert told == sorted(told)
    assert told[-1] == len(MIXED)


def test_no_problem_is_refused(untrained):
    with pytest.raises(ProblemError, match="at least one"):
        score(untrained, [])


# The model is left as it was


@pytest.mark.parametrize("training", [True, False])
def test_scoring_restores_the_training_flag(untrained, training):
    model = copy.deepcopy(untrained).train(training)
    seen: list[bool] = []
    with model.hooks([("hook_embed", lambda value, hook: seen.append(model.training))]):
        score(model, MIXED)
    assert seen
    assert not any(seen)
    assert model.training == training
    assert all(module.training == training for module in model.modules())


def _hooks(model):
    return [(name, len(point.fwd_hooks), len(point._forward_hooks)) for name, point in model.hook_dict.items()]


def test_a_hook_that_raises_leaves_no_hook_and_the_flag(untrained):
    model = copy.deepcopy(untrained).train()
    before = _hooks(model)

    def fail(value, hook):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        list(run_problems(model, MIXED, extra_hooks=lambda batch: [("blocks.1.attn.hook_pattern", fail)]))
    assert _hooks(model) == before
    assert model.training


@pytest.mark.parametrize("permanent", [True, False])
def test_the_users_own_hooks_fire_and_stay(untrained, permanent):
    model = copy.deepcopy(untrained)
    plain = score(model, MIXED)
    fired: list[str] = []

    def edit(value, hook):
        fired.append(hook.name)
        return value + 1.0 * torch.arange(value.shape[-1])

    model.add_hook("blocks.0.hook_resid_post", edit, is_permanent=permanent)
    edited = score(model, MIXED)
    assert set(fired) == {"blocks.0.hook_resid_post"}
    assert np.abs(edited.margin - plain.margin).max() > 1e-3
    np.testing.assert_array_equal(score(model, MIXED).margin, edited.margin)
    model.reset_hooks(including_permanent=True)
    np.testing.assert_array_equal(score(model, MIXED).margin, plain.margin)
