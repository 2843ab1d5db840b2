"""A checkpoint is a directory: ``model.safetensors``, ``config.json``, ``training.json``. Never a pickle.

``config.json`` holds ``{"format": 1, "model": AdderConfig}``; ``training.json`` the recipe, the seed, the versions and
the curve. Both are validated before a weight is read, and weights must have exactly the names, shapes and type that
the configuration calls for. Beside the weights stands their digest: a flipped bit makes
another model, not a broken one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.addition import Vocabulary
from models.config import AdderConfig, Frozen, InputError, NeuralGpuConfig, TuringConfig
from models.files import write_atomically, write_text
from models.location import Machine, machine
from models.recipes import MachineRecipe, Recipe
from models.transformer import HookedAdder

FORMAT = 1
T = TypeVar("T", bound=Frozen)
R = TypeVar("R", bound=Frozen)
M = TypeVar("M", bound=torch.nn.Module)
_LARGEST_JSON = 16 * 2**20  # bytes; a training curve is far below
_MOST_WEIGHTS = 5 * 10**7  # a configuration that asks for more is not one of these small models


class CheckpointError(InputError):
    """A checkpoint that cannot be trusted; the message names the file, what is wrong, and what to do."""


class CurvePoint(Frozen):
    """One point of the training curve: loss in nats per decision, share of in-distribution problems exact."""

    step: int
    loss: float
    exact: float


class Record(Frozen, Generic[R]):
    """``training.json``: where a checkpoint comes from. ``commit`` is the source's git revision when it is known."""

    recipe: R
    seed: int = Field(ge=0, lt=2**63)
    step: int
    precision: str
    threads: int
    seconds: float
    versions: dict[str, str]
    commit: str | None
    curve: tuple[CurvePoint, ...]


class TrainingRecord(Record[Recipe]):
    """Of an adder."""


class MachineRecord(Record[MachineRecipe]):
    """Of a machine that addresses by location."""


class _ConfigFile(Frozen):
    format: int
    model: AdderConfig


class _MachineFile(Frozen):
    format: int
    model: NeuralGpuConfig | TuringConfig = Field(discriminator="machine")


def save_checkpoint(folder: Path, model: HookedAdder | Machine, record: TrainingRecord | MachineRecord) -> None:
    """Write the three files, ``training.json`` last: a folder that has it is whole."""
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    save_tensors(folder / "model.safetensors", weights, {"digest": digest_of(weights)})
    write_text(folder / "config.json", _pretty({"format": FORMAT, "model": model.config.model_dump()}))
    write_text(folder / "training.json", _pretty(record.model_dump()))


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a safetensors file aside and rename it.

    Raises:
        OSError: the disk is full or the folder cannot be written; what stood at ``path`` is as it was.
    """
    try:
        write_atomically(path, lambda aside: save_file(tensors, aside, metadata=about))
    except SafetensorError as error:  # how that library says that the disk is full
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, _reason(error), str(path)) from error


def digest_of(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_checkpoint(folder: str | Path) -> HookedAdder:
    """The model of a checkpoint directory, in evaluation mode.

    Raises:
        CheckpointError: missing, truncated, foreign or inconsistent files; weights that do not match the digest beside
            them; a scheme or format that is not known.
    """
    folder = Path(folder)
    config = load_config(folder)
    require_loadable(config, str(folder / "config.json"))
    return _with_weights(HookedAdder(config), folder)


def load_machine(folder: str | Path) -> Machine:
    """The machine of a checkpoint directory, in evaluation mode. Raises :class:`CheckpointError`."""
    folder = Path(folder)
    path = folder / "config.json"
    found = _configuration(path)
    if not _of_machine(found):
        raise CheckpointError(f"{folder}: an adder, no machine that addresses by location; take one of those")
    config = _validated(_MachineFile, found, path).model
    if config.weights > _MOST_WEIGHTS:
        raise CheckpointError(f"{path}: asks for {config.weights:.1e} weights, more than are loaded")
    return _with_weights(machine(config), folder)


def holds_machine(folder: str | Path) -> bool:
    """Whether a checkpoint is of a machine that addresses by location. Raises :class:`CheckpointError`."""
    return _of_machine(_configuration(Path(folder) / "config.json"))


def _of_machine(found: Any) -> bool:
    """Whether what holds a model's configuration, as read from a file, holds that of a machine."""
    model = found.get("model") if isinstance(found, dict) else None
    return isinstance(model, dict) and "machine" in model


def load_any(folder: str | Path) -> HookedAdder | Machine:
    """The model of a checkpoint directory, whatever its kind. Raises :class:`CheckpointError`."""
    return load_machine(folder) if holds_machine(folder) else load_checkpoint(folder)


