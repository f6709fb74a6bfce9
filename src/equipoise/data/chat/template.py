"""A chat template, rendered exactly as ``transformers`` renders it.

Why
    A model answers well only to text in the very form that it was trained on: one wrong blank
    changes its tokens. Published templates rely on how ``apply_chat_template`` sets up jinja2.

What it decides
    Templates are other people's programs, so they run in jinja2's sandbox. Settings, filters and
    functions are those of ``transformers``, and so is what a template sees: messages without keys
    that are null, the named special tokens, reasoning under all of its names. ``{% generation %}``
    marks what the assistant writes.

    What a template may do is bounded: rounds of its loops, and the characters that it writes, and
    joins, beside those of the conversation. Several threads may render by one template; each
    counts and notes by itself.

    A template that asks for the date (``strftime_now``) writes the day of tokenizing.

Kept true (tests/oracle/test_chat_template.py)
    Text, tokens and marks equal those of ``apply_chat_template``, over many templates.

Sources
    transformers 5.23, ``utils/chat_template_utils.py``.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from equipoise.base.errors import DataError
from equipoise.base.shown import shorten
from equipoise.data.chat.rows import Message

Span = tuple[int, int]
"""Characters [start, stop) of a rendered conversation."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_REPEATED = 1 << 20
"""Characters of a text that a template makes by ``*``."""
_MOST_POWER = 64
_MOST_ROUNDS = 1 << 20
"""Rounds of loops and calls of macros in one rendering."""
_MOST_WRITTEN, _MOST_TIMES = 1 << 20, 8
"""Characters that a template writes of its own, and how often it may repeat what it is given."""
_MOST_JOINED = 64
"""How often a template may copy what it may write, by ``+`` and ``~``: a text that grows in a loop
is copied in every round."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class RenderError(Exception):
    """A template cannot write a conversation; with the reason, for a sentence."""


class _EndlessError(Exception):
    """A template does more than any conversation needs; with what it does."""


class _Written:
    """What a template has written so far."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.characters = 0

    def add(self, block: str) -> None:
        """Append a block."""
        self.blocks.append(block)
        self.characters += len(block)


class _Noted(threading.local):
    """What one thread renders: a server's threads write their conversations by one template."""

    def __init__(self) -> None:
        self.written: _Written | None = None
        self.spans: list[Span] = []


class _Left(threading.local):
    """What the rendering of one thread may still do."""

    def __init__(self) -> None:
        self.left = _MOST_ROUNDS
        self.most_joined = self.left_joined = _MOST_JOINED * _MOST_WRITTEN


class _Marks(jinja2.ext.Extension):
    """``{% generation %}``: notes which characters lie between it and its end."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._mine = _Noted()
        environment.extend(marks=self)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        mine = self._mine
        if mine.written is not None:
            start = mine.written.characters
            mine.spans.append((start, start + len(text)))
        return text

    @contextmanager
    def noting(self) -> Iterator[tuple[_Written, list[Span]]]:
        """Note spans, in the second of these, while blocks are added to the first."""
        mine, written, spans = self._mine, _Written(), list[Span]()
        mine.written, mine.spans = written, spans
        try:
            yield written, spans
        finally:
            mine.written = None


class _Rounds(jinja2.ext.Extension):
    """Counts every round of a template's loops, every call of its macros, and what it joins."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._mine = _Left()

    def begin(self, room: int) -> None:
        """Count anew, for a rendering that may write this many characters."""
        self._mine.left = _MOST_ROUNDS
        self._mine.most_joined = self._mine.left_joined = _MOST_JOINED * room

    def count_in(self, tree: jinja2.nodes.Template) -> None:
        """Add a count to each loop and its condition, to each macro, and to ``~``."""
        for joined in tree.find_all(jinja2.nodes.Concat):
            joined.nodes = [self.call_method("_join", [*joined.nodes], lineno=joined.lineno)]
        for loop in tree.find_all(jinja2.nodes.For):
            if loop.test is not None:
                loop.test = jinja2.nodes.And(self.attr("counted"), loop.test)
            loop.body.insert(0, jinja2.nodes.ExprStmt(self.attr("counted")))
        for macro in tree.find_all(jinja2.nodes.Macro):
            macro.body.insert(0, jinja2.nodes.ExprStmt(self.attr("counted")))

    @property
    def counted(self) -> bool:
        """True; one round less is left. A call through the sandbox takes ten times as long."""
        mine = self._mine
        mine.left -= 1
        if mine.left < 0:
            raise _EndlessError(f"runs its loops more than {_MOST_ROUNDS:,} times")
        return True

    def count_joined(self, characters: int) -> None:
        """A text of this many characters is about to be made of others."""
        mine = self._mine
        mine.left_joined -= characters
        if mine.left_joined < 0:
            raise _EndlessError(f"joins texts to more than {mine.most_joined:,} characters")

    def _join(self, *parts: Any) -> str:
        """What ``~`` makes of some values."""
        texts = [str(part) for part in parts]
        self.count_joined(sum(map(len, texts)))
        return "".join(texts)


