"""Pairs, patches and ablations: known answers on a wired model, and every sweep against the edit by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from wired import HEAD, wired

import interp.cli as cli
from interp.ablation import METHODS, SITES, AblationError, ReplaceOutput, ablate_heads, reference, sites
from interp.across import AcrossError, PatternFrom, patch_attention
from interp.decisions import score
from interp.pairs import KINDS, ROLES, PairError, build_pairs
from interp.patching import READS, SWEEPS, Runs, patch, read_parts
from models.addition import STATES
from models.checkpoint import load_checkpoint

FIXTURE = Path(__file__).parents[1] / "fixtures" / "1digit-rotary2d-pressure-seed0"

WIDE = {"chunk": 8, "carry": 8, "length": 14}  # digits


@pytest.fixture(scope="module")
def planted():
    """The wired model, and pairs whose answer is the first number's digit, which it says."""
    model = wired()
    pairs = build_pairs(model, "chunk", 8, 6)
    digit = [batch.tokens[torch.arange(6), pairs.column] for batch in (pairs.clean, pairs.corrupt)]
    return model, replace(pairs, right=digit[0], rival=digit[1])


@pytest.fixture(scope="module")
def patched(planted):
    return patch(*planted)


def test_the_wired_head_is_found_and_nothing_else(patched):
    expected = np.zeros((2, 2))
    expected[HEAD] = 1
    np.testing.assert_allclose(patched.recovered("head"), expected, atol=1e-5)
    for sweep, names, at in (("head_role", ROLES, "decision"), ("lookup", READS, "first_same_column")):
        only = np.zeros((2, 2, len(names)))
        only[(*HEAD, names.index(at))] = 1
        np.testing.assert_allclose(patched.recovered(sweep), only, atol=1e-3)


