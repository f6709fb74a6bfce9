"""What clients may know of a model."""

import dataclasses
from pathlib import Path

import pytest
import torch

from equipoise.base.errors import CheckpointError
from equipoise.serve import source
from equipoise.serve.http.served import fingerprint, model_name
from equipoise.serve.source import open_model
from equipoise.spec.model.presets import ModelSpec
from support.chat.corpus import write_model

MODEL = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=270, head_width=8)


def test_a_fingerprint_changes_with_weights_and_dtype(tmp_path: Path) -> None:
    write_model(tmp_path / "one", MODEL)
    trained = open_model(tmp_path / "one")
    known = fingerprint(trained, torch.float32)
    assert known == fingerprint(open_model(tmp_path / "one"), torch.float32)
    assert known != fingerprint(trained, torch.bfloat16)
    name = next(iter(trained.state))
    other = {**trained.state, name: trained.state[name] + 1e-3}
    assert known != fingerprint(dataclasses.replace(trained, state=other), torch.float32)


@pytest.mark.parametrize(
    ("path", "name"),
    [("runs/mine", "mine"), ("a.b/tiny.Q8_0.gguf", "tiny.Q8_0"), ("r/checkpoint/step-2", "r")],
)
def test_a_model_is_called_by_its_run_its_folder_or_its_file(
    tmp_path: Path, path: str, name: str
) -> None:
    place = tmp_path / path
    place.parent.mkdir(parents=True)
    if place.suffix == ".gguf":
        place.write_bytes(b"")
    else:
        place.mkdir()
    if "checkpoint" in path:
        (place / "manifest.json").write_text("{}")
    assert model_name(place) == name


@pytest.mark.parametrize("replaced", [0, 1, 4, 5])
def test_a_run_that_replaces_its_checkpoints_is_opened_or_refused(
    replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([*range(replaced), replaced, replaced])
    opened = []

    def newest(_: Path) -> tuple[Path, None, list[str]]:
        return Path(f"step-{next(steps)}"), None, []

    def read(path: Path, *_: object) -> str:
        opened.append(path.name)
        if path.name != "step-4" and replaced:
            raise CheckpointError(f"{path} is torn.")
        return "model"

    monkeypatch.setattr(source, "newest_good", newest)
    monkeypatch.setattr(source, "_open_checkpoint", read)
    if replaced in (0, 4, 5):
        assert source.open_run(Path("run")) == "model"
        assert opened[-1] == f"step-{min(replaced, 4)}"
    else:  # the newest one is torn
        with pytest.raises(CheckpointError) as refused:
            source.open_run(Path("run"))
        assert str(refused.value) == "step-1 is torn."


def test_a_run_that_replaces_its_checkpoints_too_fast_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter(range(9))
    monkeypatch.setattr(source, "newest_good", lambda _: (Path(f"{next(steps)}"), None, []))

    def read(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(source, "_open_checkpoint", read)
    with pytest.raises(CheckpointError) as refused:
        source.open_run(Path("run"))
    assert str(refused.value) == (
        "run replaces its checkpoints before they are read. Wait until it is trained, or let it "
        "keep more (checkpoint.keep)."
    )
