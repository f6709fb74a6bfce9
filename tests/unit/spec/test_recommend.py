"""run.toml of a recommender: its own keys, every fault at its line."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.recommend import is_recommend, read_recommend

RUN = """\
name = "clicks"
[model]
kind = "recommend"
top = [8]
[data]
path = "clicks.csv"
ids = ["user", "ad"]
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_a_file_and_flags(run_toml: Path) -> None:
    flags = [("train.epochs", "7"), ("layout.dp", "4"), ("data.label", "7")]
    spec, base = read_recommend(run_toml, flags)
    assert (spec.name, spec.model.top, spec.data.ids) == ("clicks", (8,), ("user", "ad"))
    assert (spec.train.epochs, spec.layout.dp, spec.data.label) == (7, 4, "7")
    assert base == run_toml.parent
    assert is_recommend(run_toml)
    assert is_recommend(None, [("model.kind", "recommend")])
    assert not is_recommend(None)


def test_every_fault_is_reported_at_its_line(run_toml: Path) -> None:
    run_toml.write_text(RUN + "[train]\nepochs = 0\nbatches = 5\n")
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("tables.wire", "int4")])
    assert str(error.value).splitlines() == [
        "run.toml:9  train.epochs: 0 is too small; it must be at least 1.",
        "run.toml:10  train.batches: no such key. Nearest: train.batch",
        '--tables.wire: "int4" is not one of "fp32", "bf16", "fp16", "int8". Nearest: "int8".',
    ]


def test_shards_of_a_dense_part_need_ranks_beside_each_other(run_toml: Path) -> None:
    flags = [("layout.zero", "3"), ("layout.ranks_per_host", "1")]
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, flags)
    assert str(error.value) == (
        "layout.zero = 3 divides the dense part over the ranks of a host, and "
        "layout.ranks_per_host = 1. Give 2 or more, or set layout.zero = 0."
    )
    assert read_recommend(run_toml, [*flags, ("layout.dp", "1")])[0].layout.zero == 3


def test_a_key_that_the_architecture_does_not_read_is_refused(run_toml: Path) -> None:
    run_toml.write_text(RUN.replace("top = [8]", "top = [8]\nlayers = 3"))
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("model.modules", '["dot"]')])
    assert str(error.value).splitlines() == [
        'run.toml:5  model.layers: model.architecture = "dlrm" does not read it; dcn, dhen, wukong '
        "do. Leave it out.",
        '--model.modules: model.architecture = "dlrm" does not read it; dhen does. Leave it out.',
    ]
    spec, _ = read_recommend(run_toml, [("model.architecture", "dcn")])
    assert (spec.model.architecture, spec.model.layers) == ("dcn", 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('ids = ["user", "ad"]\n', "", "data.ids and data.bags are empty, so there is no table."),
        ('path = "clicks.csv"\n', "", "data.path is missing. Set it to a Parquet, CSV or TSV"),
        ('"user", "ad"', '"ad", "ad"', "data.ids and data.bags name one column twice."),
        (
            'ids = ["user", "ad"]',
            'ids = ["user", "ad"]\nnumbers = ["price", "price"]',
            "data.numbers names one column twice. Name each once.",
        ),
        (
            'ids = ["user", "ad"]',
            'ids = ["user", "ad"]\nnumbers = ["price", "label"]',
            'data.label, "label", is also a feature, so a model would read the answer. Take it out '
            "of data.ids, data.bags and data.numbers.",
        ),
    ],
)
def test_a_run_without_tables_is_refused(run_toml: Path, old: str, new: str, message: str) -> None:
    run_toml.write_text(RUN.replace(old, new))
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml)
    assert str(error.value).startswith(message)


WRONG = """\
name = "a/b"
tables = 3
[model]
kind = "recommend"
architecture = inf
bottom = [""]
width = {a = 1}
modules = [nan]
[data]
path = "\\u0000"
ids = ["a\\u0000"]
bags = 3
numbers = [["a"]]
"a\\nb" = 3
[train]
lr = 07:32:00
[layout]
deadline_s = "x"
dp = 1025
[fault]
on = ["kill", 3]
spares = nan
wait_s = nan
"""


