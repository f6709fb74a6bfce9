"""One answer from its events: text, scores, and what a stop string takes away."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.engine.request import Finish, Score, TokenEvent
from equipoise.serve.http.choice import ChoicePart, StreamedChoice
from equipoise.serve.http.vocabulary import Vocabulary
from equipoise.serve.text import StopStrings, TextStream
from support.serving.engine import END, byte_level

VOCABULARY = Vocabulary(byte_level())


def events(ids: Sequence[int], stops: Sequence[str] = ()) -> list[TokenEvent]:
    """What an engine says of these tokens: the last one is the end of the answer."""
    text, stop, said = TextStream(byte_level()), StopStrings(stops), list[TokenEvent]()
    for at, token in enumerate(ids):
        finish: Finish | None = "length" if at == len(ids) - 1 else None
        if token == END:
            finish = "stop"
        part = "" if token == END else text.push(token)
        part += text.finish() if finish else ""
        part = stop.push(part)
        if stop.has_stopped:
            finish = "stop"
        elif finish:
            part += stop.finish()
        said.append(TokenEvent(token, part, Score(token, -1.0), finish))
        if finish:
            break
    return said


def parts(said: Sequence[TokenEvent]) -> list[ChoicePart]:
    choice = StreamedChoice(VOCABULARY, {END}.__contains__)
    return [choice.push(event) for event in said]


IDS = st.lists(st.integers(0, 279), min_size=1, max_size=30)
STOPS = st.lists(st.text("ab wor🙂l", min_size=1, max_size=3), max_size=3)


@given(IDS, STOPS)
def test_scores_are_those_of_the_text_that_is_shown(ids: list[int], stops: list[str]) -> None:
    said = events(ids, stops)
    made = parts(said)
    text = "".join(part.text for part in made)
    scored = [each for part in made for each in part.scored]
    known = [event.token for event in said]
    assert [each.token for each in scored] == known[: len(scored)]
    data = b"".join(VOCABULARY.text_bytes(each.token) for each in scored)
    shown = data.decode("utf-8", "replace")
    assert shown.startswith(text) or text.startswith(shown.rstrip("\ufffd"))
    for each in scored:
        assert each.at <= len(text)
    was_stopped = said[-1].finish == "stop" and said[-1].token != END
    if not was_stopped:
        missing = len(known) - len(scored)
        assert missing == (said[-1].token == END)
        assert shown == text


@given(IDS, STOPS)
def test_a_score_comes_with_the_text_that_its_token_begins(
    ids: list[int], stops: list[str]
) -> None:
    characters = 0
    for part in parts(events(ids, stops)):
        for each in part.scored:
            assert (
                part.finish
                or characters <= each.at < characters + len(part.text)
                or (not VOCABULARY.text_bytes(each.token))
            )
        characters += len(part.text)


def test_a_stop_string_takes_its_scores_with_it() -> None:
    ids = byte_level().encode("xyz END more", add_special_tokens=False).ids
    made = parts(events(ids, ["END"]))
    assert "".join(part.text for part in made) == "xyz "
    tokens = [each.token for part in made for each in part.scored]
    assert b"".join(map(VOCABULARY.bytes, tokens)) == b"xyz "
    assert made[-1].finish == "stop"
