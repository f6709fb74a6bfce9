"""Runs small enough for two cores."""

import dataclasses
import shutil
from pathlib import Path

from equipoise.data.cache.store import TokenStore
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import (
    CheckpointSpec,
    EvalSpec,
    ExpertsSpec,
    FaultSpec,
    LayoutSpec,
    PackSpec,
    RunSpec,
    TrainSpec,
)

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)


class MakeRun:
    """Makes resolved runs: ``make_run(steps=5, zero=3)`` takes any key of its tables by name.

    ``schedule`` is the learning rate's; ``stages`` is ``layout.schedule``; ``held`` are the
    documents of ``evaluate``.
    """

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def __call__(
        self,
        *,
        model: ModelSpec = MODEL,
        init_folder: str = "",
        held: TokenStore | None = None,
        evaluate: EvalSpec | None = None,
        experts: ExpertsSpec | None = None,
        **keys: object,
    ) -> ResolvedFile:
        small = {
            "context_tokens": 256,
            "step_tokens": 1024,
            "steps": 5,
            "warmup_steps": 2,
            "schedule": "constant",
            "dp": 2,
            "every_steps": 100,
        }
        left = small | keys
        placed = {"schedule": left.pop("stages")} if "stages" in left else {}

        def table(kind: type) -> object:
            names = [field.name for field in dataclasses.fields(kind) if field.name in left]
            return kind(**{name: left.pop(name) for name in names})

        spec = RunSpec(
            pack=table(PackSpec),
            train=table(TrainSpec),
            layout=dataclasses.replace(table(LayoutSpec), **placed),
            checkpoint=table(CheckpointSpec),
            fault=table(FaultSpec),
            eval=evaluate or EvalSpec(),
            experts=experts or ExpertsSpec(),
        )
        assert not left
        return ResolvedFile(
            spec=spec,
            model=model,
            origins={},
            ranks=spec.layout.count_ranks(cores=1),
            corpus=str(self._store.folder),
            init_folder=init_folder,
            eval_corpus="" if held is None else str(held.folder),
        )


def write_run(
    folder: Path,
    texts: Path,
    cache: Path,
    *,
    steps: int = 12,
    every_steps: int = 100,
    layers: int = 1,
    train: str = "",
    layout: str = "",
) -> Path:
    """A run.toml of such a run; ``train`` and ``layout`` are further lines of these tables."""
    path = folder / "run.toml"
    path.write_text(f"""
[data]
source = "text"
path = "{texts}"
vocab = 300
cache = "{cache}"
[model]
layers = {layers}
hidden = 32
heads = 2
kv_heads = 1
ffn = 48
vocab = 320
[pack]
context_tokens = 256
step_tokens = 1024
[train]
steps = {steps}
warmup_steps = 2
{train}
[layout]
{layout}
[checkpoint]
every_steps = {every_steps}
""")
    return path


def share_curve(of: Path, folder: Path) -> Path:
    """The folder of a run that has the price curve of another run, and measures none."""
    shutil.copytree(of / "curves", folder / "curves", dirs_exist_ok=True)
    return folder
