"""``equipoise init --from``: what lies at a path becomes a run.toml that trains as it is."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.main import main
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.load import read_run
from support.chat.corpus import write_model

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)
TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model in ``a model``."""
    write_model(tmp_path / "a model", MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def keys(folder: Path) -> dict[str, Any]:
    written = tomllib.loads((folder / "run.toml").read_text())
    return {
        f"{table}.{name}": value
        for table, rows in written.items()
        if isinstance(rows, dict)
        for name, value in rows.items()
    }


@pytest.mark.long
def test_conversations_become_an_epoch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "my chats" / "chat.jsonl", [TALK] * 300)
    argv = ["init", "a run", "--from", "my chats/chat.jsonl", "--model", "a model"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "jsonl, conversations; 300 of them" in said and "% of them answers" in said
    command = said[said.index("Train: ") + 7 :].strip()
    assert shlex.split(command) == ["equipoise", "train", "a run/run.toml"]
    made = keys(here / "a run")
    assert made["data.path"] == "../my chats/chat.jsonl" and made["data.format"] == "messages"
    assert made["model.init"] == "hf:../a model" and "data.tokenizer" not in made
    run = read_run(here / "a run" / "run.toml")
    assert run.spec.data.tokenizer == "../a model"
    pack, steps = run.spec.pack, run.spec.train.steps
    tokens = int(said[said.index("of them, ") + 9 :].split(" tokens")[0].replace(",", ""))
    assert (steps - 1) * pack.step_tokens < tokens <= steps * pack.step_tokens
    assert run.spec.train.warmup_steps <= steps
    # What was written trains, in processes of its own.
    assert main(["train", "a run/run.toml", "--train.steps", "1", "--quiet"]) == 0


def test_a_folder_of_rows_texts_or_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "pairs" / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 9)
    (here / "pairs" / "README.md").write_text("notes")
    assert main(["init", "p", "--from", "pairs", "--model", "a model", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["run_toml"] == "p/run.toml" and "prompts with completions" in answer["seen"][0]
    assert keys(here / "p")["data.format"] == "prompt-completion"
    write(here / "rows.jsonl", [{"id": 1, "body": "some text"}] * 9)
    assert main(["init", "r", "--from", "rows.jsonl", "--model", "a model", "--quiet"]) == 0
    assert keys(here / "r")["data.field"] == "body"
    (here / "books").mkdir()
    (here / "books" / "a.txt").write_text("a text")
    assert main(["init", "b", "--from", "books", "--quiet"]) == 0
    assert keys(here / "b") == {"data.source": "text", "data.path": "../books"}
    assert main(["init", "m", "--from", "a model", "--quiet"]) == 0
    assert keys(here / "m") == {"model.init": "hf:../a model"}
    assert main(["init", "k", "--from", "text", "--path", "books", "--quiet"]) == 0
    assert keys(here / "k") == {"data.source": "text", "data.path": "../books"}


def test_tables_are_looked_at(here: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([TALK] * 9), here / "chat.parquet")
    assert main(["init", "p", "--from", "chat.parquet", "--model", "a model", "--quiet"]) == 0
    made = keys(here / "p")
    assert (made["data.source"], made["data.format"]) == ("parquet", "messages")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["init", *argv]) == 2
    return capsys.readouterr().err.strip()


def test_what_is_not_clear_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--from", "none.jsonl") == (
        "No such file or folder: none.jsonl. Give --from one that exists."
    )
    write(here / "my chat.jsonl", [TALK])
    assert refusal(capsys, "--from", "my chat.jsonl") == (
        "my chat.jsonl holds conversations, which a chat model's own template must write out. Give "
        "the model's folder: equipoise init --from 'my chat.jsonl' --model DIR."
    )
    write(here / "rows.jsonl", [{"question": "a", "answer": "b"}])
    assert refusal(capsys, "--from", "rows.jsonl") == (
        "rows.jsonl has rows with the columns question, answer: no messages, no prompt and "
        "completion, and 2 columns of text. Rename the columns, or give --from jsonl --path "
        "rows.jsonl and set data.field to the column that holds the text."
    )
    (here / "empty").mkdir()
    assert refusal(capsys, "--from", "empty") == (
        "empty is empty. Give --from a folder with files in it."
    )
    assert refusal(capsys, "--from", "my chat.jsonl", "--model", "empty") == (
        "empty has no config.json with *.safetensors. Give --model the folder of a Hugging Face "
        "model."
    )
    assert refusal(capsys, "--model", "a model", "--preset", "7m") == (
        "--model and --preset both name a model. Give one of them."
    )
    assert refusal(capsys, "--from", "books", "--path", "books") == (
        "--from books is not a kind of data. With --path give one of python-stdlib, "
        "python-functions, text, jsonl, parquet, datasets; without it --from looks at a path."
    )
    assert not (here / "run.toml").exists()
