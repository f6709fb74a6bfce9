"""Where tokens' experts probably are, learned from text, before any router has chosen.

What it decides
    A *route* is the experts that a token chose in all layers. A table has, for tokens and for
    pairs of a token and the one before it, which share of their rows each rank's experts computed
    in the text that was counted. A pair that was seen a few times leans on its token, and a token
    on all tokens: a share is ``(rows here + 4 x the share it leans on) / (rows + 4)``, in tokens. A
    token that was never seen has the share of all.

    Predictions decide where tokens lie and nothing else: one that is wrong costs its rows' travel.

Kept true (tests/unit/balance/expert/test_routes.py)
    A table that is written and read predicts the same; a file that is not one is refused; rates are
    those of counting rows one by one.

Sources
    Tables of tokens and of what precedes them: Speculative MoE, arXiv:2503.04398.
"""

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.balance.expert.deal import order_tokens
from equipoise.base.arrays import Ints
from equipoise.base.digest import digest
from equipoise.base.errors import SpecError
from equipoise.spec.layout import rows_of
from equipoise.spec.model.presets import ModelSpec

ROUTES = "routes.npz"
"""Its file in the folder of a model."""

NO_TOKEN = -1
"""The token before the first of a document."""

_SCALE = 1 << 16
_LEANS = 4
"""Tokens that what is known of rarer ones weighs."""
_LEAST_PAIRS = 2
"""Times that a pair was seen, to be kept."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRoutes:
    """What routers chose for the tokens of a text, in order."""

    tokens: Ints
    """int64 [T]."""
    previous: Ints
    """The token before each, or ``NO_TOKEN``, int64 [T]."""
    chosen: Ints
    """Experts of each token in each layer, int64 [T, layers, K]."""

    def counts(self, experts: int) -> Ints:
        """How often each different token chose each expert, int64 [kinds, layers, X].

        Raises:
            SpecError: a token chose an expert that does not exist.
        """
        if (wrong := (self.chosen < 0) | (self.chosen >= experts)).any():
            token, layer, _ = np.argwhere(wrong)[0]
            raise SpecError(
                f"Token {token} chose expert {self.chosen[wrong][0]} in layer {layer}, and there "
                f"are {experts}. Count the routes of this model."
            )
        kinds, at = np.unique(self.tokens, return_inverse=True)
        tokens, layers, top_k = self.chosen.shape
        counts = np.zeros((len(kinds), layers, experts), dtype=np.int64)
        where = np.broadcast_to(at.reshape(-1, 1, 1), self.chosen.shape)
        layer = np.broadcast_to(np.arange(layers)[:, np.newaxis], (tokens, layers, top_k))
        np.add.at(counts, (where, layer, self.chosen), 1)
        return counts

    def rows_on(self, ranks_LX: Ints, ranks: int) -> Ints:
        """Rows of each token on each rank, over all layers, int64 [T, ranks]."""
        where = ranks_LX[np.arange(self.chosen.shape[1])[:, np.newaxis], self.chosen]
        flat = where.reshape(len(where), -1)
        columns = [(flat == rank).sum(axis=1) for rank in range(ranks)]
        return np.stack(columns, axis=1).astype(np.int64)

    @property
    def digest(self) -> str:
        """Equal for equal texts, whatever was chosen."""
        return digest([self.tokens, self.previous])


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """Shares of rows on each rank, in parts of 65,536, by token and by pair of tokens."""

    vocab: int
    """Tokens that there may be."""
    text: str
    """``ChosenRoutes.digest`` of the text that was counted."""
    unseen: Ints
    """What is predicted for a token that is not in the table, int64 [ranks]."""
    tokens: Ints
    """Those in the table, ascending, int64 [n]."""
    token_values: Ints
    """int64 [n, ranks]."""
    pairs: Ints
    """``previous x vocab + token`` of those in the table, ascending, int64 [m]."""
    pair_values: Ints
    """int64 [m, ranks]."""
    made_from: tuple[int, ...] = ()
    """``routed_sizes`` of the model that chose; () in a table that does not say."""
    tokenizer: str = ""
    """Digest of the text's tokens by their ids; "" in a table that does not say."""

    @property
    def ranks(self) -> int:
        """How many ranks the experts were placed on."""
        return len(self.unseen)

    @property
    def digest(self) -> str:
        """Equal for equal tables."""
        arrays = self.unseen, self.tokens, self.token_values, self.pairs, self.pair_values
        return digest([self.vocab, self.text, *arrays, self.made_from, self.tokenizer])

    def values(self, tokens: Ints, previous: Ints) -> Ints:
        """Predicted shares of each token's rows on each rank, int64 [T, ranks]."""
        values = np.repeat(self.unseen[np.newaxis], len(tokens), axis=0)
        _look_up(values, tokens, self.tokens, self.token_values)
        pairs = np.where(previous == NO_TOKEN, -1, previous * self.vocab + tokens)
        _look_up(values, pairs, self.pairs, self.pair_values)
        return values

    def order(self, tokens: Ints, previous: Ints) -> Ints:
        """The order of a micro-batch's tokens in which ranks have runs of it, int64 [T]."""
        return order_tokens(self.values(tokens, previous), ranks=self.ranks)

    def to_bytes(self) -> bytes:
        """The table as a file, which ``read_table`` reads."""
        file, names = io.BytesIO(), _FIELDS + (_ORIGIN if self.made_from else ())
        np.savez_compressed(file, **{name: getattr(self, name) for name in names})
        return file.getvalue()


