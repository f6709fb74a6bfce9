"""What a run repeats is said with its numbers and the fix."""

import pytest

from equipoise.data.reading import SourceReading, describe_reading
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec, TrainSpec
from equipoise.spec.run.step import describe_step

SPEC = RunSpec(pack=PackSpec(context_tokens=64, step_tokens=256), train=TrainSpec(steps=50))


def said(tokens: int, *, spec: RunSpec = SPEC) -> list[str]:
    trained = spec.train.steps * spec.pack.step_tokens
    return describe_reading(spec, [SourceReading("text:a", 7, tokens, 1.0, trained / tokens)])


def test_a_large_corpus_is_only_counted() -> None:
    assert said(12_800) == ["text:a: 7 documents, 12,800 tokens; 50 steps of 256 read 1.00 epochs."]


def test_many_epochs_are_said() -> None:
    assert said(1_280)[1:] == [
        "Each document is read 10 times; after 4 repeated text teaches less and less. train.steps "
        "= 20 reads it 4 times; or add documents."
    ]


@pytest.mark.parametrize(
    ("tokens", "times", "fix"),
    [
        (200, "1.28", "Set pack.step_tokens to 192 or less"),
        (60, "4.27", "Lower pack.context_tokens and pack.step_tokens"),
    ],
)
def test_a_corpus_that_repeats_within_a_step(tokens: int, times: str, fix: str) -> None:
    assert said(tokens)[1:] == [
        f"Every step reads each document {times} times. {fix}, or add documents."
    ]


def test_the_source_that_repeats_is_named() -> None:
    rows = [SourceReading("a", 7, 10_000, 0.9, 1.2), SourceReading("b", 1, 100, 0.1, 12.8)]
    assert describe_reading(SPEC, rows)[2] == (
        "Each document of b is read 13 times; after 4 repeated text teaches less and less. "
        "train.steps = 15 reads it 4 times; or add documents."
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            1,
            "A step is 256 tokens: one data-parallel rank, in 4 micro-batches or more of at most "
            "80; their gradients are summed before one update.",
        ),
        (
            8,
            "A step is 256 tokens: 4 data-parallel ranks, 64 each on average, in one micro-batch "
            "or more of at most 80; their gradients are summed before one update.",
        ),
        (
            8000,
            "A step is 256 tokens: 4,000 data-parallel ranks, 0.064 each on average, in one "
            "micro-batch or more of at most 80; their gradients are summed before one update.",
        ),
    ],
)
def test_a_step_in_micro_batches(ranks: int, text: str) -> None:
    spec = RunSpec(pack=SPEC.pack, layout=LayoutSpec(cp=1 if ranks == 1 else 2))
    assert describe_step(spec, ranks) == text
