"""``balance.pack``: what ``equipoise pack`` computes, from Python."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.balance.packing.evaluate import Setting
from equipoise.base.errors import EquipoiseError
from equipoise.cli.main import main
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.model.presets import preset
from equipoise.spec.run.load import read_run
from equipoise.spec.workload import draw_lengths


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4))
def test_each_token_is_packed_once(lengths: list[int], ranks: int) -> None:
    answer = balance.pack(lengths, ranks=ranks, policy="divided", context_tokens=128, model="2m")
    pieces = np.concatenate([share.pieces for step in answer.steps for share in step.shares])
    tokens = np.zeros((len(lengths), max(lengths)), dtype=int)
    for document, start, stop in pieces.tolist():
        tokens[document, start:stop] += 1
    assert [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)] == [
        [1] * length for length in lengths
    ]
    assert tokens.sum() == sum(lengths)
    assert answer.skew >= 1
    [step], [bound_s] = answer.steps, answer.bound_s
    heaviest_s = max(step.bin_ns(counted_curve(preset("2m")))) / 1e9
    assert bound_s <= heaviest_s
    assert answer.gap == pytest.approx(heaviest_s / bound_s - 1)


def test_it_is_the_row_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--lengths", "prolong", "--policy", "by-work", "--steps", "3", "--layout.dp", "4")
    assert main(["pack", *argv, "--pack.step_tokens", "65536", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    run = read_run(None, [("pack.step_tokens", "65536")])
    stream = DocumentStream(
        draw_lengths("prolong", 4096), seed=run.spec.train.seed, context_tokens=8192
    )
    spec, curve = run.spec.pack, counted_curve(run.model)
    steps = [stream.step(step * 65536, 65536) for step in range(3)]
    answer = balance.pack(Setting(steps, spec, bins=4, curve=curve))
    assert (answer.skew, answer.gap) == (row["skew"], row["gap"])
    assert len(answer.bound_s) == len(answer.steps) == 3


def test_importing_balance_is_cheap() -> None:
    code = (
        "import sys, equipoise.balance\n"
        "assert not {'numpy', 'torch', 'pydantic'} & set(sys.modules)\n"
        "from equipoise.balance import pack\n"
        "assert pack([5, 3], ranks=2).skew > 1 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


@pytest.mark.parametrize(
    ("lengths", "ranks", "keys", "message"),
    [
        (
            [5],
            1,
            {"policy": "by-wok"},
            'No packing policy is called "by-wok". Nearest: by-work. All: in-order, fixed, '
            "fixed-exact, by-tokens, by-work, delayed, divided, divided-in-time, gangs, flexsp, "
            "bytescale.",
        ),
        (
            [5, 0],
            1,
            {},
            "A step needs documents of 1 token or more each; there are 2, and the shortest has 0. "
            "Leave empty ones out.",
        ),
        (
            [],
            1,
            {},
            "A step needs documents of 1 token or more each, and there are none. Give lengths.",
        ),
        ([5], 0, {}, "balance.pack needs ranks of 1 or more, and there are 0."),
        (
            [5],
            1,
            {"context_tokens": 1},
            "balance.pack needs windows of 2 tokens or more, and context_tokens is 1.",
        ),
        ([5], True, {}, "ranks is true. Give a whole number from 1 to 2,147,483,647."),
        (
            [5, True],
            1,
            {},
            "Lengths have flags among them. Give numbers, such as [412, 96, 2048].",
        ),
        ([5], 1.5, {}, "ranks is 1.5. Give a whole number from 1 to 2,147,483,647."),
        (
            [5],
            1,
            {"context_tokens": 10**20},
            "context_tokens is 100000000000000000000. Give a whole number from 1 to 2,147,483,647.",
        ),
        (
            [5],
            1,
            {"max_tokens": "x"},
            'max_tokens is "x". Give a whole number from 1 to 2,147,483,647.',
        ),
        ([5], 1, {"model": 3}, "model is 3. Give the name of a preset, or a ModelSpec."),
        (
            [3, 1.5],
            1,
            {},
            "Document 1 has 1.5 tokens, which is not a whole number. Count its tokens again.",
        ),
        (
            [[5, 6]],
            1,
            {},
            "Lengths have shape (1, 2). Give one number per document, such as [412, 96, 2048].",
        ),
        (["a"], 1, {}, "Lengths are text. Give numbers, such as [412, 96, 2048]."),
        (
            [3, 2**62],
            1,
            {},
            "Document 1 has 4,611,686,018,427,387,904 tokens, more than 2,147,483,647. Count its "
            "tokens again.",
        ),
    ],
)
def test_what_is_refused(lengths: list, ranks: float, keys: dict, message: str) -> None:
    with pytest.raises(EquipoiseError) as caught:
        balance.pack(lengths, ranks=ranks, **keys)
    assert str(caught.value) == message
