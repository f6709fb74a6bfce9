r"""Which characters of a conversation its assistant writes.

Why
    A fine-tuned model must learn to answer, not to ask. Templates write headers, tools, dates and
    earlier reasoning around what is said, differently for the last message than for the others;
    searching the text for an answer finds the wrong place sooner or later.

What it decides
    An answer is all that the model itself has to write: what follows the template's generation
    prompt, to the end of the turn, with the token that ends it and what the template puts after
    it (ChatML's newline)::

        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                              ~~~~~~~~~~~~~~~~~

    A template with ``{% generation %}`` says so itself. Of any other, conversations cut short are
    rendered: up to an answer, with the generation prompt; and up to its end. Each must be a prefix
    of the whole, or the conversation is refused: then a template writes an earlier answer
    otherwise than the model wrote it, as those do that leave out earlier reasoning.

Kept true (tests/unit/data/chat/test_answers.py, tests/oracle/test_chat_template.py)
    Tokens equal those of ``return_assistant_tokens_mask``; without marks, those of the same
    template with marks.
"""

from collections.abc import Sequence

from equipoise.data.chat.rows import ASSISTANT, Conversation, RowError, require_roles
from equipoise.data.chat.template import ChatTemplate, RenderError, Span

_MARK_THEM = (
    "put {% generation %} and {% endgeneration %} around what the assistant writes in "
    "chat_template.jinja"
)


def write_conversation(
    talk: Conversation, template: ChatTemplate, loss: str
) -> tuple[str, list[Span]]:
    """The text of a conversation, and the characters of it that are learned.

    Args:
        talk: Its messages.
        template: Writes them.
        loss: ``answers``, ``last-answer`` or ``all``; of a prompt and its completion all but
            ``all`` mean the completion.

    Raises:
        RowError: the template cannot write it, or it has no answer, or where an answer begins and
            ends cannot be proven.
    """
    require_roles(talk.messages, template.source)
    try:
        text, marks = template.render_marked(talk.messages, talk.tools)
        if not text:
            raise RowError("is empty once the chat template has written it. Remove the row.")
        _require_written(talk, text)
        if loss == "all":
            return text, [(0, len(text))]
        if talk.asked is not None:
            return text, [(_begin(talk, template, text, talk.asked), len(text))]
        answers = [at for at, each in enumerate(talk.messages) if each["role"] == ASSISTANT]
        if not answers or (loss == "last-answer" and answers[-1] != len(talk.messages) - 1):
            raise RowError(_no_answer(talk, loss))
        if loss == "last-answer":
            begin = _begin(talk, template, text, answers[-1])
            if not template.has_marks:
                return text, [(begin, len(text))]
            return text, [span for span in marks if span[1] > begin]
        if template.has_marks:
            return text, marks
        return text, _between_prefixes(talk, template, text, answers)
    except RenderError as error:
        raise RowError(f"is not written: {error}. Correct the row, or remove it.") from None


def _between_prefixes(
    talk: Conversation, template: ChatTemplate, text: str, answers: Sequence[int]
) -> list[Span]:
    spans = []
    for at in answers:
        begin = _begin(talk, template, text, at)
        told = template.render(talk.messages[: at + 1], talk.tools)
        if not text.startswith(told):
            # Some templates end the last message, and only that, with the end token.
            told = told.removesuffix(template.special_tokens.get("eos_token", ""))
        if not text.startswith(told) or len(told) < begin:
            raise RowError(
                f"cannot be learned answer by answer: the chat template writes message {at + 1} "
                "otherwise once others follow it, so it is not what the model will have written. "
                f'Set data.loss = "last-answer", or {_MARK_THEM}.'
            )
        spans.append((begin, len(told)))
    return spans


def _begin(talk: Conversation, template: ChatTemplate, text: str, at: int) -> int:
    """Where an answer begins: after all that the model is given to answer to."""
    given = template.render(talk.messages[:at], talk.tools, add_generation_prompt=True)
    if not text.startswith(given):
        raise RowError(
            f"cannot be learned from: the chat template writes what comes before message {at + 1} "
            "otherwise than in the prompt that the model will be given, so where the answer "
            f'begins is not known. Set data.loss = "all", or {_MARK_THEM}.'
        )
    return len(given)


def _no_answer(talk: Conversation, loss: str) -> str:
    count = len(talk.messages)
    if loss == "last-answer":
        role = talk.messages[-1]["role"]
        return (
            f'has no last answer: the last of its {count} messages is of the role "{role}". End it '
            f'with a message of "{ASSISTANT}", or remove the row.'
        )
    return (
        f'has no answer: none of its {count} messages is of the role "{ASSISTANT}". Add one, '
        'remove the row, or set data.loss = "all".'
    )


def _require_written(talk: Conversation, text: str) -> None:
    """Refuse lists of parts that a template wrote as Python would print them."""
    for at, message in enumerate(talk.messages, start=1):
        content = message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            raise RowError(
                f"has a list of parts in the content of message {at}, which the chat template "
                "does not know. Give the content as one string."
            )
