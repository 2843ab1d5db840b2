from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from models.checkpoint import (
    CheckpointError,
    CurvePoint,
    TrainingRecord,
    load_checkpoint,
    load_config,
    load_record,
    save_checkpoint,
)
from models.config import AdderConfig, AttentionConfig, InputError, TaskConfig
from models.recipes import RECIPES, Recipe, named_recipe

FILES = ("model.safetensors", "config.json", "training.json")


@pytest.fixture(scope="module")
def record(adder) -> TrainingRecord:
    return TrainingRecord(
        recipe=Recipe(name="tiny", about="none", model=adder.config, steps=3, batch=4),
        seed=5,
        step=3,
        precision="float32",
        threads=1,
        seconds=0.5,
        versions={"python": "3"},
        commit=None,
        curve=(CurvePoint(step=3, loss=1.25, exact=0.5),),
    )


@pytest.fixture(scope="module")
def originals(adder, record, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("original")
    save_checkpoint(folder, adder, record)
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture
def folder(originals, tmp_path) -> Path:
    """A good checkpoint to spoil."""
    for name, content in originals.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def refused(folder: Path, file: str, *words: str) -> str:
    """Loading raises CheckpointError with one line that names the file and says these words."""
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    message = str(error.value)
    assert message == message.strip()
    assert "\n" not in message
    assert len(message) < len(str(folder)) + 500
    assert str(folder) in message
    assert file in message
    for word in words:
        assert word in message, message
    return message


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"])
@pytest.mark.parametrize("sink", [True, False])
def test_a_checkpoint_gives_the_same_logits_to_the_bit(make_adder, record, tmp_path, scheme, sink):
    model = make_adder(scheme, sink)
    save_checkpoint(tmp_path / "a" / "b", model, record)
    loaded = load_checkpoint(str(tmp_path / "a" / "b"))
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded("987+6543"), model("987+6543"))
    assert load_record(tmp_path / "a" / "b") == record
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == sorted(FILES)


def test_saving_the_same_model_writes_the_same_bytes(adder, record, originals, folder):
    save_checkpoint(folder, adder, record)
    assert {name: (folder / name).read_bytes() for name in FILES} == originals


def test_a_failed_save_leaves_the_old_files(adder, record, originals, folder, monkeypatch):
    def full(weights, path, metadata):
        Path(path).write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(folder, adder, record)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == originals


# Bad checkpoints


def test_a_missing_directory_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no such directory")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_directory_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(folder, name)


