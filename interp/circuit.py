"""The path from the operands to the answer: which head or MLP hands what to which, by path patching.

On pairs of runs (:mod:`interp.pairs`) a **node** is a head's or an MLP's output at one role whose clean value, put into
the corrupt run, recovers at least :data:`LEAST_NODE` of the margin. An **edge** is one node's effect through one input
of another (Wang et al. 2211.00593; Goldowsky-Dill et al. 2304.05969): the sender's clean output less its corrupt one is
added to the residual stream that the receiver's query, key, value or MLP is computed from, and to nothing else;
the receiver's output at its role is put into the corrupt run, all after it runs as usual, and the recovered fraction of
the margin is the edge's effect. Nothing is frozen or linearised: the edge is exact, norms included.

TransformerLens's ``get_act_patch_direct_path`` does the same through forks of a block's input, which this model has
not, and without roles.

**faithfulness** is the share of the margin that the clean run keeps when all heads and MLPs that are no node have the
corrupt run's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from interp.interventions import Hook
from interp.pairs import ROLES, PairError, Pairs
from interp.patching import READS, Runs, check_margin, recovered
from models.transformer import HookedAdder

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

LEAST_NODE = 0.05  # recovered fraction from which an output is a node
LEAST_EDGE = 0.02  # and an edge is kept
LEAST_READ = 0.02  # recovered through a lookup from which a head is said to perform it here
Input = Literal["q", "k", "v", "mlp", "logits"]


class Node(NamedTuple):
    """An output at a role. ``layer`` is -1 of the embedding; ``head`` None of it, of an MLP and of the logits."""

    kind: Literal["embed", "head", "mlp", "logits"]
    layer: int
    head: int | None
    role: str

    @property
    def name(self) -> str:
        what = f"{self.layer}.{self.head}" if self.kind == "head" else f"mlp {self.layer}"
        return what if self.kind in ("head", "mlp") else self.kind

    @property
    def depth(self) -> int:
        """Where it writes: a node feeds those of larger depth."""
        return {"embed": -1, "head": 2 * self.layer, "mlp": 2 * self.layer + 1, "logits": 10**6}[self.kind]


@dataclass(frozen=True)
class Edge:
    """One path; ``effect``: recovered fraction of the margin through it."""

    sender: Node
    receiver: Node
    input: Input
    effect: float


@dataclass(frozen=True)
class Circuit:
    """Nodes with their own recovered fraction and what they look up, and the edges between them.

    ``lookup``: of a head, the lookup through which most comes back, or None. ``course``: before each layer, the role
    where patching the residual stream recovers most, and how much. ``clean`` and ``corrupt``: mean margins in logits.
    """

    kind: str
    digits: int
    clean: float
    corrupt: float
    nodes: dict[Node, float]
    lookup: dict[Node, str | None]
    edges: tuple[Edge, ...]
    course: tuple[tuple[str, float], ...]
    faithfulness: float

    def to_frame(self) -> pd.DataFrame:
        """One row an edge: sender, its role, receiver, its role, input, effect."""
        import pandas as pd

        return pd.DataFrame(self.to_json()["edges"])

    def to_json(self) -> dict[str, Any]:
        nodes = [
            {"node": node.name, "role": node.role, "recovered": effect, "lookup": self.lookup.get(node)}
            for node, effect in self.nodes.items()
        ]
        edges = [
            {
                "sender": edge.sender.name,
                "sender_role": edge.sender.role,
                "receiver": edge.receiver.name,
                "receiver_role": edge.receiver.role,
                "input": edge.input,
                "effect": edge.effect,
            }
            for edge in self.edges
        ]
        return {
            "pairs": self.kind,
            "digits": self.digits,
            "clean_margin": self.clean,
            "corrupt_margin": self.corrupt,
            "faithfulness": self.faithfulness,
            "course": [{"layer": i, "role": role, "recovered": value} for i, (role, value) in enumerate(self.course)],
            "nodes": nodes,
            "edges": edges,
        }

    def plot(self) -> go.Figure:
        """This circuit alone; see :func:`circuit_figure`."""
        return circuit_figure({f"{self.kind}, {self.digits} digits": self})


def find_circuit(model: HookedAdder, pairs: Pairs, *, tell: Callable[[str], None] = lambda what: None) -> Circuit:
    """Nodes and edges on chunk or carry pairs.

    Raises:
        PairError: length pairs, which have no operand that changes; runs that hardly differ.
    """
    if pairs.kind == "length":
        raise PairError(
            "a circuit starts at a token that changes, and length pairs have none; take chunk or carry pairs"
        )
    with torch.no_grad(), model.evaluating():
        paths = _Paths(model, pairs)
        check_margin(paths.runs)
        sweeps = {
            name: paths.recovered(paths.runs.sweep(name, tell)) for name in ("residual", "mlp", "head_role", "lookup")
        }
        nodes: dict[Node, float] = {}
        for layer, head, role in np.argwhere(np.abs(sweeps["head_role"]) >= LEAST_NODE).tolist():
            nodes[Node("head", layer, head, ROLES[role])] = float(sweeps["head_role"][layer, head, role])
        for layer, role in np.argwhere(np.abs(sweeps["mlp"]) >= LEAST_NODE).tolist():
            nodes[Node("mlp", layer, None, ROLES[role])] = float(sweeps["mlp"][layer, role])
        for role in np.flatnonzero(np.abs(sweeps["residual"][0]) >= LEAST_NODE).tolist():
            nodes[Node("embed", -1, None, ROLES[role])] = float(sweeps["residual"][0, role])
        nodes = dict(sorted(nodes.items(), key=lambda item: (item[0].depth, item[0].name, item[0].role)))
        edges = _edges(paths, list(nodes), tell)
        faithfulness = paths.faithfulness(set(nodes))
    lookup: dict[Node, str | None] = {}
    for node in nodes:
        if node.kind == "head":
            reads = sweeps["lookup"][node.layer, node.head]
            lookup[node] = READS[int(reads.argmax())] if reads.max() >= LEAST_READ else None
    best = sweeps["residual"].argmax(1)
    course = tuple((ROLES[role], float(row[role])) for role, row in zip(best, sweeps["residual"], strict=True))
    clean, corrupt = paths.runs.clean_margin.mean(), paths.runs.corrupt_margin.mean()
    return Circuit(pairs.kind, pairs.digits, float(clean), float(corrupt), nodes, lookup, edges, course, faithfulness)


def _edges(paths: _Paths, nodes: list[Node], tell: Callable[[str], None]) -> tuple[Edge, ...]:
    found = []
    logits = Node("logits", -1, None, "decision")
    for receiver in [*nodes, logits]:
        tell(f"paths into {receiver.name} at {receiver.role.replace('_', ' ')}")
        for sender in nodes:
            if sender.depth >= receiver.depth:
                continue
            inputs: list[Input] = ["k", "v"] if receiver.kind == "head" else [receiver.kind]  # type: ignore[list-item]
            if sender.role == receiver.role and receiver.kind == "head":
                inputs.insert(0, "q")
            if sender.role != receiver.role and receiver.kind != "head":
                continue  # MLPs and logits read their own token alone
            for name in inputs:
                effect = paths.effect(sender, receiver, name)
                if abs(effect) >= LEAST_EDGE:
                    found.append(Edge(sender, receiver, name, effect))
    return tuple(found)


class _Paths:
    """Both runs of some pairs, and the effect of a node on another through one input."""

    def __init__(self, model: HookedAdder, pairs: Pairs):
        self.model, self.pairs, self.runs = model, pairs, Runs(model, pairs)
        self.corrupt, self.clean = self.runs.caches["corrupt"], self.runs.caches["clean"]

    def recovered(self, margins: np.ndarray) -> np.ndarray:
        return recovered(margins, self.runs.clean_margin, self.runs.corrupt_margin)

    def role(self, node: Node) -> Float[Tensor, "pair pos 1"]:
        return self.runs.where[ROLES.index(node.role)][..., None]

    def written(self, node: Node) -> Float[Tensor, "pair pos d_model"]:
        """What the node writes at its role in the clean run, less what it writes in the corrupt run."""
        if node.kind == "embed":
            name = "blocks.0.hook_resid_pre"
        else:
            name = f"blocks.{node.layer}." + ("hook_mlp_out" if node.kind == "mlp" else "attn.hook_z")
        apart = self.pairs.aligned(self.clean[name]) - self.corrupt[name]
        if node.kind == "head":
            weight = self.model.blocks[node.layer].attn.W_O[node.head]
            apart = einsum(apart[:, :, node.head], weight, "pair pos d_head, d_head d_model -> pair pos d_model")
        return torch.where(self.role(node), apart, 0.0)

    def effect(self, sender: Node, receiver: Node, name: Input) -> float:
        """The recovered fraction through one path."""
        written = self.written(sender)
        if receiver.kind == "logits":
            last = f"blocks.{self.model.cfg.n_layers - 1}.hook_resid_post"
            logits = self.model.unembed(self.model.ln_final(self.corrupt[last] + written))
        elif receiver.kind == "mlp":
            block, point = self.model.blocks[receiver.layer], f"blocks.{receiver.layer}."
            new = block.mlp(block.ln2(self.corrupt[point + "hook_resid_mid"] + written))
            logits = self._with([(point + "hook_mlp_out", self._put(receiver, new))])
        else:
            new = self._head_output(receiver, name, written)
            logits = self._with([(f"blocks.{receiver.layer}.attn.hook_z", self._put(receiver, new))])
        margin = self.pairs.margin(self.pairs.corrupt, logits).double().numpy()
        return float(self.recovered(margin))

    def _head_output(self, receiver: Node, name: str, written: Tensor) -> Float[Tensor, "pair pos head d_head"]:
        """The layer's ``z`` when one input of the receiver is computed with what the sender writes."""
        block, point = self.model.blocks[receiver.layer], f"blocks.{receiver.layer}."
        weight = getattr(block.attn, f"W_{name.upper()}")[receiver.head]
        new = block.ln1(self.corrupt[point + "hook_resid_pre"] + written) @ weight
        kept: list[Tensor] = []

        def put(x: Tensor, hook: HookPoint) -> Tensor:
            out = x.clone()
            out[:, :, receiver.head] = new
            return out

        self._with([(f"{point}attn.hook_{name}", put), (f"{point}attn.hook_z", lambda z, hook: kept.append(z))])
        return kept[0]

    def _put(self, receiver: Node, new: Tensor) -> Callable[..., Tensor]:
        where = self.role(receiver)

        def put(x: Tensor, hook: HookPoint) -> Tensor:
            if receiver.kind == "mlp":
                return torch.where(where, new, x)
            out = x.clone()
            out[:, :, receiver.head] = torch.where(where, new[:, :, receiver.head], x[:, :, receiver.head])
            return out

        return put

    def _with(self, hooks: list[Hook]) -> Tensor:
        batch = self.pairs.corrupt
        with self.model.hooks(hooks):
            return self.model(batch.tokens, batch.mask)

    def faithfulness(self, nodes: set[Node]) -> float:
        """Of the margin, when what is no node has the corrupt run's output in the clean run."""
        batch = self.pairs.clean
        width = batch.tokens.shape[1]
        roles = _resized(self.runs.where.movedim(1, 0).movedim(2, 1), width)  # [pair, pos, role]
        hooks: list[Hook] = []
        for layer in range(self.model.cfg.n_layers):
            kinds: list[tuple[str, list[int | None]]] = [
                ("attn.hook_z", list(range(self.model.cfg.n_heads))),
                ("hook_mlp_out", [None]),
            ]
            for point, heads in kinds:
                name = f"blocks.{layer}.{point}"
                kept = (
                    torch.stack([self._is_node(nodes, layer, head) @ roles.double().mT for head in heads], dim=-1) > 0
                )
                corrupt = _resized(self.corrupt[name], width)
                seen = roles.any(-1)[..., None]
                put = torch.where(kept | ~seen, 0, 1).bool()
                put = put[..., None] if point == "attn.hook_z" else put

                def swap(x: Tensor, hook: HookPoint, put: Tensor = put, corrupt: Tensor = corrupt) -> Tensor:
                    return torch.where(put, corrupt, x)

                hooks.append((name, swap))
        with self.model.hooks(hooks):
            logits = self.model(batch.tokens, batch.mask)
        return float(self.recovered(self.pairs.margin(batch, logits).double().numpy()))

    @staticmethod
    def _is_node(nodes: set[Node], layer: int, head: int | None) -> Float[Tensor, "role"]:
        kind: Any = "mlp" if head is None else "head"
        return torch.tensor([Node(kind, layer, head, role) in nodes for role in ROLES], dtype=torch.float64)


