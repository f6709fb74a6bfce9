"""verl's balancing functions, by work: the same names, arguments and contracts.

Why
    verl evens out ``24576 n + n^2``, the work of one model of 7B, whatever is trained, and does
    so by Karmarkar-Karp in Python. slime has the first function with the same signature.

What it decides
    ``Balancer`` has the price of the model at hand. ``install`` puts its functions in place of
    verl's; call it in every process, before verl's workers are imported.

Kept true (tests/oracle/adapters/test_verl.py, by Hypothesis)
    Every contract of verl's functions holds: no partition is empty, equal sizes where asked, no
    micro-batch over its tokens, equally many on all ranks, groups whole; and no more micro-batches
    than verl's, and no heavier ones.

Sources
    verl 0.9.1, ``utils/seqlen_balancing.py``; slime, ``utils/seqlen_balancing.py``.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from equipoise.balance.batches.bins import exchange, place
from equipoise.balance.batches.prices import Price, curve_of
from equipoise.balance.batches.request import batch
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError

_NAMES = ("get_seqlen_balanced_partitions", "rearrange_micro_batches")


class Balancer:
    """verl's balancing functions for one model.

    Args:
        price: What a sample costs, as in ``balance.batch``: the model's configuration.
    """

    def __init__(self, price: Price) -> None:
        self._curve = curve_of(price)

    def calculate_workload(self, seqlen_list: torch.Tensor) -> torch.Tensor:
        """Work of each sample in nanoseconds, in place of ``24576 n + n^2``."""
        work = self._curve.document_ns(seqlen_list.cpu().numpy().astype(np.int64))
        return torch.from_numpy(work).to(seqlen_list.device)

    def get_seqlen_balanced_partitions(
        self, seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
    ) -> list[list[int]]:
        """Partition items so that the heaviest partition is light.

        The numbers are what is evened out, as in verl: its callers give work or lengths.

        Args:
            seqlen_list: Weight of each item, >= 0.
            k_partitions: Number of partitions.
            equal_size: Whether all partitions have equally many items.

        Returns:
            Indices of each partition, ascending.

        Raises:
            LayoutError: fewer items than partitions, or a number that does not divide.
        """
        weights = np.array([int(each) for each in seqlen_list], dtype=np.int64)[:, None]
        items = len(weights)
        if items < k_partitions or (equal_size and items % k_partitions):
            raise LayoutError(
                f"{items} items do not make {k_partitions} partitions"
                f"{' of equal size' if equal_size else ''}. Give at least {k_partitions} items"
                f"{', and a multiple of that' if equal_size else ''}."
            )
        # An item of no weight must not leave a partition empty.
        weights = np.maximum(weights, 1)
        most = items // k_partitions if equal_size else items
        ones, limits = np.ones((items, 1), dtype=np.int64), np.array([most])
        bin_of = place(weights, ones, limits, k_partitions)
        if bin_of is None:
            raise LayoutError("Items of size 1 always fit; this cannot happen.")
        exchange(weights, ones, limits, bin_of, k_partitions)
        return [np.flatnonzero(bin_of == part).tolist() for part in range(k_partitions)]

    def rearrange_micro_batches(
        self,
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        force_group_size: int = 1,
    ) -> tuple[list[Any], list[list[int]]]:
        """Split a rank's batch into micro-batches that are even in work.

        Args:
            batch: A ``TensorDict`` with ``input_ids``, nested or with an ``attention_mask``.
            max_token_len: Most tokens of a micro-batch.
            dp_group: Data-parallel ranks that need equally many micro-batches.
            num_batches_divided_by: Number that divides the micro-batches, for virtual stages.
            same_micro_num_in_dp: Whether ranks of ``dp_group`` get equally many.
            min_num_micro_batch: Fewest micro-batches.
            use_dynamic_bsz_balance: Whether light micro-batches come first and last.
            force_group_size: Samples in a row that stay together.

        Returns:
            The micro-batches, and the samples of each.

        Raises:
            LayoutError: a group does not fit a micro-batch, or there are too few for all ranks.
        """
        from verl.utils import tensordict_utils

        lengths = _lengths(batch)
        chosen = self.split(
            lengths,
            max_token_len,
            group=dp_group if same_micro_num_in_dp else None,
            fewest=min_num_micro_batch or 1,
            multiple_of=num_batches_divided_by or 1,
            together=force_group_size,
        )
        if use_dynamic_bsz_balance:
            work = self._curve.document_ns(lengths)
            chosen.sort(key=lambda each: (-int(work[each].sum()), each[0]))
            chosen = chosen[::2][::-1] + chosen[1::2]
        parts = [tensordict_utils.index_select_tensor_dict(batch, each) for each in chosen]
        return parts, chosen

    def split(
        self,
        lengths: Ints,
        max_tokens: int,
        *,
        group: Any = None,
        fewest: int = 1,
        multiple_of: int = 1,
        together: int = 1,
    ) -> list[list[int]]:
        """Samples of each of a rank's micro-batches, equally many on all ranks of a group.

        Args:
            lengths: Tokens of this rank's samples, int64 [samples].
            max_tokens: Most tokens of a micro-batch.
            group: Ranks that need equally many micro-batches; none unless given.
            fewest: Fewest micro-batches.
            multiple_of: Number that divides the micro-batches.
            together: Samples in a row that stay together.

        Raises:
            LayoutError: the samples of this rank, or of another of the group, cannot be split so.
        """
        while True:
            chosen, fault = self._split(lengths, max_tokens, fewest, multiple_of, together)
            if group is None or not dist.is_initialized():
                break
            # A rank that cannot go on takes part, so that no other rank waits for it.
            most, least, some_fault = _agree(group, len(chosen), is_wrong=bool(fault))
            if some_fault and not fault:
                fault = (
                    f"Another rank of the data-parallel group cannot split its samples into "
                    f"{fewest} or more micro-batches of {max_tokens:,} tokens; its message says "
                    f"why."
                )
            if fault or most == least:
                break
            fewest = most
        if fault:
            raise LayoutError(fault)
        return chosen

    def _split(
        self, lengths: Ints, most_tokens: int, fewest: int, step: int, group: int
    ) -> tuple[list[list[int]], str]:
        """Micro-batches of one rank, and why there are none."""
        if len(lengths) % group:
            return [], (
                f"{len(lengths)} samples are not groups of {group}. Give a multiple of {group}."
            )
        groups = [list(range(at, at + group)) for at in range(0, len(lengths), group)]
        try:
            answer = batch(
                lengths,
                price=self._curve,
                max_tokens=int(most_tokens),
                groups=groups if group > 1 else (),
                min_micro_batches=fewest,
                multiple_of=step,
            )
        except LayoutError:
            longest = max(int(lengths[each].sum()) for each in groups)
            name = "group" if group > 1 else "sample"
            if longest > most_tokens:
                return [], (
                    f"A {name} has {longest:,} tokens, and a micro-batch holds {most_tokens:,}. "
                    f"Give max_token_len={longest} or more."
                )
            return [], (
                f"{len(groups)} {name}s cannot fill {fewest} or more micro-batches of at most "
                f"{most_tokens:,} tokens, the number that all ranks need. Give a larger "
                f"max_token_len, or this rank more samples."
            )
        return answer.micro_batches[0], ""


def _lengths(given: Any) -> Ints:
    ids = given["input_ids"]
    tokens = ids.offsets().diff() if ids.is_nested else given["attention_mask"].sum(dim=1)
    lengths: Ints = tokens.cpu().numpy().astype(np.int64)
    return lengths


def _agree(group: Any, count: int, *, is_wrong: bool) -> tuple[int, int, bool]:
    """The most and the fewest micro-batches of a rank, and whether a rank cannot go on."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    needs = torch.tensor([count, -count, int(is_wrong)], device=device)
    dist.all_reduce(needs, op=dist.ReduceOp.MAX, group=group)
    most, least, wrong = needs.tolist()
    return most, -least, bool(wrong)


def install(price: Price) -> Balancer:
    """Put the functions in place of verl's, wherever they were already imported.

    Args:
        price: What a sample costs, as in ``balance.batch``: the model's configuration.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    from verl.utils import seqlen_balancing

    balancer = Balancer(price)
    theirs = {name: getattr(seqlen_balancing, name) for name in _NAMES}
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("verl"):
            continue
        for name, function in theirs.items():
            if getattr(module, name, None) is function:
                setattr(module, name, getattr(balancer, name))
    return balancer
