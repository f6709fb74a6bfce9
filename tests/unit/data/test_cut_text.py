"""Long texts are cut where tokens are cut anyway: the parts have the tokens of the whole."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from equipoise.data.text import cut as module
from equipoise.data.text.cut import can_be_cut, cut

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES]  # type: ignore[list-item]
    )


LAYOUTS: dict[str, Callable[[], object]] = {
    "byte-level": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]  # type: ignore[list-item]
    ),
    "whitespace": pre_tokenizers.Whitespace,
    "bert": pre_tokenizers.BertPreTokenizer,
    **{f"pattern {i}": (lambda p=p: split(p)) for i, p in enumerate(sorted(module._PATTERNS))},
}
NORMALIZERS = [None, normalizers.NFC(), normalizers.NFKD()]
# Words that repeat, so that merges join letters, marks, punctuation and white space.
TRAINED_ON = [
    "the cat's  mat!\n\n  if (x):\r\n\treturn 12345 -- don't\n",
    "été 東京 ... “so”\n।\nкот é́ \u0301\n\na",
] * 60


def make(layout: str, normalizer: object = None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = LAYOUTS[layout]()  # type: ignore[assignment]
    core.normalizer = normalizer  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(TRAINED_ON, trainer)
    core.encode_special_tokens = True
    return core


@pytest.fixture(scope="module")
def cores() -> list[Tokenizer]:
    made = [make(layout, each) for layout in LAYOUTS for each in NORMALIZERS]
    assert all(map(can_be_cut, made))
    return made


WORDS = ["a", "12", "'s", "!", "/", " ", "  ", "\n", "\r\n", "\t", "é", "e\u0301", "\u0301", "東"]
WORDS += ["\u00a0", "\u2003", "\x1c", "ͺ", "\u0958", "🎈", "<|end|>", "²", "\u200d", "\u1885"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=40).map("".join) | st.text(max_size=60)


def tokens(core: Tokenizer, text: str) -> list[int]:
    return core.encode(text, add_special_tokens=False).ids


@given(TEXTS, st.integers(1, 8), st.integers(1, 30))
def test_parts_have_the_tokens_of_the_whole(cores, text: str, part: int, block: int) -> None:
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    parts = list(cut(blocks, part_chars=part))
    assert "".join(parts) == text
    for core in cores:
        assert [each for part in parts for each in tokens(core, part)] == tokens(core, text)


@given(TEXTS, st.integers(1, 8), st.integers(1, 30))
def test_blocks_do_not_move_cuts(text: str, part: int, block: int) -> None:
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    assert list(cut(blocks, part_chars=part)) == list(cut([text], part_chars=part))


def test_ordinary_text_is_cut_near_the_wanted_length() -> None:
    parts = list(cut(["one two three " * 1000], part_chars=100))
    assert max(map(len, parts)) <= 106
    assert list(cut(["x" * 1000, "y" * 1000], part_chars=100)) == ["x" * 1000 + "y" * 1000]


def added(**traits: bool) -> Tokenizer:
    core = make("byte-level")
    core.add_tokens([AddedToken("<think>", **traits)])
    return core


def joined() -> Tokenizer:
    core = make("byte-level")
    core.add_tokens(["a b"])
    return core


def with_steps(**steps: object) -> Tokenizer:
    core = make("byte-level")
    for name, step in steps.items():
        setattr(core, name, step)
    return core


UNPROVEN = {
    "no pre-tokenizer": lambda: with_steps(pre_tokenizer=None),
    "SentencePiece": lambda: with_steps(pre_tokenizer=pre_tokenizers.Metaspace()),
    "a space before": lambda: with_steps(pre_tokenizer=pre_tokenizers.ByteLevel()),
    "another pattern": lambda: with_steps(pre_tokenizer=split(r"\p{L}+\n|.")),
    "bytes before the pattern": lambda: with_steps(
        pre_tokenizer=pre_tokenizers.Sequence(
            [BYTES, pre_tokenizers.ByteLevel(add_prefix_space=False)]  # type: ignore[list-item]
        )
    ),
    "no split at all": lambda: with_steps(pre_tokenizer=BYTES),
    "a normalizer that replaces": lambda: with_steps(normalizer=normalizers.Replace(" ", "_")),
    "dropout": lambda: with_steps(model=models.BPE(dropout=0.1)),
    "a token that takes white space": lambda: added(rstrip=True),
    "a token with white space inside": joined,
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_others_are_encoded_whole(name: str) -> None:
    assert not can_be_cut(UNPROVEN[name]())


def test_added_tokens_without_white_space_do_no_harm() -> None:
    assert can_be_cut(added())
