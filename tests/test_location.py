"""Machines that address by location: known answers, plain loops, training that resumes, how decisions are scored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.decisions import reach, score
from interp.doctor import examine
from interp.interventions import InterventionError, parse_intervention
from interp.location import batches, location, trace
from models.addition import STATES, ProblemError
from models.checkpoint import CheckpointError, load_any, load_checkpoint, load_machine, load_machine_record
from models.config import NeuralGpuConfig, TuringConfig
from models.location import BLANK, NeuralGPU, TuringMachine, addressed, by_content
from models.machine_training import MachineTrainer
from models.recipes import MACHINE_RECIPES

FIXTURES = Path(__file__).parent.parent / "fixtures"
SHIPPED = ["binary-neural-gpu-seed0", "copy-ntm-seed0"]
SMALL = {
    "binary-neural-gpu": NeuralGpuConfig(channels=8, max_length=5),
    "copy-ntm": TuringConfig(bits=3, cells=10, width=5, hidden=8, max_length=5),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def one_hot(at, cells=6):
    return torch.nn.functional.one_hot(torch.tensor([at]), cells).float()


def moved(before, shift, sharpness=1.0, gate=0.0, content=None):
    content = torch.zeros_like(before) if content is None else content
    return addressed(before, content, *(torch.tensor([x]) for x in ([gate], shift, [sharpness])))


@pytest.mark.parametrize(("shift", "to"), [([1.0, 0, 0], 5), ([0, 1.0, 0], 0), ([0, 0, 1.0], 1)])
def test_a_shift_moves_a_head_round_the_tape(shift, to):
    torch.testing.assert_close(moved(one_hot(0), shift), one_hot(to))


def test_a_blurred_shift_is_a_circular_convolution_and_sharpening_restores_it():
    blurred = moved(one_hot(5), [0.1, 0.2, 0.7])
    torch.testing.assert_close(blurred, torch.tensor([[0.7, 0, 0, 0, 0.1, 0.2]]))
    squares = torch.tensor([[0.49, 0, 0, 0, 0.01, 0.04]])
    torch.testing.assert_close(moved(one_hot(5), [0.1, 0.2, 0.7], sharpness=2.0), squares / squares.sum())
    blurred = one_hot(5, cells=9)
    for _ in range(3):
        blurred = moved(blurred, [0.1, 0.2, 0.7])
    assert blurred.amax().item() == pytest.approx(0.7**3, abs=1e-6)  # what is left multiplies along the tape


@given(st.integers(0, 10**6), st.integers(3, 9))
def test_addressing_is_the_papers_sums(seed, cells):
    """Equations 5 to 9, cell by cell."""
    rng = np.random.default_rng(seed)
    before, tape, key = rng.dirichlet(np.ones(cells)), rng.normal(size=(cells, 4)), rng.normal(size=4)
    beta, gate, shift, gamma = rng.uniform(0, 5), rng.uniform(), rng.dirichlet(np.ones(3)), rng.uniform(1, 5)
    cosine = [key @ cell / (np.sqrt(key @ key) * np.sqrt(cell @ cell)) for cell in tape]
    content = np.exp(beta * np.array(cosine))
    content /= content.sum()
    held = [gate * content[i] + (1 - gate) * before[i] for i in range(cells)]
    turned = [sum(held[(i - by) % cells] * shift[1 + by] for by in (-1, 0, 1)) for i in range(cells)]
    expected = np.array(turned) ** gamma
    as_tensor = [torch.tensor(np.atleast_2d(x)) for x in (before, gate, shift, gamma)]
    found = by_content(torch.tensor(tape)[None], torch.tensor(key)[None], torch.tensor([[beta]], dtype=torch.float64))
    np.testing.assert_allclose(found[0], content, atol=1e-12)
    weights = addressed(as_tensor[0], found, *as_tensor[1:])[0]
    np.testing.assert_allclose(weights, expected / expected.sum(), atol=1e-9)


def test_the_convolutional_gated_recurrent_unit_is_a_loop_over_cells():
    model = NeuralGPU(NeuralGpuConfig(channels=4, layers=2), seed=3)
    model.gate_bias.copy_(torch.randn(model.gate_bias.shape))
    model.candidate_bias.copy_(torch.randn(model.candidate_bias.shape))
    tape = torch.randn(1, 5, 4)
    for layer in range(2):
        w = {n: p[layer].double().numpy() for n, p in model.named_parameters() if n[:4] in ("gate", "cand")}
        s = np.pad(tape[0].double().numpy(), ((1, 1), (0, 0)))

        def convolved(state, weight, bias, cell):
            return sum(weight[:, :, d] @ state[cell + d] for d in range(3)) + bias

        cut = [
            np.clip(1.2 / (1 + np.exp(-convolved(s, w["gates"], w["gate_bias"], cell))) - 0.1, 0, 1)
            for cell in range(5)
        ]
        update, reset = np.split(np.array(cut), 2, axis=1)
        kept = np.pad(reset * s[1:-1], ((1, 1), (0, 0)))
        new = np.tanh([convolved(kept, w["candidate"], w["candidate_bias"], cell) for cell in range(5)])
        np.testing.assert_allclose(model.step(tape, layer)[0], update * s[1:-1] + (1 - update) * new, atol=1e-5)


def test_an_lstm_controller_is_torchs():
    config = SMALL["copy-ntm"]
    model = TuringMachine(config, seed=1)
    cell = torch.nn.LSTMCell(config.bits + 1 + config.width, config.hidden)
    cell.weight_ih.copy_(model.input)
    cell.weight_hh.copy_(model.recurrent)
    cell.bias_ih.copy_(model.controller_bias)
    cell.bias_hh.zero_()
    from models.location import _lstm

    x, h, c = (torch.randn(2, n) for n in (config.bits + 1 + config.width, config.hidden, config.hidden))
    found = _lstm(x @ model.input.T + h @ model.recurrent.T + model.controller_bias, c)
    for ours, theirs in zip(found, cell(x, (h, c)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_was_written_is_read():
    """Heads whose controller is deaf: the write head moves on by one and writes, the read head stays, or follows."""
    config = SMALL["copy-ntm"]
    model, width = TuringMachine(config), config.width
    written = torch.tensor([1.0, -2, 3, 0, 5])
    for shift, cell in ((1, 0), (2, 3)):  # the read head's best direction, and where that takes it in three steps
        bias = torch.zeros_like(model.heads_bias)
        for head, direction in ((0, shift), (width + 6, 2)):
            bias[head + width + 1], bias[head + width + 2 + direction], bias[head + width + 5] = -50, 50, 10
        bias[-2 * width : -width], bias[-width:] = 50, written  # erase all, add this
        model.heads.zero_()
        model.heads_bias.copy_(bias)
        seen = trace(model, model.task.encode([(5,)]))
        tape = torch.full((config.cells, width), 1e-6)
        for step in range(3):
            torch.testing.assert_close(seen["hook_write_weights"][step], one_hot(step + 1, config.cells))
            tape[step + 1] = written
            torch.testing.assert_close(seen["hook_tape"][step, 0], tape)
        torch.testing.assert_close(seen["hook_read_weights"][2], one_hot(cell, config.cells))


def test_problems_stand_side_by_side_and_what_is_scored_ends_with_a_blank():
    batch = NeuralGPU(SMALL["binary-neural-gpu"]).task.encode([(5, 3), (0, 1)])
    assert batch.first.tolist() == [[1, 0, 1, BLANK, BLANK], [0, BLANK, BLANK, BLANK, BLANK]]
    assert batch.second.tolist() == [[1, 1, BLANK, BLANK, BLANK], [1, BLANK, BLANK, BLANK, BLANK]]
    assert batch.sum.tolist() == [[0, 0, 0, 1, BLANK], [1, BLANK, BLANK, BLANK, BLANK]]
    assert batch.asked.tolist() == [[True] * 5, [True, True, False, False, False]]


def test_symbols_are_read_then_a_delimiter_then_nothing():
    batch = TuringMachine(SMALL["copy-ntm"]).task.encode([(5, 2)])
    assert batch.symbols[0].tolist() == [[1, 0, 1], [0, 1, 0]]  # least significant bit first
    assert batch.inputs[0].tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0] * 4, [0] * 4]


def test_each_problem_has_as_many_steps_as_its_own_tape():
    model = NeuralGPU(SMALL["binary-neural-gpu"], seed=0)
    problems = [(1, 1), (2**9 - 1, 3), (0, 0), (2, 300)]
    together = score(model, problems)
    assert [part for part, _ in batches(model, problems)] == [[0, 2], [1, 3]]
    for i, problem in enumerate(problems):
        alone = score(model, [problem])
        np.testing.assert_allclose(alone.margin, together.margin[together.problem == i], atol=1e-5)


def test_decisions_of_the_neural_gpu_are_its_cells():
    found = score(NeuralGPU(SMALL["binary-neural-gpu"]), [(5, 3), (0, 1), (1, 4)])
    rows = found.to_frame().groupby("problem")
    assert rows["column"].apply(list).tolist() == [[0, 1, 2, 3, 4], [0, 1], [0, 1, 2, 3]]
    assert rows["eos"].apply(list).tolist() == [[False] * 4 + [True], [False, True], [False] * 3 + [True]]
    states = rows["state"].apply(list).tolist()
    assert states[0] == ["both", "both", "second_ended", "neither", "neither"]
    assert states[2] == ["both", "first_ended", "first_ended", "neither"]
    assert (found.wrong == (found.margin < 0)).all()


def test_decisions_of_the_turing_machine_are_its_symbols():
    found = score(TuringMachine(SMALL["copy-ntm"]), [(5, 2, 0), (7,)])
    assert found.to_frame()["column"].tolist() == [0, 1, 2, 0]
    assert found.count(found.state == STATES.index("neither")) == {"decisions": 4, "wrong": found.n_wrong}
    assert (found.wrong == (found.margin <= 0)).all()


@pytest.mark.parametrize("name", SMALL)
def test_training_goes_on_to_the_same_weights(tmp_path, name):
    recipe = MACHINE_RECIPES[name].model_copy(update={"model": SMALL[name], "steps": 6, "batch": 4})
    with torch.enable_grad():
        MachineTrainer(recipe, 1, tmp_path / "whole").run()
        (tmp_path / "parts").mkdir()
        stopped = MachineTrainer(recipe, 1, tmp_path / "parts")
        for step in range(3):
            stopped._train_step(step)
            stopped.step += 1
        stopped._save()
        MachineTrainer(recipe, 1, tmp_path / "parts", resume=True).run()
        with pytest.raises(CheckpointError, match="already holds"):
            MachineTrainer(recipe, 2, tmp_path / "parts")
    whole, parts = (tmp_path / which / "model.safetensors" for which in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    assert load_machine_record(tmp_path / "whole").recipe == recipe
    assert type(load_any(tmp_path / "whole")) is type(load_machine(tmp_path / "whole"))
    assert [check.check for check in examine(tmp_path / "whole") if check.ok is False] == []


def test_the_curriculum_grows_to_every_training_length(tmp_path):
    trainer = MachineTrainer(MACHINE_RECIPES["copy-ntm"], 0, tmp_path)
    longest = [trainer._longest(step) for step in range(trainer.recipe.steps)]
    assert longest == sorted(longest)
    assert (longest[0], longest[-1]) == (3, 20)
    assert longest[trainer.recipe.steps // 2] == 20


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_are_exact_at_training_lengths(name):
    model = load_machine(FIXTURES / name)
    assert load_machine_record(FIXTURES / name).curve[-1].exact == 1
    found = reach(model, [1, 10, 20], 20)
    assert [scores.n_wrong for scores in found.scores.values()] == [0, 0, 0]


def test_the_copying_heads_stand_where_they_should():
    found = location(load_machine(FIXTURES / "copy-ntm-seed0"), 20, 10)
    assert found.weight.shape == (2, 20)
    assert (found.weight > 0.98).all()
    assert (found.n_eff < 1.1).all()
    assert (found.kept[:, -1] < 0.5).all()  # the shifts alone would have lost it: sharpening restores it
    assert len(found.to_frame()) == 40
    assert len(found.plot().data) == 4


def test_carries_run_along_the_tape_cell_by_cell():
    """Cells that no carry reaches are right at once; the accuracy after the last step is the score's."""
    model = load_machine(FIXTURES / "binary-neural-gpu-seed0")
    found = location(model, 20, 30)
    assert found.right.shape == (22, 22)
    last = score(model, model.task.evaluation_problems(20, 30)).to_frame().groupby("column")["wrong"].mean()
    np.testing.assert_allclose(1 - last, found.right[-1][: len(last)], atol=1e-9)
    assert np.nanmean(found.right[0]) < 1
    assert len(found.to_frame()) == 22 * 22
    assert found.plot().data[0].z.shape == (22, 22)


