"""Read the JSON body of a request, and refuse what is wrong with it before it costs anything.

What it decides
    A body has a size, a time to arrive, a depth and known fields. Faults are reported all at once;
    ``param`` names the first.

Kept true (tests/unit/serve/http/test_gate.py, test_fields.py)
    Whatever the bytes, the answer is a 4xx in OpenAI's shape.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from equipoise.base.nearest import nearest
from equipoise.base.read import LongNumberError, parse_json
from equipoise.base.shown import shorten
from equipoise.serve.http.fault import HttpError, invalid
from equipoise.serve.http.fields import MOST_MESSAGES

_ARRIVAL_S = 30.0
"""Most seconds between the head of a request and the end of its body."""
_DISCARDED = 16
"""Bodies up to this many times too large are read to their end: a client that is still sending
would take a connection that closes for a fault of the network, and try again."""
_DISCARDED_BYTES_PER_S = 32 << 20
"""How fast one of them is read on: no faster than a tenth of a core."""
SHORT_BYTES = 64 << 10
"""Bodies that are parsed at once; longer ones must not hold others up."""
_MOST_FAULTS = 5
_MANY_FAULTS = 1_000
"""More are counted, and not described: pydantic takes 10 us for each, and nothing else runs."""
_LOOKED_AT = 64
"""Unknown fields, and entries of a list, that are looked at if there are more."""
_Body = TypeVar("_Body", bound=BaseModel)


async def read_body(
    request: Request,
    kind: type[_Body],
    most_bytes: int,
    hold: Callable[[int], None],
    admit: Callable[[], None] = lambda: None,
    spent: Callable[[float], None] = lambda _: None,
) -> _Body:
    """The body of a request.

    Args:
        request: Whose body it is.
        kind: What it holds.
        most_bytes: Its largest size.
        hold: Called with the size of each part before it is kept; may refuse it.
        admit: Called once it is here, before it is parsed; may refuse it.
        spent: Called with the seconds that parsing took on another thread, on that thread.

    Raises:
        HttpError: 400, 408, 413 or 415, or what ``hold`` or ``admit`` raises.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(
            415,
            f"The body must be JSON: send it with Content-Type: application/json, not "
            f'"{shorten(content_type, 80)}".',
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(
            415,
            "The body must not be compressed. Leave Content-Encoding out.",
            code="unsupported_media_type",
        )
    data = await _read_bytes(request, most_bytes, hold)
    admit()
    if len(data) <= SHORT_BYTES:
        return parse_body(data, kind)

    def parse() -> _Body:
        began_s = time.thread_time()
        try:
            return parse_body(data, kind)
        finally:
            spent(time.thread_time() - began_s)

    return await asyncio.to_thread(parse)


def parse_body(data: bytes, kind: type[_Body]) -> _Body:
    """A body of this kind, from its bytes.

    Raises:
        HttpError: 400; says all that is wrong.
    """
    try:
        value = parse_json(data, once=True)  # a proxy may read the first of two, and we the last
    except json.JSONDecodeError as error:
        raise invalid(
            f"The body is not JSON: {error.msg} at line {error.lineno:,}, column {error.colno:,}.",
            code="invalid_json",
        ) from None
    except ValueError as error:
        if isinstance(error, LongNumberError) and error.place:
            path = path_of(error.place)
            words = f"'{shorten(path, 120)}' has more digits than 64 bits hold."
            raise invalid(words, path) from None
        raise invalid(f"The body cannot be read: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object: {...}.", code="invalid_json")
    return judge(value, kind)


async def _read_bytes(request: Request, most_bytes: int, hold: Callable[[int], None]) -> bytes:
    too_large = HttpError(
        413,
        f"The body is too large: at most {most_bytes:,} bytes are read.",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    length = request.headers.get("content-length", "0")
    said = int(length[:20]) if length.isdigit() else 0
    if said > (most_bytes if "expect" in request.headers else _DISCARDED * most_bytes):
        raise too_large
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(_ARRIVAL_S):
            async for part in request.stream():
                size += len(part)
                if size <= most_bytes:
                    hold(len(part))
                    data += part
                elif size > _DISCARDED * most_bytes:
                    raise too_large
                else:  # whoever sends it waits, and nobody else
                    data.clear()
                    await asyncio.sleep(len(part) / _DISCARDED_BYTES_PER_S)
    except TimeoutError:
        raise HttpError(
            408,
            f"The body did not arrive within {_ARRIVAL_S:.0f} s.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise HttpError(499, "The client went away.", code="client_closed_request") from None
    if size > most_bytes:
        raise too_large
    return bytes(data)


def judge(value: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """A body of this kind.

    Raises:
        HttpError: 400; says all that is wrong.
    """
    known = _Known()
    value = known.fields_of(value, kind)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        count = error.error_count()
        faults = (
            error.errors(include_url=False) if count <= _MANY_FAULTS else _some_faults(value, kind)
        )
        count += known.left_out
    sentences = [_sentence(each["loc"], dict(each), kind) for each in faults[:_MOST_FAULTS]]
    if more := count - len(sentences):
        sentences.append(f"There are {more:,} {'more ' if sentences else ''}faults.")
    words = " ".join(sentences)
    if not faults:
        raise invalid(words)
    raise invalid(words, _param(faults[0], kind), _code(faults[0]["type"]))


class _Known:
    """Bodies without most of their unknown fields, where these are many.

    Each is a fault, for which pydantic takes 7 us while nothing else runs.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._left = _LOOKED_AT

    def fields_of(self, value: Any, kind: type[BaseModel]) -> Any:
        """An object, or a list of objects, with its known fields and the first unknown ones."""
        if isinstance(value, list):
            looked_at = [self.fields_of(each, kind) for each in value[:MOST_MESSAGES]]
            return looked_at + value[MOST_MESSAGES:]
        if not isinstance(value, dict):
            return value
        unknown = [name for name in value if name not in kind.model_fields]
        surplus = {*unknown[self._left :]}
        self._left -= len(unknown) - len(surplus)
        self.left_out += len(surplus)
        inner = {
            name: self.fields_of(value[name], models[0])
            for name, field in kind.model_fields.items()
            if name in value and (models := _models(field.annotation))
        }
        if not (surplus or inner):
            return value
        return {name: each for name, each in value.items() if name not in surplus} | inner


def _some_faults(value: Mapping[str, Any], kind: type[BaseModel]) -> list[ErrorDetails]:
    """Faults of the first entries of every list."""
    try:
        kind.model_validate(_first_parts(value, kind))
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _first_parts(value: Any, kind: type[BaseModel], place: tuple[str | int, ...] = ()) -> Any:
    if isinstance(value, list):
        return [_first_parts(each, kind, (*place, 0)) for each in value[:_LOOKED_AT]]
    if not isinstance(value, dict) or not _fields_at(kind, place):
        return value
    return {name: _first_parts(each, kind, (*place, name)) for name, each in value.items()}


def _param(fault: ErrorDetails, kind: type[BaseModel]) -> str | None:
    """The field at fault; where several are, the sentence begins with the one to change."""
    if fault["loc"]:
        return path_of(fault["loc"])
    first = str(fault.get("ctx", {}).get("error", "")).partition(" ")[0]
    return first if first in kind.model_fields else None


def path_of(place: Sequence[str | int]) -> str:
    """A place in a body as OpenAI writes it.

    >>> path_of(("messages", 0, "role"))
    'messages[0].role'
    """
    words = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in place]
    return "".join(words).lstrip(".")


def _code(kind: str) -> str:
    if kind == "extra_forbidden":
        return "unknown_parameter"
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
}


def _sentence(place: Sequence[str | int], fault: Mapping[str, Any], kind: type[BaseModel]) -> str:
    path, what, context = shorten(path_of(place), 120), fault["type"], fault.get("ctx", {})
    if what == "extra_forbidden":
        words = _fields_at(kind, place[:-1])
        hint = f" Nearest: '{nearest(str(place[-1])[:60], words)}'." if words else ""
        return f"Unknown parameter: '{path}'.{hint}"
    if what == "missing":
        return f"Missing parameter: '{path}'."
    if what == "string_unicode":
        named = f"'{path}'" if path else "The name of a field"
        return f"{named} has half of a surrogate pair, which is not text."
    if what == "value_error":
        return f"'{path}' {context['error']}" if path else str(context["error"])
    if what in _WANTED:
        return f"'{path}' must be {_WANTED[what]}, not {_shown(fault['input'])}."
    for bound, words_ in (("ge", "at least"), ("le", "at most"), ("gt", "above"), ("lt", "below")):
        if bound in context:
            limit = f"{context[bound]:g}" if isinstance(context[bound], float) else context[bound]
            return f"'{path}' must be {words_} {limit}; it is {_shown(fault['input'])}."
    if what == "literal_error":
        return f"'{path}' must be {context['expected']}, not {_shown(fault['input'])}."
    if what in ("too_long", "too_short", "string_too_long", "string_too_short"):
        edge = "at most" if "max_length" in context else "at least"
        size = context.get("max_length", context.get("min_length"))
        one, many = (
            ("character", "characters") if what.startswith("string") else ("entry", "entries")
        )
        unit = one if size == 1 else many
        return f"'{path}' must have {edge} {size:,} {unit}."
    return f"'{path}': {fault['msg']}."


def _shown(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=True, default=str), 60)


def _fields_at(kind: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Names of the fields of the object at a place."""
    fields = kind.model_fields
    for each in place:
        if isinstance(each, int):
            continue
        inner = [*_models(fields[each].annotation)] if each in fields else []
        if not inner:
            return []
        fields = inner[0].model_fields
    return [*fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in getattr(annotation, "__args__", ()) for model in _models(each)]
