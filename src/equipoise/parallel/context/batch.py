"""One rank's share of a pack of documents, as the arguments of a model of ``transformers``.

Why
    A model that runs on a share of the tokens needs more than the tokens: their positions in
    their documents, their labels, shifted before tokens were separated from their successors,
    the number of labels of all ranks, and, in every layer, who holds what.

What it decides
    The names follow ``transformers``. ``labels`` are all -100, and ``shift_labels`` hold the
    labels: a model that shifts labels by itself then has a loss of zero, instead of one that
    compares unrelated tokens.

Kept true (tests/oracle/hf/test_hf_context.py)
    Loss and gradients of a model over ranks equal those of its documents one by one.

Sources
    Names: transformers 5.23, ``loss/loss_utils.py`` ForCausalLMLoss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.balance.batches.units import read_numbers
from equipoise.balance.context.plan import plan_context, share_tokens
from equipoise.base.digest import digest_bytes
from equipoise.base.errors import DataError, LayoutError
from equipoise.nn.attention import Scoring
from equipoise.parallel.context.agree import require_one_pack
from equipoise.parallel.context.attention import attend_by_plan

REGISTERED = "equipoise"
"""Name of attention over ranks in the registries of ``transformers``."""

IGNORED = -100
"""Label of a token without a next one, as in ``torch.nn.functional.cross_entropy``."""


class AttendedPack(Protocol):
    """What the registered attention asks of a pack."""

    @property
    def doc_tokens(self) -> tuple[int, ...]:
        """Lengths of its documents, the longest at least [tokens]."""

    @property
    def reach_tokens(self) -> int:
        """One more than the last position of the pack, whichever rank holds it."""

    def agree(self, layer: object, device: torch.device) -> None:
        """Refuse ranks that were given different packs; called by each layer that attends."""

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, scoring: Scoring) -> Tensor:
        """One layer's attention."""


@dataclass(frozen=True, slots=True)
class ContextPack:
    """What attention over ranks must know about a pack; the same on every rank."""

    doc_tokens: tuple[int, ...]
    """Length of each packed document, in order [tokens]."""
    strategy: str = "needed-kv"
    """What moves: a name in ``schedule.attention.strategies``."""
    sharding: str = "mixed"
    """Who holds what: a strategy of ``balance.context.sharding``, or ``auto``."""
    ranks_per_node: int | None = None
    group: dist.ProcessGroup | None = None
    """The ranks that share the pack; all ranks unless given."""
    contents: str = field(default="", compare=False)
    """Digest of the pack's tokens and labels."""
    _asking: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def reach_tokens(self) -> int:
        """One more than the last position of the pack, whichever rank holds it."""
        return max(self.doc_tokens, default=0)

    def agree(self, layer: object, device: torch.device) -> None:
        """Compare packs over the group once per forward pass, when its first layer attends.

        Args:
            layer: The attention layer that asks.
            device: Where the group's collectives run.

        Raises:
            CheckError: ranks of the group were given different packs.
        """
        if not self._asking:
            self._asking.append(id(layer))
        if self._asking[0] == id(layer):
            settings = (self.strategy, self.sharding, self.ranks_per_node)
            require_one_pack(self.doc_tokens, self.contents, settings, self.group, device)

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, scoring: Scoring) -> Tensor:
        """One layer's attention. Plans are kept, so planning in each layer is cheap."""
        plan = plan_context(
            self.doc_tokens,
            dist.get_world_size(self.group),
            self.strategy,
            heads=q_tHE.shape[1],
            kv_heads=k_tGE.shape[1],
            mask=scoring.mask,
            sharding=self.sharding,
            ranks_per_node=self.ranks_per_node,
        )
        attend = partial(
            attend_by_plan,
            plan=plan,
            group=self.group,
            softcap=scoring.softcap,
            sinks_H=scoring.sinks_H,
        )
        if len(q_tHE) != 1 or len(plan.shares.rows[dist.get_rank(self.group)]):
            return attend(q_tHE, k_tGE, v_tGE)
        # The spare token of a rank without tokens, which may still forward others' keys.
        none_tHE = attend(q_tHE[:0], k_tGE[:0], v_tGE[:0])
        return torch.cat([none_tHE, torch.zeros_like(q_tHE)])


def shard_batch(
    input_ids_T: Tensor,
    doc_tokens: Sequence[int],
    strategy: str = "needed-kv",
    group: dist.ProcessGroup | None = None,
    *,
    labels_T: Tensor | None = None,
    sharding: str = "mixed",
    ranks_per_node: int | None = None,
    step_labels: int | None = None,
) -> dict[str, Any]:
    """This rank's share of a pack that every rank has: all arguments of ``model(**batch)``.

    ``use_context_parallelism`` must have prepared the model. Its ``loss`` is this rank's part of
    the mean over all labels, so *sum* losses and gradients over ranks.

    Args:
        input_ids_T: Tokens of the documents, one after another, int64 [tokens].
        doc_tokens: Length of each document, in order [tokens].
        strategy: What moves between ranks; ``schedule.attention.strategies.STRATEGIES``.
        group: The ranks that share the pack; all ranks unless given.
        labels_T: Label of each token, as in ``transformers``: the token itself (it is compared
            with the prediction of the token before it), or -100 for tokens to leave out. By
            default all tokens count.
        sharding: Who holds which tokens: a strategy of ``balance.context.sharding``, or ``auto``.
        ranks_per_node: Ranks that share a node; for strategies in two levels.
        step_labels: Labels of the whole step, if it has other packs as well: several
            micro-batches, or several groups of ranks.

    Returns:
        ``input_ids``, ``shift_labels``, ``position_ids``: int64 [1, tokens of this rank].
        ``labels``: the same shape, -100 everywhere, because they have been shifted.
        ``attention_mask``: ones, so that transformers does not look for documents itself.
        ``num_items_in_batch``: labels of the step; 1 if it has none.
        ``use_cache``: False.
        ``context_pack``: for the attention of every layer.
        A rank without tokens gets one spare token without a label: transformers cannot run on
        zero tokens.

    Raises:
        LayoutError: tokens or labels are not as many as the documents' tokens.
        DataError: a length is not a whole number of tokens.
        SpecError: no sharding has that name.
    """
    pack = ContextPack(_whole(doc_tokens), strategy, sharding, ranks_per_node, group)
    labels = input_ids_T if labels_T is None else labels_T
    for name, values in (("input_ids_T", input_ids_T), ("labels_T", labels)):
        if values.shape != (sum(pack.doc_tokens),):
            raise LayoutError(
                f"{name} has shape {list(values.shape)}, but the {len(pack.doc_tokens)} "
                f"documents have {sum(pack.doc_tokens):,} tokens. Lay them end to end in one "
                f"dimension."
            )
    return _shard(input_ids_T, _shift(labels, pack.doc_tokens), pack, step_labels)