def test_truncated_weights_are_refused_at_any_length(originals, folder):
    whole = originals["model.safetensors"]
    header = struct.unpack("<Q", whole[:8])[0]
    lengths = {0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(whole) // 2, len(whole) - 1}
    for length in sorted(lengths):
        (folder / "model.safetensors").write_bytes(whole[:length])
        refused(folder, "model.safetensors", "restore the file")
    (folder / "model.safetensors").write_bytes(whole + b"\0")
    refused(folder, "model.safetensors")


def test_flipped_header_bits_are_refused(originals, folder):
    whole = originals["model.safetensors"]
    rng = np.random.default_rng(0)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for at in [*range(8), *rng.choice(header, size=150, replace=False).tolist()]:
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << int(rng.integers(8))
        (folder / "model.safetensors").write_bytes(spoiled)
        refused(folder, "model.safetensors")


def test_a_flipped_bit_in_any_weight_is_refused(originals, folder):
    whole = originals["model.safetensors"]
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = np.random.default_rng(1)
    for at in rng.choice(np.arange(header, len(whole)), size=40, replace=False).tolist():
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << int(rng.integers(8))
        (folder / "model.safetensors").write_bytes(spoiled)
        refused(folder, "model.safetensors", "restore the file")


def test_weights_without_a_digest_are_not_refused(folder, adder):
    edit_weights(folder, lambda weights: None)  # which saves no metadata, as other programs do
    assert torch.equal(load_checkpoint(folder)("98+7"), adder("98+7"))
    weights = load_file(folder / "model.safetensors")
    for about in ({"digest": "0" * 64}, {"digesu": "0" * 64}):
        save_file(weights, folder / "model.safetensors", metadata=about)
        refused(folder, "model.safetensors", "do not match their digest")


def test_foreign_weights_are_refused(folder, originals):
    def restore():
        (folder / "model.safetensors").write_bytes(originals["model.safetensors"])

    cases = {
        "W_U": lambda w: w.update({"unembed.W_U": torch.zeros(16, 15)}),
        "float32": lambda w: w.update({"unembed.W_U": torch.zeros(16, 14, dtype=torch.float16)}),
        "names differ": lambda w: w.update({"extra": torch.zeros(1)}),
        "1 names differ": lambda w: w.pop("unembed.b_U"),
        "script": lambda w: w.update({"<script>alert(1)</script>\n" + "x" * 1000: torch.zeros(1)}),
        "NaN": lambda w: w["blocks.1.attn.W_Q"].fill_(torch.nan),
        "infinity": lambda w: w["unembed.b_U"].index_fill_(0, torch.tensor([3]), -torch.inf),
    }
    for word, spoil in cases.items():
        restore()
        edit_weights(folder, spoil)
        refused(folder, "model.safetensors", word)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", 2, "format must be 1, got 2"),
        ("format", None, "got None"),
        ("format", "1", "got '1'"),
        ("model__attention__scheme", "t5", "scheme"),
        ("model__attention__scheme", "<img src=x>\nsecond line", "scheme"),
        ("model__attention__decay", -1, "decay"),
        ("model__attention__decay", float("nan"), "decay"),
        ("model__n_layers", 10**9, "n_layers"),
        ("model__n_layers", 0, "n_layers"),
        ("model__d_model", 10**9, "d_model"),
        ("model__d_head", 6, "multiple of 4"),
        ("model__task__chunk", 2, "chunk"),
        ("model__task__max_digits", 0, "max_digits"),
        ("model__unknown", 1, "unknown"),
        ("<b>\n", 1, "<b>"),
        ("model", [], "model"),
        ("model", None, "model"),
    ],
)
def test_a_bad_configuration_names_the_field(folder, path, value, words):
    edit_config(folder, **{path: value})
    refused(folder, "config.json", words)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "x\n<b>"),
        ("format", "\ud800"),
        ("model__" + "x" * 5000, 1),
        ("model__attention__scheme", "\ud800"),
        ("model__attention__scheme", "x\n" * 3000),
        ("model__\ud800", 1),
    ],
    ids=["format line end", "format surrogate", "long name", "surrogate", "long value", "surrogate name"],
)
def test_messages_are_short_and_printable(folder, path, value):
    edit_config(folder, **{path: value})
    refused(folder, "config.json").encode()


def test_a_huge_model_is_refused_before_it_is_allocated(folder):
    edit_config(folder, model__d_model=8192, model__n_layers=64, model__d_mlp=65536, model__n_heads=256)
    refused(folder, "config.json", "weights, more than")


