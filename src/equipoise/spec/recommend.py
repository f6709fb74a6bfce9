"""A run.toml with ``model.kind = "recommend"``: columns, tables, a model and its training.

What it decides
    Such a run has its own keys, since a recommender has neither tokens nor windows; the keys that
    both kinds of runs have mean the same. All faults are reported at once, each at its line.

Kept true (tests/unit/spec/test_recommend.py)
    Unknown keys, wrong types and values out of range are refused by line; flags replace keys.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from equipoise.base import read
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.base.shown import printable
from equipoise.spec.architectures import Architecture, DhenModule, Ensemble, readers_of
from equipoise.spec.run.faults import describe, explain_refusal, refuse_text
from equipoise.spec.run.load import parse_toml
from equipoise.spec.run.spec import FaultKind, FaultSpec, SpareRanks
from equipoise.spec.tables.groups import require_groups
from equipoise.spec.tables.table import SparseOptimizer
from equipoise.spec.towers import TowerKind, TowerSizes, require_hosts, require_towers

KIND = "recommend"
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class ColumnsSpec:
    """Which columns are read, and what each is."""

    source: Literal["columns", "ml-100k"] = "columns"
    path: str = ""
    """A Parquet, CSV or TSV file; relative to run.toml."""
    label: str = "label"
    positive_from: float = 1.0
    """Least value of the label that counts as positive."""
    time: str = ""
    """What rows are sorted by: numbers, or Parquet's timestamps; the file's order unless given."""
    ids: tuple[str, ...] = ()
    """Columns of one value each: a table each."""
    bags: tuple[str, ...] = ()
    """Columns of several values each, separated by blanks, or lists: a table each."""
    numbers: tuple[str, ...] = ()
    session: str = ""
    """Column whose value a session belongs to, a user's say; it need not be a table."""
    session_gap: Annotated[float, Field(gt=0)] = 1800.0
    """The longest pause inside a session, in the units of ``time``."""
    train_share: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """The earliest rows; validation and test halve the rest."""