def test_an_edit_of_a_shift_takes_effect_downstream():
    model = load_machine(FIXTURES / "copy-ntm-seed0")
    batch = model.task.encode(model.task.evaluation_problems(5, 3))
    stuck = [("hook_read_shift", lambda shift, hook: torch.tensor([[0.0, 1.0, 0.0]]).expand_as(shift))]
    plain, edited = model(batch), model.run_with_hooks(batch, fwd_hooks=stuck)
    assert ((plain > 0) == batch.symbols.bool()).all()
    assert not ((edited > 0) == batch.symbols.bool()).all()


@pytest.mark.parametrize(
    ("problems", "words"), [([], "at least one"), ([(-1, 2)], "negative")], ids=["none", "negative"]
)
def test_bad_sums_are_refused(problems, words):
    with pytest.raises(ProblemError, match=words):
        NeuralGPU(SMALL["binary-neural-gpu"]).task.encode(problems)


@pytest.mark.parametrize("problems", [[], [()], [(1, 2), (3,)], [(8,)], [(-1,)]])
def test_bad_sequences_are_refused(problems):
    with pytest.raises(ProblemError):
        TuringMachine(SMALL["copy-ntm"]).task.encode(problems)


def test_interventions_are_refused():
    with pytest.raises(InterventionError, match="this machine has none"):
        score(NeuralGPU(SMALL["binary-neural-gpu"]), [(1, 1)], [parse_intervention("far")])