def test_a_configuration_of_another_shape_is_refused(folder):
    edit_config(folder, model__n_layers=3)
    refused(folder, "model.safetensors", "use the files of one checkpoint together")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe\x00", b"[" * 200_000, b'{"a":' * 200_000, b"1" * 5000, b"<html>"],
    ids=["empty", "brace", "list", "null", "number", "not UTF-8", "deep lists", "deep objects", "huge", "html"],
)
def test_a_configuration_that_is_no_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json")
    (folder / "training.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"training\.json"):
        load_record(folder)


def test_an_enormous_json_file_is_not_read(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**34)
    refused(folder, "config.json", "bytes, more than")


class Touch:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_renamed_pickle_is_refused_and_not_run(folder):
    mark = folder / "mark"
    content = pickle.dumps(Touch(mark))
    pickle.loads(content)
    assert mark.exists()  # it would have
    mark.unlink()
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors")
    torch.save({"a": Touch(mark)}, folder / "model.safetensors")
    refused(folder, "model.safetensors")
    assert not mark.exists()


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "random"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json")


def test_a_record_with_unknown_fields_is_refused(folder):
    found = json.loads((folder / "training.json").read_text())
    (folder / "training.json").write_text(json.dumps(found | {"surprise": 1}))
    with pytest.raises(CheckpointError, match=r"training\.json: surprise"):
        load_record(folder)


# Configurations

attention = st.builds(
    lambda scheme, decay, sink, boost, base, column, exact, beyond: AttentionConfig(
        scheme=scheme,
        decay=decay if scheme == "rotary2d" else 0,
        sink=sink,
        sink_boost=boost if sink else 0,
        rotary_base=base,
        separator_column=column,
        null_key=sink and scheme == "counters",
        exact_counters=exact if scheme == "counters" else 0,
        kernel_beyond=beyond,
    ),
    st.sampled_from(["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"]),
    st.floats(0, 5),
    st.booleans(),
    st.floats(-20, 20),
    st.floats(1.5, 1e7),
    st.integers(-100, 100),
    st.integers(0, 2),
    st.sampled_from(["linear", "constant", "floor"]),
)
tasks = st.builds(
    lambda chunk, cut, low, more: TaskConfig(chunk=chunk, cut=cut, min_digits=low, max_digits=low + more),
    st.sampled_from([1, 3]),
    st.sampled_from(["left", "right"]),
    st.integers(1, 10),
    st.integers(0, 40),
)
configs = st.builds(
    AdderConfig,
    task=tasks,
    attention=attention,
    n_layers=st.integers(1, 64),
    n_heads=st.integers(1, 256),
    d_model=st.integers(4, 8192),
    d_head=st.integers(1, 64).map(lambda n: 4 * n),
    d_mlp=st.integers(1, 65536),
)


@given(configs)
def test_a_configuration_survives_json(config):
    assert AdderConfig.model_validate_json(config.model_dump_json()) == config
    assert AdderConfig.model_validate(json.loads(json.dumps(config.model_dump()))) == config
    assert hash(config) == hash(config.model_copy(deep=True))


@given(tasks)
def test_training_limits_are_reached_and_not_passed(task):
    nines = 10**task.max_digits - 1
    sizes = [-(-len(str(n)) // task.chunk) for n in (nines, nines, 2 * nines)]
    assert task.max_columns == sizes[2]
    assert task.max_keys == sum(sizes) + 2
    assert task.trained_distance("columns") == sizes[2] - 1
    assert task.trained_distance("tokens") == task.max_keys - 1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (AdderConfig, {"n_layer": 2}),
        (AttentionConfig, {"scheme": "none", "window": 3}),
        (TaskConfig, {"digits": 3}),
        (TaskConfig, {"min_digits": 5, "max_digits": 4}),
        (AttentionConfig, {"scheme": "rotary", "decay": 0.3}),
        (AttentionConfig, {"sink": False, "sink_boost": 1.0}),
        (AttentionConfig, {"decay": float("inf")}),
        (Recipe, {"name": "x", "about": "", "model": AdderConfig(), "steps": 1, "batch": 3, "micro_batches": 2}),
        (
            Recipe,
            {
                "name": "x",
                "about": "",
                "model": AdderConfig(attention=AttentionConfig(sink=False)),
                "steps": 1,
                "batch": 2,
                "sink_pressure": 1.0,
            },
        ),
    ],
)
def test_inconsistent_or_unknown_fields_are_refused(kind, fields):
    with pytest.raises(ValidationError):
        kind(**fields)


def test_configurations_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        AdderConfig().n_layers = 2


def test_every_recipe_is_named_for_its_key_and_survives_json():
    assert RECIPES
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
        assert recipe.about
        assert recipe.warmup < recipe.steps
        if not recipe.key_pressure:  # which stands for the crowd better
            assert recipe.model.attention.sink_boost == recipe.sink_pressure


def test_a_named_recipe_is_itself_but_for_its_steps():
    name, recipe = next(iter(RECIPES.items()))
    assert named_recipe(name) == recipe
    assert named_recipe(name, steps=7) == Recipe.model_validate(recipe.model_dump() | {"steps": 7})
    for bad in ("1digit", name + "\n" + "x" * 1000):
        with pytest.raises(InputError, match="no recipe is called '1digit") as error:
            named_recipe(bad)
        assert len(str(error.value)) < 200
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="at least 1, got 0"):
        named_recipe(name, steps=0)


def test_the_configuration_can_be_read_without_the_weights(folder, adder):
    (folder / "model.safetensors").unlink()
    assert load_config(folder) == adder.config
