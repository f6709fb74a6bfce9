"""Runs small enough for two cores, and a way for ranks to find their functions."""

import dataclasses
import sys
from pathlib import Path

import pytest

from equipoise.data.store import SilentProgress, TokenStore, prepare
from equipoise.spec.model import ModelSpec
from equipoise.spec.resolved import ResolvedFile
from equipoise.spec.run import (
    CheckpointSpec,
    DataSpec,
    LayoutSpec,
    PackSpec,
    RunSpec,
    TrainSpec,
)

# Ranks are other processes: they import by name what the tests hand to ``run_ranks``.
sys.path.insert(0, str(Path(__file__).parent))

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)


@pytest.fixture(scope="session")
def store(texts: Path, cache: Path) -> TokenStore:
    """The tokens of the small corpus."""
    spec = DataSpec(source="text", path=str(texts), vocab=300, cache=str(cache))
    return prepare(spec, texts, progress=SilentProgress(), workers=1)


class MakeRun:
    """Makes settled runs: ``make_run(steps=5, zero=3)``; any key of its tables by its name."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def __call__(
        self, *, model: ModelSpec = MODEL, init_folder: str = "", **keys: object
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

        def table(kind: type) -> object:
            names = [field.name for field in dataclasses.fields(kind) if field.name in left]
            return kind(**{name: left.pop(name) for name in names})

        spec = RunSpec(
            pack=table(PackSpec),
            train=table(TrainSpec),
            layout=table(LayoutSpec),
            checkpoint=table(CheckpointSpec),
        )
        assert not left
        return ResolvedFile(
            spec=spec,
            model=model,
            origins={},
            ranks=spec.layout.count_ranks(cores=1),
            corpus=str(self._store.folder),
            init_folder=init_folder,
        )


@pytest.fixture
def make_run(store: TokenStore) -> MakeRun:
    return MakeRun(store)
