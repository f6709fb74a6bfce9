"""Runs with images and sound: planned with their encoders, packed, and stale when these change."""

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from equipoise.base.errors import PlanError
from equipoise.plan.run import read_obeyed
from equipoise.spec.device.file import write_device_file
from equipoise.spec.device.here import cpu_model, device_file
from equipoise.spec.device.parts import EncoderPoint, PassCost, encoder_name
from equipoise.spec.plan import read_plan
from equipoise.spec.run.load import read_run
from support.device_files import A_FILE
from support.timed_parts import parts
from support.verbs import plan, run


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run on pictures and words, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rows = []
    for number, (width, height) in enumerate([(40, 24), (16, 16), (64, 32), (8, 80)] * 3):
        Image.new("RGB", (width, height), (number, 90, 200)).save(tmp_path / f"{number}.png")
        rows.append([{"image": f"{number}.png"}, {"text": f" is picture number {number}."}])
        rows.append([{"text": "Words alone, which stand between two pictures."}])
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text("".join(json.dumps({"parts": row}) + "\n" for row in rows))
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "seen"\n[data]\nsource = "jsonl"\npath = "{corpus}"\nformat = "parts"\n'
        f'vocab = 300\ncache = "{tmp_path / "cache"}"\n[model]\nlayers = 2\nhidden = 32\n'
        f"heads = 2\nkv_heads = 1\nffn = 48\nvocab = 320\nhead_width = 16\n[vision]\nlayers = 1\n"
        f"patch = 4\nleast_tokens = 1\n[pack]\ncontext_tokens = 128\nstep_tokens = 512\n"
    )
    return file


def test_a_plan_prices_encoders_and_goes_stale_with_them(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    code, out, _ = plan(capsys, run_toml, "--ranks", 1, "--json")
    assert code == 0
    found = json.loads(out)
    for each in (found["best"], *found["runners_up"]):
        price = each["price"]
        assert price["terms"]["encoders"] > 0 and price["memory"]["encoders"] > 0
        assert sum(price["terms"].values()) == pytest.approx(price["step_s"])
        assert sum(price["memory"].values()) == pytest.approx(price["memory_gib_max"])
    encoded_s = found["best"]["price"]["terms"]["encoders"]
    assert encoded_s < found["bound_s"] <= found["best"]["price"]["step_s"]
    lock = run_toml.parent / "plan.lock"
    kept, _ = read_obeyed(lock, read_run(run_toml))
    assert kept == read_plan(lock)
    with pytest.raises(PlanError) as caught:
        read_obeyed(lock, read_run(run_toml, [("vision.hidden", "128")]))
    assert str(caught.value) == (
        f"{lock} is stale: images and sound changed since it was written. Plan again: "
        f'"equipoise plan {run_toml} --ranks 1 --out {lock.parent}".'
    )


def test_a_plan_knows_what_is_frozen(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    prices = []
    for freeze in ("[]", '["layers"]', '["layers", "encoders"]'):
        flags = ["--ranks", 1, "--layout.dp", 1, "--train.freeze", freeze, "--json"]
        code, out, _ = plan(capsys, run_toml, *flags)
        assert code == 0
        found = json.loads(out)
        prices.append(found["best"]["price"])
        # No bound is known of steps in which something is not trained.
        assert (found["bound_s"] == 0) == (found["gap"] is None) == (freeze != "[]")
    for name in ("optimizer", "encoders"):
        assert prices[0]["terms"][name] > prices[2]["terms"][name]
        assert prices[0]["memory"][name] > prices[2]["memory"][name]
    assert prices[0]["memory"]["gradients"] > prices[1]["memory"]["gradients"]
    seconds = [each["step_s"] for each in prices]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3

    lock = run_toml.parent / "plan.lock"
    with pytest.raises(PlanError) as caught:
        read_obeyed(lock, read_run(run_toml, [("layout.dp", "1"), ("train.freeze", "layers")]))
    assert str(caught.value).startswith(f"{lock} is stale: frozen weights changed since it was")


def test_what_was_timed_of_encoders_is_priced(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    resolved = read_run(run_toml)
    of_decoder = dataclasses.replace(parts(resolved.model), ranks=1)
    timed = dataclasses.replace(A_FILE, machine=cpu_model(), parts=(of_decoder,))
    device_file().parent.mkdir(parents=True)
    write_device_file(device_file(), timed)
    flags = [run_toml, "--ranks", 1, "--layout.dp", 1, "--json"]
    code, out, err = plan(capsys, *flags)
    assert code == 0
    assert (
        "The encoders of images and sound were never timed here, so they are priced from kernels "
        "alone, which miss the host's time and the reading of files. \"equipoise calibrate "
        f'{run_toml} --layout.dp 1" times them; then plan again.\n'
    ) in err
    assert "interval" not in json.loads(out)["best"]["price"]
    (spec,) = resolved.spec.encoders
    call = PassCost(0.5, 0.0, 0.0)
    point = EncoderPoint(encoder_name(spec, resolved.model.hidden), "image", call, call, call)
    of_both = dataclasses.replace(of_decoder, encoders=(point,))
    write_device_file(device_file(), dataclasses.replace(timed, parts=(of_both,)))
    code, out, err = plan(capsys, *flags)
    assert code == 0 and "never timed" not in err
    price = json.loads(out)["best"]["price"]
    # Reading and the forward of the slowest rank, and the backward of the slowest.
    assert price["terms"]["encoders"] == pytest.approx(1.5)
    assert price["interval"]["low_s"] < price["step_s"] < price["interval"]["high_s"]
    # Nobody timed a run in which something is frozen: a part of the backward is left out.
    encoded_s = []
    for freeze in ("encoders.*.layers", "encoders"):
        code, out, _ = plan(capsys, *flags, "--train.freeze", freeze)
        frozen = json.loads(out)["best"]["price"]
        assert code == 0 and "interval" not in frozen
        encoded_s.append(frozen["terms"]["encoders"])
    assert encoded_s[1] == pytest.approx(1.0) and 1.1 < encoded_s[0] < 1.5


def test_pack_says_how_evenly_ranks_encode(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    flags = ["--layout.dp", 2, "--steps", 4, "--policy", "by-work"]
    code, out, _ = run(capsys, "pack", run_toml, *flags, "--json")
    assert code == 0
    (row,) = json.loads(out)
    score = row["encoders"]
    assert score["ranks"] == 2 and score["items"] > 4
    assert 1.0 <= score["encoder_skew"] <= score["encoder_skew_in_turn"]
    code, out, _ = run(capsys, "pack", run_toml, *flags)
    assert code == 0
    assert out.splitlines()[-1] == (
        f"Encoders: {score['items']:.1f} items a step on 2 ranks, max/mean "
        f"{score['encoder_skew']:.3f} by work, {score['encoder_skew_in_turn']:.3f} in turn, "
        f"{score['encoder_gap']:.1%} above the bound. Ranks meet between encoding and computing, "
        "so packs are evened out without them."
    )
    code, out, _ = run(capsys, "pack", run_toml, *flags, "--lengths", "100,50,20", "--json")
    assert code == 0 and "encoders" not in json.loads(out)[0]
