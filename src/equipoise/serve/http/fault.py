"""Errors as OpenAI's clients expect them: a status, and ``{"error": {...}}`` as the body.

Sources
    OpenAI's API reference, "Error codes"; openai-python retries 408, 409, 429 and 5xx, and obeys
    ``retry-after-ms``, ``retry-after`` and ``x-should-retry``.
"""

import math
from collections.abc import Mapping
from typing import Any

INVALID = "invalid_request_error"


class HttpError(Exception):
    """A request that is refused, or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.kind, self.param, self.code = kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> HttpError:
    """A 400 that names the field at fault."""
    return HttpError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: float) -> HttpError:
    """A 503 that says when to try again."""
    return HttpError(
        503,
        message,
        kind="overloaded_error",
        code="overloaded",
        headers=retry_headers(retry_after_s),
    )


def retry_headers(seconds: float) -> dict[str, str]:
    """When a client should try again, for clients that count seconds and those that count ms."""
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def failed(message: str = "The server failed to answer. Its log says why.") -> HttpError:
    """A 500."""
    return HttpError(500, message, kind="server_error", code="internal_error")


def too_long(
    limit: int,
    prompt_tokens: int,
    field: str,
    most_tokens: int | None = None,
    most_name: str = "",
    *,
    is_least: bool = False,
) -> HttpError:
    """What a context refuses, by the field of the prompt and the one that asks for the answer."""
    what = "input" if field == "input" else "prompt"
    count = f"{'at least ' * is_least}{prompt_tokens:,}"
    parts = f"the {what} has {count} token{'s' * (prompt_tokens != 1)}"
    if most_tokens:
        parts += f" and the answer may have {most_tokens:,} ({most_name}), together "
        parts += f"{prompt_tokens + most_tokens:,}"
    elif prompt_tokens == limit:
        parts += ", which leaves none for an answer"
    fix = "Shorten the input." if field == "input" else "Shorten the prompt or ask for fewer."
    return HttpError(
        400,
        f"The model's context is {limit:,} tokens; {parts}. {fix}",
        param=most_name if most_tokens and prompt_tokens < limit else field,
        code="context_length_exceeded",
    )