def test_values_of_wrong_kinds_are_said_as_they_stand_in_the_file(run_toml: Path) -> None:
    run_toml.write_text(WRONG)
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("tables.deduplicate", '["a"]'), ("data.session_gap", "0")])
    assert str(error.value).splitlines() == [
        'run.toml:1  name: "a/b" is not a name. Use letters, digits, ".", "_" and "-", and begin '
        "with a letter or a digit.",
        "run.toml:2  tables: needs a table, got 3 (a whole number).",
        'run.toml:5  model.architecture: inf is not one of "dlrm", "dcn", "dhen", "wukong".',
        'run.toml:6  model.bottom: item 1: needs a whole number, got "" (text).',
        "run.toml:7  model.width: needs a whole number, got a table.",
        'run.toml:8  model.modules: item 1: nan is not one of "dot", "cross", "attention", '
        '"linear", "convolution".',
        'run.toml:10  data.path: "\\u0000" has a NUL character, which no text here can hold.',
        'run.toml:11  data.ids: "a\\u0000" has a NUL character, which no text here can hold.',
        "run.toml:12  data.bags: needs a list, got 3 (a whole number).",
        "run.toml:13  data.numbers: item 1: needs text, got a list.",
        "run.toml:14  data.a\\nb: no such key. Nearest: data.label",
        "run.toml:16  train.lr: needs a number, got 07:32:00 (a date or a time).",
        'run.toml:18  layout.deadline_s: needs a number, got "x" (text).',
        "run.toml:19  layout.dp: 1025 is too large; it must be at most 1024.",
        'run.toml:21  fault.on: item 1: "kill" is not one of "killed", "failed", "hung", '
        '"corrupt", "non-finite". Nearest: "killed".',
        'run.toml:22  fault.spares: nan is not one of "never", "auto", "at-once".',
        "run.toml:23  fault.wait_s: nan is not a finite number.",
        '--tables.deduplicate: item 1: needs a list, got "a" (text).',
        "--data.session_gap: 0 is too small; it must be more than 0.",
    ]


def test_no_kind_of_placement_is_refused(run_toml: Path) -> None:
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("tables.kinds", "[]")])
    assert str(error.value) == (
        "tables.kinds is empty, so no table has a place. List some of table, row, table-row, "
        "column, data."
    )


def test_keys_that_a_run_does_not_read_are_refused(run_toml: Path) -> None:
    """They were taken in silence."""
    run_toml.write_text(RUN + "session_gap = 9\n[tables]\ncache = 0.2\n")
    flags = [("tables.rounding", "nearest"), ("tables.cache_policy", "lfu")]
    flags += [("data.source", "ml-100k"), ("model.tower_low_rank", "4")]
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, flags)
    few = "is read only where tables.precision is below fp32"
    assert str(error.value).splitlines() == [
        'run.toml:6  data.path: is read only where data.source is "columns". Leave it out.',
        "run.toml:8  data.session_gap: is read only where data.session and data.time are given. "
        "Leave it out.",
        f"run.toml:10  tables.cache: {few}. Leave it out.",
        f"--tables.rounding: {few}. Leave it out.",
        f"--tables.cache_policy: {few} or tables.memory_mib is given. Leave it out.",
        '--model.tower_low_rank: is read only where model.tower_module is "cross". Leave it out.',
    ]
    dhen = [("model.architecture", "dhen"), ("model.low_rank", "4")]
    with pytest.raises(SpecError) as error:
        read_recommend(None, [("data.path", "x.csv"), ("data.ids", '["user"]'), *dhen])
    assert str(error.value) == (
        '--model.low_rank: is read only where model.modules has "cross". Leave it out.'
    )
    flags = [("tables.precision", "int4"), ("tables.cache_policy", "lfu")]
    flags += [("data.session", "user"), ("data.time", "t"), *dhen, ("model.modules", '["cross"]')]
    assert read_recommend(run_toml, flags)[0].tables.cache == 0.2