def _resized(x: Float[Tensor, "pair pos *rest"], width: int) -> Float[Tensor, "pair width *rest"]:
    """Cut, or filled up with zeros, along the tokens: the two runs part beyond the decision alone."""
    if x.shape[1] >= width:
        return x[:, :width]
    return torch.cat([x, x.new_zeros(x.shape[0], width - x.shape[1], *x.shape[2:])], dim=1)


def circuit_figure(circuits: Mapping[str, Circuit]) -> go.Figure:
    """Circuits side by side: tokens by role across, layers upwards, a line an edge, as wide as its effect.

    Edges that recover are blue, those that lose vermilion; hovering tells numbers.
    """
    from plotly.subplots import make_subplots

    from interp.plots import BLUE, GREY, LIGHT, VERMILLION, as_text

    figure = make_subplots(
        rows=1, cols=len(circuits), subplot_titles=[as_text(name) for name in circuits], shared_yaxes=True
    )
    standing = {node.role for circuit in circuits.values() for node in circuit.nodes} | {"decision"}
    roles = [role for role in ROLES if role in standing]
    for col, circuit in enumerate(circuits.values(), start=1):
        at = _places(circuit, roles)
        for edge in circuit.edges:
            x, y = zip(at[edge.sender], at[edge.receiver], strict=True)
            words = f"{edge.sender.name} to {edge.receiver.name}, {edge.input}: {edge.effect:.2f}"
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                line={"width": 1 + 7 * min(1.0, abs(edge.effect)), "color": BLUE if edge.effect > 0 else VERMILLION},
                opacity=0.6,
                hoverinfo="text",
                text=words,
                row=1,
                col=col,
            )
        figure.add_scatter(
            x=[at[node][0] for node in at],
            y=[at[node][1] for node in at],
            mode="markers+text",
            marker={"size": 12, "color": GREY},
            text=[node.name for node in at],
            textposition="top center",
            hovertext=[
                f"{node.name} at {node.role.replace('_', ' ')}: {circuit.nodes.get(node, 1.0):.2f} recovered"
                + (f", {circuit.lookup[node]}".replace("_", " ") if circuit.lookup.get(node) else "")
                for node in at
            ],
            hoverinfo="text",
            row=1,
            col=col,
        )
    named = [role.replace("_", " ") for role in roles]
    figure.update_xaxes(tickvals=list(range(len(roles))), ticktext=named, tickangle=-40, range=[-0.6, len(roles) - 0.4])
    layers = max((node.layer for circuit in circuits.values() for node in circuit.nodes), default=0) + 1
    ticks = ["tokens", *(f"{what} {layer}" for layer in range(layers) for what in ("heads", "mlp")), "logits"]
    figure.update_yaxes(tickvals=list(range(-1, 2 * layers + 1)), ticktext=ticks)
    return figure.update_layout(template=LIGHT, height=560, showlegend=False)


def _places(circuit: Circuit, roles: Sequence[str]) -> dict[Node, tuple[float, float]]:
    """Where each node stands; heads of one layer and role side by side."""
    layers = max((node.layer for node in circuit.nodes), default=0) + 1
    nodes = [*circuit.nodes, Node("logits", -1, None, "decision")]
    places: dict[Node, tuple[float, float]] = {}
    for node in nodes:
        beside = [other for other in nodes if (other.depth, other.role) == (node.depth, node.role)]
        shift = (beside.index(node) - (len(beside) - 1) / 2) * min(0.28, 0.8 / len(beside))
        places[node] = (roles.index(node.role) + shift, min(node.depth, 2 * layers))
    return places
