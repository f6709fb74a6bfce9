"""Encoders are refused beside whatever they are not proven with."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.run.compared import compared_specs
from equipoise.spec.run.load import read_run

GIVEN = {
    "vision.layers": "2",
    "data.source": "jsonl",
    "data.path": "rows.jsonl",
    "data.format": "parts",
}
SAID = "vision.layers = 2 (--vision.layers) is proven"

REFUSED = [
    (
        {"vision.layers": "0"},
        '--data.format: "parts" reads images and sound, and the run has no encoder for them. Set '
        "vision.layers or audio.layers.",
    ),
    (
        {"data.format": "text"},
        '--vision.layers: 2 encodes images or sound, but data.format = "text" (--data.format). '
        'Set data.format = "parts", or vision.layers = 0.',
    ),
    (
        {"data.source": "parquet"},
        '--data.source: "parquet" has no rows with parts. Set data.source = "jsonl", whose rows '
        "name files.",
    ),
    (
        {"vision.hidden": "72"},
        "--vision.hidden: a width of 72 does not divide into 4 heads of a width that is a multiple "
        "of 4, which rotary positions of two axes need. Set vision.hidden to 64 or 80.",
    ),
    (
        {"audio.layers": "1", "audio.heads": "3"},
        "--audio.heads: a width of 64 does not divide into 3 heads of a width that is a multiple "
        "of 4, which rotary positions of two axes need. Set audio.hidden to 60 or 72.",
    ),
    (
        {"vision.least_tokens": "9", "vision.most_tokens": "8"},
        "--vision.least_tokens: 9 is more than vision.most_tokens = 8 (--vision.most_tokens). "
        "Give at most 8.",
    ),
    (
        {"model.preset": "moe-3m", "experts.policy": "speculative", "layout.tp": "2"},
        f'--experts.policy: "speculative" places tokens by their words, but {SAID} with tokens in '
        'the order of their documents. Set experts.policy = "fixed" or "exact".',
    ),
    (
        {"model.preset": "moe-3m", "experts.memory_mib": "64", "layout.zero": "3"},
        f"--experts.memory_mib: 64 keeps experts in a file, but {SAID} with experts in memory. Set "
        "experts.memory_mib = 0.",
    ),
    (
        {"train.precision": "fp8"},
        f'--train.precision: "fp8" is given, but {SAID} in fp32 and bf16.',
    ),
    (
        {"pack.policy": "divided"},
        f'--pack.policy: "divided" divides documents, but {SAID} with policies that leave them '
        'whole. Set pack.policy = "by-work".',
    ),
    (
        {"lora.rank": "4", "model.init": "hf:nowhere"},
        f"--lora.rank: 4 trains adapters, but {SAID} where the weights themselves are trained. "
        "Set lora.rank = 0.",
    ),
    (
        {"model.engine": "transformers", "model.init": "hf:nowhere"},
        f'--model.engine: "transformers" is given, but {SAID} beside this package\'s own '
        'decoders. Set model.engine = "equipoise".',
    ),
]


@pytest.mark.parametrize(("more", "sentence"), REFUSED, ids=[" ".join(more) for more, _ in REFUSED])
def test_what_is_not_proven_is_refused(more: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, list((GIVEN | more).items()))
    assert sentence in str(caught.value).splitlines()


def test_what_is_proven_is_accepted() -> None:
    run = read_run(None, list(GIVEN.items()))
    assert [each.kind for each in run.spec.encoders] == ["image"]
    assert read_run(None, []).spec.encoders == ()
    frozen = read_run(None, list((GIVEN | {"train.freeze": '["embed", "encoders"]'}).items()))
    assert [each.is_frozen for each in frozen.spec.encoders] == [True]
    beside = {"model.preset": "moe-3m", "experts.policy": "exact"}
    assert read_run(None, list((GIVEN | beside).items())).model.experts == 8


def test_policies_are_not_compared_with_images() -> None:
    spec = read_run(None, [*GIVEN.items(), ("pack.cut", "windows")]).spec
    with pytest.raises(SpecError) as caught:
        compared_specs(spec, ["in-order", "by-work"])
    assert str(caught.value) == (
        "Packing policies are compared on text alone, and the run has vision.layers or "
        "audio.layers. Train each policy in a run of its own, without --compare."
    )
