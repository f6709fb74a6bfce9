"""What libraries say of damaged files becomes part of a sentence."""

import json
import struct
from pathlib import Path

import pytest
import tokenizers
from safetensors import SafetensorError, safe_open

from equipoise.base.damage import plain_words
from equipoise.base.read import reason

TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def refusal(header: object, data: bytes = bytes(4), length: int | None = None) -> str:
    """What safetensors says of a file, in our words."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = Path("model.safetensors")
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    with pytest.raises(SafetensorError) as caught, safe_open(file, framework="np"):
        pass
    return reason(caught.value)


def test_damaged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    header = "its header: "
    assert refusal({"a": TENSOR | {"shape": 3}}) == (
        header + "the number 3 stands where a list belongs"
    )
    assert refusal({"a": TENSOR | {"shape": [0.5]}}) == (
        header + "the number 0.5 stands where a whole number belongs"
    )
    assert refusal({"a": TENSOR | {"data_offsets": [0]}}) == (
        header + "a list of 1 stands where a list of 2 belongs"
    )
    assert refusal({"a": "x"}) == header + 'the text "x" stands where a table belongs'
    assert refusal({"a": {}}) == header + "it lacks dtype"
    assert refusal({"a": TENSOR | {"dtype": "Q4"}}) == header + '"Q4" is not a known name'
    assert refusal({"a": TENSOR | {"shape": [2]}}) == (
        "its header gives a tensor more or fewer bytes than its shape takes"
    )
    assert refusal({"a": TENSOR}, b"") == "its size is not what its header says"
    assert refusal(b"{x") == header + "it is not JSON"
    assert refusal(b"\xff\xff") == "its header is not UTF-8 text"
    assert {refusal({"a": TENSOR}, length=each) for each in (1 << 20, 1 << 63)} == {
        "its header is damaged"
    }


def test_damaged_tokenizers() -> None:
    core = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    said = {}
    for name, part in {
        "vocabulary": {"vocab": {"a": []}},
        "merges": {"merges": [["a", "b"]]},
        "flag": {"fuse_unk": "x"},
    }.items():
        with pytest.raises(Exception, match=r".") as caught:
            tokenizers.Tokenizer.from_str(json.dumps(core | {"model": core["model"] | part}))
        said[name] = reason(caught.value)
    assert said == {
        "vocabulary": "a list stands where a whole number belongs (line 1, column 385)",
        "merges": 'its vocabulary lacks "a" (line 1, column 388)',
        "flag": 'the text "x" stands where true or false belongs (line 1, column 376)',
    }
    with pytest.raises(Exception, match=r".") as caught:
        tokenizers.Tokenizer.from_str("{")
    assert reason(caught.value) == "it is not JSON (line 1, column 1)"


@pytest.mark.parametrize("words", ["some words of another kind", "", "invalid"])
def test_other_words_stay(words: str) -> None:
    assert plain_words(words) == words
