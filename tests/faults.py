"""Faults, injected on purpose: what was injected, how often, and what was lost.

``python tests/faults.py`` injects as many as stand in CONTRIBUTING.md and prints its table; the tests inject a share.
Processes are forked from one that has imported everything, so that a kill costs no start.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import interp.cli as cli
import interp.sweep as sweeps
from interp.cases import read_cases
from models import training
from models.addition import read_problems
from models.checkpoint import load_checkpoint, load_record
from models.config import AdderConfig, AttentionConfig, InputError
from models.recipes import Recipe
from models.training import Trainer

FILES = ("model.safetensors", "config.json", "training.json")
MEMORY = 256 * 2**20  # bytes that reading a hostile checkpoint may add
LONGEST_LINE = 600  # characters, the path aside


@dataclass(frozen=True)
class Fault:
    """One row of the table. ``lost``: checkpoints or results that were not as without the fault, or accepted."""

    injected: str
    times: int
    lost: int
    note: str


def recipe(steps: int = 40, **changes) -> Recipe:
    model = AdderConfig(attention=AttentionConfig(decay=0.3), n_layers=1, n_heads=2, d_model=16, d_head=8, d_mlp=32)
    base = Recipe(name="tiny", about="a test", model=model, steps=steps, batch=8, warmup=3)
    return Recipe.model_validate(base.model_dump() | {"precision": "float32"} | changes)


def quick() -> None:
    """Probes small and a resume file after every step: a kill then hits the writing of files too."""
    training.PROBE_PROBLEMS, training.PROBE_EVERY, training.SAVE_SECONDS = 16, 5, -1.0
    torch.set_num_threads(1)


@contextmanager
def forked(action: Callable[[], object]) -> Iterator[int]:
    """A child, in a process group of its own, that does this and exits with 0, or 1 and a traceback."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            quick()
            action()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    yield child


def killed_after(seconds: float, action: Callable[[], object]) -> bool:
    """Whether SIGKILL came before the action was done."""
    with forked(action) as child:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                assert status == 0, "a resumed run failed"
                return False
            time.sleep(0.001)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True


def done(action: Callable[[], object]) -> float:
    """The seconds it takes."""
    began = time.monotonic()
    with forked(action) as child:
        assert os.waitpid(child, 0)[1] == 0
    return time.monotonic() - began


def kill_training(times: int, work: Path, seed: int = 0) -> Fault:
    """SIGKILL at random moments of training; each run goes on from where the last kill left it."""
    rng = np.random.default_rng(seed)

    def train(folder: Path) -> Callable[[], object]:
        return lambda: Trainer(recipe(), 3, folder, resume=True).run()

    whole = work / "whole"
    seconds = done(train(whole))
    kills = lost = runs = torn = 0
    while kills < times:
        folder = work / f"run{runs}"
        while kills < times and killed_after(rng.uniform(0, seconds), train(folder)):
            kills += 1
            torn += any(folder.glob(".*")) if folder.exists() else 0
        done(train(folder))
        lost += not _same(folder, whole)
        runs += 1
    return Fault(
        "SIGKILL at a random moment of training",
        kills,
        lost,
        f"{runs} runs resumed, {torn} kills while a file was written",
    )


def _same(folder: Path, whole: Path) -> bool:
    ours, theirs = ((at / "model.safetensors").read_bytes() for at in (folder, whole))
    return ours == theirs and load_record(folder).curve == load_record(whole).curve


def kill_sweep(times: int, work: Path, seed: int = 0) -> Fault:
    """SIGKILL of a sweep of two processes at random moments: of all of it, or of the parent alone."""
    rng = np.random.default_rng(seed)
    grid = sweeps.Sweep(recipes=(recipe(20), recipe(15, name="other")), seeds=(0, 1), digits=(3, 5), problems=4)

    def sweep(folder: Path) -> Callable[[], object]:
        return lambda: sweeps.write_outcome(sweeps.run_sweep(grid, folder, jobs=2), folder, "grid")

    def bytes_of(folder: Path) -> list[bytes]:
        weights = [(folder / "runs" / run.name / "model.safetensors").read_bytes() for run in grid.runs]
        return weights + [(folder / f"grid.{kind}").read_bytes() for kind in ("csv", "parquet", "json")]

    with _forking_workers():
        seconds = done(sweep(work / "whole"))
        kills = lost = runs = 0
        while kills < times:
            folder = work / f"sweep{runs}"
            while kills < times and killed_after(rng.uniform(0, seconds), sweep(folder)):
                kills += 1
            done(sweep(folder))
            lost += bytes_of(folder) != bytes_of(work / "whole")
            runs += 1
    return Fault(
        "SIGKILL at a random moment of a sweep", kills, lost, f"{runs} sweeps of {len(grid.runs)} runs resumed"
    )


