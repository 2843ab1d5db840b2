"""Path patching: the wired model's one path, and every kind of edge against the procedure with all else frozen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from wired import HEAD, wired

import interp.cli as cli
from interp.circuit import Node, _Paths, circuit_figure, find_circuit
from interp.pairs import ROLES, PairError, build_pairs
from interp.patching import LEAST_MARGIN

FIXTURE = Path(__file__).parents[1] / "fixtures" / "1digit-rotary2d-pressure-seed0"


@pytest.fixture(scope="module")
def found():
    model = wired()
    pairs = build_pairs(model, "chunk", 8, 6)
    digit = [batch.tokens[torch.arange(6), pairs.column] for batch in (pairs.clean, pairs.corrupt)]
    return find_circuit(model, replace(pairs, right=digit[0], rival=digit[1]))


def test_the_wired_path_is_found_and_nothing_else(found):
    head, embed = Node("head", *HEAD, "decision"), Node("embed", -1, None, "first")
    assert set(found.nodes) == {head, embed}
    assert found.lookup == {head: "first_same_column"}
    edges = {(edge.sender, edge.receiver.kind, edge.input): edge.effect for edge in found.edges}
    assert edges == {(embed, "head", "v"): pytest.approx(1, abs=1e-3), (head, "logits", "logits"): pytest.approx(1)}
    assert found.faithfulness == pytest.approx(1, abs=1e-3)
    assert [role for role, _ in found.course] == ["first", "first"]


def test_a_path_is_what_is_left_when_all_else_is_frozen(adder):
    """Wang et al.: the sender clean, all other heads and MLPs as in the corrupt run, the receiver's input kept."""
    pairs = build_pairs(adder, "chunk", 6, 4, seed=2)
    tokens = pairs.corrupt.tokens
    with torch.no_grad():
        paths = _Paths(adder, pairs)
        _, clean = adder.run_with_cache(pairs.clean.tokens)
        _, corrupt = adder.run_with_cache(tokens)

        def where(role):
            return paths.runs.where[ROLES.index(role)]

        def frozen(sender):
            """Hooks that freeze heads and MLPs but for the sender's output at its role."""
            hooks = []
            for layer in (0, 1):

                def z(x, hook):
                    out = corrupt[hook.name].clone()
                    if (sender.kind, sender.layer) == ("head", hook.layer()):
                        mask, own = where(sender.role), pairs.aligned(clean[hook.name])[:, :, sender.head]
                        out[:, :, sender.head] = torch.where(mask[..., None], own, out[:, :, sender.head])
                    return out

                def mlp(x, hook):
                    out = corrupt[hook.name].clone()
                    if (sender.kind, sender.layer) == ("mlp", hook.layer()):
                        out = torch.where(where(sender.role)[..., None], pairs.aligned(clean[hook.name]), out)
                    return out

                hooks += [(f"blocks.{layer}.attn.hook_z", z), (f"blocks.{layer}.hook_mlp_out", mlp)]
            if sender.kind == "embed":

                def embed(x, hook):
                    return torch.where(where(sender.role)[..., None], pairs.aligned(clean[hook.name]), x)

                hooks.append(("hook_embed", embed))
            return hooks

        def margin(logits):
            return float(paths.recovered(pairs.margin(pairs.corrupt, logits).double().numpy()))

        def through_head(sender, receiver, name):
            point = f"blocks.{receiver.layer}.attn.hook_"
            kept = {}
            keep = [(point + name, lambda x, hook: kept.update(input=x.clone()))]
            adder.run_with_hooks(tokens, fwd_hooks=keep + frozen(sender))

            def put(x, hook):
                out = x.clone()
                out[:, :, receiver.head] = kept["input"][:, :, receiver.head]
                return out

            keep = [(point + name, put), (point + "z", lambda x, hook: kept.update(z=x.clone()))]
            adder.run_with_hooks(tokens, fwd_hooks=keep)

            def put_z(x, hook):
                out = x.clone()
                mask = where(receiver.role)[..., None]
                out[:, :, receiver.head] = torch.where(mask, kept["z"][:, :, receiver.head], out[:, :, receiver.head])
                return out

            return margin(adder.run_with_hooks(tokens, fwd_hooks=[(point + "z", put_z)]))

        def through_mlp(sender, receiver):
            name = f"blocks.{receiver.layer}.hook_mlp_out"
            kept = {}
            hooks = frozen(sender)
            adder.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: kept.update(out=x.clone())), *hooks])
            mask = where(receiver.role)[..., None]
            put = [(name, lambda x, hook: torch.where(mask, kept["out"], x))]
            return margin(adder.run_with_hooks(tokens, fwd_hooks=put))

        embed = Node("embed", -1, None, "first")
        for sender, receiver, name in (
            (embed, Node("head", 1, 0, "decision"), "v"),
            (embed, Node("head", 0, 1, "second"), "k"),
            (Node("head", 0, 1, "decision"), Node("head", 1, 1, "decision"), "q"),
            (Node("mlp", 0, None, "first"), Node("head", 1, 1, "decision"), "k"),
        ):
            assert paths.effect(sender, receiver, name) == pytest.approx(through_head(sender, receiver, name), abs=1e-4)
        for sender, receiver in (
            (Node("head", 1, 0, "decision"), Node("mlp", 1, None, "decision")),
            (Node("mlp", 0, None, "decision"), Node("mlp", 1, None, "decision")),
        ):
            assert paths.effect(sender, receiver, "mlp") == pytest.approx(through_mlp(sender, receiver), abs=1e-4)
        logits = Node("logits", -1, None, "decision")
        for sender in (Node("head", 0, 0, "decision"), Node("mlp", 1, None, "decision")):
            expected = margin(adder.run_with_hooks(tokens, fwd_hooks=frozen(sender)))
            assert paths.effect(sender, logits, "logits") == pytest.approx(expected, abs=1e-4)
        everything = {
            Node(kind, layer, head, role)
            for layer in (0, 1)
            for kind, head in (("head", 0), ("head", 1), ("mlp", None))
            for role in ROLES
        }
        assert paths.faithfulness(everything) == pytest.approx(1, abs=1e-5)