_Count = Annotated[int, Field(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class RankModelSpec:
    """The dense part and its sizes."""

    kind: Literal["recommend"] = "recommend"
    architecture: Architecture = "dlrm"
    width: _Count = 16
    """Floats of every embedding."""
    bottom: tuple[_Count, ...] = (32,)
    """Hidden widths of the MLP for numbers."""
    top: tuple[_Count, ...] = (64, 32)
    """Hidden widths of the last MLP."""
    pooling: Literal["sum", "mean"] = "mean"
    layers: Annotated[int, Field(ge=1, le=64)] = 2
    """Layers of interaction."""
    low_rank: _Count = 16
    """Rank of a cross layer's matrix."""
    modules: tuple[DhenModule, ...] = ("dot", "linear")
    """What each layer of DHEN mixes."""
    ensemble: Ensemble = "concat"
    """How it puts the modules' vectors together."""
    vectors: _Count = 8
    """Vectors that a layer of DHEN passes on."""
    fm_vectors: _Count = 8
    """Vectors of Wukong's factorization machine."""
    linear_vectors: _Count = 8
    """Vectors of its linear compression."""
    compressed: _Count = 8
    """Columns to which its products are compressed."""
    hidden: tuple[_Count, ...] = (64,)
    """Hidden widths of the MLP behind its products."""
    towers: tuple[tuple[str, ...], ...] = ()
    """Columns of each tower, which a host holds; none: rows go to samples as they are."""
    tower_module: TowerKind = "identity"
    """What a tower makes of its vectors before they leave its host."""
    tower_vectors: Annotated[int, Field(ge=0, le=4096)] = 0
    """Vectors that leave a tower; 0: one for each of its columns."""
    tower_width: Annotated[int, Field(ge=0, le=4096)] = 0
    """Floats of each; 0: as many as of every embedding."""
    tower_low_rank: _Count = 8
    """Rank of the matrix of a cross tower."""

    @property
    def tower_sizes(self) -> TowerSizes:
        """The module of every tower."""
        return TowerSizes(
            self.tower_module,
            self.width,
            self.tower_vectors,
            self.tower_width,
            self.tower_low_rank,
        )


@dataclass(frozen=True, slots=True)
class PlacedTablesSpec:
    """How tables are placed, updated and exchanged."""

    optimizer: SparseOptimizer = "adam"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    kinds: tuple[Literal["table", "row", "table-row", "column", "data"], ...] = (
        "table",
        "row",
        "column",
        "data",
    )
    wire: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    precision: Literal["fp32", "int8", "int4", "int2"] = "fp32"
    """What rows are kept in; below fp32, a cache of fp32 rows stands before them."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """What rows do with remainders when they leave the cache."""
    cache: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Bytes of the cache, tags included, of a table's in fp32."""
    cache_policy: Literal["lru", "lfu", "trace"] = "lru"
    """Which rows stay in it; ``trace`` knows the coming steps of the epoch."""
    memory_mib: Annotated[float, Field(ge=0)] = 0.0
    """Memory of a rank for rows and their optimizer state; the others lie in files. 0: no limit."""
    deduplicate: tuple[tuple[str, ...], ...] = ()
    """Groups of columns: a group's distinct rows are sent, looked up and computed once."""


@dataclass(frozen=True, slots=True)
class RankTrainSpec:
    """The optimisation."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    batch: Annotated[int, Field(ge=1, le=1 << 24)] = 512
    """Samples of a step, over all ranks."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The learning rate of the MLPs' Adam."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle: Literal["samples", "sessions"] = "samples"
    """What an epoch shuffles; sessions stay together in order of time."""


@dataclass(frozen=True, slots=True)
class RankLayoutSpec:
    """How many ranks, and how long they wait for each other."""

    dp: Annotated[int, Field(ge=1, le=1024)] = 2
    ranks_per_host: Annotated[int, Field(ge=0, le=1024)] = 0
    """Ranks of a host, for what is placed on hosts and counted between them; 0: all are on one."""
    zero: Literal[0, 3] = 0
    """3: the dense part is divided over the ranks of a host, and copied on hosts."""
    deadline_s: Annotated[float | None, Field(gt=0, le=36_000)] = None
    """Longest wait of one rank for another; ten steps and at least 30 s unless given."""


@dataclass(frozen=True, slots=True)
class RankSaveSpec:
    """When to save."""

    every_steps: Annotated[int, Field(ge=1)] = 200


@dataclass(frozen=True, slots=True)
class RankFaultSpec:
    """What follows a fault; as ``[fault]`` of a language model's run."""

    on: tuple[FaultKind, ...] = ("killed", "failed", "hung")
    restarts: Annotated[int, Field(ge=0, le=10_000)] = 8
    within_s: Annotated[float, Field(gt=0, le=3.2e7)] = 3600.0
    least_dp: Annotated[int | None, Field(ge=1)] = None
    spares: SpareRanks = "never"
    wait_s: Annotated[float | None, Field(ge=0, le=3.2e7)] = None

    def rules(self) -> FaultSpec:
        """What ``fault.policy`` obeys."""
        return FaultSpec(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class RecommendSpec:
    """A whole run.toml of a recommender."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "recommend"
    model: RankModelSpec = field(default_factory=RankModelSpec)
    data: ColumnsSpec = field(default_factory=ColumnsSpec)
    tables: PlacedTablesSpec = field(default_factory=PlacedTablesSpec)
    train: RankTrainSpec = field(default_factory=RankTrainSpec)
    layout: RankLayoutSpec = field(default_factory=RankLayoutSpec)
    checkpoint: RankSaveSpec = field(default_factory=RankSaveSpec)
    fault: RankFaultSpec = field(default_factory=RankFaultSpec)


_READ_IF: Mapping[str, tuple[Callable[[RecommendSpec], bool], str]] = {
    "data.path": (lambda s: s.data.source == "columns", 'data.source is "columns"'),
    "data.session_gap": (
        lambda s: bool(s.data.session and s.data.time),
        "data.session and data.time are given",
    ),
    "model.low_rank": (
        lambda s: s.model.architecture != "dhen" or "cross" in s.model.modules,
        'model.modules has "cross"',
    ),
    "model.tower_low_rank": (
        lambda s: s.model.tower_module == "cross",
        'model.tower_module is "cross"',
    ),
    "tables.rounding": (lambda s: s.tables.precision != "fp32", "tables.precision is below fp32"),
    "tables.cache": (lambda s: s.tables.precision != "fp32", "tables.precision is below fp32"),
    "tables.cache_policy": (
        lambda s: s.tables.precision != "fp32" or s.tables.memory_mib > 0,
        "tables.precision is below fp32 or tables.memory_mib is given",
    ),
}
"""Keys that only some runs read: which, and in words."""


def is_recommend(path: Path | None, overrides: Sequence[tuple[str, str]] = ()) -> bool:
    """Whether a run.toml, or a flag, asks for a recommender; False where it cannot be read."""
    kind = dict(overrides).get("model.kind")
    if kind is not None or path is None:
        return kind == KIND
    try:
        table, _ = parse_toml(read_bytes(path), path.name)
    except (OSError, SpecError):
        return False  # whoever reads it as a run says what is wrong
    model = table.get("model")
    return isinstance(model, dict) and model.get("kind") == KIND


def read_recommend(
    path: Path | None, overrides: Sequence[tuple[str, str]] = ()
) -> tuple[RecommendSpec, Path]:
    """The run that a file and flags describe, and the folder that its paths refer to.

    Raises:
        SpecError: every fault, a line each.
    """
    faults: list[tuple[int, str]] = []
    given: dict[str, tuple[Any, str, int]] = {}
    if path is not None:
        table, lines = parse_toml(read_bytes(path), path.name)
        for name, value in table.items():
            if name in _sections() and not isinstance(value, dict):
                line = lines[(name,)]
                faults.append(
                    (line, f"{path.name}:{line}  {name}: needs a table, got {describe(value)}.")
                )
                continue
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, item in entries:
                dotted = f"{name}.{key}" if key else name
                line = lines[(name, key) if key else (name,)]
                given[dotted] = (item, f"{path.name}:{line}  {printable(dotted)}", line)
    for place, (name, text) in enumerate(overrides):
        given[name] = (_value(name, text), f"--{name}", 1_000_000 + place)
    read_only: list[tuple[int, str, tuple[str, ...]]] = []
    sections: dict[str, dict[str, Any]] = {name: {} for name in ("", *_sections())}
    for dotted, (value, label, line) in given.items():
        section, _, key = dotted.rpartition(".")
        hints = _hints().get(section, {})
        if key not in hints:
            names = [f"{s}.{k}".lstrip(".") for s, row in _hints().items() for k in row]
            faults.append((line, f"{label}: no such key. Nearest: {nearest(dotted, names)}"))
            continue
        try:
            judged = TypeAdapter(hints[key], config=_STRICT).validate_python(_frozen(value))
        except ValidationError as error:
            faults.append((line, f"{label}: {explain_refusal(hints[key], error)}"))
            continue
        if (words := _refuse_texts(judged)) is not None:
            faults.append((line, f"{label}: {words}"))
            continue
        sections[section][key] = judged
        if section == "model" and (readers := readers_of(key)):
            read_only.append((line, label, readers))
    architecture = sections["model"].get("architecture", RankModelSpec().architecture)
    faults += [
        (
            line,
            f'{label}: model.architecture = "{architecture}" does not read it; '
            f"{', '.join(readers)} {'does' if len(readers) == 1 else 'do'}. Leave it out.",
        )
        for line, label, readers in read_only
        if architecture not in readers
    ]
    if faults:
        raise SpecError("\n".join(text for _, text in sorted(faults)))
    spec = RecommendSpec(
        **sections[""], **{name: kind(**sections[name]) for name, kind in _sections().items()}
    )
    _require(spec)
    if unread := [
        (given[key][2], f"{given[key][1]}: is read only where {words}. Leave it out.")
        for key, (is_read, words) in _READ_IF.items()
        if key in given and not is_read(spec)
    ]:
        raise SpecError("\n".join(text for _, text in sorted(unread)))
    return spec, Path.cwd() if path is None else path.absolute().parent


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _refuse_texts(value: Any) -> str | None:
    """What is wrong with a text, or with the first such text of a list."""
    if isinstance(value, tuple):
        return next((words for each in value if (words := _refuse_texts(each)) is not None), None)
    return refuse_text(value) if isinstance(value, str) else None


def _require(spec: RecommendSpec) -> None:
    if not (spec.data.ids or spec.data.bags):
        raise SpecError(
            "data.ids and data.bags are empty, so there is no table. List the columns of ids."
        )
    if spec.data.source == "columns" and not spec.data.path:
        raise SpecError(
            "data.path is missing. Set it to a Parquet, CSV or TSV file, or set data.source to "
            '"ml-100k".'
        )
    doubled = [*spec.data.ids, *spec.data.bags]
    if len(set(doubled)) < len(doubled):
        raise SpecError("data.ids and data.bags name one column twice. Name each once.")
    if not spec.tables.kinds:
        kinds = "table, row, table-row, column, data"
        raise SpecError(f"tables.kinds is empty, so no table has a place. List some of {kinds}.")
    if len(set(spec.data.numbers)) < len(spec.data.numbers):
        raise SpecError("data.numbers names one column twice. Name each once.")
    if spec.data.label in (*doubled, *spec.data.numbers):
        raise SpecError(
            f'data.label, "{spec.data.label}", is also a feature, so a model would read the '
            "answer. Take it out of data.ids, data.bags and data.numbers."
        )
    if spec.train.shuffle == "sessions" and not spec.data.session:
        raise SpecError(
            'train.shuffle = "sessions" needs data.session, the column that a session belongs to. '
            "Name it, or shuffle samples."
        )
    if spec.tables.precision != "fp32" and set(spec.tables.kinds) == {"column"}:
        raise SpecError(
            f'tables.precision = "{spec.tables.precision}": its rows have one scale each and are '
            "not divided by columns. Add another kind to tables.kinds."
        )
    if spec.tables.precision != "fp32" and spec.tables.memory_mib:
        raise SpecError(
            f'tables.precision = "{spec.tables.precision}" and tables.memory_mib = '
            f"{spec.tables.memory_mib:g}: files hold rows as fp32. Set one of them."
        )
    require_groups(spec.tables.deduplicate, (*spec.data.ids, *spec.data.bags), spec.data.numbers)
    columns, shares = (*spec.data.ids, *spec.data.bags), bool(spec.tables.deduplicate)
    require_towers(spec.model.towers, spec.model.tower_sizes, columns, shares_rows=shares)
    require_hosts(len(spec.model.towers), spec.layout.dp, spec.layout.ranks_per_host)
    if spec.layout.zero and spec.layout.ranks_per_host == 1 < spec.layout.dp:
        raise SpecError(
            "layout.zero = 3 divides the dense part over the ranks of a host, and "
            "layout.ranks_per_host = 1. Give 2 or more, or set layout.zero = 0."
        )


def _sections() -> Mapping[str, Any]:
    return {
        each.name: each.default_factory
        for each in dataclasses.fields(RecommendSpec)
        if each.default_factory is not dataclasses.MISSING
    }


def _hints() -> dict[str, dict[str, Any]]:
    """The type of each key, by section."""
    hints = {name: get_type_hints(kind, include_extras=True) for name, kind in _sections().items()}
    return {"": {"name": get_type_hints(RecommendSpec, include_extras=True)["name"]}, **hints}


def _value(name: str, text: str) -> Any:
    section, _, key = name.rpartition(".")
    if _hints().get(section, {}).get(key) is str:
        return text
    try:
        table = read.parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text
