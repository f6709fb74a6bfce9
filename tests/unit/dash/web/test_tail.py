from pathlib import Path

from equipoise.dash.web.tail import CHUNK_BYTES, Tail
from equipoise.observe.event import seal

LINE = seal('{"v":1,"kind":"instant","name":"start"}')


def read(tail: Tail) -> list[str]:
    assert tail.look()
    names = []
    while tail.has_more:
        names += [event["name"] for event in tail.read()]
    return names


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(LINE[:20])
    tail = Tail(path)
    assert read(tail) == [] and tail.offset == 0
    with path.open("a") as file:
        file.write(LINE[20:])
    assert read(tail) == ["start"]  # whole, though its newline is not there yet
    with path.open("a") as file:
        file.write(f"\n{LINE}\n")
    assert read(tail) == ["start"]
    assert tail.torn_lines == 0 and tail.offset == path.stat().st_size


def test_a_line_longer_than_a_chunk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    long = seal(f'{{"v":1,"kind":"fault","name":"{"x" * 3 * CHUNK_BYTES}"}}')
    path.write_text(f"{LINE}\n{long}\n{LINE}\n")
    assert [len(name) for name in read(Tail(path))] == [5, 3 * CHUNK_BYTES, 5]


def test_a_torn_line_is_counted_and_what_was_appended_to_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(f"{LINE[:30]}\n{LINE[:12]}{LINE}\n\0\0\n")
    tail = Tail(path)
    assert read(tail) == ["start"] and tail.torn_lines == 3


def test_a_file_that_became_shorter_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(f"{LINE}\n{LINE}\n")
    tail = Tail(path)
    read(tail)
    path.write_text(f"{LINE}\n")
    assert not tail.look()
