"""The training loop: resumable after a kill at any moment, with the same weights to the last bit.

Everything random at step ``i`` is a function of ``(seed, i)``: the problems (``models.addition``), the boosts of
pressures and the first position ids of position coupling. What else a step depends on (weights, optimizer moments,
step, curve so far) is one file, ``resume.safetensors``, written aside and renamed; a run that is killed loses the steps
since it was written.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.addition import Batch, Problem, decimal_string, generator
from models.checkpoint import (
    CheckpointError,
    CurvePoint,
    TrainingRecord,
    digest_of,
    load_record,
    require_loadable,
    save_checkpoint,
    save_tensors,
)
from models.recipes import MachineRecipe, Recipe, kept_at
from models.transformer import HookedAdder

PROBE_PROBLEMS = 512  # problems behind each in-distribution accuracy of the curve
COOLED = 0.03  # share of the peak learning rate that a cooldown ends at
PROBE_EVERY = 100  # steps between two points of the curve
KEPT = "steps"  # folder of the checkpoints that a recipe keeps
SAVE_SECONDS = 20.0  # between two resume files; losing more to a kill is worse than the 10 ms a save takes


def fast_precision() -> str:
    """``bfloat16`` where the processor multiplies it natively (AMX or AVX512-BF16), else ``float32``.

    Without such instructions bfloat16 products are emulated and many times slower than float32 ones.
    """
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if native else "float32"


class Trainer:
    """Trains one recipe with one seed.

    Args:
        folder: where the checkpoint goes, and the resume file while it trains.
        resume: continue from the resume file if there is one.
        progress: called after every step with the step, the loss and the latest in-distribution accuracy.

    Raises:
        CheckpointError: the folder holds another run, or a resume file that does not fit; or the recipe asks for a
            model that is too large to be loaded.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        folder: Path,
        resume: bool = False,
        progress: Callable[[int, float, float], None] = lambda step, loss, exact: None,
    ):
        self.recipe, self.seed, self.folder, self.progress = recipe, seed, folder, progress
        self.precision = fast_precision() if recipe.precision == "auto" else recipe.precision
        self.model, self.optimizer = self._start()
        self.step = 0
        self.curve: list[CurvePoint] = []
        self.seconds = 0.0
        self.commit = source_commit()  # of the source as it was imported, not as it is when the run ends
        if (folder / "training.json").exists():
            self._refuse_another_run()
        elif resume and self._resume_file.exists():
            self._restore()
        elif self._resume_file.exists():
            raise CheckpointError(f"{folder} holds an unfinished run; add --resume to go on, or choose another --out")

    def _start(self) -> tuple[Any, torch.optim.Optimizer]:
        """The untrained model and its optimizer."""
        require_loadable(self.recipe.model, f"recipe {self.recipe.name!r}")
        model = HookedAdder(self.recipe.model, seed=self.seed)
        return model, _optimizer(model, self.recipe)

    @property
    def _resume_file(self) -> Path:
        return self.folder / "resume.safetensors"

    def done(self) -> Any:
        """The record of the finished run. Raises CheckpointError."""
        return load_record(self.folder)

    def _refuse_another_run(self) -> None:
        done = self.done()
        if (done.recipe, done.seed) != (self.recipe, self.seed):
            raise CheckpointError(
                f"{self.folder} already holds {done.recipe.name}, {done.recipe.steps} steps, seed {done.seed}; "
                "choose another --out"
            )
        self.step = done.step

    def run(self) -> Path:
        """Train to the end (or return at once if that is done) and write the checkpoint. Returns its folder."""
        if self.step == self.recipe.steps:
            self._resume_file.unlink(missing_ok=True)  # of a run that was killed just when it was done
            return self.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        began, saved = time.monotonic() - self.seconds, time.monotonic()
        self.model.train()
        exact = self.curve[-1].exact if self.curve else 0.0
        while self.step < self.recipe.steps:
            loss = self._train_step(self.step)
            self.step += 1
            if self.step % PROBE_EVERY == 0 or self.step == self.recipe.steps:
                exact = self.in_distribution_accuracy()
                self.curve.append(CurvePoint(step=self.step, loss=loss, exact=exact))
            self.progress(self.step, loss, exact)
            self._keep(time.monotonic() - began)
            if time.monotonic() - saved > SAVE_SECONDS and self.step < self.recipe.steps:
                self.seconds = time.monotonic() - began
                self._save()
                saved = time.monotonic()
        self.seconds = time.monotonic() - began
        self._round_counters(True)
        save_checkpoint(self.folder, self.model.eval(), self._record())
        self._resume_file.unlink(missing_ok=True)
        return self.folder

    def _keep(self, seconds: float) -> None:
        """A checkpoint of this step, where the recipe asks for it."""
        if not kept_at(self.recipe, self.step):
            return
        self.seconds = seconds
        digits = len(str(self.recipe.steps))
        save_checkpoint(self.folder / KEPT / f"{self.step:0{digits}}", self.model, self._record())

    def _train_step(self, step: int) -> float:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * group["rate"] * schedule(step, recipe)
        task = self.model.task
        problems = sorted(task.training_problems(self.seed, step, recipe.batch), key=_tokens_needed)
        size = recipe.batch // recipe.micro_batches
        parts = [task.encode(problems[i : i + size]) for i in range(0, recipe.batch, size)]
        decisions = sum(int(part.decisions.sum()) for part in parts)
        pressure = ramp(step / recipe.steps, recipe.pressure_ramp)
        boosts = generator(self.seed, "sink pressure", step).uniform(0, recipe.sink_pressure * pressure, recipe.batch)
        boost = torch.from_numpy(boosts).float().split(size)
        keys = generator(self.seed, "key pressure", step)
        starts = generator(self.seed, "first position id", step)
        self._round_counters(step / recipe.steps >= recipe.exact_from)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i, part in enumerate(parts):
            hooks, rates = [], _Rates(self.model)
            if recipe.key_pressure:
                hooks += self._key_pressure(keys, part, pressure)
            if recipe.gate_penalty:
                hooks += rates.hooks()
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16"),
                self.model.hooks(hooks) if hooks else nullcontext(),
            ):
                logits = self.model(
                    part.tokens,
                    part.mask,
                    sink_boost=boost[i] if recipe.sink_pressure else None,
                    first_id=self._first_ids(starts, part),
                )
            asked = part.decisions
            loss = cross_entropy(logits[asked].float(), part.targets[asked], reduction="sum") / decisions
            total += loss.item()
            if recipe.gate_penalty:
                weight = recipe.gate_penalty * ramp(step / recipe.steps, recipe.penalty_ramp)
                loss = loss + weight * rates.softness(part.mask) / recipe.micro_batches
            loss.backward()
        if not math.isfinite(total):
            raise CheckpointError(f"the loss is {total} at step {step}; lower the learning rate of {recipe.name!r}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        return total

    def _round_counters(self, exact: bool) -> None:
        if self.recipe.model.attention.scheme == "counters":
            for block in self.model.blocks:
                block.attn.counters.exact = self.recipe.model.attention.exact_counters if exact else 0

    def _first_ids(self, rng: np.random.Generator, part: Batch) -> Tensor | int:
        """Where each sequence's position ids start: anywhere that leaves room for its sum and the end behind it."""
        if self.recipe.model.attention.scheme != "coupling":
            return 0
        room = self.recipe.model.attention.coupled_positions - (part.lengths[:, 2] + 2)
        return torch.from_numpy(rng.integers(0, room.numpy() + 1))

    def _key_pressure(self, rng: np.random.Generator, part: Batch, pressure: float) -> list[Any]:
        """Hooks that boost random keys, drawn anew for each layer and sequence."""
        recipe, hooks = self.recipe, []
        for layer in range(self.model.cfg.n_layers):
            hit = rng.random(part.mask.shape) < recipe.key_pressure_rate
            boost = torch.from_numpy(hit * rng.uniform(0, recipe.key_pressure * pressure, part.mask.shape)).float()
            add = partial(_add_to_keys, boost=boost[:, None, None])
            hooks.append((f"blocks.{layer}.attn.hook_attn_scores", add))
        return hooks

    def in_distribution_accuracy(self) -> float:
        """Share of problems, drawn as training draws them but never trained on, whose every decision is right."""
        self._round_counters(True)
        return in_distribution_accuracy(self.model, self.seed)

    # The resume file

    def _save(self) -> None:
        tensors = {f"model.{name}": weight for name, weight in self.model.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        about = {
            "recipe": self.recipe.model_dump_json(),
            "seed": str(self.seed),
            "step": str(self.step),
            "seconds": str(self.seconds),
            "precision": self.precision,
            "curve": json.dumps([point.model_dump() for point in self.curve]),
            "digest": digest_of(tensors),
        }
        save_tensors(self._resume_file, tensors, about)

    def _restore(self) -> None:
        path = self._resume_file
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = type(self.recipe).model_validate_json(about["recipe"]), int(about["seed"]), about["precision"]
            if found != (self.recipe, self.seed, self.precision):
                raise CheckpointError(
                    f"{self.folder} holds an unfinished {found[0].name}, {found[0].steps} steps, seed {found[1]}, "
                    f"{found[2]}; go on with the same, or choose another --out"
                )
            if about["digest"] != digest_of(tensors):
                raise ValueError("its contents do not match their digest")
            model, optimizer = ({k: v for k, v in tensors.items() if k.startswith(part)} for part in ("model", "optim"))
            self.model.load_state_dict({k.removeprefix("model."): v for k, v in model.items()})
            self._restore_optimizer(optimizer)
            self.step, self.seconds = int(about["step"]), float(about["seconds"])
            self.curve = [CurvePoint.model_validate(point) for point in json.loads(about["curve"])]
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged file makes of it
            why = " ".join(str(error).split())[:120]
            raise CheckpointError(
                f"{path} cannot be resumed from ({type(error).__name__}: {why}); remove it to start again"
            ) from error

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            _, index, field = name.split(".")
            state.setdefault(int(index), {})[field] = value
        shapes = [weight.shape for group in self.optimizer.param_groups for weight in group["params"]]
        fields = {"step", "exp_avg", "exp_avg_sq"}
        whole = state.keys() == set(range(len(shapes))) and all(
            state[i].keys() == fields and state[i]["exp_avg"].shape == state[i]["exp_avg_sq"].shape == shape
            for i, shape in enumerate(shapes)
        )
        if not whole:
            raise ValueError("its optimizer state is not that of this model")
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _record(self) -> Any:
        return TrainingRecord(recipe=self.recipe, **self._about())

    def _about(self) -> dict[str, Any]:
        """What a record says beside the recipe."""
        return {
            "seed": self.seed,
            "step": self.step,
            "precision": self.precision,
            "threads": torch.get_num_threads(),
            "seconds": round(self.seconds, 1),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "leaksum": source_version()},
            "commit": self.commit,
            "curve": tuple(self.curve),
        }


def in_distribution_accuracy(model: HookedAdder, seed: int) -> float:
    """Share of :data:`PROBE_PROBLEMS` problems, drawn as training with this seed draws them but never trained on, whose
    every decision is right.
    """
    task = model.task
    batch = task.encode(task.training_problems(seed, 0, PROBE_PROBLEMS, stream="probe"))
    with torch.no_grad(), model.evaluating():
        right = model(batch.tokens, batch.mask).argmax(-1) == batch.targets
    return (right | ~batch.decisions).all(1).float().mean().item()


class _Rates:
    """Collects the gates and resets of a forward pass."""

    def __init__(self, model: HookedAdder):
        self.names = [f"blocks.{i}.attn.hook_{what}" for i in range(model.cfg.n_layers) for what in ("gate", "reset")]
        self.kept: list[Tensor] = []

    def hooks(self) -> list[Any]:
        return [(name, lambda rates, hook: self.kept.append(rates)) for name in self.names]

    def softness(self, mask: Tensor) -> Tensor:
        """Mean of ``rate (1 - rate)`` over real tokens and counters, gates and resets added, averaged over layers."""
        parts = [(rates * (1 - rates))[mask].mean() for rates in self.kept]
        return torch.stack(parts).sum() * 2 / len(parts)


def _add_to_keys(scores: Tensor, hook: Any, boost: Tensor) -> Tensor:
    return scores + boost


def ramp(done: float, between: tuple[float, float]) -> float:
    """How far a ramp has risen, from 0 to 1, when this share of training is done."""
    start, full = between
    if done >= full:
        return 1.0
    return 0.0 if done <= start else (done - start) / (full - start)


def schedule(step: int, recipe: Recipe | MachineRecipe) -> float:
    """The learning rate at ``step`` as a share of its peak: linear warm-up, then a cosine to 0, or held and cooled."""
    warm = min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
    if recipe.cooldown is None:
        return warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return warm * (1 - (1 - COOLED) * ramp(step / recipe.steps, (recipe.cooldown, 1.0)))


def _optimizer(model: HookedAdder, recipe: Recipe) -> torch.optim.AdamW:
    """Groups: weights that decay, those that do not, kernels of counts. ``rate``: a multiple of the learning rate."""
    groups: dict[str, dict[str, Any]] = {
        "decayed": {"params": [], "weight_decay": recipe.weight_decay, "rate": 1.0},
        "others": {"params": [], "weight_decay": 0.0, "rate": 1.0},
        "kernels": {"params": [], "weight_decay": 0.0, "rate": recipe.kernel_rate},
    }
    for name, weight in model.named_parameters():
        kind = "kernels" if ".counters.kernel" in name else "decayed" if _decays(name) else "others"
        groups[kind]["params"].append(weight)
    used = [group for group in groups.values() if group["params"]]
    return torch.optim.AdamW(used, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def _decays(name: str) -> bool:
    return ".W_" in name and not name.endswith(("W_E", "W_pos"))


def _tokens_needed(problem: Problem) -> int:
    return sum(len(decimal_string(n)) for n in (*problem, sum(problem)))


def source_version() -> str:
    try:
        return version("leaksum")
    except PackageNotFoundError:
        return "unknown"


def source_commit() -> str | None:
    """The git revision of the source, ``-dirty`` if ``models/`` differs from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return out + ("-dirty" if dirty else "")
