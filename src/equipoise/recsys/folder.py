"""The folder of a recommender's run: what its ranks read, and its record.

What it decides
    ``spec.json`` is the run as its ranks obey it, with the folder that its paths begin from and the
    rates by which tables are placed. Data, model, the order of samples and these rates stay as they
    were when the run began.

Kept true (tests/multi/recsys/test_train.py)
    A folder that holds another run is refused, with the key that differs.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from equipoise.base.durable import write_whole
from equipoise.base.errors import CheckpointError, SpecError
from equipoise.base.read import read_json, reason
from equipoise.cost.recommend import TableRates
from equipoise.spec.names import RANKED, RECOMMEND, unread_record
from equipoise.spec.recommend import RecommendSpec

_SAME = (
    "data",
    "model",
    "train.batch",
    "train.seed",
    "train.shuffle",
    "tables.optimizer",
    "tables.precision",
    "tables.rounding",
    "tables.cache",
    "tables.cache_policy",
    "tables.memory_mib",
)
"""What a run that goes on must not change."""
_SAME_IN_FILES = ("layout.dp", "layout.ranks_per_host", "tables.kinds")
"""Further such keys where rows lie in files, which belong to one rank's shards."""
_RATES = "rates"
_TABLES = tuple(each.name for each in dataclasses.fields(RecommendSpec) if each.name != "name")


def require_held(folder: Path, spec: RecommendSpec) -> None:
    """Refuse the folder of a run of other data, another model or another order of samples.

    Raises:
        CheckpointError: names the key that differs; or the folder's file is damaged.
    """
    file = folder / RANKED
    if file.is_file():
        theirs = _tables_of(file)
        held = {
            f"{section}.{key}": value
            for section, table in theirs.items()
            for key, value in table.items()
        }
        if changed := changed_key(spec, held):
            raise CheckpointError(
                f"{folder} holds a run with another {changed}. Give it back its value, or "
                "choose another folder with --out."
            )


def prepare(folder: Path, spec: RecommendSpec, base: Path, rates: TableRates | None = None) -> None:
    """Write what ranks read.

    Args:
        folder: The run's.
        spec: The run.
        base: Where its relative paths begin.
        rates: By which its tables are placed; assumed unless given.

    Raises:
        CheckpointError: as ``require_held``.
    """
    require_held(folder, spec)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"base": str(base), _RATES: dataclasses.asdict(rates or TableRates())}
    write_whole(folder / RANKED, json.dumps(_plain(spec) | facts, indent=1))


def held_rates(folder: Path) -> TableRates | None:
    """The rates by which a run's tables are placed, on every rank and whenever it goes on.

    None before it is prepared. A run of an earlier version was placed by the assumed ones.

    Raises:
        CheckpointError: the folder's file is damaged.
    """
    file = folder / RANKED
    if not file.is_file():
        return None
    _tables_of(file)
    facts = read_json(file).get(_RATES, {})
    try:
        return TypeAdapter(TableRates).validate_python(facts)
    except ValidationError as error:
        raise _damaged(file, "its rates are not numbers") from error


def fixed_keys(spec: RecommendSpec) -> dict[str, Any]:
    """The values of all keys that a run which goes on must not change, by dotted name."""
    tables, fixed = _plain(spec), dict[str, Any]()
    for name in (*_SAME, *(_SAME_IN_FILES if spec.tables.memory_mib else ())):
        section, _, key = name.partition(".")
        own = {key: tables[section][key]} if key else tables[section]
        fixed |= {f"{section}.{each}": value for each, value in own.items()}
    return fixed


def changed_key(spec: RecommendSpec, held: Mapping[str, Any]) -> str:
    """The first such key that has another value in ``held``; empty if none has.

    A key that ``held`` lacks, since an earlier version did not know it, had the effect of its
    default.
    """
    unset = _plain(RecommendSpec())
    for name, value in fixed_keys(spec).items():
        section, _, key = name.partition(".")
        if held.get(name, unset[section][key]) != value:
            return name
    return ""


def _plain(spec: RecommendSpec) -> dict[str, Any]:
    """A run as its JSON is read again."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec)))
    return plain


def read_prepared(folder: Path) -> tuple[RecommendSpec, Path]:
    """The run of a folder, and where its relative paths begin.

    Raises:
        SpecError: nobody has prepared it.
    """
    try:
        facts = json.loads((folder / RANKED).read_text("utf-8"))
        base = Path(facts.pop("base"))
        facts.pop(_RATES, None)
        return TypeAdapter(RecommendSpec).validate_python(facts), base
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise SpecError(
            f"{folder} holds no readable {RANKED}: it is not the folder of a recommender of this "
            "version. Start it with `equipoise train run.toml`."
        ) from error


def read_trained(folder: Path) -> dict[str, Any]:
    """The record of a run; empty before its ranks have ended once.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = folder / RECOMMEND
    try:
        record = read_json(file) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(unread_record(file, reason(error))) from None
    if not isinstance(record, dict):
        raise CheckpointError(unread_record(file, "it does not hold a JSON object"))
    return record


def _tables_of(file: Path) -> dict[str, Any]:
    """The tables of a run that a folder holds.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        spec = read_json(file)
    except (OSError, ValueError) as error:
        raise _damaged(file, reason(error)) from None
    tables = {} if not isinstance(spec, dict) else {k: v for k, v in spec.items() if k in _TABLES}
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise _damaged(file, "it does not hold a run's tables")
    return tables


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {why}. Copy it from a backup, or choose another folder with --out."
    )