def test_the_wired_digit_stays_at_the_first_number_until_it_is_read(patched):
    found = patched.recovered("residual")
    np.testing.assert_allclose(found, np.eye(len(ROLES))[[0, 0]], atol=1e-4)
    np.testing.assert_allclose(patched.recovered("mlp"), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_differ_in_one_thing(adder, kind):
    pairs = build_pairs(adder, kind, WIDE[kind], 12, seed=3)
    query = pairs.query(pairs.corrupt)
    seen = (torch.arange(pairs.corrupt.tokens.shape[1]) <= query[:, None]) & (pairs.source >= 0)
    changed = seen & (pairs.aligned(pairs.clean.tokens) != pairs.corrupt.tokens)
    number = {"chunk": 1, "carry": 2, "length": 0}[kind]
    assert changed.sum(1).tolist() == [number] * 12
    named = {"chunk": ("first",), "carry": ("first_before", "second_before"), "length": ()}[kind]
    allowed = torch.stack([pairs.roles[ROLES.index(name)] for name in named or ("first",)]).any(0)
    assert not (changed & ~allowed).any()
    for side in ("row", "column"):
        clean, corrupt = getattr(pairs.clean, side), getattr(pairs.corrupt, side)
        assert torch.equal(pairs.aligned(clean)[seen], corrupt[seen])
    assert torch.equal(pairs.source[torch.arange(12), query], pairs.query(pairs.clean))
    for i, c in enumerate(pairs.column.tolist()):
        (a, b), (x, y) = pairs.clean.problems[i], pairs.corrupt.problems[i]
        digits = [n // 10**c % 10 for n in (a + b, x + y)]
        assert [int(pairs.right[i]), int(pairs.rival[i])] == ([digits[0], -1] if kind == "length" else digits)
        carries = [(p % 10**c + q % 10**c) >= 10**c for p, q in ((a, b), (x, y))]
        assert (carries[0] != carries[1]) == (kind == "carry")
        if kind == "length":
            assert (a, b) == (x % 10**10, y % 10**10)


def test_roles_partition_the_tokens(adder):
    pairs = build_pairs(adder, "length", 13, 5)
    assert torch.equal(pairs.roles.sum(0), pairs.corrupt.mask.long())
    first_columns = pairs.column == 0
    assert torch.equal(pairs.roles[ROLES.index("first_before")].sum(1), (~first_columns).long())
    assert (pairs.roles[ROLES.index("decision")].sum(1) == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_is_the_edit_by_hand(make_adder, kind):
    model = make_adder("rotary2d", True)
    pairs = build_pairs(model, kind, WIDE[kind], 4, seed=1)
    with torch.no_grad():
        runs = Runs(model, pairs)
        _, clean = model.run_with_cache(pairs.clean.tokens)
        cell = {"layer": 1, "head": 1, "role": 4}

        def edited(name, edit):
            def hook(x, hook):
                out = x.clone()
                for pair in range(4):
                    for pos in range(out.shape[1]):
                        if pairs.source[pair, pos] >= 0:
                            edit(out, clean[hook.name], pair, pos, int(pairs.source[pair, pos]))
                return out

            logits = model.run_with_hooks(pairs.corrupt.tokens, fwd_hooks=[(name, hook)])
            return pairs.margin(pairs.corrupt, logits).numpy()

        def whole(out, clean, pair, pos, there):
            if pairs.roles[cell["role"], pair, pos]:
                out[pair, pos] = clean[pair, there]

        def head_everywhere(out, clean, pair, pos, there):
            out[pair, pos, 1] = clean[pair, there, 1]

        def head(out, clean, pair, pos, there):
            if pairs.roles[cell["role"], pair, pos]:
                head_everywhere(out, clean, pair, pos, there)

        by_hand = {
            "residual": ("blocks.1.hook_resid_pre", whole),
            "mlp": ("blocks.1.hook_mlp_out", whole),
            "head": ("blocks.1.attn.hook_z", head_everywhere),
            "head_role": ("blocks.1.attn.hook_z", head),
        }
        for sweep, edit in by_hand.items():
            found = runs.sweep(sweep, lambda what: None)[tuple(cell[axis] for axis in SWEEPS[sweep])]
            np.testing.assert_allclose(found, edited(*edit), atol=1e-4)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none"])
def test_what_heads_read_adds_up(make_adder, batch, scheme):
    model = make_adder(scheme)
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens)
        parts = read_parts(model, batch, cache)
    for name, found in parts.items():
        torch.testing.assert_close(found.sum(-1)[batch.mask], cache[name][batch.mask], atol=1e-5, rtol=1e-4)


def test_a_patching_result_is_a_table_and_a_figure(patched):
    frame, found = patched.to_frame(), patched.to_json()
    assert len(frame) == sum(patched.recovered(sweep).size for sweep in SWEEPS) == len(found["patches"])
    best = frame[frame.sweep == "lookup"].sort_values("recovered").iloc[-1]
    assert (best["layer"], best["head"], best["lookup"]) == (*HEAD, "first_same_column")
    assert best["low"] == pytest.approx(1, abs=1e-3)
    assert len(patched.plot().data) == 4


def test_pairs_that_make_no_sense_are_refused(adder, make_adder):
    refusals = [
        (("digit", 8), "pairs are one of chunk, carry, length, got 'digit'"),
        (("carry", 1), "more digits than 1"),
        (("length", 10), "more digits than 10"),
        (("chunk", 0), "digits must be from 1"),
    ]
    for (kind, digits), words in refusals:
        with pytest.raises(ValueError, match=words):
            build_pairs(adder, kind, digits, 4)
    with pytest.raises(PairError, match="chosen among length pairs"):
        build_pairs(adder, "chunk", 8, 4, failing=True)
    never_wrong = wired()
    with pytest.raises(PairError, match="is needed to speak of its recovery"):
        patch(never_wrong, build_pairs(never_wrong, "length", 14, 4))


# Ablations


def test_zero_ablation_is_a_head_without_weights(adder):
    problems = adder.task.evaluation_problems(6, 4)
    known = reference(adder, problems)
    found = score(adder, problems, [ReplaceOutput((1, 1), "zero", known)])
    weight = adder.blocks[1].attn.W_O
    with torch.no_grad():
        kept = weight[1].clone()
        weight[1] = 0
        expected = score(adder, problems)
        weight[1] = kept
    np.testing.assert_allclose(found.margin, expected.margin, atol=1e-4)


def test_sites_are_told_apart(adder, batch):
    at = sites(batch)
    assert torch.equal(at >= 0, batch.mask & ~((batch.row == 2) & ~batch.decisions))
    assert torch.equal(at[batch.decisions & ~batch.eos], batch.state[batch.decisions & ~batch.eos])
    assert (at[batch.eos] == len(STATES)).all()
    counts = dict(zip(SITES, torch.bincount(at[at >= 0], minlength=len(SITES)).tolist(), strict=True))
    present = batch.lookups["first_from_second"].present
    assert counts["second with first"] == int(present.sum())
    assert counts["plus"] == len(batch)


def test_the_mean_is_over_queries_of_the_same_site(adder):
    problems = adder.task.evaluation_problems(5, 6)
    known = reference(adder, problems)
    batch = adder.task.encode(problems)
    with torch.no_grad():
        _, cache = adder.run_with_cache(batch.tokens)
    at = sites(batch)
    for layer in (0, 1):
        for i in range(len(SITES)):
            assert int(known.number[i]) == int((at == i).sum())
            if (at == i).any():
                expected = cache["z", layer][at == i].mean(0)
                torch.testing.assert_close(known.mean[layer, i], expected, atol=1e-5, rtol=1e-4)


def test_a_head_that_writes_a_constant_is_broken_by_zero_ablation_alone():
    """Its constant is a bias for the logits; the wired lookup still needs its own input."""
    constant = wired()
    with torch.no_grad():
        attention = constant.blocks[0].attn
        attention.W_V[1, 14, 0] = 1.0
        attention.W_O[1, 0, 20] = 0.2  # towards the digit 4, at every query alike
        attention.sink.fill_(-50.0)
    found = ablate_heads(constant, 6, 6)
    margin = found.margin[:, 0, 1] - found.margin_before
    assert abs(margin[METHODS.index("zero")]) > 0.1
    np.testing.assert_allclose(margin[1:], 0, atol=1e-4)
    assert len(found.to_frame()) == 3 * 4 == len(found.to_json()["heads"])
    assert len(found.plot().data) == 3
    problems = constant.task.evaluation_problems(6, 6)
    known, base = reference(constant, problems), score(constant, problems)
    for method in METHODS:
        lookup = score(constant, problems, [ReplaceOutput(HEAD, method, known)])
        assert np.abs(lookup.margin - base.margin).max() > 1


def test_resampling_does_not_depend_on_the_batch(adder):
    problems = adder.task.evaluation_problems(7, 5)
    known = reference(adder, adder.task.evaluation_problems(7, 8, seed=1))
    together = score(adder, problems, [ReplaceOutput((0, 0), "resample", known)])
    alone = [score(adder, [problem], [ReplaceOutput((0, 0), "resample", known)]).margin for problem in problems]
    np.testing.assert_allclose(together.margin, np.concatenate(alone), atol=1e-4)
    other = score(adder, problems, [ReplaceOutput((0, 0), "resample", known, seed=1)])
    assert np.abs(other.margin - together.margin).max() > 1e-3


def test_a_reference_without_the_site_is_refused(adder):
    equal_lengths = reference(adder, [(12, 34), (55, 66)])
    with pytest.raises(AblationError, match="no query of the site 'second_ended'"):
        score(adder, [(123, 4)], [ReplaceOutput((0, 0), "mean", equal_lengths)])


# Across seeds


def test_a_models_own_attention_changes_nothing(adder):
    problems = adder.task.evaluation_problems(40, 3)
    heads = tuple(((layer, head), (layer, head)) for layer in (0, 1) for head in (0, 1))
    found, base = score(adder, problems, [PatternFrom(adder, heads)]), score(adder, problems)
    np.testing.assert_allclose(found.margin, base.margin, atol=1e-4)


def test_a_head_is_matched_with_its_own_copy():
    failing, passing = wired(), wired(head=(0, 1))
    found = patch_attention(failing, passing, 14, 3)
    own = next(swap for swap in found.swaps if swap.head == HEAD)
    assert own.counterpart == (0, 1)
    assert own.distance == pytest.approx(0, abs=1e-5)
    assert (own.sensible, own.repaired, own.broken) == (True, 0, 0)
    frame = found.to_frame()
    assert frame["head"].iloc[-1] == "all sensible"
    assert found.to_json()["swaps"][-1]["counterpart"] is None


def test_models_of_other_tokens_are_refused(adder, make_adder):
    with pytest.raises(AcrossError, match="chunks of 1 cut from the right and of 3"):
        patch_attention(adder, make_adder(chunk=3), 12, 2)


# The command


@pytest.fixture
def leaksum(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["patch", *map(str, arguments)])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


def test_the_command_prints_the_patches(leaksum):
    arguments = (FIXTURE, "--digits", 3, "--problems", 2, "--pairs", "carry")
    code, out, err = leaksum(*arguments, "--json")
    assert (code, err) == (0, "")
    found, model = json.loads(out), load_checkpoint(FIXTURE)
    expected = patch(model, build_pairs(model, "carry", 3, 2)).to_json()
    assert {key: found[key] for key in expected} == json.loads(json.dumps(expected))
    assert leaksum(*arguments, "--json")[1] == out
    code, out, err = leaksum(*arguments)
    assert (code, err) == (0, "")
    assert "first before" not in out.splitlines()[1]
    assert "carry" in out


@pytest.mark.parametrize("mode", [["--ablate"], ["--from", "fixtures/1digit-rotary2d-seed0"]])
def test_the_command_ablates_and_goes_across(leaksum, mode, monkeypatch):
    monkeypatch.chdir(FIXTURE.parents[1])
    code, out, err = leaksum(FIXTURE, "--digits", 12, "--problems", 1, *mode, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["wrong"] == 0
    assert leaksum(FIXTURE, "--digits", 12, "--problems", 1, *mode)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "digit"], "pairs are one of chunk, carry, length, got 'digit'"),
        (["--pairs", "length"], "take more digits than 10"),
        (["--ablate", "--from", "x"], "leave one out"),
        (["--failing", "--ablate"], "--failing is about length pairs"),
        (["--failing"], "failing decisions are chosen among length pairs"),
        (["--digits", "0"], "whole numbers from 1 up"),
        (["--problems", "0"], "problems must be at least 1"),
        (["--from", "nowhere"], "nowhere"),
    ],
)
def test_the_command_refuses_in_one_line(leaksum, arguments, words):
    code, out, err = leaksum(FIXTURE, *arguments, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
