"""Rows as tokens and masks, through the cache: verified like the tokens, in the cache's name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore, open_store, prepare
from equipoise.data.chat.encode import Encoder, Recipe
from equipoise.data.chat.rows import RowError
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec

ROWS = [
    {"messages": [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": text}]}
    for text in ("Hello", "🙃", "", "a" * 300)
]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def store_of(folder: Path, tokenizer: Path, workers: int = 1, **keys: Any) -> TokenStore:
    given = {"source": "jsonl", "format": "messages", "cache": str(folder / "cache")} | keys
    spec = DataSpec(path=str(folder / "chat.jsonl"), tokenizer=str(tokenizer), **given)
    return prepare(spec, folder, progress=SilentProgress(), workers=workers)


def learned_text(store: TokenStore, tokenizer: Path, document: int) -> str:
    tokens = store.read(document, 0, int(store.doc_tokens[document]))
    begin = int(store.offsets[document])
    assert store.learned is not None
    is_learned = store.learned.mask(begin, begin + len(tokens))
    return Encoder(Recipe(tokenizer)).tokenizer.decode(tokens[is_learned])


def test_only_answers_are_learned(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "chat.jsonl", ROWS)
    store = store_of(tmp_path, tokenizer)
    said = [row["messages"][1]["content"] for row in ROWS]
    for document, text in enumerate(said):
        assert learned_text(store, tokenizer, document) == f"{text}<|im_end|>\n"
    assert store_of(tmp_path, tokenizer, loss="all").learned is None
    assert store.end == 2


def test_a_prompt_and_its_completion_end_with_the_end_token(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "", "completion": "x<|im_end|>"}]
    write(tmp_path / "chat.jsonl", rows)
    store = store_of(tmp_path, tokenizer, format="prompt-completion")
    assert learned_text(store, tokenizer, 0) == "4<|im_end|>"
    assert learned_text(store, tokenizer, 1) == "x<|im_end|>"
    trained = store_of(tmp_path, Path("train"), format="prompt-completion", vocab=260)
    # Both documents are bytes here: "2 + 2 = " is not learned, "4", "x" and their ends are.
    assert trained.learned is not None and trained.learned.runs[0].tolist() == [8, 22]


@pytest.mark.parametrize("source", ["parquet", "datasets"])
def test_columns_of_tables_are_the_same_conversations(
    source: str, tmp_path: Path, tokenizer: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "chat.jsonl", ROWS)
    expected = store_of(tmp_path, tokenizer)
    table = pa.Table.from_pylist(ROWS)
    if source == "parquet":
        pq.write_table(table, tmp_path / "chat.parquet", row_group_size=1)
        path = tmp_path / "chat.parquet"
    else:
        path = tmp_path / "saved"
        path.mkdir()
        with (
            pa.OSFile(str(path / "data.arrow"), "wb") as out,
            pa.ipc.new_stream(out, table.schema) as writer,
        ):
            writer.write_table(table)
        (path / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": None})
        )
    spec = DataSpec(
        source=source,
        path=str(path),
        format="messages",
        tokenizer=str(tokenizer),
        cache=str(tmp_path / "cache"),
    )
    store = prepare(spec, tmp_path, progress=SilentProgress(), workers=1)
    assert store.digest == expected.digest
    assert store.name(1).endswith("row 1")


def test_a_cache_is_named_by_how_rows_become_tokens(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "chat.jsonl", ROWS)
    stores = [store_of(tmp_path, tokenizer, loss=loss) for loss in ("answers", "all")]
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{# the same text #}"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    stores.append(store_of(tmp_path, tokenizer))
    assert len({store.folder for store in stores}) == 3
    assert stores[0].digest == stores[2].digest != stores[1].digest


def test_any_number_of_workers_makes_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "chat.jsonl", ROWS * 800)
    one = store_of(tmp_path, tokenizer, cache=str(tmp_path / "one"))
    two = store_of(tmp_path, tokenizer, workers=2, cache=str(tmp_path / "two"))
    assert one.digest == two.digest and one.documents == 3200
    assert {path.name for path in one.folder.iterdir()} >= {"learned.bin", "tokens.bin"}
    for path in one.folder.iterdir():
        assert path.read_bytes() == (two.folder / path.name).read_bytes()


def test_a_changed_bit_of_what_is_learned_is_detected(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "chat.jsonl", ROWS)
    store = store_of(tmp_path, tokenizer)
    file = store.folder / "learned.bin"
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 7):
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(DataError) as caught:
            open_store(store.folder)
        assert str(caught.value) == (
            f"{file} is damaged: its bytes have changed since it was written. Delete the folder "
            f"{store.folder}; the next run makes it again."
        )
        data[at] ^= 1
    file.write_bytes(data)
    assert open_store(store.folder).digest == store.digest


def test_a_template_that_writes_no_answer_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% generation %}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(RowError) as caught:
        Encoder(Recipe(tokenizer, "messages", "answers")).encode_row(ROWS[0])
    assert str(caught.value) == (
        "has no token to learn: the chat template writes none of its answers. Correct the row, "
        'remove it, or set data.loss = "all".'
    )
    made = Encoder(Recipe(tokenizer, "messages", "all")).encode_row(ROWS[0])
    assert made.is_learned is None and np.all(made.tokens < 270)


def test_a_folder_without_a_template_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "chat.jsonl", ROWS)
    (tokenizer / "tokenizer_config.json").unlink()
    with pytest.raises(DataError) as caught:
        store_of(tmp_path, tokenizer)
    assert str(caught.value) == (
        f'data.format = "messages" needs a chat template, and {tokenizer} has none: no '
        'chat_template.jinja, and no "chat_template" in tokenizer_config.json. Copy the chat '
        "model's chat_template.jinja there, or set data.tokenizer to a folder that has one."
    )
    (tokenizer / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError) as caught:
        store_of(tmp_path, tokenizer)
    assert str(caught.value).startswith("The chat template is not valid: ")