@contextmanager
def _forking_workers() -> Iterator[None]:
    """joblib's forked workers in place of fresh ones, whose imports take longer than these runs."""

    @contextmanager
    def engine(name: str, address: str | None) -> Iterator[str]:
        yield "multiprocessing"

    ours, sweeps._engine = sweeps._engine, engine
    try:
        yield
    finally:
        sweeps._engine = ours


# A full disk


def full_disk(work: Path) -> Fault | None:
    """Training on a small tmpfs that fills up, while it goes on and just before it ends. None: none may be mounted."""
    whole, report, disk = work / "whole", work / "report.json", work / "disk"
    done(lambda: Trainer(recipe(), 3, whole).run())
    disk.mkdir()
    done(lambda: report.write_text(json.dumps(_fill(disk, whole))))
    found = json.loads(report.read_text())
    if found is None:
        return None
    return Fault("a full disk (tmpfs) while training saves, and when it ends", len(found), found.count(False), "")


def _fill(disk: Path, whole: Path) -> list[bool] | None:
    if not _mount(disk, 2**20):
        return None
    intact = []
    for step in (7, 39):
        folder, filler = disk / f"run{step}", disk / "filler"
        saved: list[bytes] = []

        def fill(now, loss, exact, step=step, folder=folder, filler=filler, saved=saved):
            if now == step + 1:
                saved.append((folder / "resume.safetensors").read_bytes())
                try:
                    with filler.open("wb", buffering=0) as file:
                        while file.write(b"x" * 4096):
                            pass
                except OSError:
                    pass

        sys.argv = ["leaksum"]
        status, out, err = _command(lambda fill=fill, folder=folder: Trainer(recipe(), 3, folder, progress=fill).run())
        good = status == 2 and out == "" and err.count("\n") == 1 and "No space left on device" in err
        good &= (folder / "resume.safetensors").read_bytes() == saved[0]
        good &= not list(folder.glob(".*"))  # nothing half written is left
        filler.unlink()
        Trainer(recipe(), 3, folder, resume=True).run()
        intact.append(good and _same(folder, whole))
        shutil.rmtree(folder)
    return intact


def _command(action: Callable[[], object]) -> tuple[int, str, str]:
    """What the command line makes of an action: exit status, standard output, standard error."""
    ours, cli.app = cli.app, lambda *args, **kwargs: action() and None
    try:
        return command()
    finally:
        cli.app = ours


def command(*arguments: object) -> tuple[int, str, str]:
    """``leaksum`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            return int(stop.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def _mount(at: Path, size: int) -> bool:
    """Mount a tmpfs of so many bytes that only this process sees and that goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mount, private = 0x10000000, 0x20000, (1 << 18) | 16384
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_mount | (0 if user == 0 else new_user)):
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", b"/", None, private, None):
        return False
    return not libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, f"size={size}".encode())


# Hostile checkpoints


