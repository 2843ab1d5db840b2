"""Is a checkpoint what it says it is: whole, from where, and as accurate as its record says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from models.checkpoint import CheckpointError, MachineRecord, TrainingRecord, load_any, load_any_record
from models.location import Machine
from models.machine_training import in_distribution_accuracy as machine_accuracy
from models.recipes import kept_at
from models.training import in_distribution_accuracy
from models.transformer import HookedAdder

PARTS = ("task", "attention")  # of an adder's configuration
FILES = ("config.json", "model.safetensors", "training.json")
MOST_OFF = 0.01  # of the recorded accuracy: other processors and versions round otherwise, and flip a close decision


@dataclass(frozen=True)
class Check:
    """One question about a checkpoint. ``ok`` is None where it cannot be answered or is no matter of right or wrong."""

    check: str
    ok: bool | None
    found: str


def examine(folder: str | Path) -> tuple[Check, ...]:
    """Integrity, provenance, and the accuracy on problems as in training, drawn and counted again.

    Raises:
        CheckpointError: the folder is no checkpoint at all. A damaged one is what the checks are for.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists() and not (folder / "training.json").exists():
        load_any(folder)  # says what is there instead
    return tuple(_checks(folder))


def _checks(folder: Path) -> Iterator[Check]:
    model: HookedAdder | Machine | None = None
    try:
        model = load_any(folder)
    except CheckpointError as error:
        yield Check("weights", False, str(error))
    else:
        count = sum(weight.numel() for weight in model.parameters())
        yield Check("weights", True, f"{count} finite numbers, with the names and shapes of config.json")
        recorded = _has_digest(folder / "model.safetensors")
        yield Check("digest", recorded or None, "matches the weights" if recorded else "none recorded")
    others = sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "resume.")))
    yield Check("files", None if others else True, f"also {', '.join(others)[:120]}" if others else "no leftovers")
    try:
        record = load_any_record(folder)
    except CheckpointError as error:
        yield Check("record", False, str(error))
        return
    yield from _record(record, model)
    if model is not None and record.curve:
        yield _accuracy(record, model)


def _record(record: TrainingRecord | MachineRecord, model: HookedAdder | Machine | None) -> Iterator[Check]:
    if model is not None and record.recipe.model != model.config:
        parts: list[tuple[str, Any, Any]] = [("", record.recipe.model, model.config)]
        parts += [(part, getattr(parts[0][1], part, None), getattr(parts[0][2], part, None)) for part in PARTS]
        differ = [
            f"{part}.{name}" if part else name
            for part, ours, theirs in parts
            for name in getattr(type(ours), "model_fields", ())
            if name not in PARTS and getattr(ours, name) != getattr(theirs, name, None)
        ]
        yield Check("recipe", False, f"config.json is not the recipe's model: {', '.join(differ)} differ")
    else:
        yield Check("recipe", True, f"{record.recipe.name}, seed {record.seed}")
    whole = record.step == record.recipe.steps and bool(record.curve) and record.curve[-1].step == record.step
    if kept_at(record.recipe, record.step):
        yield Check("steps", True, f"{record.step} of {record.recipe.steps}, kept on the way")
    else:
        yield Check("steps", whole, f"{record.step} of {record.recipe.steps}, {len(record.curve)} points in the curve")
    versions = ", ".join(f"{name} {number}" for name, number in sorted(record.versions.items()))
    yield Check(
        "trained with", None, f"{versions}, {record.precision}, {record.threads} threads, {record.seconds:.0f} s"
    )
    clean = record.commit is not None and not record.commit.endswith("-dirty")
    yield Check("source", True if clean else None, record.commit or "revision not recorded")


def _accuracy(record: TrainingRecord | MachineRecord, model: HookedAdder | Machine) -> Check:
    measure: Any = in_distribution_accuracy if isinstance(model, HookedAdder) else machine_accuracy
    now, then = measure(model, record.seed), record.curve[-1].exact
    found = f"{now:.4f} of problems drawn as in training are exact, {then:.4f} recorded"
    return Check("accuracy", abs(now - then) <= MOST_OFF, found)


def _has_digest(path: Path) -> bool:
    with safe_open(path, framework="pt") as file:
        return "digest" in (file.metadata() or {})
