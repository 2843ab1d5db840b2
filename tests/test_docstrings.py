"""The examples in docstrings are run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import interp
import models

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (models, interp)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])  # examples load what ships
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    with_examples = {
        found.name
        for name in MODULES
        for found in finder.find(importlib.import_module(name))
        if found.examples and found.name.startswith(name)
    }
    assert {"interp.leak.log_slope", "models.normalizers.softmax", "interp.decisions.score"} <= with_examples
