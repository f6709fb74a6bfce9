"""Images beside a decoder: how even encoders are, and what a step costs beside one of text alone.

``photographs`` are the sizes of the 28 that scikit-image 0.26 ships, after rounding to whole
blocks (counted). ``simulated`` is llama3-8b on 16 H100 with a vision transformer of Qwen2-VL's
sizes, whose products run at the decoder's own share of peak and overlap with nothing. ``measured``
is two gloo ranks that take turns between a step with images and one of as many tokens of text.

    python -m bench.run modality.throughput
    python -m bench.modality.throughput --counted         without the measurement, in a second
"""

import json
import statistics
import sys
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.modality.deal import deal_items
from equipoise.base.arrays import Ints
from equipoise.data.modality.image import fit_image
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.device.by_name import find_device
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.modality.sections import VisionSpec
from equipoise.spec.model.presets import preset

PHOTOGRAPHS = (
    *((512, 512),) * 7,
    *((172, 448), (303, 384), (400, 600), (370, 371), (660, 550), (300, 451), (200, 200)),
    *((200, 200), (300, 400), (872, 1000), (328, 400), (500, 500), (102, 102), (500, 741)),
    *((500, 741), (15, 10), (25, 14), (191, 384), (400, 400), (1411, 1411), (427, 640)),
)
"""Height and width [pixels]."""
QWEN2_VL = EncoderSpec("image", layers=32, hidden=1280, heads=16, values=1176, merge=(2, 2))
"""Its config.json; patches span two frames."""
PASSES = 3
"""Forward, and a backward of twice its products."""
SHARES = (0.1, 0.3, 0.5)
"""Share of a step's tokens that stand in for images."""
ROUNDS = 9


def photographs() -> Ints:
    """Patches of each."""
    vision = VisionSpec(layers=1)
    return np.array([np.prod(fit_image(*size, vision)) for size in PHOTOGRAPHS])


def evenness(ranks: int, copies: int) -> dict[str, Any]:
    """Fullest over mean, by patches and by multiplications, over 300 orders of the items."""
    patches = np.tile(photographs(), copies)
    draw = np.random.default_rng(0)
    rows = {}
    for name, work in (
        ("patches", patches),
        ("multiplications", QWEN2_VL.multiplications(patches, 4096)),
    ):
        dealt = [deal_items(draw.permutation(work), ranks) for _ in range(300)]
        in_turn = [each.skew_in_turn for each in dealt]
        rows[name] = {
            "in_turn": {"mean": statistics.fmean(in_turn), "worst": max(in_turn)},
            "by_work": {
                "mean": statistics.fmean(each.skew for each in dealt),
                "worst": max(each.skew for each in dealt),
            },
            "worst_gap_to_bound": max(each.gap for each in dealt),
        }
    return {"ranks": ranks, "items": len(patches), **rows}


def simulated(share: float) -> dict[str, Any]:
    """A step of 64 windows of 8,192 tokens beside the same step of text."""
    model, ranks, sequences, window = preset("llama3-8b"), 16, 64, 8192
    answer = simulate(
        StepRequest("llama3-8b", "h100-sxm:16", "tp=2,dp=8,zero=1", window, sequences)
    ).as_row()
    peak = dict(find_device("h100-sxm").peaks)["bf16"]
    rows = share * sequences * window
    patches = np.tile(photographs(), 1 + int(4 * rows // photographs().sum()))
    patches = patches[np.cumsum(patches) <= 4 * rows]
    work = QWEN2_VL.multiplications(patches, model.hidden)
    dealt = deal_items(work, ranks)
    rate = peak * answer["mfu"]
    seconds = {
        name: 2 * PASSES * float(each.max()) / rate
        for name, each in (("by_work", dealt.work), ("in_turn", dealt.work_in_turn))
    }
    row_bytes = 2 * model.hidden * int(patches.sum()) // 4
    bridge_s = 2 * row_bytes / ranks / 50e9  # each rank's share over ConnectX-7 at 400 Gb/s
    step_s = answer["step_s"]
    return {
        "image_tokens": share,
        "items": len(patches),
        "text_step_s": step_s,
        "encode_s": seconds,
        "bridge_s": bridge_s,
        "skew": {"by_work": dealt.skew, "in_turn": dealt.skew_in_turn},
        "throughput_over_text": {
            name: step_s / (step_s + each + bridge_s) for name, each in seconds.items()
        },
    }


def measured(share: float) -> dict[str, Any]:
    """Two ranks: median step with images over median step of text, step by step."""
    from bench.modality.ranks import MODEL, VISION, measure_steps
    from equipoise.comm.local import run_ranks

    stamp = LoadStamp()
    report = run_ranks(2, measure_steps, ROUNDS, share)[0]
    ratios = [text / image for text, image in zip(report.text_s, report.image_s, strict=True)]
    return {
        "decoder_params": MODEL.params,
        "vision": {"layers": VISION.layers, "hidden": VISION.hidden},
        "tokens": report.tokens,
        "image_tokens": report.rows / report.tokens,
        "text_s": spread(report.text_s),
        "image_s": spread(report.image_s),
        "throughput_over_text": spread(ratios),
        "processor_over_text": report.text_processor_s / report.image_processor_s,
        "encode_s": report.encode_s,
        "bridge_bytes": report.bridge_bytes,
        "skew": {"by_work": report.skew, "in_turn": report.skew_in_turn},
        "other_load": stamp.other_load(report.ranks_s),
    }


def main() -> None:
    """Print everything as JSON."""
    out: dict[str, Any] = {
        "environment": environment(),
        "photographs (counted)": [evenness(r, c) for r in (2, 4, 8) for c in (1, 8)],
        "llama3-8b, 16 H100 (simulated)": [simulated(share) for share in SHARES],
    }
    if "--counted" not in sys.argv:
        out["two ranks (measured)"] = [measured(share) for share in (*SHARES, 1.0)]
    sys.stdout.write(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
