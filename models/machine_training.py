"""Training of the machines that address by location, by the loop of :mod:`models.training`.

Everything random at step ``i`` is a function of ``(seed, i)``: one longest length, and the problems.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from models.addition import generator
from models.checkpoint import CheckpointError, MachineRecord, load_machine_record
from models.location import Copies, Machine, NeuralGPU, Sums, TuringMachine, machine
from models.recipes import MachineRecipe, Recipe
from models.training import PROBE_PROBLEMS, Trainer, ramp, schedule

SHORTEST = 3  # cells of the longest problem where a curriculum begins


class MachineTrainer(Trainer):
    """Trains one recipe of a machine with one seed; as :class:`models.training.Trainer`."""

    recipe: MachineRecipe  # type: ignore[assignment]

    def _start(self) -> tuple[Machine, torch.optim.Optimizer]:
        model = machine(self.recipe.model, self.seed)
        groups = [{"params": list(model.parameters()), "rate": 1.0}]
        return model, torch.optim.Adam(groups, lr=self.recipe.learning_rate, fused=True)

    def _train_step(self, step: int) -> float:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(step, recipe)
        batch = drawn(self.model, self.seed, "train", step, recipe.batch, self._longest(step))
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not math.isfinite(loss.item()):
            raise CheckpointError(
                f"the loss is {loss.item()} at step {step}; lower the learning rate of {recipe.name!r}"
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        return loss.item()

    def _longest(self, step: int) -> int:
        """The longest problem that the curriculum allows at this step, in cells."""
        longest, shortest = self.recipe.model.max_length, self.recipe.model.min_length
        first = min(longest, max(SHORTEST, shortest))
        grown = ramp(step / self.recipe.steps, (0.0, self.recipe.curriculum))
        return first + int(grown * (longest - first))

    def _round_counters(self, exact: bool) -> None:
        """There are none."""

    def in_distribution_accuracy(self) -> float:
        """As :func:`in_distribution_accuracy`, with this seed."""
        return in_distribution_accuracy(self.model, self.seed)

    def done(self) -> MachineRecord:
        """The record of the finished run. Raises CheckpointError."""
        return load_machine_record(self.folder)

    def _record(self) -> MachineRecord:
        return MachineRecord(recipe=self.recipe, **self._about())


def trainer_of(recipe: Recipe | MachineRecipe, *args: Any, **kwargs: Any) -> Trainer:
    """The trainer of a recipe, whatever its kind; the other arguments are :class:`models.training.Trainer`'s."""
    return (
        Trainer(recipe, *args, **kwargs)
        if isinstance(recipe, Recipe)
        else MachineTrainer(cast(Any, recipe), *args, **kwargs)
    )


def drawn(model: Any, seed: int, stream: str, step: int, n: int, longest: int) -> Sums | Copies:
    """One batch of problems: a length from ``U(min_length, longest)``, then problems as long, or that long at most."""
    rng = generator(seed, f"machine {stream}", step)
    length = int(rng.integers(model.config.min_length, longest + 1))
    if isinstance(model, NeuralGPU):
        return model.task.encode(model.task.training_problems(rng, n, length))
    assert isinstance(model, TuringMachine)
    return model.task.encode(model.task.draw(rng, length, n))


def loss_of(model: Any, batch: Sums | Copies) -> Tensor:
    """Mean cross-entropy in nats, over the cells of the tape, or over the bits of the copy."""
    logits = model(batch)
    if isinstance(batch, Sums):
        return cross_entropy(logits.flatten(0, 1), batch.sum.flatten())
    return binary_cross_entropy_with_logits(logits, batch.symbols)


@torch.no_grad()
def in_distribution_accuracy(model: Machine, seed: int) -> float:
    """Share of :data:`PROBE_PROBLEMS` problems of all training lengths, never trained on, that are wholly right."""
    low, high = model.config.min_length, model.config.max_length
    size = -(-PROBE_PROBLEMS // (high - low + 1))
    right = total = 0
    for length in range(low, high + 1):
        rng = generator(seed, "machine probe", length)
        if isinstance(model, NeuralGPU):
            batch = model.task.encode(model.task.training_problems(rng, size, length))
            exact = ((model(batch).argmax(-1) == batch.sum) | ~batch.asked).all(1)
        else:
            copies = model.task.encode(model.task.draw(rng, length, size))
            exact = ((model(copies) > 0) == copies.symbols.bool()).flatten(1).all(1)
        right, total = right + int(exact.sum()), total + size
    return right / total