def _with_weights(model: M, folder: Path) -> M:
    """The model with the weights of a checkpoint directory. Raises :class:`CheckpointError`."""
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    path = folder / "model.safetensors"
    try:
        _require_file(path)
        if path.stat().st_size > 4 * _MOST_WEIGHTS + _LARGEST_JSON:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, more than any model that is loaded has")
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(shapes):
                odd = sorted(names ^ set(shapes))
                raise CheckpointError(
                    f"{path}: its weights are not those of config.json ({len(odd)} names differ, "
                    f"{odd[0][:80]!a} first); use the files of one checkpoint together"
                )
            for name, shape in shapes.items():
                found = file.get_slice(name)
                if tuple(found.get_shape()) != shape or found.get_dtype() != "F32":
                    raise CheckpointError(
                        f"{path}: weight {name!r} must be float32 {list(shape)}, got "
                        f"{found.get_dtype()} {found.get_shape()}; use the files of one checkpoint together"
                    )
            weights = {name: file.get_tensor(name) for name in shapes}
            about = {key: value for key, value in (file.metadata() or {}).items() if key != "format"}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({_reason(error)}); restore the file"
        ) from error
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{path}: weight {name!r} holds NaN or infinity; train again or restore the file")
    if about and about != {"digest": digest_of(weights)}:  # files of other programs have none
        raise CheckpointError(f"{path}: its weights do not match their digest; train again or restore the file")
    model.load_state_dict(weights)
    return model.eval()


def load_config(folder: str | Path) -> AdderConfig:
    """The model's configuration alone. Raises :class:`CheckpointError`."""
    path = Path(folder) / "config.json"
    found = _configuration(path)
    if _of_machine(found):
        raise CheckpointError(
            f"{Path(folder)}: a machine that addresses by location has no attention to look at; `leaksum score`, "
            "`reach`, `compare`, `doctor` and `location` apply to it"
        )
    return _validated(_ConfigFile, found, path).model


def _configuration(path: Path) -> dict[str, Any]:
    found = _read_json(path)
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: format must be {FORMAT}, got {ascii(version)[:40]}; is this a leaksum checkpoint?"
        )
    assert isinstance(found, dict)
    return found


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a directory claims to be one of these checkpoints, readable or not, rather than another kind of model."""
    path = Path(folder) / "config.json"
    try:
        found = _read_json(path)
    except CheckpointError:
        return False
    return isinstance(found, dict) and "format" in found and "model_type" not in found


def load_record(folder: str | Path) -> TrainingRecord:
    """How the checkpoint was trained. Raises :class:`CheckpointError`."""
    path = Path(folder) / "training.json"
    return _validated(TrainingRecord, _read_json(path), path)


def load_any_record(folder: str | Path) -> TrainingRecord | MachineRecord:
    """How a checkpoint was trained, whatever its kind. Raises :class:`CheckpointError`."""
    found = _read_json(Path(folder) / "training.json")
    of_machine = isinstance(found, dict) and _of_machine(found.get("recipe"))
    return load_machine_record(folder) if of_machine else load_record(folder)


def load_machine_record(folder: str | Path) -> MachineRecord:
    """How a machine was trained. Raises :class:`CheckpointError`."""
    path = Path(folder) / "training.json"
    return _validated(MachineRecord, _read_json(path), path)


def require_loadable(config: AdderConfig, where: str) -> None:
    """Refuse a configuration of more weights than are loaded, before anything is allocated.

    Raises:
        CheckpointError: it asks for more; the message names ``where`` it stands.
    """
    per_layer = 4 * config.n_heads * config.d_head * config.d_model + 2 * config.d_model * config.d_mlp
    attention = config.attention
    positions = {"coupling": attention.coupled_positions, "cope": config.n_layers * attention.cope_positions}
    rows = 2 * Vocabulary(config.task).size + positions.get(attention.scheme, 0)
    size = config.n_layers * per_layer + rows * config.d_model
    if size > _MOST_WEIGHTS:
        raise CheckpointError(
            f"{where}: asks for {size:.1e} weights, more than the {_MOST_WEIGHTS:.0e} that are loaded"
        )


def _read_json(path: Path) -> Any:
    try:
        _require_file(path)
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, more than the {_LARGEST_JSON} that are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        folder = path.parent
        where = (
            f"it has no {path.name}" if folder.is_dir() else "it is a file" if folder.exists() else "no such directory"
        )
        raise CheckpointError(
            f"{path.parent}: not a checkpoint, {where}; name a directory that `leaksum train` wrote"
        ) from error
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not readable JSON ({_reason(error)}); restore the file") from error


def _require_file(path: Path) -> None:
    """A device or a pipe has no end, and one that a name leads to is not read."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file; restore the file")


def _validated(kind: type[T], found: Any, path: Path) -> T:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """The first complaint of a validation, in one line: where, what, and the value it got."""
    first = error.errors()[0]
    where = ascii(".".join(str(part) for part in first["loc"]))[1:-1][:80]
    got = "" if isinstance(first["input"], dict | list) else f", got {str(first['input'])[:60]!a}"
    return " ".join(f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}{got}".split())


def _reason(error: BaseException) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:160]


def _pretty(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