class Touch:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _weights(edit: Callable[[dict], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors")

    return spoil


def _config(*keys: str, value: object, file: str = "config.json") -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        inner = found
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        (folder / file).write_text(json.dumps(found))

    return spoil


def _bytes(change: Callable[[bytes], bytes], file: str = "model.safetensors") -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def _flipped(at: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        spoiled = bytearray(content)
        spoiled[int(at * (len(content) - 1))] ^= 4
        return bytes(spoiled)

    return flip


def _special(file: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return spoil


def _sparse(size: int, start: bytes = b"") -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size)

    return make


HTML = "<script>alert(1)</script>"
TRAVERSAL = "../../../../tmp/evil"
HOSTILE: dict[str, Callable[[Path], object]] = {
    "truncated weights": _bytes(lambda content: content[: len(content) // 2]),
    "no weights": _bytes(lambda content: b""),
    "a flipped bit in the header": _bytes(_flipped(0.01)),
    "a flipped bit in the weights": _bytes(_flipped(0.7)),
    "a wrong shape": _weights(lambda w: w.update({"unembed.W_U": torch.zeros(16, 15)})),
    "a wrong type": _weights(lambda w: w.update({"unembed.W_U": w["unembed.W_U"].half()})),
    "NaN in a weight": _weights(lambda w: w["unembed.W_U"].fill_(torch.nan)),
    "a weight too many, its name a path": _weights(lambda w: w.update({TRAVERSAL: torch.zeros(1)})),
    "a weight too many, its name HTML": _weights(lambda w: w.update({HTML + "\n": torch.zeros(1)})),
    "another format": _config("format", value=2),
    "10^9 layers": _config("model", "n_layers", value=10**9),
    "10^400 layers": _config("model", "n_layers", value=10**400),
    "the largest of every size": lambda folder: [
        _config("model", key, value=value)(folder)
        for key, value in (("n_layers", 64), ("n_heads", 256), ("d_model", 8192), ("d_head", 1024), ("d_mlp", 65536))
    ],
    "10^9 digits, so that counting its keys takes memory": _config("model", "task", "max_digits", value="9" * 5000),
    "HTML for a scheme": _config("model", "attention", "scheme", value=HTML),
    "a path for a scheme": _config("model", "attention", "scheme", value=TRAVERSAL),
    "HTML for a field": _config("model", HTML, value=1),
    "deep JSON": _bytes(lambda content: b"[" * 10**6, "config.json"),
    "a number of 10^6 digits": _bytes(lambda content: b"1" * 10**6, "config.json"),
    "16 GB of configuration": _special("config.json", _sparse(2**34)),
    "a configuration without end": _special("config.json", lambda path: path.symlink_to("/dev/zero")),
    "a pipe for a configuration": _special("config.json", lambda path: os.mkfifo(path)),
    "a pipe for weights": _special("model.safetensors", lambda path: os.mkfifo(path)),
    "weights without end": _special("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "16 GB of weights": _special("model.safetensors", _sparse(2**34)),
    "a header of 2^62 bytes": _special("model.safetensors", _sparse(2**20, struct.pack("<Q", 2**62))),
    "a header of 90 MB": _special("model.safetensors", _sparse(2**27, struct.pack("<Q", 90 * 10**6) + b"{")),
    "a header that nests": _special(
        "model.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 10**6) + b'{"a":' * (2 * 10**5))
    ),
    "a shape of 2^64 numbers": _special(
        "model.safetensors",
        lambda path: path.write_bytes(
            (lambda header: struct.pack("<Q", len(header)) + header)(
                b'{"unembed.W_U":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'
            )
        ),
    ),
    "a pickle, renamed": lambda folder: (folder / "model.safetensors").write_bytes(
        pickle.dumps(Touch(folder / "mark"))
    ),
    "a torch.save file, renamed": lambda folder: torch.save(
        {"a": Touch(folder / "mark")}, folder / "model.safetensors"
    ),
    "a pickle for a configuration": lambda folder: (folder / "config.json").write_bytes(
        pickle.dumps(Touch(folder / "mark"))
    ),
}


def hostile(work: Path) -> Fault:
    """Each hostile checkpoint through ``leaksum score`` and ``leaksum doctor``, in a process that may hardly grow."""
    good = work / "good"
    done(lambda: Trainer(recipe(3), 3, good).run())
    report = work / "report.json"

    def refuse() -> None:
        _limit_memory()
        report.write_text(json.dumps({what: _refusal(work, good, what) for what in HOSTILE}))

    done(refuse)
    accepted = {what: why for what, why in json.loads(report.read_text()).items() if why}
    return Fault(
        "hostile or damaged checkpoints",
        len(HOSTILE),
        len(accepted),
        "; ".join(f"{k}: {v}" for k, v in accepted.items()),
    )


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(240)  # of what waits forever


def _refusal(work: Path, good: Path, what: str) -> str:
    """What is wrong with how it was refused; nothing if nothing is."""
    folder = work / "hostile"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    HOSTILE[what](folder)
    before = sorted(path.name for path in folder.iterdir())
    for name in ("score", "doctor"):
        try:
            status, out, err = command(name, folder)
        except BaseException as error:
            return f"{name}: {type(error).__name__}: {str(error)[:200]}"
        if (status, err.count("\n")) != (2, 1) or len(err) > LONGEST_LINE + len(str(folder)):
            return f"{name}: status {status}, {err[:200]!r}"
        if not err.rstrip("\n").isprintable() or (name == "score" and out):
            return f"{name}: printed {out[:100]!r} {err[:100]!r}"
    if sorted(path.name for path in folder.iterdir()) != before:
        return "a file appeared"
    return ""


# Fuzzing


def fuzz(cases: int, work: Path, seed: int = 0) -> list[Fault]:
    """Random damage to every kind of file that is read: refused in one line, or read as something valid."""
    good = work / "good"
    done(lambda: Trainer(recipe(3), 3, good).run())

    def stop(step: int, loss: float, exact: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    def unfinished() -> None:
        try:
            Trainer(recipe(), 3, work / "unfinished", progress=stop).run()
        except KeyboardInterrupt:
            return

    done(unfinished)
    model = SimpleNamespace(name="tiny", vocabulary=50, tokenizer=None, config=SimpleNamespace(), limit=None)
    lines = '{"tokens": [3, 4, 5], "decisions": [0, 1], "targets": [0, [0, 1]]}\n\n{"tokens": [1, 2, 3]}\n'
    grid = "recipes: [1digit-nope, {base: 1digit-rotary2d, steps: 20, attention: {decay: 1.0}}]\nseeds: [0-3, 9]\n"
    grid += "digits: [20, 100]\nproblems: 5\ninterventions: [far, window=10]\ndiagnose: 100\n"
    (work / "cases.jsonl").write_text(lines)
    (work / "grid.yaml").write_text(grid)
    (work / "problems.txt").write_text("# two\n12 + 345\n\n9 + 1\n")
    readers = {
        "weights": (good / FILES[0], lambda path: load_checkpoint(path.parent)),
        "configurations": (good / FILES[1], lambda path: load_checkpoint(path.parent)),
        "training records": (good / FILES[2], lambda path: load_record(path.parent)),
        "resume files": (
            work / "unfinished" / "resume.safetensors",
            lambda path: Trainer(recipe(), 3, path.parent, True),
        ),
        "JSONL files of cases": (work / "cases.jsonl", lambda path: read_cases(path, model)),
        "sweep files": (work / "grid.yaml", sweeps.read_sweep),
        "files of problems": (work / "problems.txt", read_problems),
    }
    report = work / "report.json"

    def run() -> None:
        _limit_memory()
        signal.alarm(0)
        share = -(-cases // len(readers))
        rows = {what: _fuzzed(path, read, share, seed) for what, (path, read) in readers.items()}
        report.write_text(json.dumps(rows))

    done(run)
    return [Fault(f"fuzzed {what}", *row) for what, row in json.loads(report.read_text()).items()]


def _fuzzed(path: Path, read: Callable[[Path], object], cases: int, seed: int) -> tuple[int, int, str]:
    whole, wrong, refused, note = path.read_bytes(), 0, 0, ""
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        path.write_bytes(mutated(whole, rng))
        try:
            read(path)
        except (InputError, OSError) as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > LONGEST_LINE + len(str(path)):
                wrong, note = wrong + 1, f"; {str(error)[:100]!r}"
        except BaseException as error:
            wrong, note = wrong + 1, f"; {type(error).__name__}: {str(error)[:100]!r}"
    path.write_bytes(whole)
    return cases, wrong, f"{refused} refused, {cases - refused - wrong} harmless{note}"


TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b'"',
    b"{",
    b"[[[[",
    b"\\ud800",
    b"9" * 40,
    b"\n",
    b"\xff",
    b"0",
    b"true",
    b": ",
)


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """One to four of: bits flipped, bytes cut, doubled, overwritten, a hostile token put in."""
    spoiled = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        near = 8 + min(len(spoiled), 4000) if rng.random() < 0.8 else len(spoiled)  # headers more often than weights
        at, size = int(rng.integers(0, min(near, len(spoiled)) + 1)), int(rng.integers(1, 40))
        match int(rng.integers(6)):
            case 0 if at < len(spoiled):
                spoiled[at] ^= 1 << int(rng.integers(8))
            case 1:
                del spoiled[at:]
            case 2:
                del spoiled[at : at + size]
            case 3:
                spoiled[at:at] = spoiled[at : at + size]
            case 4:
                spoiled[at : at + size] = rng.bytes(size)
            case _:
                spoiled[at : at + int(rng.integers(0, 4))] = TOKENS[int(rng.integers(len(TOKENS)))]
    return bytes(spoiled)


# The table


def inject(times: int, cases: int, work: Path, seed: int = 0) -> list[Fault]:
    """All of it."""
    folders = {name: work / name for name in ("training", "sweep", "disk", "hostile", "fuzz")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    full = full_disk(folders["disk"])
    return [
        kill_training(times, folders["training"], seed),
        kill_sweep(times, folders["sweep"], seed),
        *([full] if full else []),
        hostile(folders["hostile"]),
        *fuzz(cases, folders["fuzz"], seed),
    ]


def table(faults: list[Fault]) -> str:
    lines = ["| injected | times | lost or accepted | |", "|---|---:|---:|---|"]
    return "\n".join([*lines, *(f"| {f.injected} | {f.times} | {f.lost} | {f.note} |" for f in faults)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="kills of training, and of sweeps")
    parser.add_argument("--cases", type=int, default=10_000, help="fuzzed files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = inject(given.times, given.cases, Path(folder), given.seed)
    print(json.dumps([asdict(fault) for fault in faults]) if given.json else table(faults))
    sys.exit(any(fault.lost for fault in faults))


if __name__ == "__main__":
    main()
