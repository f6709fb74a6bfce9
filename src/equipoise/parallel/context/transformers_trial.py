"""Compare a model of ``transformers`` over two ranks, played in this process, with one rank.

Why
    There are hundreds of architectures. A layer that reads a token's neighbour, counts tokens
    instead of reading their positions, or uses the largest position that it sees, is silently
    wrong over ranks. So a model is tried before it is trusted.

What it decides
    Each rank is a copy of the model that shares its weights and sees only its own tokens. Ranks
    run in turns: each until it attends, where all meet. Positions may begin anywhere, so a
    document of 30 tokens can cross a switch at 131,072. Documents are compared with themselves,
    one by one, or, if frequencies depend on the longest sequence, with the packed row.

Kept true (tests/oracle/hf/test_hf_context.py, tests/oracle/hf/test_hf_rope.py)
    Models that equal one rank over real ranks pass; models made wrong on purpose do not.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from equipoise.balance.context.plan import ContextShares, plan_context, share_tokens
from equipoise.base.errors import CheckError
from equipoise.nn.attention import Scoring
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.context.batch import IGNORED, REGISTERED, ContextPack
from equipoise.parallel.context.transformers_rope import length_dependent_types, switch_lengths

RANKS = 2
_SHARDING = "head-tail-document"

_SHORT_WINDOW = 8
"""Length to which a sliding window is shortened if no tried document exceeds it [tokens]."""


@dataclass(frozen=True, slots=True)
class TriedPack:
    """Documents to try, with positions if those are not the tokens' places in their document."""

    doc_tokens: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    """If given, the pack is one document."""

    @property
    def reach_tokens(self) -> int:
        """One more than the last position."""
        return max(self.doc_tokens) if self.positions is None else max(self.positions) + 1


class _Meeting:
    """Where ranks meet to attend; between meetings one of them runs at a time."""

    def __init__(self) -> None:
        self.turns = [threading.Semaphore(int(not rank)) for rank in range(RANKS)]
        self.parts: dict[int, tuple[Tensor, ...]] = {}
        self.outs: list[Tensor] = []
        self.met = 0
        self.error: BaseException | None = None

    def attend(
        self, rank: int, parts: tuple[Tensor, ...], pack: "_PlayedPack", scoring: Scoring
    ) -> Any:
        self.parts[rank] = parts
        if len(self.parts) < RANKS:
            met = self.met
            self.turns[1 - rank].release()
            self.turns[rank].acquire()
            if self.error is not None or self.met == met:
                raise CheckError("Ranks attend in different numbers of layers.")
            return self.outs[rank]
        q, k, v = (torch.cat(x) for x in zip(*(self.parts[r] for r in range(RANKS)), strict=True))
        plan = plan_context(
            pack.doc_tokens,
            RANKS,
            pack.strategy,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            mask=scoring.mask,
            sharding=_SHARDING,
        )
        order = torch.from_numpy(np.concatenate(plan.shares.rows)).to(q.device)
        back = torch.argsort(order)
        out = attend_in_one_process(
            q[back], k[back], v[back], plan, softcap=scoring.softcap, sinks_H=scoring.sinks_H
        )[order]
        self.outs = list(out.split([len(self.parts[r][0]) for r in range(RANKS)]))
        self.parts = {}
        self.met += 1
        return self.outs[rank]

    def run(self, replicas: Sequence[nn.Module], batches: Sequence[dict[str, Any]]) -> list[Any]:
        """What the model returns on each rank."""
        outs: list[Any] = [None] * RANKS

        def run_rank(rank: int) -> None:
            self.turns[rank].acquire()
            try:
                if self.error is None:
                    outs[rank] = replicas[rank](**batches[rank])
            except BaseException as error:  # raised again in the calling thread
                self.error = self.error or error
            finally:
                self.turns[1 - rank].release()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return outs


@dataclass(frozen=True, slots=True)
class _PlayedPack(ContextPack):
    """A pack as seen by one of the ranks in this process."""

    rank: int = 0
    reach: int = 0
    meeting: _Meeting = field(default_factory=_Meeting, compare=False)

    @property
    def reach_tokens(self) -> int:
        return self.reach

    def agree(self, layer: object, device: torch.device) -> None:
        """All ranks are this process."""

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, scoring: Scoring) -> Tensor:
        out: Tensor = self.meeting.attend(self.rank, (q_tHE, k_tGE, v_tGE), self, scoring)
        return out