def test_nothing_is_left_of_a_margin_without_nodes():
    model = wired()
    pairs = build_pairs(model, "chunk", 8, 6)
    digit = [batch.tokens[torch.arange(6), pairs.column] for batch in (pairs.clean, pairs.corrupt)]
    with torch.no_grad():
        paths = _Paths(model, replace(pairs, right=digit[0], rival=digit[1]))
        assert abs(paths.faithfulness(set())) < 1e-3
        assert float(np.mean(paths.runs.clean_margin - paths.runs.corrupt_margin)) > LEAST_MARGIN


def test_a_circuit_is_a_table_and_a_figure(found):
    assert len(found.to_frame()) == 2
    assert found.to_json()["edges"][0]["sender_role"] == "first"
    figure = circuit_figure({"one": found, "two": found})
    assert len(figure.data) == 2 * 3
    assert len(found.plot().data) == 3


def test_length_pairs_are_refused(adder):
    with pytest.raises(PairError, match="take chunk or carry pairs"):
        find_circuit(adder, build_pairs(adder, "length", 13, 2))


def test_the_command(capsys, tmp_path):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["circuit", str(FIXTURE), *map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    figure = tmp_path / "circuit.html"
    short = ("--digits", 3, "--problems", 2)
    code, out, err = run(*short, "--pairs", "chunk", "--figure", figure, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["circuits"]
    assert row["pairs"] == "chunk"
    assert "plotly" in figure.read_text()
    for arguments, words in ((("--pairs", "digit"), "pairs are one of"), (("--digits", "1,2"), "one number of digits")):
        code, out, err = run(*arguments, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
