"""The house as it stands: ``docs/map.md``, and the floors on every page that draws them.

``python docs/_ext/house.py`` writes ``docs/map.md`` from the tree and the first line of every
file; ``tests/unit/test_docs.py`` compares. ``{floors}`` draws the contracts of pyproject.toml.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "equipoise"

# Each answer is three files or fewer, read in this order.
QUESTIONS = {
    "How does ring attention work here?": (
        "src/equipoise/schedule/attention/pass_kv.py",
        "src/equipoise/parallel/context/forward.py",
        "src/equipoise/parallel/context/backward.py",
    ),
    "How do I add a packing policy?": (
        "docs/recipes.md",
        "src/equipoise/spec/catalog.py",
        "src/equipoise/balance/packing/whole.py",
    ),
    "How do I add a pipeline schedule?": (
        "docs/recipes.md",
        "src/equipoise/spec/catalog.py",
        "src/equipoise/schedule/pipeline/orders.py",
    ),
    "How do I add a device?": ("docs/recipes.md", "src/equipoise/spec/device/table.py"),
    "Where is the loss normalised?": (
        "src/equipoise/train/step.py",
        "src/equipoise/nn/loss.py",
    ),
    "Where does ZeRO 3 gather its weights?": (
        "src/equipoise/parallel/apply.py",
        "src/equipoise/parallel/zero/shard.py",
        "src/equipoise/parallel/zero/exchange.py",
    ),
    "How do I add a verb?": (
        "docs/recipes.md",
        "src/equipoise/cli/main.py",
        "src/equipoise/cli/trace.py",
    ),
    "Which formula gives a step's time?": (
        "src/equipoise/sim/step.py",
        "src/equipoise/sim/parts.py",
        "src/equipoise/cost/step/layer.py",
    ),
    "What does resume restore?": (
        "src/equipoise/train/loop.py",
        "src/equipoise/checkpoint/store.py",
        "src/equipoise/checkpoint/manifest.py",
    ),
    "Where is exactness checked?": (
        "src/equipoise/train/check/case.py",
        "src/equipoise/train/check/prove.py",
        "src/equipoise/train/step.py",
    ),
}


def first_line(file: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def floors() -> list[tuple[int, list[str]]]:
    """The floors of pyproject.toml, highest first: its number and its packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each for each in contracts["contracts"] if each["type"] == "layers")["layers"]
    rooms = [[room.strip().rpartition(".")[2] for room in row.split("|")] for row in layers]
    return [(len(rooms) - index, row) for index, row in enumerate(rooms)]


def torchless() -> list[str]:
    """The packages that never import torch."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    banned = next(each for each in contracts["contracts"] if each["type"] == "forbidden")
    return [module.partition(".")[2] for module in banned["source_modules"]]


def draw_floors() -> str:
    """The floors as text.

    >>> draw_floors().splitlines()[0].split()[:2]
    ['10', 'cli']
    """
    lines = [f"  {number:>2}   {' | '.join(row)}" for number, row in floors()]
    *most, last = torchless()
    return "\n".join([*lines, "", f"  {', '.join(most)} and {last} never import torch."])


def rooms() -> Iterator[tuple[Path, list[Path]]]:
    """Each room of the source and its files, a floor's packages from the top down."""
    for _, packages in floors():
        for package in packages:
            for init in sorted((SOURCE / package).rglob("__init__.py")):
                files = sorted(set(init.parent.glob("*.py")) - {init})
                yield init.parent, files


def render_map() -> str:
    """The text of ``docs/map.md``."""
    lines = [
        "# Map",
        "",
        "Every room of `src/equipoise` and every file in it, with its first line. This page is",
        "written by `make map` from the tree.",
        "",
        "## Ten questions",
        "",
        "| question | read, in this order |",
        "|---|---|",
    ]
    lines += [
        f"| {question} | {', '.join(f'`{file}`' for file in files)} |"
        for question, files in QUESTIONS.items()
    ]
    lines += ["", "## Floors", "", "A package imports packages on lower floors only.", ""]
    lines += ["```text", draw_floors(), "```"]
    for room, files in rooms():
        name = room.relative_to(SOURCE).as_posix()
        depth = "##" if "/" not in name else "###"
        lines += ["", f"{depth} `{name}/`", "", first_line(room / "__init__.py")]
        if files:
            lines.append("")
        lines += [f"- `{file.name}`: {first_line(file)}" for file in files]
    return re.sub(r"(?<!`)``(?!`)", "`", "\n".join(lines)) + "\n"


def setup(app: Any) -> dict[str, Any]:
    """Register the directive ``{floors}``."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Floors(SphinxDirective):
        """The floors as a drawing."""

        def run(self) -> list[nodes.Node]:
            """A literal block."""
            return [nodes.literal_block(text=draw_floors(), language="text")]

    app.add_directive("floors", Floors)
    return {"version": "1", "parallel_read_safe": True}


if __name__ == "__main__":
    (ROOT / "docs" / "map.md").write_text(render_map())