@dataclass(frozen=True, slots=True)
class ContextCollator:
    """``shard_batch`` as the ``collate_fn`` of a loader that gives all ranks the same documents.

    Args:
        strategy: As in ``shard_batch``.
        group: The ranks that share the pack; all ranks unless given.
        sharding: As in ``shard_batch``.
        ranks_per_node: Ranks that share a node; for strategies in two levels.
    """

    strategy: str = "needed-kv"
    group: dist.ProcessGroup | None = None
    sharding: str = "mixed"
    ranks_per_node: int | None = None

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's share.

        Args:
            documents: ``input_ids`` of each, and ``labels`` if not all tokens count; or samples
                of ``data.loader.PackedDataset``, whose ``shift_labels`` and count of the step's
                labels are used unchanged.

        Raises:
            LayoutError: a document has not as many labels as tokens.
        """
        ids = [torch.as_tensor(each["input_ids"], dtype=torch.int64) for each in documents]
        shifted, step_labels = list[Tensor](), None
        for document, tokens in zip(documents, ids, strict=True):
            ready = document.get("shift_labels")
            given = document.get("labels", tokens) if ready is None else ready
            labels = torch.as_tensor(given, dtype=torch.int64)
            if len(labels) != len(tokens):
                raise LayoutError(
                    f"Document {len(shifted)} of the batch has {len(labels):,} labels for "
                    f"{len(tokens):,} tokens. Give a label for each, -100 where there is none."
                )
            shifted.append(_shift(labels, (len(labels),)) if ready is None else labels)
        if all(document.get("is_counted", False) for document in documents):
            step_labels = documents[0]["turn"].step_labels
        lengths = tuple(map(len, ids))
        pack = ContextPack(lengths, self.strategy, self.sharding, self.ranks_per_node, self.group)
        return _shard(torch.cat(ids), torch.cat(shifted), pack, step_labels)


def _whole(doc_tokens: npt.ArrayLike) -> tuple[int, ...]:
    """Lengths of documents, each 0 or more.

    Raises:
        DataError: one is not.
    """
    lengths = read_numbers("Lengths", doc_tokens, "[412, 96, 2048]").reshape(-1)
    wrong = lengths[~((lengths >= 0) & (lengths == np.floor(lengths)))]
    if len(wrong):
        raise DataError(f"A document of {wrong[0]:g} tokens. Give whole numbers, 0 or more.")
    return tuple(map(int, lengths))


def _shift(labels_T: Tensor, doc_tokens: Sequence[int]) -> Tensor:
    """The label that each token predicts: the next one of its document."""
    lengths = np.asarray(doc_tokens, dtype=np.int64).reshape(-1)
    shifted = labels_T.roll(-1)
    shifted[torch.from_numpy(np.cumsum(lengths)[lengths > 0] - 1)] = IGNORED
    return shifted


def _shard(
    input_ids_T: Tensor, shifted_T: Tensor, pack: ContextPack, step_labels: int | None
) -> dict[str, Any]:
    group, device = pack.group, input_ids_T.device
    if step_labels is None:
        step_labels = int((shifted_T != IGNORED).sum())
    numbers = torch.cat([input_ids_T, shifted_T, shifted_T.new_tensor([step_labels])]).long()
    pack = replace(pack, contents=digest_bytes(numbers.cpu().numpy().data))
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shares = share_tokens(pack.doc_tokens, ranks, pack.sharding, ranks_per_node=pack.ranks_per_node)
    rows = torch.from_numpy(shares.rows[rank]).to(device)
    ids_t, shifted_t = input_ids_T[rows], shifted_T[rows]
    positions_t = torch.from_numpy(shares.positions[rank]).to(device)
    if not len(rows):
        ids_t, shifted_t, positions_t = (
            x.new_full((1,), fill)
            for x, fill in ((ids_t, 0), (shifted_t, IGNORED), (positions_t, 0))
        )
    return {
        "input_ids": ids_t.unsqueeze(0),
        "labels": torch.full_like(shifted_t, IGNORED).unsqueeze(0),
        "shift_labels": shifted_t.unsqueeze(0),
        "position_ids": positions_t.unsqueeze(0),
        "attention_mask": torch.ones_like(ids_t).unsqueeze(0),
        "num_items_in_batch": max(step_labels, 1),
        "use_cache": False,
        "context_pack": pack,
    }