class _Dict:
    """``dict`` for templates, without its attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, without names that lead to Python's internals."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *rest = args  # a template may name a variable "self"
        values = dict(*rest, **named)
        for name in values:
            _Namespace._require_plain(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._require_plain(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _require_plain(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"it stores {name!r} in a namespace")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """One in which texts stay small: one that is repeated 10^10 times would fill the memory."""

    intercepted_binops = frozenset({"+", "*", "**"})

    @property
    def rounds(self) -> _Rounds:
        """What it counts."""
        rounds = self.extensions[_Rounds.identifier]
        assert isinstance(rounds, _Rounds)  # noqa: S101 - as the environment was made
        return rounds

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.rounds.count_joined(len(left) + len(right))
            return left + right
        for text, times in ((left, right), (right, left)):
            is_repeated = isinstance(text, Sized) and isinstance(times, int)
            if operator == "*" and is_repeated and len(text) * times > _MOST_REPEATED:
                raise _EndlessError(f"repeats a text {shorten(f'{times:,}')} times")
        if operator == "**" and abs(right) > _MOST_POWER:
            raise _EndlessError(f"has a power with the exponent {shorten(str(right))}")
        return super().call_binop(context, operator, left, right)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > jinja2.sandbox.MAX_RANGE:
        raise _EndlessError(f"counts to {len(numbers):,}")
    return numbers


def _environment() -> _Sandbox:
    made = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, _Rounds, jinja2.ext.loopcontrols]
    )
    made.globals["range"] = _range
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    made.globals["dict"] = _Dict()
    made.globals["namespace"] = _Namespace
    return made


def _as_seen(message: Message) -> dict[str, Any]:
    """A message as templates see it: without null keys, reasoning under all of its names."""
    seen = {name: value for name, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING if name in seen), None)
    if reasoning is not None:
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The template.
        special_tokens: The tokenizer's named tokens, such as ``eos_token``.

    Raises:
        DataError: it is not a jinja2 template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)
        environment = _environment()
        self._rounds = environment.rounds
        try:
            tree = environment.parse(source)
            self._rounds.count_in(tree)
            self._template = jinja2.Template.from_code(
                environment, environment.compile(tree), environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"The chat template is not valid: {error.message} (line {error.lineno}). Correct "
                "chat_template.jinja in the tokenizer's folder."
            ) from None

    @property
    def has_marks(self) -> bool:
        """Whether it says by ``{% generation %}`` what the assistant writes."""
        return _MARK.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: Each with its ``role``.
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: Whether to end with what comes before an answer.

        Raises:
            RenderError: the template refuses the conversation, or fails on it.
        """
        return self.render_marked(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """As ``render``, and the characters that the template marks as written by the assistant."""
        marks: _Marks = self._template.environment.marks  # type: ignore[attr-defined]
        given = sum(len(str(each)) for each in (*messages, *(tools or ())))
        room = _MOST_WRITTEN + _MOST_TIMES * given
        self._rounds.begin(room)
        try:
            with marks.noting() as (written, spans):
                for block in self._template.generate(
                    messages=[_as_seen(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                ):
                    written.add(block)
                    if written.characters > room:
                        raise _EndlessError(
                            f"writes more than {_MOST_WRITTEN:,} characters of its own"
                        )
                return "".join(written.blocks), spans
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template refuses it: {_line(error)}") from None
        except RecursionError:
            raise RenderError("the chat template calls itself without end") from None
        except _EndlessError as error:
            raise RenderError(f"the chat template {error}") from None
        except Exception as error:  # whatever a template's own code raises
            raise RenderError(f"the chat template fails on it: {_line(error)}") from None


def _line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return shorten(words, 200).rstrip(".")
