"""Tokens on the rank where a table of routes says that their experts are.

Why
    With sequence parallelism a rank's tokens are a run of the micro-batch, and all but one in
    ``ranks`` rows travel to their experts. Which tokens a rank keeps is free to choose.

What it decides
    Nothing: the table (``balance.expert.routes``) orders the tokens of each micro-batch, before any
    layer has seen them, and the decoder keeps them in that order (``nn.shuffle``). Every rank of
    those that share weights has all token ids, so all compute the same order; that all have the
    same table is compared once. Routers then choose as ever, and rows whose expert is elsewhere
    travel: a prediction that is wrong costs bytes, and changes no result.

    Of the rows of a token, ``top_k`` in each layer, those travel that are not local, there and
    back, in forward and backward: ``4 top_k (1 - p) D`` elements of a token with the local rate p.

Kept true (tests/multi/parallel/test_speculative.py)
    Loss, every gradient and a step of SGD equal one rank's whatever the table says; the bytes sent
    are those of the rows that are not local.

Sources
    Speculative MoE: arXiv:2503.04398, which shuffles for each layer. Here the residual stream is
    sharded too, and would have to travel between two layers' orders, so there is one order for all.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.expert.routes import NO_TOKEN, RouteTable
from equipoise.balance.expert.table import require_table
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.comm.meet import name_ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTokens:
    """Orders the tokens of micro-batches; a ``nn.shuffle.PlaceTokens``."""

    table: RouteTable

    def __call__(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """The order of the tokens, on their device."""
        tokens = tokens_T.numpy(force=True)
        order = self.table.order(tokens, tokens_before(tokens, positions_T.numpy(force=True)))
        return torch.from_numpy(order).to(tokens_T.device)


def tokens_before(tokens: Ints, positions: Ints) -> Ints:
    """The token before each in its document, or ``NO_TOKEN`` where it is not among these.

    >>> tokens_before(np.array([7, 8, 9]), np.array([0, 1, 0])).tolist()
    [-1, 7, -1]
    """
    before = np.full(len(tokens), NO_TOKEN, dtype=np.int64)
    follows = positions[1:] == positions[:-1] + 1
    before[1:][follows] = tokens[:-1][follows]
    return before


def place_by_routes(decoder: Decoder, mesh: Mesh, table: RouteTable) -> None:
    """Let a decoder keep tokens where the table predicts their experts; every rank calls it.

    Args:
        decoder: Its weights and experts have their places.
        mesh: Of a layout whose tp ranks share the experts.
        table: The same on every rank.

    Raises:
        LayoutError: it is of another model or layout, or ranks read different ones.
    """
    require_table(table, decoder.model, tp=mesh.layout.tp)
    peers, experts = mesh.peers("tp"), mesh.peers("ep")
    if peers.ranks != experts.ranks:
        raise LayoutError(
            f"Tokens are shared by {name_ranks(list(peers.ranks))}, but experts by "
            f"{name_ranks(list(experts.ranks))}. Set layout.ep = layout.tp, or "
            f'experts.policy = "fixed".'
        )
    digests = mesh.ranks.gather_objects(table.digest)
    if differing := [rank for rank, each in enumerate(digests) if each != digests[0]]:
        names = name_ranks(differing)
        raise LayoutError(
            f"{names[0].upper()}{names[1:]} read another table of experts.routes than rank 0. Give "
            f"every machine the same file."
        )
    decoder.place_tokens = RoutedTokens(table)
