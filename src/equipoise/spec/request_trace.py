"""Traces of requests: who asked when, with how long a prompt, and what was generated.

Why
    Every published trace names its columns differently. A row that is silently misread changes
    every answer that follows, so each row must be whole, and is refused with its line.

What it decides
    The form is recognised by its names:

    ============ ======================================================================
    ours         JSON lines: arrival_s, prompt_tokens, output_tokens; optional tenant,
                 most_tokens, prefix_group, prefix_tokens
    APEX         JSON lines: StartTimeOffset [ns], ContextTokens, GeneratedTokens
    Azure        CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens; optional tenant
    ============ ======================================================================

    Requests of one ``prefix_group`` and one tenant begin with the same ``prefix_tokens`` tokens.
    Dates count from the first request. Requests are sorted by arrival and then by their sizes, so
    the order of lines with the same time changes nothing.

Kept true (tests/unit/spec/test_request_trace.py)
    The forms read alike; the order of lines does not matter; each faulty row is refused by line.

Sources
    Azure LLM inference trace 2023; APEX, arXiv:2411.17651, simulation traces.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from equipoise.base.errors import DataError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import parse_json, read_text
from equipoise.base.shown import shorten, shown

_MOST_TOKENS = 2**31 - 1
_MOST_S = 1e10
_FORMS = ("StartTimeOffset", "TIMESTAMP")
"""The key by which each form is known; ours has none of them."""
_KEYS = (
    "arrival_s",
    "tenant",
    "prompt_tokens",
    "output_tokens",
    "most_tokens",
    "prefix_group",
    "prefix_tokens",
)


@dataclass(frozen=True, slots=True, order=True)
class TracedRequest:
    """One request of a trace."""

    arrival_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    """Tokens that were generated."""
    most_tokens: int
    """Tokens that it allowed; at least those that were generated."""
    prefix_group: str = ""
    prefix_tokens: int = 0
    """First tokens of the prompt, which are those of every request of its group and tenant."""


def require_traced(request: TracedRequest) -> None:
    """Refuse a request that no file could hold.

    Raises:
        SpecError: its time or one of its sizes is out of range.
    """
    at_s: object = request.arrival_s
    if isinstance(at_s, bool) or not isinstance(at_s, Real):
        raise SpecError(
            f"A request arrives at {shown(at_s)} s. Give a time of 0 to {_MOST_S:,.0f}."
        )
    if not 0 <= request.arrival_s <= _MOST_S:
        raise SpecError(
            f"A request arrives at {request.arrival_s:g} s. Give a time of 0 to {_MOST_S:,.0f}."
        )
    for name, tokens, least, most in (
        ("prompt_tokens", request.prompt_tokens, 1, _MOST_TOKENS),
        ("output_tokens", request.output_tokens, 0, _MOST_TOKENS),
        ("most_tokens", request.most_tokens, 0, _MOST_TOKENS),
        ("prefix_tokens", request.prefix_tokens, 0, request.prompt_tokens),
    ):
        if not _is_whole(tokens) or not least <= tokens <= most:
            raise SpecError(
                f"A request has {name} = {tokens}. Give a whole number of {least:,} to {most:,}."
            )
    if bool(request.prefix_group) != bool(request.prefix_tokens):
        raise SpecError("A request needs both prefix_group and prefix_tokens, or neither.")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def read_request_trace(path: Path, *, vocab: int | None = None) -> tuple[TracedRequest, ...]:
    """Read a trace, sorted by arrival.

    Args:
        path: The file.
        vocab: Of the model that serves it [tokens]; says whether tokens that stand where their
            number belongs may be that model's.

    Raises:
        DataError: the file cannot be read, has no request, or a row is wrong; names its line.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise DataError(f"No such file: {path}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read: {reason.lower()}.") from None
    except ValueError as error:
        raise DataError(f"{path} holds no requests: {error}.") from None
    first = text.lstrip()[:1]
    is_json = first in ("{", "[", "") or path.suffix == ".jsonl"
    rows = _json_rows(path, text) if is_json else _csv_rows(path, text)
    forms = [next((each for each in _FORMS if each in row), "") for _, row in rows]
    for (line, _), form in zip(rows, forms, strict=True):
        if form != forms[0]:
            raise DataError(
                f"{path}:{line}  is of another form than line {rows[0][0]}, which has "
                f"{forms[0] or 'arrival_s'}. Give one form a file."
            )
    requests = [_request(f"{path}:{line}", row, vocab) for line, row in rows]
    if not requests:
        raise DataError(
            f"{path} holds no requests. Give JSON lines with arrival_s, prompt_tokens and "
            "output_tokens, or a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens."
        )
    if any("TIMESTAMP" in row for _, row in rows[:1]):
        begin_s = min(each.arrival_s for each in requests)
        requests = [_later(each, -begin_s) for each in requests]
    return tuple(sorted(requests))


def _later(request: TracedRequest, by_s: float) -> TracedRequest:
    return TracedRequest(
        request.arrival_s + by_s,
        request.tenant,
        request.prompt_tokens,
        request.output_tokens,
        request.most_tokens,
    )


def _json_rows(path: Path, text: str) -> list[tuple[int, Mapping[str, Any]]]:
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for line, each in enumerate(text.split("\n"), 1):  # a name may hold other marks of lines
        if not each.strip():
            continue
        try:
            row = parse_json(each, once=True)
        except ValueError as error:
            raise DataError(f"{path}:{line}  {error}.") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{line}  is {shown(row)}. Each line must be an object in braces."
            )
        rows.append((line, row))
    return rows


