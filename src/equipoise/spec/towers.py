"""Towers of a recommender: which columns are condensed together, and to what.

What it decides
    ``model.towers`` lists the columns of each tower, so that the model is the same on any layout.
    A layout deals whole towers to hosts.

Kept true (tests/unit/spec/test_towers.py)
    What cannot be a tower, or does not divide over hosts, is refused in one sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest

TowerKind = Literal["identity", "linear", "cross"]
Towers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """The module of every tower, and what leaves it."""

    module: TowerKind
    entering: int
    """Floats of a vector that enters."""
    vectors: int
    """Vectors that leave; 0: as many as enter."""
    width: int
    """Floats of each; 0: as many as entered."""
    low_rank: int
    """Rank of the cross module's matrix."""

    def leaving(self, features: int) -> tuple[int, int]:
        """Vectors that leave a tower of some features, and floats of each."""
        return self.vectors or features, self.width or self.entering

    def count_weights(self, features: int) -> int:
        """Weights of the module of a tower.

        >>> TowerSizes("linear", 16, 2, 8, 4).count_weights(5)
        146
        """
        flat = features * self.entering
        cross = (2 * self.low_rank + 1) * flat if self.module == "cross" else 0
        return cross + features * self.vectors + (self.entering + 1) * self.width

    def compression(self, towers: Sequence[Sequence[str]]) -> float:
        """Floats that enter all towers over those that leave."""
        entering = sum(map(len, towers)) * self.entering
        left = [self.leaving(len(tower)) for tower in towers]
        return entering / sum(vectors * width for vectors, width in left)


def require_towers(
    towers: Towers, sizes: TowerSizes, columns: Sequence[str], *, shares_rows: bool
) -> None:
    """Refuse towers that do not hold each column once, and modules that condense nothing.

    Args:
        towers: The columns of each.
        sizes: Their module.
        columns: All columns that have a table.
        shares_rows: Whether the run sends rows that samples share once.

    Raises:
        SpecError: says what, and what to do.
    """
    if not towers:
        if sizes.module != "identity" or sizes.vectors or sizes.width:
            raise SpecError(
                "model.tower_module, tower_vectors and tower_width need model.towers, the columns "
                "of each tower. Give it, or leave them out."
            )
        return
    _require_columns(towers, columns)
    _require_sizes(towers, sizes)
    if shares_rows:
        raise SpecError(
            "model.towers and tables.deduplicate: a tower condenses each sample's own rows. Leave "
            "one of them out."
        )


def _require_columns(towers: Towers, columns: Sequence[str]) -> None:
    if len(towers) > len(columns) or not all(towers):
        raise SpecError(
            f"model.towers has {len(towers)} towers, {sum(map(bool, towers))} of them with "
            f"columns, for {len(columns)} columns of ids. Give at most {len(columns)} towers, each "
            "with a column."
        )
    named: set[str] = set()
    for name in (each for tower in towers for each in tower):
        if name not in columns:
            raise SpecError(
                f'model.towers: "{name}" is not among data.ids and data.bags. Nearest: '
                f'"{nearest(name, list(columns))}".'
            )
        if name in named:
            raise SpecError(f'model.towers names "{name}" twice. Name it once.')
        named.add(name)
    if left := [name for name in columns if name not in named]:
        raise SpecError(
            f"model.towers leaves out {', '.join(left)}. Put every column of data.ids and "
            "data.bags into one tower."
        )


def _require_sizes(towers: Towers, sizes: TowerSizes) -> None:
    if sizes.module == "identity" and (sizes.vectors or sizes.width):
        raise SpecError(
            'model.tower_module = "identity" passes vectors on as they are. Leave out '
            'model.tower_vectors and model.tower_width, or choose "linear" or "cross".'
        )
    if sizes.module == "linear" and not (sizes.vectors or sizes.width):
        raise SpecError(
            'model.tower_module = "linear" has nothing to do. Give model.tower_vectors, '
            "model.tower_width or both."
        )
    least = min(map(len, towers))
    if sizes.vectors > least:
        raise SpecError(
            f"model.tower_vectors = {sizes.vectors} is more than the {least} vectors that enter "
            f"tower {[len(each) for each in towers].index(least) + 1}. Give at most {least}."
        )
    if sizes.width > sizes.entering:
        raise SpecError(
            f"model.tower_width = {sizes.width} is more than model.width = {sizes.entering}. Give "
            f"at most {sizes.entering}."
        )


def require_hosts(towers: int, ranks: int, ranks_per_host: int) -> None:
    """Refuse ranks that do not fill hosts, and towers that do not divide over them.

    Raises:
        SpecError: says what, and what to do.
    """
    per_host = ranks_per_host or ranks
    if ranks % per_host:
        raise SpecError(
            f"layout.dp = {ranks} does not fill hosts of layout.ranks_per_host = {per_host}. Give "
            f"a multiple of {per_host}."
        )
    hosts = ranks // per_host
    if towers and towers % hosts:
        raise SpecError(
            f"model.towers has {towers} towers for {hosts} hosts (layout.dp = {ranks}, "
            f"layout.ranks_per_host = {per_host}), and each host holds as many whole towers. Give "
            f"a multiple of {hosts}."
        )
