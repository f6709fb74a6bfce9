"""Where an answer begins and ends: proven by prefixes, or refused in one sentence."""

from typing import Any

import pytest

from equipoise.data.chat.answers import write_conversation
from equipoise.data.chat.rows import Conversation, RowError
from equipoise.data.chat.template import ChatTemplate
from support.chat.template import CHATML

TALK = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": ""},
)
STRIPS = (  # as templates do that leave out earlier reasoning
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
ENDS = (  # the end token after the last message alone
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% else %}{{ eos_token }}"
    "{% endif %}"
)


def learned(
    source: str, messages: tuple[dict[str, Any], ...], loss: str, asked: int | None = None
) -> list[str]:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    text, spans = write_conversation(Conversation(messages, None, asked), template, loss)
    return [text[start:stop] for start, stop in spans]


def refusal(source: str, messages: tuple[dict[str, Any], ...], loss: str) -> str:
    with pytest.raises(RowError) as caught:
        learned(source, messages, loss)
    return str(caught.value)


def test_answers_run_from_the_generation_prompt_to_the_end_of_the_turn() -> None:
    assert learned(CHATML, TALK, "answers") == ["Hello<|im_end|>\n", "<|im_end|>\n"]
    assert learned(CHATML, TALK, "last-answer") == ["<|im_end|>\n"]
    (whole,) = learned(CHATML, TALK, "all")
    assert whole.startswith("<|im_start|>system") and whole.endswith("<|im_end|>\n")


def test_an_end_token_after_the_last_message_alone_is_learned() -> None:
    assert learned(ENDS, TALK, "answers") == ["Hello\n", "\n</s>"]


def test_a_completion_is_learned_whole() -> None:
    assert learned(CHATML, TALK, "answers", asked=2) == [
        "Hello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    ]


def test_a_template_that_rewrites_earlier_answers_teaches_the_last_alone() -> None:
    talk = (*TALK[:2], {"role": "assistant", "content": "<think>x</think>A"}, *TALK[3:])
    assert refusal(STRIPS, talk, "answers") == (
        "cannot be learned answer by answer: the chat template writes message 3 otherwise once "
        "others follow it, so it is not what the model will have written. Set data.loss = "
        '"last-answer", or put {% generation %} and {% endgeneration %} around what the assistant '
        "writes in chat_template.jinja."
    )
    assert learned(STRIPS, talk, "last-answer") == ["\n"]
    assert learned(STRIPS, talk[:3], "answers") == ["<think>x</think>A\n"]


def test_a_prompt_that_the_model_will_not_be_given_is_refused() -> None:
    thinks = CHATML.replace("assistant\n'", "assistant\n<think>'")
    assert refusal(thinks, TALK, "answers") == (
        "cannot be learned from: the chat template writes what comes before message 3 otherwise "
        "than in the prompt that the model will be given, so where the answer begins is not "
        'known. Set data.loss = "all", or put {% generation %} and {% endgeneration %} around '
        "what the assistant writes in chat_template.jinja."
    )


def test_conversations_without_an_answer_are_refused() -> None:
    assert refusal(CHATML, TALK[:2], "answers") == (
        'has no answer: none of its 2 messages is of the role "assistant". Add one, remove the '
        'row, or set data.loss = "all".'
    )
    assert refusal(CHATML, TALK[:4], "last-answer") == (
        'has no last answer: the last of its 4 messages is of the role "user". End it with a '
        'message of "assistant", or remove the row.'
    )
    assert learned(CHATML, TALK[:2], "all")


def test_what_a_template_refuses_is_refused() -> None:
    alternating = "{{ raise_exception('Roles must alternate!') }}"
    assert refusal(alternating, TALK, "answers") == (
        "is not written: the chat template refuses it: Roles must alternate!. Correct the row, or "
        "remove it."
    )
    parts = ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TALK[2])
    assert refusal("{% for m in messages %}{{ m.content }}{% endfor %}", parts, "all") == (
        "has a list of parts in the content of message 1, which the chat template does not know. "
        "Give the content as one string."
    )
    assert refusal("", TALK, "all") == (
        "is empty once the chat template has written it. Remove the row."
    )