def _csv_rows(path: Path, text: str) -> list[tuple[int, Mapping[str, Any]]]:
    # Strict: a quote that nobody closes would take all lines after it into one tenant's name.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [each.strip() for each in reader.fieldnames or ()]
    except csv.Error as error:
        raise DataError(f"{path}:1  is not CSV: {error}.") from None
    missing = [
        each for each in ("TIMESTAMP", "ContextTokens", "GeneratedTokens") if each not in names
    ]
    if missing:
        raise DataError(
            f"{path}:1  has no column {missing[0]}. A CSV trace needs TIMESTAMP, ContextTokens and "
            f"GeneratedTokens; these are {shorten(', '.join(names))}."
        )
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise DataError(f"{path}:1  has column {shorten(twice)} twice. Give it once.")
    reader.fieldnames = names
    return list(_numbered(path, reader))


def _numbered(path: Path, reader: "csv.DictReader[str]") -> Iterator[tuple[int, Mapping[str, Any]]]:
    begin = reader.line_num + 1
    try:
        for row in reader:
            if None in row:
                columns = len(reader.fieldnames or ())
                raise DataError(
                    f"{path}:{reader.line_num}  has {columns + len(row[None]):,} columns, and the "
                    f"first line {columns:,}."
                )
            yield reader.line_num, row
            begin = reader.line_num + 1
    except csv.Error as error:
        said = str(error)
        if said == "unexpected end of data":
            said = "a quote is not closed"
        elif "expected after" in said:
            said = "a value goes on behind its closing quote"
        raise DataError(f"{path}:{begin}  is not CSV: {said}.") from None


def _request(where: str, row: Mapping[str, Any], vocab: int | None) -> TracedRequest:
    for key, value in row.items():
        if isinstance(value, list):
            raise _refuse_tokens(where, str(key), value, vocab)
    if "StartTimeOffset" in row:
        at_s = _moment(where, row, "StartTimeOffset", _MOST_S * 1e9) / 1e9
        prompt = _tokens(where, row, "ContextTokens", 1)
        output = _tokens(where, row, "GeneratedTokens", 0)
        return TracedRequest(at_s, _name(where, row, "tenant"), prompt, output, output)
    if "TIMESTAMP" in row:
        at_s = _date_s(where, row)
        prompt = _tokens(where, row, "ContextTokens", 1)
        output = _tokens(where, row, "GeneratedTokens", 0)
        return TracedRequest(at_s, _name(where, row, "tenant"), prompt, output, output)
    for key in row:
        if key not in _KEYS:
            raise DataError(
                f"{where}  {shorten(str(key))}: no such key. Nearest: {nearest(str(key), _KEYS)}. "
                f"All: {', '.join(_KEYS)}."
            )
    at_s = _moment(where, row, "arrival_s", _MOST_S)
    prompt = _tokens(where, row, "prompt_tokens", 1)
    output = _tokens(where, row, "output_tokens", 0)
    most = _tokens(where, row, "most_tokens", output) if "most_tokens" in row else output
    group = _name(where, row, "prefix_group")
    prefix = _tokens(where, row, "prefix_tokens", 0) if "prefix_tokens" in row else 0
    if bool(group) != bool(prefix):
        raise DataError(f"{where}  needs both prefix_group and prefix_tokens, or neither.")
    if prefix > prompt:
        raise DataError(
            f"{where}  prefix_tokens is {prefix:,}, and the prompt has {prompt:,} tokens. Give at "
            "most those."
        )
    return TracedRequest(at_s, _name(where, row, "tenant"), prompt, output, most, group, prefix)


def _moment(where: str, row: Mapping[str, Any], key: str, most: float) -> float:
    """A number of 0 to ``most``, beyond which a float cannot tell milliseconds apart."""
    value = _given(where, row, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        raise DataError(f"{where}  {key} is {shown(value)}. Give a number of 0 to {most:,.0f}.")
    return float(value)


def _date_s(where: str, row: Mapping[str, Any]) -> float:
    value = _given(where, row, "TIMESTAMP")
    try:
        moment = datetime.fromisoformat(str(value).strip())
        # Without a zone, hours that a clock is put forward or back would be lost or come twice.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise DataError(f"{where}  TIMESTAMP is {shown(value)}. Give a date and time.") from None


def _given(where: str, row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise DataError(f"{where}  has no {key}.")
    return row[key]


def _refuse_tokens(where: str, key: str, value: list[Any], vocab: int | None) -> DataError:
    """Tokens where their number belongs; of another vocabulary, if one of them says so."""
    named = shorten(key)
    count = f"{key if key in _KEYS else 'prompt_tokens'} = {len(value)}"
    numbers = [each for each in value if isinstance(each, int) and not isinstance(each, bool)]
    strange = [each for each in numbers if vocab is not None and not 0 <= each < vocab]
    if strange:
        return DataError(
            f"{where}  {named} has token {shown(max(strange, key=abs))}, and the model's "
            f"vocabulary has {vocab:,}, counted from 0. Split the text with the model's own "
            f"tokenizer, and give the number of its tokens; {count} is that of the other one."
        )
    return DataError(
        f"{where}  {named} is a list of {len(value):,}. A trace has numbers of tokens, and not the "
        f"tokens, which need not be in the vocabulary of the model that serves them. Give {count}."
    )


def _tokens(where: str, row: Mapping[str, Any], key: str, least: int) -> int:
    if key not in row:
        raise DataError(f"{where}  has no {key}.")
    value = row[key]
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        value = int(value) if len(value) < 20 else value
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= _MOST_TOKENS:
        raise DataError(
            f"{where}  {key} is {shown(row[key])}. Give a whole number of {least:,} to "
            f"{_MOST_TOKENS:,}."
        )
    return int(value)


def _name(where: str, row: Mapping[str, Any], key: str) -> str:
    value = row.get(key, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}  {key} is {shown(value)}. Give a name.")
    return str(value)
