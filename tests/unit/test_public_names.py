"""The public names: lazy, typed, complete, and what they say they are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import equipoise
from equipoise import balance, plan, train

STUB = Path(equipoise.__file__).with_suffix(".pyi")


def stub_names() -> dict[str, str]:
    """Each public name with the module that the stub imports it from."""
    tree = ast.parse(STUB.read_text())
    return {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_name_is_what_the_stub_says() -> None:
    names = stub_names()
    assert set(equipoise.__all__) == set(names)
    for name, module in names.items():
        value = getattr(equipoise, name)
        if module == "equipoise":
            assert value.__name__ == f"equipoise.{name}"
        else:
            assert value is getattr(sys.modules[module], name)


def test_dir_lists_the_names_and_unknown_ones_are_refused() -> None:
    assert set(stub_names()) | {"__version__"} <= set(dir(equipoise))
    with pytest.raises(AttributeError, match="'equipoise' has no attribute 'nope'"):
        equipoise.nope  # noqa: B018


def run(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing() -> None:
    source = (
        "import sys; before = set(sys.modules); import equipoise;"
        "dir(equipoise); print(sorted(set(sys.modules) - before))"
    )
    assert run(source) == "['equipoise']"


def test_a_star_brings_all_names_and_without_torch_those_that_need_none() -> None:
    everything = "from equipoise import *; print('simulate' in dir(), 'PackedLoader' in dir())"
    names: dict[str, object] = {}
    exec("from equipoise import *", names)
    assert {"simulate", "PackedLoader"} <= set(names)
    hidden = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    assert run(hidden + everything) == "True False"


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (balance, {"Batches", "Shared", "batch", "device_curve", "fit_curve", "pack"}),
        (plan, {"measure", "plan", "plan_serving"}),
        (train, {"compare", "run"}),
    ],
)
def test_packages_have_functions_of_their_own(package, names) -> None:
    assert set(package.__all__) == names
    assert names <= set(dir(package)) | {"run"}
    for name in names:
        assert callable(getattr(package, name))
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        package.nope  # noqa: B018


def test_balancing_needs_no_torch() -> None:
    source = (
        "import sys; from equipoise import balance;"
        "print('numpy' in sys.modules);"
        "balance.batch([8, 3, 4], 2, price='7m', pipeline=2, min_micro_batches=1);"
        "print('torch' in sys.modules)"
    )
    assert run(source) == "False\nFalse"
