"""Text while its tokens arrive: parts that join to the whole, none within a character."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.serve.text import StopStrings, TextStream

TEXTS = [
    "Hello  world\n",
    "naïve façade — 你好, мир! 🙂🙃 \u200d é e\u0301",
    "🙂" * 9,
    "a",
    "\x00\x07\ufeff\U0010ffff end",
]


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["Hello world", "a world"], trainer)
    return core


def pieces() -> tokenizers.Tokenizer:
    """Words with a marked space, as SentencePiece has them, and bytes for what is unknown."""
    words = ["▁", "▁Hello", "▁world", "▁end", "a", ",", *(chr(c) for c in range(97, 123))]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + at for at, word in enumerate(dict.fromkeys(words))}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    return core


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("text", TEXTS)
def test_parts_join_to_the_whole(make: object, text: str) -> None:
    core = make()  # type: ignore[operator]
    prompt, ids = core.encode("Hello world").ids, core.encode(text).ids
    stream = TextStream(core, prompt)
    parts = [stream.push(token) for token in ids]
    assert all("\ufffd" not in part for part in parts)
    parts.append(stream.finish())
    whole = core.decode([*prompt, *ids])
    assert "".join(parts) == whole[len(core.decode(prompt)) :]


def test_bytes_that_never_become_a_character_come_last() -> None:
    core = byte_level()
    ids = core.encode("🙂").ids
    stream = TextStream(core)
    assert [stream.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    core = byte_level()
    stream = TextStream(core)
    end = core.token_to_id("<|end|>")
    assert stream.push(end) == ""
    assert "".join(stream.push(token) for token in core.encode("a").ids) + stream.finish() == "a"


class Counting:
    """A tokenizer that notes how many tokens it decodes at once."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core, self.sizes = core, list[int]()

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.sizes.append(len(ids))
        return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_token_costs_the_same_behind_bytes_that_never_end(make: object) -> None:
    core = make()  # type: ignore[operator]
    counting = Counting(core)
    stream = TextStream(counting)  # type: ignore[arg-type]
    broken = core.encode("é").ids[-1]
    parts = [stream.push(broken) for _ in range(300)]
    word = core.encode("a").ids
    parts += [stream.push(token) for token in word]
    assert "".join(parts) + stream.finish() == core.decode([broken] * 300 + word)
    assert max(counting.sizes) <= 128


def test_a_token_costs_the_same_behind_tokens_without_text() -> None:
    core = byte_level()
    counting = Counting(core)
    stream = TextStream(counting)  # type: ignore[arg-type]
    ids = [core.token_to_id("<|end|>")] * 300 + core.encode("a").ids
    assert "".join(stream.push(token) for token in ids) + stream.finish() == "a"
    assert max(counting.sizes) <= 128


def stopped(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], bool]:
    """The parts of a text that is cut at some places, up to a stop string."""
    strings, parts, begin = StopStrings(stops), list[str](), 0
    for cut in [*sorted(cuts), len(text)]:
        parts.append(strings.push(text[begin:cut]))
        begin = cut
        if strings.has_stopped:
            return parts, True
    return [*parts, strings.finish()], False


def one_by_one(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        whole = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if whole:
            return text[: end - max(map(len, whole))], True
    return text, False


@given(st.data())
def test_a_text_ends_before_its_stop_string_however_it_is_cut(data: st.DataObject) -> None:
    text = data.draw(st.text("ab🙂", max_size=12))
    stops = data.draw(st.lists(st.text("ab🙂", max_size=4), max_size=4))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    parts, has_stopped = stopped(text, stops, cuts)
    assert ("".join(parts), has_stopped) == one_by_one(text, stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["\n\nUser:"])
    assert [strings.push(each) for each in ("One.\n", "Two", "\n\nUse", "ful", "\n\n", "User")] == [
        "One.",
        "\nTwo",
        "",
        "\n\nUseful",
        "",
        "",
    ]
    assert (strings.push(": x"), strings.has_stopped, strings.finish()) == ("", True, "")
