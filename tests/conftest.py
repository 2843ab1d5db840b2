"""Shared fixtures: small untrained adders whose every weight matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import settings
from stirred import stirred

from interp import cli
from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.transformer import HookedAdder

settings.register_profile("tests", max_examples=20, deadline=None, derandomize=True, database=None)
settings.load_profile("tests")
torch.set_num_threads(1)

PROBLEMS = ((987, 45), (6, 12345), (40, 0), (999, 1))


@cache
def _adder(scheme: str, sink: bool, n_layers: int, chunk: int) -> HookedAdder:
    decay = 0.3 if scheme == "rotary2d" else 0.0
    config = AdderConfig(
        task=TaskConfig(chunk=chunk),
        attention=AttentionConfig(scheme=scheme, sink=sink, decay=decay, null_key=sink and scheme == "counters"),
        n_layers=n_layers,
        n_heads=2,
        d_model=16,
        d_head=8,
        d_mlp=32,
    )
    return stirred(HookedAdder(config, seed=1))


@pytest.fixture(scope="session")
def make_adder() -> Callable[..., HookedAdder]:
    """Cached: leave the model as you found it. Arguments: scheme, sink, n_layers, chunk."""

    def make(scheme: str = "rotary2d", sink: bool = True, n_layers: int = 2, chunk: int = 1) -> HookedAdder:
        return _adder(scheme, sink, n_layers, chunk)

    return make


@pytest.fixture(scope="session")
def adder(make_adder) -> HookedAdder:
    return make_adder()


@pytest.fixture(scope="session")
def batch(adder):
    return adder.task.encode(PROBLEMS)


@pytest.fixture
def leaksum(capsys):
    """Runs the command in this process; gives its exit status, standard output and standard error."""
    threads = torch.get_num_threads()

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    yield run
    torch.set_num_threads(threads)