def packs_to_try(config: Any, doc_tokens: tuple[int, ...]) -> list[TriedPack]:
    """The given documents, one across each length at which RoPE may switch, and the given again.

    The last quarter of such a document lies far beyond the switch and the rest before it: rank 0
    holds its first and last quarter, so rank 1 sees no position beyond. No document is longer
    than an attention chunk, because longer ones are refused.
    """
    chunk = getattr(config, "attention_chunk_size", None) or sum(doc_tokens)
    given, crossing = TriedPack(tuple(min(tokens, chunk) for tokens in doc_tokens)), []
    for switch in switch_lengths(config):
        quarter = max(min(8, switch // 3, chunk // 4), 1)
        first, far = max(switch - 4 * quarter, 0), 4 * switch
        near = range(first, first + 3 * quarter)
        crossing.append(TriedPack((4 * quarter,), (*near, *range(far, far + quarter))))
    return [given, *crossing, given] if crossing else [given]


@dataclass(frozen=True, slots=True)
class Compared:
    """Errors of a pack over ranks, relative to one rank."""

    pack: TriedPack
    loss: float
    """Error of the loss that the model returns, beside the cross-entropy of its logits."""
    parts: tuple[tuple[float, str], ...]
    """Errors of the logits and of the worst gradient, each with the name of what differs."""

    @property
    def worst(self) -> float:
        """The largest of all; infinite where one is not a number."""
        errors = (self.loss, *(error for error, _ in self.parts))
        return max(error if error == error else float("inf") for error in errors)


def show_compared(rows: Sequence[Compared], tolerance: float) -> str:
    """A table of what was compared."""
    lines = [f"{'documents':<16}{'compared':<52}{'error':>9}  allowed {tolerance:.0e}"]
    for row in rows:
        documents = " ".join(map(str, row.pack.doc_tokens))
        for error, what in ((row.loss, "loss"), *row.parts):
            verdict = "exact" if error <= tolerance else "WRONG"
            lines.append(f"{documents:<16}{what:<52}{error:>9.1e}  {verdict}")
            documents = ""
    return "\n".join(lines)


def try_over_ranks(
    model: PreTrainedModel, packs: Sequence[TriedPack], tolerance: float, *, short_windows: bool
) -> float:
    """Compare logits and gradients over two ranks with those of one rank, pack after pack.

    Args:
        model: The model; its weights are only read, and its gradients untouched.
        packs: Packs in order, so that a module's state after one carries over to the next.
        tolerance: Largest difference allowed, relative to the largest logit or a gradient's norm.
        short_windows: Make sliding windows shorter than the documents.

    Returns:
        The largest difference.

    Raises:
        CheckError: the difference is larger; names the tensor and the position.
    """
    is_packed = bool(length_dependent_types(model.config.get_text_config()))
    whole = "the same pack on one rank" if is_packed else "its documents one by one"
    worst = 0.0
    for row in compare_over_ranks(model, packs, short_windows=short_windows):
        if not row.loss <= tolerance:
            raise CheckError(
                f"The loss of {type(model).__name__} differs by {row.loss:.1e} from the cross "
                f"entropy of its logits and shift_labels, and {tolerance:.1e} is allowed. It has "
                f"labels or losses of its own: train it without context parallelism."
            )
        pack = row.pack
        at = f" at positions up to {pack.reach_tokens - 1:,}" if pack.positions else ""
        for error, what in row.parts:
            worst = max(worst, error)
            if not error <= tolerance:
                raise CheckError(
                    f"{type(model).__name__} over {RANKS} ranks differs from {whole}{at} by "
                    f"{error:.1e} of the {what}, and {tolerance:.1e} is allowed. Some layer reads "
                    f"other tokens, or goes by where a token lies: train it without context "
                    f"parallelism."
                )
    return worst


def compare_over_ranks(
    model: PreTrainedModel, packs: Sequence[TriedPack], *, short_windows: bool
) -> list[Compared]:
    """Errors of each pack; arguments as ``try_over_ranks`` has them."""
    shared = {id(weight): weight for weight in model.parameters()}
    *replicas, reference = (copy.deepcopy(model, dict(shared)) for _ in range(RANKS + 1))
    for each in (*replicas, reference):
        each.train(False)
        if short_windows:
            _shorten_windows(each, max(packs[0].doc_tokens))
    for each in replicas:
        each.set_attn_implementation(REGISTERED)
    reference.set_attn_implementation("eager")
    config = model.config.get_text_config()
    is_packed = bool(length_dependent_types(config))
    source = torch.Generator().manual_seed(0)
    rows = []
    for pack in packs:
        ids = torch.randint(config.vocab_size, (sum(pack.doc_tokens),), generator=source)
        ids = ids.to(model.device)
        mine, loss_error = _over_ranks(replicas, ids, pack)
        right = _on_one_rank(reference, ids, pack, is_packed)
        parts = tuple(_differences(model, mine, right, source))
        rows.append(Compared(pack, loss_error, parts))
    return rows


def _shorten_windows(model: PreTrainedModel, longest: int) -> None:
    places: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    places += [each.config for each in model.modules() if hasattr(each, "config")]
    for place in places:
        window = getattr(place, "sliding_window", None)
        if isinstance(window, int) and window >= longest:
            place.sliding_window = _SHORT_WINDOW


def _over_ranks(
    replicas: Sequence[nn.Module], ids: Tensor, pack: TriedPack
) -> tuple[Tensor, float]:
    """Logits in the order of the documents, and how far the loss is from theirs."""
    shares: ContextShares = share_tokens(pack.doc_tokens, RANKS, _SHARDING)
    meeting, batches = _Meeting(), list[dict[str, Any]]()
    for rank, (rows, counted) in enumerate(zip(shares.rows, shares.positions, strict=True)):
        positions = counted if pack.positions is None else np.array(pack.positions)[rows]
        ids_1t = ids[torch.from_numpy(rows).to(ids.device)].unsqueeze(0)
        labels_1t = ids_1t.roll(1)  # any will do
        played = _PlayedPack(pack.doc_tokens, rank=rank, reach=pack.reach_tokens, meeting=meeting)
        batches.append(
            {
                "input_ids": ids_1t,
                "labels": torch.full_like(labels_1t, IGNORED),
                "shift_labels": labels_1t,
                "position_ids": torch.from_numpy(positions).to(ids.device)[None],
                "attention_mask": torch.ones_like(ids_1t),
                "num_items_in_batch": len(ids),
                "use_cache": False,
                "context_pack": played,
            }
        )
    outs = meeting.run(replicas, batches)
    logits = torch.cat([out.logits[0] for out in outs])
    labels = torch.cat([batch["shift_labels"][0] for batch in batches])
    wanted = float(cross_entropy(logits.detach().float(), labels))
    loss = float(sum(out.loss.detach().float() for out in outs))
    order = torch.from_numpy(np.concatenate(shares.rows)).to(ids.device)
    return logits[torch.argsort(order)], abs(loss - wanted) / abs(wanted)


def _on_one_rank(model: nn.Module, ids: Tensor, pack: TriedPack, is_packed: bool) -> Tensor:
    logits: Tensor
    if pack.positions is not None:
        options = {
            "position_ids": torch.tensor(pack.positions, device=ids.device)[None],
            "attention_mask": torch.ones_like(ids)[None],  # else it is cut where positions jump
        }
        logits = model(input_ids=ids[None], use_cache=False, **options).logits[0]
    elif is_packed:
        at = torch.cat([torch.arange(tokens) for tokens in pack.doc_tokens]).to(ids.device)
        logits = model(input_ids=ids[None], use_cache=False, position_ids=at[None]).logits[0]
    else:
        documents = [each for each in ids.split(pack.doc_tokens) if len(each)]
        rows = [model(input_ids=each[None], use_cache=False).logits[0] for each in documents]
        logits = torch.cat(rows)
    return logits


def _differences(
    model: nn.Module, mine: Tensor, right: Tensor, source: torch.Generator
) -> list[tuple[float, str]]:
    """Errors of the logits, and of the gradients of a random weighted sum of the logits."""
    logits, expected = mine.detach().double(), right.detach().double()
    errors = [(float((logits - expected).abs().max() / expected.abs().max()), "largest logit")]
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not named or not right.requires_grad:
        return errors
    weights = torch.randn(right.shape, generator=source).to(right)
    if not mine.requires_grad:
        return [*errors, (float("inf"), "gradients: over ranks there are none")]
    parameters = [weight for _, weight in named]
    mine_grads, right_grads = (
        torch.autograd.grad(
            (x * weights).sum(), parameters, materialize_grads=True, allow_unused=True
        )
        for x in (mine, right)
    )
    norms = [float(x.double().norm()) for x in right_grads]
    # Queries and keys have small gradients, and they alone see RoPE; that of a key's bias is zero
    # but for rounding.
    is_half = mine.dtype.itemsize < 4
    floors = [(1e-3 if is_half or x.dim() < 2 else 1e-5) * max(norms) for x in parameters]
    gradients = [
        (float((a.double() - b.double()).norm()) / max(norm, floor), f"gradient of {name}")
        for a, b, norm, floor, (name, _) in zip(
            mine_grads, right_grads, norms, floors, named, strict=True
        )
    ]
    return [*errors, max(gradients)]
