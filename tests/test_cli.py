"""The command line: what it prints, what it refuses, and in how many lines."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import interp.cli as cli
from interp.decisions import score
from interp.interventions import NAMES, parse_intervention
from models.addition import handmade_problems
from models.checkpoint import load_checkpoint
from models.recipes import LANGUAGE_RECIPES, MACHINE_RECIPES, RECIPES

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "fixtures" / "1digit-rotary2d-pressure-seed0"
HERE = str(FIXTURE)
SCORE_KEYS = [
    *("checkpoint", "digits", "problems", "decisions", "wrong", "exact", "exact_low", "exact_high"),
    *("first_wrong_column", "by_state", "eos", "by_column", "run"),
]  # INTERFACE.md, `score`


@pytest.fixture
def small(leaksum):
    """The JSON of a command on three problems of six digits."""

    def run(command, *arguments, digits="6", problems=3):
        code, out, err = leaksum(command, HERE, "--digits", digits, "--problems", problems, "--json", *arguments)
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return run


# Output


def test_score_prints_the_keys_of_the_interface(small):
    found = small("score", "--seed", "4")
    assert sorted(found) == sorted(SCORE_KEYS)
    assert (found["checkpoint"], found["digits"], found["problems"]) == (HERE, 6, 3)
    model = load_checkpoint(FIXTURE)
    expected = score(model, model.task.evaluation_problems(6, 3, seed=4), seed=4).to_json()
    assert {key: found[key] for key in expected} == json.loads(json.dumps(expected))


def test_reach_prints_a_row_per_length(small):
    found = small("reach", digits="4,6")
    assert sorted(found) == ["checkpoint", "reach", "run"]
    assert [row["digits"] for row in found["reach"]] == [4, 6]
    for row in found["reach"]:
        assert sorted(row) == sorted(["digits", "problems", "exact", "low", "high", "decisions", "wrong"])
        alone = small("score", digits=str(row["digits"]))
        assert (row["exact"], row["decisions"], row["wrong"]) == (alone["exact"], alone["decisions"], alone["wrong"])


def test_compare_is_a_table_of_scores(leaksum, small):
    other = str(FIXTURE.parent / "1digit-rotary-seed0")
    arguments = ["--digits", "4,6", "--problems", 3, "--intervene", "window=2", "--intervene", "sink-boost=9", "--json"]
    code, out, err = leaksum("compare", HERE, other, *arguments)
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    keys = ["checkpoint", "digits", "intervention", "exact", "low", "high", "wrong", "decisions"]
    assert all(list(row) == [*keys, "parameters", "train_steps", "train_seconds"] for row in rows)
    cells = [(row["checkpoint"], row["digits"], row["intervention"]) for row in rows]
    names = ("none", "window=2", "sink-boost=9")
    assert cells == [(path, n, name) for path in (HERE, other) for n in (4, 6) for name in names]
    alone = small("ablate", "--window", "2", digits="6")
    row = rows[cells.index((HERE, 6, "window=2"))]
    assert (row["exact"], row["wrong"], row["decisions"]) == (alone["exact"], alone["wrong"], alone["decisions"])
    assert rows[cells.index((other, 6, "sink-boost=9"))]["exact"] is None  # it has no sink
    assert rows[0]["parameters"] == sum(w.numel() for w in load_checkpoint(FIXTURE).parameters())


def test_compare_takes_the_handmade_problems(leaksum):
    code, out, _ = leaksum("compare", HERE, "--digits", 10, "--handmade", "--json")
    found = json.loads(out)["rows"][0]
    expected = score(load_checkpoint(FIXTURE), handmade_problems(10))
    assert (code, found["wrong"], found["decisions"]) == (0, expected.n_wrong, expected.decisions)


def test_recipes_are_listed(leaksum):
    code, out, err = leaksum("recipes", "--json")
    assert (code, err) == (0, "")
    assert [row["name"] for row in json.loads(out)["recipes"]] == [*RECIPES, *MACHINE_RECIPES, *LANGUAGE_RECIPES]
    code, out, err = leaksum("recipes")
    assert code == 0
    assert all(name in out for name in RECIPES)


def test_people_read_the_same_numbers(leaksum, small):
    found = small("score")
    code, out, err = leaksum("score", FIXTURE, "--digits", 6, "--problems", 3)
    assert (code, err) == (0, "")
    assert f"{found['wrong']} of {found['decisions']} decisions wrong" in out
    assert f"exact {found['exact']:.3f}" in out


@pytest.mark.parametrize("command", ["score", "reach", "ablate"])
def test_the_same_command_gives_the_same_bytes(leaksum, command):
    flags = ["--random-control", "--sink-boost", "log"] if command == "ablate" else []
    arguments = [command, FIXTURE, "--digits", 14, "--problems", 3, "--seed", 2, "--json", *flags]
    first, again = leaksum(*arguments), leaksum(*arguments)
    assert first == again
    assert first[0] == 0
    assert leaksum(*arguments[:6], 3, *arguments[7:])[1] != first[1]


def test_problems_come_from_a_file(leaksum, tmp_path):
    file = tmp_path / "problems.txt"
    file.write_text("# two\n12 + 345\n\n99999+1\n")
    code, out, err = leaksum("score", FIXTURE, "--problems-from", file, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["problems"], found["digits"]) == (2, None)
    assert found["decisions"] == len("357") + 1 + len("100000") + 1


def test_infinities_are_words_and_what_does_not_apply_is_null():
    value = {"a": [math.inf, (-math.inf, math.nan)], "b": {"c": 1.5, "d": None, "e": "inf", "f": True, "g": 3}}
    plain = cli._plain(value)
    assert plain == {"a": ["inf", ["-inf", None]], "b": {"c": 1.5, "d": None, "e": "inf", "f": True, "g": 3}}
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(["", "inf", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


def _as_promised(value):
    if isinstance(value, dict):
        return {key: _as_promised(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_promised(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    return {math.inf: "inf", -math.inf: "-inf"}.get(value, value)


@given(json_values)
def test_any_result_is_strict_json(value):
    assert json.loads(json.dumps(cli._plain(value), allow_nan=False)) == _as_promised(value)


# Interventions


def test_every_intervention_has_a_flag():
    assert tuple(cli.INTERVENTION_FLAGS) == NAMES
    for name, takes_value in cli.INTERVENTION_FLAGS.items():
        other = {"first-and-window": "1,3", "normalizer": "sparsemax", "round-gates": "all", "jitter-gates": "column"}
        value = other.get(name, "1")
        parse_intervention(f"{name}={value}" if takes_value else name)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--window", "4", "--far", "--window", "2"], ["window=4", "far", "window=2"]),
        (["--far", "--window=4"], ["far", "window=4"]),
        (["--intervention", "far", "--sink-boost", "log"], ["far", "sink-boost=log"]),
        (["--sink-boost", "-1", "--intervention", "window=3"], ["sink-boost=-1", "window=3"]),
    ],
)
def test_flags_are_applied_in_the_order_given(small, flags, names):
    found = small("ablate", *flags, digits="15")
    assert found["interventions"] == names
    assert sorted(found) == sorted([*SCORE_KEYS, "interventions"])
    plain = small("score", digits="15")
    assert found["decisions"] == plain["decisions"]
    assert found["by_column"] != plain["by_column"]


def test_scope_reaches_the_heads(small):
    model = load_checkpoint(FIXTURE)
    heads = [f"{layer}.{head}" for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    only, without = ([part for head in heads for part in (flag, head)] for flag in ("--head", "--except-head"))
    whole, each, none = (small("ablate", "--window", "1", *scope) for scope in ([], only, without))
    one = small("ablate", "--window", "1", "--head", "1.2")
    plain = small("score")
    assert whole["by_column"] == each["by_column"]
    assert none["by_column"] == plain["by_column"]
    assert one["by_column"] not in (whole["by_column"], plain["by_column"])


def test_each_head_in_turn_adds_up_to_scoped_runs(small):
    found = small("ablate", "--far", "--each-head", digits="14")
    assert [(row["layer"], row["head"]) for row in found["heads"]] == [(x, y) for x in range(3) for y in range(4)]
    assert found["wrong_before"] == small("score", digits="14")["wrong"]
    row = found["heads"][6]
    assert row["wrong_alone"] == small("ablate", "--far", "--head", "1.2", digits="14")["wrong"]
    assert row["wrong_without"] == small("ablate", "--far", "--except-head", "1.2", digits="14")["wrong"]


@pytest.mark.parametrize("more", [["--sink-boost", "1"], ["--head", "1.2"], ["--except-head", "0.0"]])
def test_each_head_goes_with_one_intervention_alone(leaksum, more):
    code, out, err = leaksum("ablate", HERE, "--digits", 6, "--far", "--each-head", *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--each-head takes one intervention" in err


def test_the_seed_reaches_the_random_control(small):
    edit = parse_intervention("random-control", seed=5)
    model = load_checkpoint(FIXTURE)
    expected = score(model, model.task.evaluation_problems(15, 3, seed=5), [edit]).to_json()
    assert small("ablate", "--random-control", "--seed", "5", digits="15")["by_column"] == expected["by_column"]


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["ablate", "c", "--far"], ["ablate", "c", "--intervention", "far"]),
        (["--window", "4"], ["--intervention", "window=4"]),
        (["--window=4"], ["--intervention", "window=4"]),
        (["--window"], ["--intervention", "window="]),
        (["--far=3"], ["--intervention", "far=3"]),
        (["--head", "1.2", "--digits", "5"], ["--head", "1.2", "--digits", "5"]),
        (["far", "window"], ["far", "window"]),
    ],
)
def test_flags_become_interventions(given, expanded):
    assert cli.expand_flags(given) == expanded


# Bad input: status 2, one line on standard error, nothing on standard output


def refused(result, *words):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("leaksum: ")
    for word in words:
        assert word in err, (word, err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score", HERE, "--digits", "0"], ["digits", "'0'"]),
        (["score", HERE, "--digits", "abc"], ["digits", "'abc'"]),
        (["score", HERE, "--digits", "-5"], ["digits"]),
        (["score", HERE, "--digits", "5,6"], ["one number of digits", "reach"]),
        (["score", HERE, "--digits", "٤"], ["digits"]),
        (["score", HERE, "--digits", "100001"], ["100000"]),
        (["score", HERE, "--digits", "9999999999"], ["digits"]),
        (["reach", HERE, "--digits", "5,,6"], ["digits"]),
        (["reach", HERE, "--digits", ""], ["digits"]),
        (["score", HERE, "--problems", "0"], ["problems", "0"]),
        (["score", HERE, "--problems", "-1"], ["problems", "-1"]),
        (["score", HERE, "--problems", "many"], ["many"]),
        (["score", HERE, "--seed", "-1"], ["-1"]),
        (["score", HERE, "--threads", "0"], ["0"]),
        (["score", HERE, "--colour", "red"], ["--colour"]),
        (["score"], ["CKPT"]),
        (["score", HERE, "--problems-from", "/nowhere.txt"], ["/nowhere.txt"]),
        (["scores", HERE], ["scores"]),
        (["train", "2digit", "--out", "/nowhere"], ["2digit", "recipes"]),
        (["train", "1digit-nope", "--out", "/nowhere", "--steps", "0"], ["steps", "0"]),
        (["train", "1digit-nope"], ["--out"]),
        (["ablate", HERE], ["intervention"]),
        (["ablate", HERE, "--window", "0"], ["window", "'0'"]),
        (["ablate", HERE, "--window"], ["window"]),
        (["ablate", HERE, "--window", "--far"], ["window", "'--far'"]),
        (["ablate", HERE, "--far=3"], ["far takes no value"]),
        (["ablate", HERE, "--sink-boost", "nan"], ["sink-boost", "'nan'"]),
        (["ablate", HERE, "--sink-boost", "1e300"], ["sink-boost"]),
        (["ablate", HERE, "--intervention", "fra"], ["'fra'", "far"]),
        (["ablate", HERE, "--far", "--head", "9.0"], ["9.0", "does not exist"]),
        (["ablate", HERE, "--far", "--head", "one"], ["'one'"]),
        (["ablate", HERE, "--far", "--except-head", "0.99"], ["0.99", "does not exist"]),
        (["score", HERE, "--far"], ["--far"]),
    ],
)
def test_bad_arguments_are_refused_in_one_line(leaksum, arguments, words):
    refused(leaksum(*arguments), *words)


def _missing(folder):
    shutil.rmtree(folder)


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _foreign(folder):
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def _unknown_scheme(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace("rotary2d", "rotary3d"))


def _not_json(folder):
    (folder / "config.json").write_text("{\n\n")


def _a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("weights")


@pytest.mark.parametrize("command", ["score", "reach", "ablate"])
@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_missing, "no such directory"),
        (_truncated, "model.safetensors"),
        (_foreign, "format must be 1"),
        (_unknown_scheme, "rotary3d"),
        (_not_json, "config.json"),
        (_a_file, "spoiled"),
    ],
)
def test_bad_checkpoints_are_refused_in_one_line(leaksum, tmp_path, command, spoil, word):
    folder = tmp_path / "spoiled"
    shutil.copytree(FIXTURE, folder)
    spoil(folder)
    refused(leaksum(command, folder, *(["--far"] if command == "ablate" else [])), word, "spoiled")


@pytest.mark.parametrize("name", ["two\nlines", "tab\tbell\x07", "ünïcode", "[bold]"])
def test_odd_paths_still_make_one_printable_line(leaksum, tmp_path, name):
    result = leaksum("score", tmp_path / name)
    refused(result)
    assert result[2].rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("bad", "word"), [("12 + x5", "'12 + x5'"), ("12", "'12'"), ("1 + 02", "'02'"), ("-1 + 2", "-1")]
)
def test_a_bad_problem_is_named_by_its_line(leaksum, tmp_path, bad, word):
    file = tmp_path / "problems.txt"
    file.write_text("\n".join(["# seven", "1 + 2", "", "3 + 4", "5 + 6", "7 + 8", bad, "9 + 9"]) + "\n")
    refused(leaksum("score", FIXTURE, "--problems-from", file), "line 7", word)


def test_a_boost_needs_a_sink(leaksum, tmp_path):
    code, _, _ = leaksum("train", "1digit-nope", "--steps", 1, "--out", tmp_path / "nope")
    assert code == 0
    result = leaksum("ablate", tmp_path / "nope", "--sink-boost", "1", "--digits", 3, "--problems", 1)
    refused(result, "needs a model with a sink")


# Training, interruption, imports


def test_training_runs_once_and_is_not_overwritten(leaksum, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "1digit-nope", "--steps", 1, "--out", out, "--json"]
    code, text, err = leaksum(*arguments)
    assert (code, err) == (0, "")
    found = json.loads(text)
    assert (found["recipe"], found["steps"], found["seed"]) == ("1digit-nope", 1, 0)
    files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "training.json"}
    assert leaksum(*arguments) == (0, text, "")
    refused(leaksum(*arguments, "--seed", 1), "already holds", "choose another --out")
    refused(leaksum("train", "1digit-nope", "--steps", 2, "--out", out), "already holds")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == files


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_an_interrupted_command_exits_130(leaksum, monkeypatch, json_flag):
    def interrupt(checkpoint):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupt)
    code, out, err = leaksum("shares", FIXTURE, *json_flag)
    assert (code, out) == (130, "")
    assert err in ("", "leaksum: interrupted\n")


def test_an_interrupt_while_scoring_exits_130(leaksum, monkeypatch):
    import models.transformer

    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(models.transformer.HookedAdder, "forward", interrupt)
    assert leaksum("score", FIXTURE, "--digits", 3, "--problems", 1, "--json")[:2] == (130, "")


def test_a_defect_is_not_passed_off_as_bad_input(monkeypatch):
    def fail(checkpoint):
        raise ValueError("a defect of ours")

    monkeypatch.setattr(cli, "_load", fail)
    with pytest.raises(ValueError, match="a defect of ours"):
        cli.main(["shares", HERE])


def test_no_command_shows_the_help(leaksum):
    code, out, err = leaksum()
    assert code == 2
    assert "Commands" in out + err


@pytest.mark.parametrize("command", [[], ["score"], ["ablate"], ["reach"], ["train"], ["recipes"]])
def test_help_is_there_for_every_command(leaksum, command):
    code, out, err = leaksum(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage" in out


def _modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running this."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_and_bad_flags_do_not_import_torch():
    code = (
        "from interp.cli import main\nfor a in (['--help'], ['score', '--help'], ['recipes'], ['score', '--nope']):\n"
    )
    loaded = _modules_after(code + "    try: main(a)\n    except SystemExit: pass")
    assert "typer" in loaded
    assert not loaded & {"torch", "transformer_lens", "pandas", "plotly", "safetensors"}


def test_the_models_do_not_import_plotly_or_the_study():
    loaded = _modules_after("import models, models.transformer")
    assert "torch" in loaded
    assert not loaded & {"plotly", "interp", "typer"}


def test_a_table_in_a_pipe_keeps_all_its_columns(leaksum):
    code, out, _ = leaksum("leak", HERE, "--digits", "4,6", "--problems", 2)
    header, *rows = out.splitlines()
    assert code == 0
    assert header.split()[:4] == ["layer", "head", "lookup", "present"]
    assert all(len(row.split()) == len(rows[0].split()) for row in rows)
    assert "first_same_column" in out


@pytest.mark.parametrize(
    "arguments", [["score", str(ROOT / "README.md")], ["score", HERE, "--problems", "10000000000"]]
)
def test_a_file_is_no_checkpoint_and_problems_have_a_limit(leaksum, arguments):
    code, out, err = leaksum(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "it is a file" in err or "problems must be at most 100000, got 10000000000" in err


def test_counters_prints_a_row_a_counter_and_a_head(leaksum):
    fixture = str(ROOT / "fixtures" / "1digit-counters-seed0")
    code, out, err = leaksum("counters", fixture, "--digits", 12, "--problems", 5, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (len(found["counters"]), len(found["null_keys"])) == (24, 12)
    assert found["column_counters"] == sum(row["counts_columns"] for row in found["counters"]) > 0
    code, people, _ = leaksum("counters", fixture, "--digits", 12, "--problems", 5)
    assert code == 0
    assert f"{found['column_counters']} of 24 counters follow the column" in people
    code, out, err = leaksum("counters", HERE)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no counters" in err
