"""Training with images and sound: any layout, and a resume on another, trains as one rank does."""

import dataclasses
import json
import math
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import read_index
from equipoise.comm.local import run_ranks
from equipoise.cost.modality import count_weight_traffic
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.modality.rules import ItemRules
from equipoise.data.progress import SilentProgress
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.modality.attach import ENCODERS, make_encoders
from equipoise.observe.reader import read_run
from equipoise.serve.source import open_model
from equipoise.spec.layout import Layout
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.match import match_any
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import DataSpec
from equipoise.train.saving.reshape import ReshapeRequest, predict_reshape
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended, weights_of
from support.read_run import assert_close, events

VISION = VisionSpec(layers=1, hidden=16, heads=2, patch=4, least_tokens=1)
AUDIO = AudioSpec(layers=1, hidden=16, heads=2)
SAME = {"cut": "documents", "lr": 1e-3, "eps": 1e-6, "clip_norm": 0.5, "model": MODEL}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Pictures of 1 to 60 tokens, tones, and texts without either."""
    root = tmp_path_factory.mktemp("items")
    draw, lines = np.random.default_rng(0), []
    for number in range(24):
        name, shade = f"{number}.png", number * 10
        high, wide = int(draw.integers(4, 60)), int(draw.integers(4, 60))
        if number % 3 == 0:
            parts = [{"text": f"No picture, but the number {number} in words and more words."}]
        elif number % 3 == 1:
            Image.new("RGB", (wide, high), (shade, 0, 90)).save(root / name)
            parts = [{"text": "A picture: "}, {"image": name}, {"text": f" shade {shade}."}]
        else:
            with wave.open(str(root / f"{number}.wav"), "wb") as out:
                out.setparams((1, 2, 4000, 0, "NONE", ""))
                tone = (9000 * math.sin(at * number / 40) for at in range(200 * number))
                out.writeframes(b"".join(struct.pack("<h", int(each)) for each in tone))
            parts = [{"audio": f"{number}.wav"}, {"text": f" hums {number}."}]
        lines.append(json.dumps({"parts": parts}))
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    data = DataSpec(
        "jsonl", str(root / "rows.jsonl"), format="parts", vocab=300, cache=str(root / "cache")
    )
    rules = ItemRules(VISION, AUDIO)
    return prepare(data, root, progress=SilentProgress(), workers=1, rules=rules)


def _make(store: TokenStore, **keys: object) -> ResolvedFile:
    made = MakeRun(store)(**(SAME | {"context_tokens": 128, "step_tokens": 512} | keys))
    data = DataSpec("jsonl", "rows.jsonl", format="parts")
    spec = dataclasses.replace(made.spec, data=data, vision=VISION, audio=AUDIO)
    return dataclasses.replace(made, spec=spec)


def _train(folder: Path, resolved: ResolvedFile) -> Ended:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, {})[0]


def test_a_resume_on_other_axes_trains_as_one_rank(tmp_path: Path, rows: TokenStore) -> None:
    alone = _train(tmp_path / "alone", _make(rows, steps=4, dp=1))
    assert any(name.startswith("encoders.audio.") for name in alone.weights)
    assert any(name.startswith("encoders.image.") for name in alone.weights)
    folder = tmp_path / "resumed"
    sessions = [
        {"steps": 1, "dp": 2, "zero": 3},
        {"steps": 2, "dp": 1, "tp": 2},
        {"steps": 3, "dp": 3, "zero": 2},
        {"steps": 4, "dp": 2, "zero": 0},
    ]
    ended = [_train(folder, _make(rows, **keys)) for keys in sessions]
    losses = [loss for each in ended for loss in each.losses]
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert_close(dataclasses.replace(ended[-1], losses=alone.losses), alone)

    record = read_run(folder)
    encoders = record.encoders
    assert encoders is not None
    assert encoders.work.sum() == pytest.approx(1)
    assert encoders.skew <= encoders.skew_in_turn
    for event in events(folder, "encoders"):
        assert sum(event["work"]) == sum(event["work_in_turn"])
        assert event["bridge_bytes"] % (4 * MODEL.hidden) == 0
        assert 0 < event["bridge_bytes"] <= 2 * event["rows"] * 4 * MODEL.hidden
    specs = VISION.encoder, AUDIO.encoder
    for event, keys in zip(events(folder, "encoders"), sessions, strict=True):
        layout = Layout(dp=len(event["work"]), zero=keys.get("zero", 1))
        counted = count_weight_traffic(specs, MODEL.hidden, layout)
        assert (event["weight_bytes"], event["weight_messages"]) == dataclasses.astuple(counted)
    names = {event["name"] for event in events(folder) if event["kind"] == "span"}
    assert {"encode", "encode-backward"} <= names

    said = (
        "is of a model that reads images or sound ([vision] and [audio] of its run). equipoise "
        "train resumes it in any layout; nothing else here reads it yet."
    )
    with pytest.raises(CheckpointError) as refused:
        open_model(folder)
    assert str(refused.value) == f"{folder}/checkpoint/step-000004 {said}"
    with pytest.raises(CheckpointError) as refused:
        predict_reshape(ReshapeRequest(folder, "dp=1"))
    assert str(refused.value) == f"{folder}/checkpoint/step-000004 {said}"
    with pytest.raises(CheckpointError) as refused:
        other = dataclasses.replace(VISION, layers=2)
        made = _make(rows, steps=5, dp=1)
        _train(folder, dataclasses.replace(made, spec=dataclasses.replace(made.spec, vision=other)))
    assert "vision.layers = 1 before and 2 now" in str(refused.value)


DECODER = ("embed", "layers", "norm", "head")
PROJECTORS = ("encoders.*.embed", "encoders.*.layers", "encoders.*.norm")
"""What stays as it is while the last products of encoders are trained."""


def _first_weights(model: ModelSpec) -> dict[str, np.ndarray]:
    decoder = Decoder(model)
    initialize(decoder, 0)
    decoder.add_module(ENCODERS, make_encoders((VISION.encoder, AUDIO.encoder), model.hidden, 0))
    return weights_of(decoder)


def test_projectors_then_the_decoder_then_all_train_as_on_one_rank(
    tmp_path: Path, rows: TokenStore
) -> None:
    model = dataclasses.replace(MODEL, layers=2)
    phases = [
        (2, (*DECODER, *PROJECTORS), [{"dp": 1, "pp": 2}, {"dp": 2, "zero": 3}]),
        (3, ("encoders",), [{"dp": 1, "tp": 2}]),
        (4, (), [{"dp": 2, "zero": 2}]),
    ]
    specs, before = (VISION.encoder, AUDIO.encoder), _first_weights(model)
    step = 0
    for steps, freeze, layouts in phases:
        alone = _train(
            tmp_path / "alone", _make(rows, steps=steps, dp=1, model=model, freeze=freeze)
        )
        losses: list[float] = []
        for at, keys in enumerate(layouts, steps - len(layouts) + 1):
            made = _make(rows, steps=at, model=model, freeze=freeze, **keys)
            ended = _train(tmp_path / "resumed", made)
            losses += ended.losses
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert_close(dataclasses.replace(ended, losses=alone.losses), alone)
        frozen = set(match_any(freeze, before))
        for name, weights in ended.weights.items():
            is_same = bool(np.array_equal(weights, before[name]))
            assert is_same == (name in frozen), name
        before = ended.weights

        folder = tmp_path / "resumed" / "checkpoint" / f"step-{steps:06}"
        start = "optimizer.state."
        kept = {name.removeprefix(start) for name in read_index(folder) if name.startswith(start)}
        assert {name.rpartition(".")[0] for name in kept} == set(before) - frozen

        some = [each.with_frozen(freeze) for each in specs]
        for event, keys in zip(
            events(tmp_path / "resumed", "encoders")[step:], layouts, strict=True
        ):
            layout = Layout(dp=2, zero=keys.get("zero", 1))
            counted = count_weight_traffic(some, model.hidden, layout)
            assert (event["weight_bytes"], event["weight_messages"]) == dataclasses.astuple(counted)
            if freeze == ("encoders",):  # rows go, and nothing returns
                assert 0 < event["bridge_bytes"] <= event["rows"] * 4 * model.hidden
        step += len(layouts)
    changed = [each["message"] for each in events(tmp_path / "resumed", "changed")]
    assert [each for each in changed if 'train.freeze = ["encoders"] before and [] now' in each]