@pytest.mark.parametrize("name", SHIPPED)
def test_what_needs_attention_refuses_and_says_what_applies(leaksum, name):
    folder = FIXTURES / name
    with pytest.raises(CheckpointError, match="no attention to look at"):
        load_checkpoint(folder)
    for command in ("diagnose", "leak", "shares", "counters"):
        code, out, err = leaksum(command, folder)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "`leaksum score`, `reach`, `compare`, `doctor` and `location` apply" in err
    code, _, err = leaksum("ablate", folder, "--far", "--digits", "3")
    assert code == 2
    assert "far edits attention, and this machine has none" in err


def test_an_adder_has_no_location(leaksum):
    code, out, err = leaksum("location", FIXTURES / "1digit-nope-seed0")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no machine that addresses by location" in err


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    ("command", "arguments", "keys"),
    [
        ("score", ("--digits", "6", "--problems", "4"), {"exact", "by_column", "run"}),
        ("reach", ("--digits", "3,6", "--problems", "4"), {"reach", "run"}),
        ("compare", ("--digits", "4", "--problems", "3", "--intervene", "far"), {"rows"}),
        ("location", ("--digits", "6", "--problems", "4"), {"machine", "problems", "run"}),
        ("doctor", (), {"ok", "checks"}),
    ],
)
def test_commands_that_apply(leaksum, name, command, arguments, keys):
    code, out, err = leaksum(command, FIXTURES / name, *arguments, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert keys <= found.keys()
    if command == "compare":
        assert [row["exact"] for row in found["rows"]] == [1, None]
        assert found["rows"][0]["train_steps"] == load_machine_record(FIXTURES / name).step
    if command == "doctor":
        assert found["ok"]
    assert leaksum(command, FIXTURES / name, *arguments)[0] == 0
