"""Bodies as requests to the engine: what is refused before it costs anything, who cuts texts."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.serve.engine.request import PromptScored, Score
from equipoise.serve.http.asked import Asked, Prompt, ask_chat, ask_completion, read_prompts
from equipoise.serve.http.body import judge
from equipoise.serve.http.choice import ChoicePart, Scored
from equipoise.serve.http.fault import HttpError
from equipoise.serve.http.fields import ChatBody, CompletionBody
from equipoise.serve.http.shape import AnswerHead, CompletionShape


class _Core:
    """Cuts texts into characters, and notes on which thread."""

    def __init__(self) -> None:
        self.threads = set[int]()

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        assert add_special_tokens
        self.threads.add(threading.get_ident())
        (text,) = texts
        ids = [ord(each) for each in text]
        return [_Encoding(ids, [(at, at + 1) for at in range(len(ids))])]


class _Encoding(SimpleNamespace):
    def __init__(self, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        super().__init__(ids=ids, offsets=offsets)

    def __len__(self) -> int:
        return len(self.ids)


def model_of(core: Any) -> Any:
    tokenizer = SimpleNamespace(core=core, encode_chat=lambda *_: [])
    return SimpleNamespace(
        tokenizer=tokenizer,
        vocabulary=SimpleNamespace(longest_bytes=None),
        first_ids=(7,),
        context_tokens=5_000,
        vocab=128,
        long_texts=asyncio.Semaphore(1),
        texts={"ann": asyncio.Semaphore(2), "bob": asyncio.Semaphore(2)},
    )


def test_too_many_prompts_are_refused_before_one_is_cut() -> None:
    core = _Core()
    body = judge({"prompt": ["a"] * 200_000, "n": 2}, CompletionBody)
    with pytest.raises(HttpError) as refused:
        asyncio.run(ask_completion(model_of(core), body, "ann"))
    assert refused.value.param == "n"
    assert refused.value.message == (
        "200,000 prompts with 2 answers each are 400,000 answers. One request may have at most 128."
    )
    assert not core.threads


@pytest.mark.parametrize(("texts", "is_aside"), [(9, False), (100, True)])
def test_texts_that_are_long_together_are_cut_beside_others(texts: int, is_aside: bool) -> None:
    core = _Core()
    given = (*["b" * 100] * texts, (1, 2), "")
    prompts = asyncio.run(
        read_prompts(model_of(core), given, "ann", most_tokens=100, name="prompt")
    )
    assert (threading.get_ident() not in core.threads) == is_aside
    assert [prompt.ids for prompt in prompts] == [(98,) * 100] * texts + [(1, 2), (7,)]
    assert (prompts[-1].text, prompts[-1].offsets) == ("", (0,))


def test_a_tenants_texts_keep_no_other_tenants_waiting() -> None:
    """Ann's are cut two at a time: those that wait hold no thread, and bob's is cut beside them."""
    go_on, most = threading.Event(), 0

    class Slow(_Core):
        under_way = 0

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            nonlocal most
            self.under_way += 1
            most = max(most, self.under_way)
            if texts[0].startswith("a"):
                go_on.wait(240)
            self.under_way -= 1
            return super().encode_batch(texts, add_special_tokens=add_special_tokens)

    async def cut() -> None:
        model = model_of(Slow())

        def read(text: str, tenant: str) -> Any:
            return read_prompts(model, (text,), tenant, most_tokens=9_999, name="prompt")

        anns = [asyncio.ensure_future(read("a" * 5_000, "ann")) for _ in range(40)]
        gone = asyncio.ensure_future(read("a" * 5_000, "ann"))
        await asyncio.sleep(0)
        gone.cancel()
        (bobs,) = await read("b" * 5_000, "bob")
        assert len(bobs.ids) == 5_000 and not any(each.done() for each in anns)
        go_on.set()
        assert len(await asyncio.gather(*anns)) == 40
        assert not any(each.locked() for each in model.texts.values())

    asyncio.run(cut())
    assert most <= 3


def test_a_completion_that_gives_no_number_of_tokens_has_at_most_what_is_left() -> None:
    for prompt, most in ((3, 16), (4_990, 10), (4_999, 1)):
        body = judge({"prompt": [1] * prompt}, CompletionBody)
        (request,) = asyncio.run(ask_completion(model_of(_Core()), body, "ann")).requests
        assert request.most_tokens == most
    for given, message in (
        (
            {"prompt": [1] * 5_000},
            "The model's context is 5,000 tokens; the prompt has 5,000 tokens, which leaves none "
            "for an answer. Shorten the prompt or ask for fewer.",
        ),
        (
            {"prompt": [1] * 4_990, "max_tokens": 16},
            "The model's context is 5,000 tokens; the prompt has 4,990 tokens and the answer may "
            "have 16 (max_tokens), together 5,006. Shorten the prompt or ask for fewer.",
        ),
    ):
        with pytest.raises(HttpError) as refused:
            asyncio.run(ask_completion(model_of(_Core()), judge(given, CompletionBody), "ann"))
        assert (refused.value.message, refused.value.code) == (message, "context_length_exceeded")


def test_the_first_answer_of_a_prompt_scores_it_for_all() -> None:
    asked = {"prompt": ["ab", "c"], "echo": True, "logprobs": 1}
    body = judge({**asked, "n": 2, "best_of": 3}, CompletionBody)
    requests = asyncio.run(ask_completion(model_of(_Core()), body, "ann")).requests
    assert [each.scores_prompt for each in requests] == [True, False, False] * 2
    with pytest.raises(HttpError) as refused:
        body = judge({**asked, "n": 2, "max_tokens": 0}, CompletionBody)
        asyncio.run(ask_completion(model_of(_Core()), body, "ann"))
    assert refused.value.message == "max_tokens is 0, so n and best_of must be 1."


def test_answers_that_come_before_the_scores_of_their_prompt_wait_for_them() -> None:
    prompts = (Prompt((65, 66), "AB", (0, 1)), Prompt((67,), "C", (0,)))
    asked = Asked(prompts, (), each=2, n=2, top=0, echo=True)
    vocabulary: Any = SimpleNamespace(name=chr, text_bytes=lambda token: bytes([token]))
    shape = CompletionShape(AnswerHead("tiny", "fp"), asked, vocabulary)
    score = Score(70, -0.5)
    late = ChoicePart("F", (Scored(score, 70, 0),), None)
    assert shape.chunk(1, late) == []
    assert shape.chunk(1, ChoicePart("", (), "length")) == []
    assert shape.chunk(2, late) == []
    assert shape.scored(0, PromptScored((Score(66, -2.0),))) == [1]
    (choice,) = shape.begun(1)
    assert (choice["text"], choice["finish_reason"]) == ("ABF", "length")
    assert choice["logprobs"]["tokens"] == ["A", "B", "F"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert [each["text"] for each in shape.chunk(0, late)] == ["ABF"]
    assert [each["text"] for each in shape.chunk(0, late)] == ["F"]
    assert shape.scored(2, PromptScored(())) == [2]
    assert [each["text"] for each in shape.whole([1, 2])] == ["ABF", "CF"]


def test_a_conversation_that_a_template_writes_nothing_of_begins_a_text() -> None:
    body = judge({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, ChatBody)
    asked = asyncio.run(ask_chat(model_of(_Core()), body, "ann"))
    assert [prompt.ids for prompt in asked.prompts] == [(7,)]
    assert asked.requests[0].prompt == (7,)
