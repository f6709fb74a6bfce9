"""The examples in the docstrings of floors 1 and 2, and of the frame of the command line."""

import doctest
import importlib
import pkgutil

import pytest

import equipoise.base
import equipoise.spec

MODULES = [
    f"{package.__name__}.{found.name}"
    for package in (equipoise.base, equipoise.spec)
    for found in pkgutil.iter_modules(package.__path__)
] + ["equipoise.cli.run_arguments"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0
