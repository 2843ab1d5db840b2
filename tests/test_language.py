"""The small language model that learns induction."""

from __future__ import annotations

import json

import pytest
import torch

import interp.cli as cli
from interp.bridge import load_language_model
from models.checkpoint import CheckpointError
from models.language import accuracy, repeated, train_language_model
from models.recipes import LANGUAGE_RECIPES, LanguageRecipe


def tiny(**changes):
    sizes = {"vocabulary": 16, "longest": 16, "positions": 32, "width": 16, "heads": 2, "layers": 1}
    return LanguageRecipe(**{"name": "tiny", "about": "a test", **sizes, "steps": 4, "batch": 4, "warmup": 2} | changes)


def test_sequences_are_distinct_tokens_repeated_once():
    found = repeated(20, 12, 50, seed=3, index=5)
    assert torch.equal(found[:, :6], found[:, 6:])
    assert all(len(set(row[:6])) == 6 for row in found.tolist())
    assert found.max() < 20
    assert torch.equal(found, repeated(20, 12, 50, seed=3, index=5))
    assert not torch.equal(found, repeated(20, 12, 50, seed=3, index=6))
    assert not torch.equal(found, repeated(20, 12, 50, seed=3, index=5, stream="probe"))


def test_accuracy_is_of_the_second_half():
    tokens = repeated(16, 8, 10, 0, 0)

    class Right:
        def __call__(self, input_ids):
            following = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 16).float()
            following[:, :4] = 0  # what the first half predicts does not count
            following[0, 5] = 0
            following[0, 5, 15 - tokens[0, 6]] = 1
            return type("Out", (), {"logits": following})

    assert accuracy(Right(), tokens) == pytest.approx(1 - 1 / 30)


def test_the_same_seed_gives_the_same_bytes_and_transformers_reads_them(tmp_path):
    last = train_language_model(tiny(), 3, tmp_path / "a")
    train_language_model(tiny(), 3, tmp_path / "b")
    train_language_model(tiny(), 4, tmp_path / "c")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert load_language_model(tmp_path / "a").limit == 32
    record = json.loads((tmp_path / "a" / "training.json").read_text())
    assert LanguageRecipe.model_validate(record["recipe"]) == tiny()
    assert record["curve"][-1] == last
    assert record["seed"] == 3
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        train_language_model(tiny(), 3, tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"), [({"longest": 64}, "lengths must rise"), ({"vocabulary": 8, "longest": 20}, "distinct")]
)
def test_recipes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_the_command_trains_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(LANGUAGE_RECIPES, "tiny", tiny())
    for arguments, status in ((["--steps", "2"], 0), (["--steps", "2"], 2), (["--resume"], 2), (["--steps", "0"], 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "tiny", "--out", str(tmp_path / "out"), "--json", *arguments])
        out, err = capsys.readouterr()
        assert stop.value.code == status
        assert (out.count("\n"), err.count("\n")) == ((1, 0) if status == 0 else (0, 1))
