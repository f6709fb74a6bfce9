"""Who may use a server, and how much of it: the tenants file.

What it decides
    The file's form::

        [tenants.research]
        keys = ["sha256:9f86d0818...", "sha256:..."]   # equipoise serve --new-key research
        weight = 2.0                    # share under load, beside the others' (default 1)
        requests_per_minute = 600       # absent: not limited
        tokens_per_minute = 100000      # prompts and answers together
        concurrency = 16                # answers at the same time

    Several keys let one be replaced while the other still works.

Kept true (tests/unit/serve/http/test_tenants.py)
    All faults of a file are reported at once, with their lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.base.shown import shorten, shown
from equipoise.schedule.batching.settings import LEAST_WEIGHT, MOST_WEIGHT
from equipoise.serve.http.keys import HASH
from equipoise.spec.run.load import TomlPath, parse_toml

OPEN = "default"
"""The tenant of a server without a tenants file."""
MOST_TENANTS = 1_000
_NO_NAME = (
    'is not a tenant\'s name. Use letters, digits, ".", "_" and "-", at most 63 of them, and begin '
    "with a letter or a digit."
)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class _Tenant(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    keys: Annotated[list[str], Field(min_length=1)]
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrency: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant and its limits; None where there is none."""

    name: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants of a server."""

    by_name: dict[str, Tenant]
    by_hash: dict[str, Tenant]
    """Empty if the server is open."""

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self.by_hash

    @property
    def weights(self) -> dict[str, float]:
        """Shares by name."""
        return {name: each.weight for name, each in self.by_name.items()}


def open_tenants() -> Tenants:
    """One tenant without a key and without limits."""
    return Tenants({OPEN: Tenant(OPEN)}, {})


def read_tenants(path: Path) -> Tenants:
    """Read a tenants file.

    Raises:
        OSError: it cannot be read.
        SpecError: all that is wrong with it, with lines.
    """
    table, lines = parse_toml(read_bytes(path), str(path))
    faults: list[tuple[int, str]] = []

    def add(place: TomlPath, message: str) -> None:
        line = next(
            (lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1
        )
        name = ".".join(map(str, place))
        faults.append((line, f"{path}:{line}  {shorten(name)}: {message}"))

    for key in table:
        if key != "tenants":
            add((key,), "no such key. A tenants file has tables [tenants.NAME].")
    named = table.get("tenants", {})
    if not isinstance(named, dict) or not named:
        add(("tenants",), "there is no tenant. Write at least one table [tenants.NAME].")
        named = {}
    if len(named) > MOST_TENANTS:
        add(("tenants",), f"{len(named):,} tenants are too many. Give {MOST_TENANTS:,} or fewer.")
    by_name, by_hash = {}, dict[str, Tenant]()
    for name, each in named.items():
        tenant = _read_tenant(name, each, add)
        if tenant is None:
            continue
        by_name[name] = tenant
        for key in each["keys"]:
            if key in by_hash:
                add(
                    ("tenants", name, "keys"),
                    f"tenant {by_hash[key].name} has the same key. Make one for each: equipoise "
                    "serve --new-key NAME",
                )
            by_hash[key] = tenant
    if faults:
        raise SpecError("\n".join(text for _, text in sorted(faults)))
    return Tenants(by_name, by_hash)


def require_name(name: str) -> None:
    """Refuse what cannot name a tenant.

    Raises:
        SpecError: it has other characters, or too many.
    """
    if not re.fullmatch(_NAME, name):
        raise SpecError(f'"{shorten(name)}" {_NO_NAME}')


def _read_tenant(name: str, table: Any, add: Any) -> Tenant | None:
    place = ("tenants", name)
    if not re.fullmatch(_NAME, name):
        add(place, _NO_NAME)
        return None
    try:
        read = _Tenant.model_validate(table)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            add((*place, *each["loc"]), _explain(dict(each)))
        return None
    wrong = [key for key in read.keys if not HASH.fullmatch(key)]
    if wrong:
        add(
            (*place, "keys"),
            "a key is kept as its digest, sha256: and 64 hexadecimal digits. Make one: equipoise "
            f"serve --new-key {name}",
        )
        return None
    return Tenant(
        name, read.weight, read.requests_per_minute, read.tokens_per_minute, read.concurrency
    )


def _explain(fault: dict[str, Any]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return f"no such key. Nearest: {nearest(str(fault['loc'][-1]), _Tenant.model_fields)}"
    if kind == "missing":
        return "is missing. Every tenant needs one: equipoise serve --new-key NAME"
    if kind == "too_short":
        return "is empty. Make a key: equipoise serve --new-key NAME"
    for bound, words in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
        if bound in context:
            return f"must be {words} {context[bound]:g}; it is {shown(fault['input'])}."
    wanted = {
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "list_type": "a list",
        "model_type": "a table",
        "finite_number": "a finite number",
    }
    return f"must be {wanted.get(kind, kind)}, not {shown(fault['input'])}."
