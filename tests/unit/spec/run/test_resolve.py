"""Ways to show a run: TOML with origins, a template, a schema, plain data."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.run.keys import keys
from equipoise.spec.run.load import ResolvedRun, read_run, render, schema, template, to_dict
from equipoise.spec.run.spec import RunSpec

RUNS: list[list[tuple[str, str]]] = [
    [],
    [("name", "b"), ("model.hidden", "128"), ("train.lr", "1e-20"), ("layout.dp", "3")],
    [("layout.cp", "4"), ("layout.strategy", "usp"), ("layout.ranks_per_node", "2")],
    [("data.source", "text"), ("data.path", 'a "b" \\ c\t\x7fé'), ("pack.max_tokens", "500000")],
]


def reload(text: str, folder: Path) -> ResolvedRun:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return read_run(folder / "run.toml")


@pytest.mark.parametrize("overrides", RUNS)
def test_what_is_rendered_loads_back_to_the_same_digest(
    overrides: list[tuple[str, str]], tmp_path: Path
) -> None:
    run = read_run(None, overrides)
    again = reload(render(run), tmp_path)
    assert (again.spec, again.model, again.digest) == (run.spec, run.model, run.digest)


def test_rendered_lines_say_where_values_come_from(tmp_path: Path) -> None:
    run = reload("train.steps = 50\nmodel.preset = '7m'\npack.context_tokens = 4096\n", tmp_path)
    lines = render(run).splitlines()
    assert lines[0] == f"# {run.model.params / 1e6:.1f}M parameters; digest {run.digest}"
    assert f"{'steps = 50':<44}  # run.toml:1" in lines
    assert f"{'#layers = 6':<44}  # preset 7m" in lines
    assert f"{'#max_tokens = 5120':<44}  # default" in lines
    notes = {line.index("  # ") for line in lines if "  # " in line and line[0] != " "}
    assert max(notes) == 44


def test_keys_that_no_one_value_stands_for_show_an_example() -> None:
    lines = render(read_run(None)).splitlines()
    for line in ("#deadline_s = 600.0", "#least_dp = 1", "#wait_s = 60.0"):
        assert f"{line:<44}  # not given; an example" in lines


def test_every_key_has_a_description() -> None:
    assert [name for name, key in keys().items() if not key.description] == []


@pytest.mark.parametrize("overrides", RUNS)
def test_the_template_loads_to_what_was_given(
    overrides: list[tuple[str, str]], tmp_path: Path
) -> None:
    run = read_run(None, overrides)
    assert reload(template(run), tmp_path).digest == run.digest


def test_the_template_switched_on_is_the_default_run(tmp_path: Path) -> None:
    run = reload(re.sub(r"^#(?=\w)", "", template(read_run(None)), flags=re.M), tmp_path)
    assert run.model == read_run(None).model
    assert all(origin.startswith("run.toml:") for origin in run.origins.values())
    assert run.spec.train == dataclasses.replace(RunSpec().train, decay_steps=10)
    assert run.spec.data == RunSpec().data
    assert run.spec.pack.max_tokens == 1.25 * RunSpec().pack.context_tokens


def test_plain_data_has_every_key() -> None:
    plain = to_dict(RunSpec())
    flat = {
        f"{name}.{field}" if isinstance(table, dict) else name
        for name, table in plain.items()
        for field in (table if isinstance(table, dict) else [""])
    }
    assert flat == set(keys())


def tables(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, list):
        return [table for each in part for table in tables(each)]
    if not isinstance(part, dict):
        return []
    below = [table for each in part.values() for table in tables(each)]
    return [*below, part] if part.get("type") == "object" else below


def test_the_schema_is_closed_and_described() -> None:
    whole = schema()
    assert whole["title"] == "run.toml"
    assert whole["properties"]["extends"]["type"] == "string"
    assert len(tables(whole)) == 15
    for table in tables(whole):
        assert table["additionalProperties"] is False
        for name, each in table["properties"].items():
            assert "description" in each or "$ref" in each, name
    assert "null" not in str(whole)
    train = whole["$defs"]["TrainSpec"]["properties"]
    assert train["steps"] == {
        "default": 100,
        "description": "optimizer steps; 0 saves the first weights and ends",
        "minimum": 0,
        "title": "Steps",
        "type": "integer",
    }
    assert whole["$defs"]["ModelSection"]["properties"]["layers"] == {
        "description": "decoder layers",
        "maximum": 4096,
        "minimum": 1,
        "title": "Layers",
        "type": "integer",
    }


def test_keys_of_an_evaluation_need_documents() -> None:
    flags = [("eval.every_steps", "5"), ("eval.field", "body"), ("eval.tokens", "9")]
    with pytest.raises(SpecError) as caught:
        read_run(None, flags)
    needs = (
        "eval.path names no documents. Set eval.path to a file or a folder that is not trained on"
    )
    assert str(caught.value).splitlines() == [
        f"--eval.every_steps: 5 is given, but {needs}, or remove eval.every_steps.",
        f'--eval.field: "body" is given, but {needs}, or remove eval.field.',
        f"--eval.tokens: 9 is given, but {needs}, or remove eval.tokens.",
    ]


@pytest.mark.parametrize("tokens", ["1", "-5"])
def test_an_evaluation_has_two_tokens(tokens: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("eval.tokens", tokens)])
    assert str(caught.value) == (f"--eval.tokens: {tokens} is too small; it must be at least 2.")


def test_shipped_documents_are_not_held_out() -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("eval.path", "held"), ("eval.source", "python-stdlib")])
    assert str(caught.value) == (
        '--eval.source: "python-stdlib" reads no path, but eval.path = "held" (--eval.path) is '
        'given. Set eval.source to "text", "jsonl", "parquet" or "datasets", or remove it.'
    )


def test_held_out_conversations_have_rows() -> None:
    flags = [("data.source", "jsonl"), ("data.path", "a.jsonl"), ("data.tokenizer", "folder")]
    flags += [("data.format", "messages"), ("eval.path", "held"), ("eval.source", "text")]
    with pytest.raises(SpecError) as caught:
        read_run(None, flags)
    assert str(caught.value) == (
        '--eval.source: "text" has no rows with columns, but data.format = "messages" '
        '(--data.format). Set eval.source to "jsonl", "parquet" or "datasets", or remove it.'
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"layout.dp": "2"}, 'tp = 1, ep = 1, etp = 1, policy = "fixed"'),
        (
            {"model.preset": "moe-3m", "layout.dp": "2", "layout.etp": "2"},
            'tp = 1, ep = 1, etp = 2, policy = "fixed"',
        ),
        (
            {"model.preset": "moe-3m", "layout.dp": "4", "layout.ep": "2", "layout.etp": "2"},
            'tp = 1, ep = 2, etp = 2, policy = "fixed"',
        ),
        ({"layout.tp": "2"}, None),
        ({"model.preset": "moe-3m", "layout.ep": "2"}, None),
        ({"model.preset": "moe-3m", "layout.ep": "2", "experts.policy": "exact"}, None),
        (
            {
                "model.preset": "moe-3m",
                "layout.dp": "4",
                "layout.ep": "2",
                "layout.etp": "2",
                "experts.policy": "tutel",
            },
            None,
        ),
        (
            {
                "model.preset": "moe-3m",
                "layout.tp": "2",
                "layout.etp": "2",
            },
            None,
        ),
    ],
)
def test_parts_of_rows_that_do_not_travel_are_refused(
    flags: dict[str, str], said: str | None
) -> None:
    given = [*flags.items(), ("layout.parts", "4")]
    if said is None:
        assert read_run(None, given).spec.layout.parts == 4
        return
    with pytest.raises(SpecError) as caught:
        read_run(None, given)
    assert str(caught.value) == (
        "--layout.parts: 4 cuts rows of blocks with layout.tp > 1, and of experts with "
        'layout.ep > 1 and layout.etp = 1 or experts.policy = "tutel"; here are none '
        f"({said}). Set layout.parts = 1."
    )
