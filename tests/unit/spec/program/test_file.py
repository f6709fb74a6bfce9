"""Programs as data: the shipped ones, one's own, and what a file may not say."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.program.file import program_names, read_program
from equipoise.spec.program.spec import DEFAULT
from equipoise.spec.program.stack import Stack


def test_the_default_is_what_equipoise_does() -> None:
    program = read_program(DEFAULT)
    assert program.stack == Stack()
    assert (program.order, program.context_strategy, program.sharding) == (
        "dp-pp",
        "needed-kv",
        "mixed",
    )
    assert program_names()[0] == DEFAULT


@pytest.mark.parametrize("name", program_names())
def test_every_shipped_program_is_read(name: str) -> None:
    program = read_program(name)
    assert program.title
    assert all(source for _, source in program.sources)


@pytest.mark.parametrize("name", ["megatron-core", "nemo", "torchtitan", "fsdp", "deepspeed"])
def test_other_programs_do_something_else(name: str) -> None:
    assert read_program(name).stack != Stack()


def test_a_file_of_ones_own_has_what_it_says_and_the_rest_of_its_base(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        'title = "our fork"\nlike = "nemo"\n'
        '[runs]\nschedules = ["1f1b"]\n'
        "[stack]\nsum_bytes = 8.0\n"
        '[sources]\nschedules = "our docs"\nsum_bytes = "a profile"\n'
    )
    ours, nemo = read_program(str(file)), read_program("nemo")
    assert (ours.name, ours.schedules, ours.stack.sum_bytes) == ("ours", ("1f1b",), 8.0)
    assert (ours.orders, ours.stack.tensor_overlap) == (nemo.orders, nemo.stack.tensor_overlap)
    assert dict(ours.sources)["sum_bytes"] == "a profile"
    assert dict(ours.sources)["split"] == dict(nemo.sources)["split"]


FAULTS = {
    "like": (
        'title = "x"\nlike = "nemmo"\n',
        'bad.toml:2  like: there is no program "nemmo". Nearest: nemo',
    ),
    "key": (
        'title = "x"\n[stack]\nsum_byte = 8.0\n',
        "bad.toml:3  stack.sum_byte: no such key. Nearest: sum_bytes",
    ),
    "range": (
        'title = "x"\n[stack]\ntensor_overlap = 1.5\n',
        "bad.toml:3  stack.tensor_overlap: 1.5 is too large; it must be at most 1.",
    ),
    "source": (
        'title = "x"\n[stack]\nsum_bytes = 0.0\n',
        "bad.toml:3  stack.sum_bytes: has no source. Say where it is from: [sources] "
        'sum_bytes = "..."',
    ),
    "stray": (
        'title = "x"\n[sources]\nsum_bytes = "a profile"\n',
        "bad.toml:3  sources.sum_bytes: is the source of no fact here. Nearest: facts",
    ),
    "schedule": (
        'title = "x"\n[runs]\nprecision = ["bf16", "int8"]\n',
        'bad.toml:3  runs.precision: "int8" is not one of "bf16", "fp8" or "fp32".',
    ),
    "true": (
        'title = "x"\n[stack]\nmaster = true\n',
        'bad.toml:3  stack.master: true is not one of "whole", "rest" or "none".',
    ),
    "list": (
        'title = "x"\n[runs]\nsharding = ["mixed"]\n',
        'bad.toml:3  runs.sharding: a list is not one of "mixed" or "head-tail".',
    ),
    "text": (
        'title = "x"\n[runs]\nschedules = "1f1b"\n',
        'bad.toml:3  runs.schedules: needs a list, got "1f1b" (text).',
    ),
    "title": ("like = 'nemo'\n", "bad.toml:1  title: is missing. Every program needs a title."),
    "toml": ("title = \n", None),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_faulty_file_is_refused_with_its_line(fault: str, tmp_path: Path) -> None:
    text, said = FAULTS[fault]
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_program(str(file))
    assert str(refused.value).startswith("bad.toml:1  not TOML" if said is None else said)
    assert said is None or str(refused.value) == said


def test_an_unknown_program_gets_its_nearest() -> None:
    with pytest.raises(SpecError) as refused:
        read_program("megatron-cores")
    assert str(refused.value) == (
        f'No program is called "megatron-cores". Nearest: megatron-core. Known: '
        f"{', '.join(program_names())}; any other is a program.toml."
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read_program(str(tmp_path / "none.toml"))
    assert str(refused.value) == (
        f"Cannot read the program file {tmp_path / 'none.toml'}: no such file or directory. "
        f"Shipped programs need no file: {', '.join(program_names())}."
    )


REFUSED = {
    "schedule": (
        "megatron-core",
        Layout(pp=2),
        {"schedule": "zb-v"},
        "program megatron-core cannot run schedule zb-v; it has 1f1b, interleaved. Give "
        "--schedule 1f1b, or another --program.",
    ),
    "zero": (
        "megatron-core",
        Layout(dp=2, zero=3),
        {},
        "program megatron-core cannot run zero 3; it has 0, 1. Give --layout zero=0, or another "
        "--program.",
    ),
    "stages": (
        "fsdp",
        Layout(pp=2, zero=3),
        {},
        "program fsdp has no stages, and the layout has pp=2. Give a layout without pp, or another "
        "--program.",
    ),
    "context": (
        "torchtitan",
        Layout(cp=2),
        {"context_strategy": "ring"},
        "program torchtitan cannot run context strategy ring; it has all-gather. Give "
        "--context-strategy all-gather, or another --program.",
    ),
    "order": (
        "torchtitan",
        Layout(dp=2, pp=2, order=ORDERS["dp-pp"]),
        {},
        "program torchtitan cannot run order dp-pp; it has pp-dp. Give --order pp-dp, or another "
        "--program.",
    ),
    "precision": (
        "deepspeed",
        Layout(),
        {"precision": "fp8"},
        "program deepspeed cannot run precision fp8; it has bf16, fp32. Give --precision bf16, or "
        "another --program.",
    ),
    "recompute": (
        "fsdp",
        Layout(),
        {"recompute": "attention"},
        "program fsdp cannot run recompute attention; it has none, full. Give --recompute none, or "
        "another --program.",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_a_program_cannot_run_is_refused_by_name(what: str) -> None:
    name, layout, changed, said = REFUSED[what]
    asked = {
        "schedule": "1f1b",
        "recompute": "none",
        "context_strategy": "all-gather",
        "precision": "bf16",
    }
    with pytest.raises(SpecError) as refused:
        read_program(name).require(layout, **(asked | changed))
    assert str(refused.value) == said
