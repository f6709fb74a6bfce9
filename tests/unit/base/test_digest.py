"""Digests: one name for one value, whatever it is held in."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.digest import digest, digest_bytes, digest_file


@dataclass(frozen=True, slots=True)
class Pair:
    """Two values."""

    left: int
    right: tuple[float, ...]


def test_known_names() -> None:
    assert digest_bytes(b"") == "cae66941d9efbd404e4d88758ea67670"
    assert digest({}) == digest_bytes(b"{}")


def test_a_dataclass_is_its_fields() -> None:
    assert digest(Pair(1, (2.0,))) == digest({"right": [2.0], "left": 1})
    assert digest(np.int64(3)) == digest(3)
    assert digest(Path("a") / "b") == digest("a/b")


def test_arrays_differ_by_type_shape_and_bytes() -> None:
    zeros = np.zeros(4, np.int32)
    names = {
        digest(zeros),
        digest(zeros.reshape(2, 2)),
        digest(zeros.astype(np.int64)),
        digest(zeros + 1),
    }
    assert len(names) == 4


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()))
def test_the_order_of_keys_does_not_matter(value: dict[str, int | str | bool]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000  # more than one part
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == digest_bytes(data)
