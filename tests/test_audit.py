"""Audits of language models: cases, the ledger of heads, verdicts and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import VOCABULARY, tiny, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_bridge import own

import interp.audit as audits
import interp.cli as cli
from interp.audit import Case, audit, induction, language_edit, passkey, read_cases
from interp.bridge import LanguageModel, load_language_model, uniform_first_token
from interp.interventions import Scope
from models.config import InputError


@given(st.integers(2, 200), st.integers(4, 120), st.integers(0, 3))
def test_induction_targets_hold_the_right_answer(vocabulary, length, seed):
    for case in induction(vocabulary, length, 2, seed):
        half = length // 2
        assert len(case.tokens) == 2 * half
        assert case.tokens[:half] == case.tokens[half:]
        if vocabulary >= half:
            assert len(set(case.tokens)) == half
        for query, (target,) in zip(case.decisions, case.targets, strict=True):
            assert case.tokens[target - 1] == case.tokens[query]
            assert case.tokens[target] == case.tokens[query + 1]
            assert target <= half - 1 < query


@given(st.integers(7, 200), st.integers(12, 120), st.integers(0, 3))
def test_passkey_targets_hold_the_right_answer(vocabulary, length, seed):
    for case in passkey(vocabulary, length, 2, seed):
        assert len(case.tokens) == length
        marker = case.tokens[case.decisions[0]]
        assert case.tokens.count(marker) == 2
        assert case.tokens[case.targets[0][0] - 1] == marker
        for query, (target,) in zip(case.decisions, case.targets, strict=True):
            assert target < case.decisions[0]
            assert case.tokens[target] == case.tokens[query + 1]


def test_cases_depend_on_the_seed_and_their_index_alone():
    assert induction(50, 30, 2, 5) == induction(50, 30, 5, 5)[:2]
    assert induction(50, 30, 1, 5) != induction(50, 30, 1, 6)
    assert len({case.targets[0] for case in passkey(50, 60, 8)}) > 3  # at different depths


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_heads_are_measured_as_from_full_matrices(family):
    """Against the weights that the model itself reports, decision by decision."""
    model, cases = tiny(family), induction(VOCABULARY, 30, 3, 1)
    found = audits._measure(model, cases, far=10)
    shares, first, far, weight_on_first = [], [], [], []
    for case in cases:
        _, patterns = own(model, torch.tensor([case.tokens]))
        patterns = patterns[:, 0].double()
        for query, (target,) in zip(case.decisions, case.targets, strict=True):
            shares.append(patterns[:, :, query, target])
            first.append(patterns[:, :, query, 0])
            far.append(patterns[:, :, query, : max(0, query - 10)].sum(-1))
        weight_on_first.append(patterns[..., 0].mean(-1))
    for ours, theirs in ((found.share, shares), (found.first_share, first), (found.far_share, far)):
        np.testing.assert_allclose(ours, torch.stack(theirs, dim=-1).numpy(), atol=2e-5)
    np.testing.assert_allclose(found.first, torch.stack(weight_on_first).mean(0).numpy(), atol=1e-5)
    assert (found.null_share is None) == (family != "gpt_oss")


def test_rows_are_per_query_head_and_name_the_key_head():
    found = audit(tiny("llama"), [20, 40], cases=2)
    rows = {(row.layer, row.head, row.length): row for row in found.heads}
    assert len(rows) == 2 * 4 * 2
    assert [rows[0, head, 20].key_head for head in range(4)] == [0, 0, 1, 1]
    assert all(row.null_sink_share is None for row in found.heads)
    assert [score.length for score in found.lengths] == [20, 40]
    assert [score.decisions for score in found.lengths] == [2 * 9, 2 * 19]


def test_where_a_window_excludes_the_first_token_its_share_is_null():
    found = audit(tiny("gpt_oss"), [8, 30], cases=2)
    null = {(row.layer, row.length) for row in found.heads if row.first_token_share is None}
    assert null == {(0, 30)}  # its first layer sees 9 tokens back
    assert all(row.null_sink_share is not None for row in found.heads)
    assert audit(tiny("mistral"), [30], cases=1).sink_metric.share_of_heads is None


def test_the_sink_metric_stands_beside_what_even_attention_gives():
    metric = audit(tiny("llama"), [9], cases=2).sink_metric
    assert metric.uniform_value == uniform_first_token(9) > metric.threshold


def test_verdicts_name_heads_that_lose_their_targets(monkeypatch):
    model = tiny("llama")
    lengths = {20: induction(VOCABULARY, 20, 2), 40: induction(VOCABULARY, 40, 2)}

    def measured(share, wrong, length):
        decisions = sum(len(case.decisions) for case in lengths[length])
        leak = np.full((2, 4, decisions), 9.0)
        leak[1, 2] = 1 / share - 1
        flat = np.zeros((2, 4, decisions))
        wrongs = np.zeros(decisions, dtype=bool)
        wrongs[:wrong] = True
        return audits._Measured(
            wrongs, 0, leak, flat, flat, flat, None, flat, np.zeros((2, 4)), np.zeros(2, dtype=bool)
        )

    def measure(model, cases, far, edits=()):
        length = len(cases[0].tokens)
        if length == 20:
            return measured(0.9, 0, 20)
        return measured(0.1, 1 if edits and calls.pop() == "far" else 30, 40)

    calls = ["last", "other", "window", "far"]
    monkeypatch.setattr(audits, "_measure", measure)
    verdict = audit(model, [20, 40], cases=2).verdict
    assert (verdict.fails_from, verdict.heads, verdict.repaired_by) == (40, ((1, 2),), "far")
    assert any("head 1.2: share on its targets 0.90 at 20 tokens, 0.10 at 40" in line for line in verdict.evidence)


def test_interventions_on_language_models():
    model, tokens = tiny("gpt_oss"), torch.tensor([induction(VOCABULARY, 30, 1)[0].tokens])
    plain = model.run(tokens)
    names = ("far", "window=3", "first-and-window=1,3", "sink-boost=log", "sink-boost=1", "ssmax=.4", "temperature=2")
    for name in names:
        assert not torch.allclose(model.run(tokens, edits=[language_edit(name, 5, Scope(), model)]), plain), name
    far = language_edit("far", 5, Scope(only=frozenset({(1, 0)})), model)
    window = language_edit("window=5", 99, Scope(only=frozenset({(1, 0)})), model)
    assert torch.equal(model.run(tokens, edits=[far]), model.run(tokens, edits=[window]))
    refused = {"drop-best-far": "not among", "temperature=yarn": "not among", "nothing": "no intervention"}
    for name, word in refused.items():
        with pytest.raises(InputError, match=word):
            language_edit(name, 5, Scope(), model)
    with pytest.raises(InputError, match=r"head 1\.4 does not exist"):
        language_edit("far", 5, Scope(only=frozenset({(1, 4)})), model)


# Files of cases


def write(tmp_path, *lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_cases_are_read_from_a_file(tmp_path):
    model = LanguageModel("tiny", tiny("llama").model, word_tokenizer())
    path = write(
        tmp_path,
        {"tokens": [3, 4, 5, 6]},
        {"tokens": [3, 4, 5, 6], "decisions": [1, 2], "targets": [0, [0, 1]]},
        "",
        {"text": "t7 t8 t9 t3", "decisions": [2], "targets": [None]},
    )
    assert read_cases(path, model) == [
        Case((3, 4, 5, 6), (0, 1, 2)),
        Case((3, 4, 5, 6), (1, 2), ((0,), (0, 1))),
        Case((7, 8, 9, 3), (2,), (None,)),
    ]
    found = audit(model, [], str(path))
    assert [(score.length, score.decisions) for score in found.lengths] == [(4, 6)]


def test_without_targets_the_best_key_is_the_target(tmp_path):
    model, tokens = tiny("llama"), list(induction(VOCABULARY, 20, 1)[0].tokens)
    found = audits._measure(model, read_cases(write(tmp_path, {"tokens": tokens}), model), far=5)
    _, patterns = own(model, torch.tensor([tokens]))
    np.testing.assert_allclose(found.share, patterns[:, 0, :, :-1].amax(-1).numpy(), atol=1e-5)
    assert (found.gap[..., 1:] >= 0).all()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        ("[1, 2]", "a case is an object"),
        ({"tokens": [1]}, "at least 2 tokens"),
        ({"tokens": [1, VOCABULARY]}, "from 0 to 49"),
        ({"tokens": [1, True]}, "whole numbers"),
        ({"tokens": "12"}, "whole numbers"),
        ({"tokens": [1, 2], "text": "t1"}, "either tokens or text"),
        ({}, "either tokens or text"),
        ({"text": "t1 t2"}, "has no tokenizer"),
        ({"text": 5}, "must be a string"),
        ({"tokens": [1, 2, 3], "decisions": [2]}, "from 0 to 1"),
        ({"tokens": [1, 2, 3], "decisions": [1, 0]}, "rising order"),
        ({"tokens": [1, 2, 3], "decisions": []}, "at least one"),
        ({"tokens": [1, 2, 3], "targets": [0]}, "a list of 2"),
        ({"tokens": [1, 2, 3], "decisions": [0], "targets": [1]}, "from 0 to 0"),
        ({"tokens": [1, 2, 3], "target": [0, 1]}, "unknown key 'target'"),
        ({"tokens": [1, 10**400]}, "from 0 to 49"),
        ("[" * 100000, "line 2"),
        ('{"tokens": [1, 2], "tokens": [3, 4]}', "given twice"),
    ],
)
def test_a_bad_case_is_named_by_its_line(tmp_path, line, word):
    path = write(tmp_path, {"tokens": [1, 2]}, line)
    with pytest.raises(InputError, match=word) as error:
        read_cases(path, tiny("llama"))
    assert "line 2" in str(error.value)
    assert len(str(error.value)) < 400


def test_a_doubled_start_token_is_warned_about(tmp_path):
    model = LanguageModel("tiny", tiny("llama").model, word_tokenizer())
    with pytest.warns(UserWarning, match="two start tokens"):
        read_cases(write(tmp_path, {"text": "t1 t1 t5"}), model)


def test_text_that_a_tokenizer_cannot_read_is_named(tmp_path):
    model = LanguageModel("tiny", tiny("llama").model, word_tokenizer())
    with pytest.raises(InputError, match=r"line 1: the tokenizer cannot read"):
        read_cases(write(tmp_path, '{"text": "\\ud800 t3 t4"}'), model)
    found = read_cases(write(tmp_path, json.dumps({"text": "t3\u2028 t4 t5"}, ensure_ascii=False)), model)
    assert found[0].tokens == (3, 4, 5)


# The command


def test_the_command_prints_the_keys_of_the_interface(tmp_path, capsys):
    tiny("llama").model.save_pretrained(tmp_path)
    arguments = ["audit", str(tmp_path), "--lengths", "20,40", "--cases", "2"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    out, _ = capsys.readouterr()
    assert stop.value.code == 0
    found = json.loads(out)
    assert sorted(found) == sorted(["model", "task", "lengths", "heads", "sink_metric", "verdict", "run"])
    assert {"length", "decisions", "wrong", "exact"} <= found["lengths"][0].keys()
    head = ["layer", "head", "key_head", "length", "target_share", "leak", "gap", "n_eff"]
    assert list(found["heads"][0]) == [*head, "first_token_share", "null_sink_share", "far_share"]
    assert sorted(found["sink_metric"]) == ["share_of_heads", "threshold", "uniform_value"]
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, _ = capsys.readouterr()
    assert stop.value.code == 0
    assert "fails from 20 tokens" in " ".join(out.split())


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--lengths", "200"], "96 positions"),
        (["--lengths", "2"], "at least 4"),
        (["--task", "passkey", "--lengths", "5"], "at least 12"),
        (["--task", "songs"], "no task is called 'songs'"),
        (["--lengths", "x"], "lengths must be"),
        (["--lengths", "60000000"], "96 positions"),
        (["--cases", "99999999"], "cases must be from 1 to"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, more, word):
    tiny("llama").model.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit", str(tmp_path), "--lengths", "20", *more])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert word in err


def test_the_shipped_language_model_fails_by_degrees_in_its_second_layer():
    """It repeats all that it was trained on, and less the longer the sequence, inside its 512 positions: the heads that
    found the target at 32 tokens score it below other keys at 256, and no edit tried brings it back."""
    model = load_language_model(Path(__file__).parents[1] / "fixtures" / "induction-llama-seed0")
    found = audit(model, [32, 64, 96, 128, 256], cases=4)
    right = [score.right for score in found.lengths]
    assert right[:2] == [1, 1]
    assert right[2:] == sorted(right[2:], reverse=True)
    assert 0.5 < right[2] < 0.9
    assert right[-1] < 0.2
    assert found.verdict.fails_from == 96
    assert found.verdict.repaired_by is None
    assert found.verdict.heads
    assert all(layer == 1 for layer, _ in found.verdict.heads)
    rows = {(row.layer, row.head, row.length): row for row in found.heads}
    for head in found.verdict.heads:
        assert rows[*head, 256].gap < 0 < rows[*head, 32].target_share - rows[*head, 256].target_share