_FIELDS = ("vocab", "text", "unseen", "tokens", "token_values", "pairs", "pair_values")

_ORIGIN = ("made_from", "tokenizer")
"""Fields that tables of earlier versions lack."""


def routed_sizes(model: ModelSpec) -> tuple[int, ...]:
    """What a route consists of: experts of a layer, layers that have some, experts of a token."""
    return model.experts, model.sparse_layers, model.top_k


def _look_up(values: Ints, keys: Ints, known: Ints, table: Ints) -> None:
    """Put the rows of known keys into ``values``."""
    if not len(known):
        return
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    hit = known[at] == keys
    values[hit] = table[at[hit]]


def fit_table(
    routes: ChosenRoutes, ranks_LX: Ints, ranks: int, vocab: int, *, tokenizer: str = ""
) -> RouteTable:
    """The table of a text whose experts lie on given ranks.

    Args:
        routes: What routers chose for the text.
        ranks_LX: Where the experts of each layer lie, int64 [layers, X].
        ranks: That share them.
        vocab: Tokens of the model.
        tokenizer: Digest of the text's tokens by their ids.
    """
    rows = routes.rows_on(ranks_LX, ranks)
    each = max(1, routes.chosen.shape[1] * routes.chosen.shape[2])
    unseen = _shares(rows.sum(axis=0), len(rows), each, np.full(ranks, _SCALE // ranks))
    tokens, token_values = _fit_keys(routes.tokens, rows, each, unseen)
    has_before = routes.previous != NO_TOKEN
    keys = routes.previous[has_before] * vocab + routes.tokens[has_before]
    pairs, at, seen = np.unique(keys, return_index=True, return_counts=True)
    own = routes.tokens[has_before][at]
    leans = token_values[np.searchsorted(tokens, own)]
    pairs, pair_values = _fit_keys(keys, rows[has_before], each, leans)
    often = seen >= _LEAST_PAIRS
    return RouteTable(
        vocab,
        routes.digest,
        unseen,
        tokens,
        token_values,
        pairs[often],
        pair_values[often],
        made_from=(ranks_LX.shape[1], *routes.chosen.shape[1:]),
        tokenizer=tokenizer,
    )


def _fit_keys(keys: Ints, rows: Ints, each: int, leans: Ints) -> tuple[Ints, Ints]:
    """Different keys, ascending, and their shares; ``leans`` is of all, or of each key."""
    known, at, seen = np.unique(keys, return_inverse=True, return_counts=True)
    sums = np.zeros((len(known), rows.shape[1]), dtype=np.int64)
    np.add.at(sums, at.reshape(-1), rows)
    return known, _shares(sums, seen[:, np.newaxis], each, leans)


def _shares(rows: Ints, seen: Ints | int, each: int, leans: Ints) -> Ints:
    """Shares of ``seen`` tokens with ``each`` rows, in parts of 65,536."""
    shares: Ints = (rows * _SCALE // each + _LEANS * leans) // (seen + _LEANS)
    return shares.astype(np.int64)


def read_table(file: Path) -> RouteTable:
    """Read a file of ``RouteTable.to_bytes``.

    Raises:
        SpecError: it is missing, or is something else.
    """
    fix = "Make one: equipoise convert RUN TO --cluster-experts RANKS"
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
            names = _FIELDS if set(archive.files) == set(_FIELDS) else _FIELDS + _ORIGIN
            stored: dict[str, Any] = {name: archive[name] for name in names}
    except FileNotFoundError:
        raise SpecError(f"experts.routes: no such file: {file}. {fix}") from None
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SpecError(
            f"experts.routes: {file} is not a table of routes ({reason}). {fix}"
        ) from None
    stored = {"made_from": np.zeros(3, np.int64), "tokenizer": np.array("")} | stored
    sizes = [stored[name].size for name in ("tokens", "pairs", "unseen")]
    shapes = [*((n,) for n in sizes), *((n, sizes[2]) for n in sizes[:2]), (), (), (3,), ()]
    counts = ("tokens", "pairs", "unseen", "token_values", "pair_values", "vocab")
    names = (*counts, "text", "made_from", "tokenizer")
    arrays = [stored[name] for name in (*counts, "made_from")]
    if [stored[name].shape for name in names] != shapes or not all(map(_is_counted, arrays)):
        given = [stored[name].shape for name in ("token_values", "pair_values")]
        raise SpecError(
            f"experts.routes: {file} is damaged: values of shapes {given[0]} and {given[1]} for "
            f"{sizes[0]} tokens, {sizes[1]} pairs and {sizes[2]} ranks. {fix}"
        )
    if any((np.diff(stored[name]) <= 0).any() for name in ("tokens", "pairs")):
        raise SpecError(
            f"experts.routes: {file} is damaged: its tokens or pairs are not ascending. {fix}"
        )
    unseen, tokens, token_values, pairs, pair_values = (stored[name] for name in _FIELDS[2:])
    made_from = tuple(stored["made_from"].tolist()) if stored["made_from"].any() else ()
    return RouteTable(
        int(stored["vocab"]),
        str(stored["text"]),
        unseen,
        tokens,
        token_values,
        pairs,
        pair_values,
        made_from,
        str(stored["tokenizer"]),
    )


_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,  # an encrypted member, or a compression that this Python lacks
    zipfile.BadZipFile,
    zlib.error,
)


def _is_counted(numbers: Ints) -> bool:
    """Whether these are int64 from 0 to what predictions and keys of pairs may be."""
    return numbers.dtype == np.int64 and bool(((numbers >= 0) & (numbers < 1 << 48)).all())


@dataclass(frozen=True, slots=True)
class LocalRates:
    """Shares of a text's rows that need not travel, over all layers [ratio]."""

    predicted: float
    """Tokens dealt by a table, experts clustered."""
    in_order: float
    """Tokens as they come, experts in turn over ranks (round-robin)."""
    known: float
    """Tokens dealt by what their routers chose, which nobody knows beforehand; same experts."""
    own: float
    """Tokens as they come, experts in runs as they are numbered: policy ``fixed``."""
    skew: float
    """Rows of the fullest rank over the mean, with experts clustered; worst layer."""


def measure_rates(
    held: ChosenRoutes, table: RouteTable, ranks_LX: Ints, window_tokens: int
) -> LocalRates:
    """How well a table does on text that it was not fitted to.

    Args:
        held: What routers chose for it.
        table: Fitted to another text.
        ranks_LX: Where the experts lie.
        window_tokens: Tokens of a micro-batch, which are dealt together.

    Raises:
        SpecError: it is the text that the table was fitted to.
    """
    if held.digest == table.text:
        raise SpecError(
            f"The {len(held.tokens):,} held-out tokens are the text that the table was fitted to. "
            f"Give other documents as eval.path."
        )
    ranks, (layers, experts) = table.ranks, ranks_LX.shape
    turns = np.tile(np.arange(experts) % ranks, (layers, 1))
    runs = np.tile(np.sort(ranks_LX[0]), (layers, 1))
    clustered = held.rows_on(ranks_LX, ranks)
    values = table.values(held.tokens, held.previous)
    local = dict.fromkeys(("predicted", "in_order", "known", "own"), 0)
    by_turns, by_runs = held.rows_on(turns, ranks), held.rows_on(runs, ranks)
    for begin in range(0, len(clustered), window_tokens):
        part = slice(begin, begin + window_tokens)
        plain = np.arange(len(clustered[part]))
        ways = {
            "predicted": (order_tokens(values[part], ranks=ranks), clustered[part]),
            "in_order": (plain, by_turns[part]),
            "known": (order_tokens(clustered[part], ranks=ranks), clustered[part]),
            "own": (plain, by_runs[part]),
        }
        for name, (order, rows) in ways.items():
            local[name] += _count_local(rows[order], ranks)
    total = int(clustered.sum()) or 1
    loads = held.counts(experts).sum(axis=0)
    heights = [
        np.bincount(ranks_LX[at], weights=loads[at], minlength=ranks) for at in range(layers)
    ]
    skew = max((float(each.max() / each.mean()) for each in heights if each.any()), default=1.0)
    return LocalRates(**{name: count / total for name, count in local.items()}, skew=skew)


def _count_local(rows: Ints, ranks: int) -> int:
    """Rows on their own rank, of tokens that lie in runs."""
    runs = [rows_of(len(rows), ranks=ranks, rank=rank) for rank in range(ranks)]
    return sum(int(rows[run.start : run.stop, rank].sum()) for rank, run in enumerate(runs))
