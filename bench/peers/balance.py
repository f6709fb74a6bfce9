"""balance.batch beside the balancers of other trainers, on the same lengths.

Every side says which samples each rank runs in which micro-batch, under the same cap. All are
scored by one price: the FLOP of Llama 3 8B, tokens without padding. Ranks that have fewer
micro-batches than others wait in the rest. Sides run interleaved, one thread; verl, TRL, SkyRL and
transformers are their own code, and what is not installed is named. torchtitan's and Megatron's
rules are next fit in order, a few lines here because their loaders read text or need a GPU.
"""

import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment
from equipoise import balance
from equipoise.balance.bound import largest_bin_bound
from equipoise.base.arrays import Ints
from equipoise.cost.curve import counted_curve
from equipoise.spec.model.presets import preset
from equipoise.spec.workload import distribution_names, draw_lengths

CURVE = counted_curve(preset("llama3-8b"))
CASES = ((2000, 64, 32_768), (512, 8, 32_768))
"""Samples, ranks, most tokens of a micro-batch."""

Rows = list[list[list[int]]]
"""Lengths of the samples of each micro-batch of each rank."""
Side = Callable[[list[int], int, int], Rows]


def _ours(lengths: list[int], ranks: int, cap: int) -> Rows:
    answer = balance.batch(lengths, ranks, price=CURVE, max_tokens=cap)
    return [[[lengths[at] for at in each] for each in rank] for rank in answer.micro_batches]


def _ours_at_step(lengths: list[int], ranks: int, cap: int) -> Rows:
    answer = balance.batch(lengths, ranks, price=CURVE, max_tokens=cap, meets_each_turn=False)
    return [[[lengths[at] for at in each] for each in rank] for rank in answer.micro_batches]


def _next_fit(lengths: list[int], cap: int) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for tokens in lengths:
        if rows[-1] and sum(rows[-1]) + tokens > cap:
            rows.append([])
        rows[-1].append(tokens)
    return rows


def _in_order(lengths: list[int], ranks: int, cap: int) -> Rows:
    return [_next_fit(lengths[rank::ranks], cap) for rank in range(ranks)]


def _verl_side() -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.utils import seqlen_balancing as verl

    def side(lengths: list[int], ranks: int, cap: int) -> Rows:
        # ray_trainer._balance_batch: equal numbers of samples per rank.
        kept = len(lengths) // ranks * ranks
        work = verl.calculate_workload(torch.tensor(lengths[:kept])).tolist()
        parts = verl.get_seqlen_balanced_partitions(work, ranks, equal_size=True)
        turns = max(-(-sum(lengths[at] for at in part) // cap) for part in parts)
        while True:  # rearrange_micro_batches, with equal counts on all ranks
            rows = []
            for part in parts:
                mine = verl.get_seqlen_balanced_partitions(
                    [work[at] for at in part], turns, equal_size=False
                )
                rows.append([[lengths[part[at]] for at in each] for each in mine])
            if max(sum(each) for rank in rows for each in rank) <= cap:
                break
            turns += 1
        for rank in rows:  # light ones at both ends
            rank.sort(key=lambda each: -sum(24576 * n + n * n for n in each))
            rank[:] = rank[::2][::-1] + rank[1::2]
        return rows

    return side


def _skyrl_side() -> Side:
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("skyrl")
    folder = next(iter(spec.submodule_search_locations))
    file = importlib.util.spec_from_file_location(
        "skyrl_bin_packing", f"{folder}/train/dataset/bin_packing.py"
    )
    if file is None or file.loader is None:
        raise ImportError("skyrl")
    module: Any = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)

    def side(lengths: list[int], ranks: int, cap: int) -> Rows:
        rows = []
        for rank in range(ranks):
            mine = lengths[rank::ranks]
            bins = module.make_seq_packer("balanced", cap).pack(mine)
            rows.append([[mine[at] for at in each] for each in bins])
        return rows

    return side


def _trl_side() -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pyarrow as pa
        from trl.data_utils import _pack_bfd

    def side(lengths: list[int], ranks: int, cap: int) -> Rows:
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        values = pa.array(np.zeros(int(ends[-1]), dtype=np.int8))
        table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(ends), values)})
        packed = _pack_bfd(table, cap)["seq_lengths"].to_pylist()
        return [packed[rank::ranks] for rank in range(ranks)]

    return side


def _rebalance_side() -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.trainer_pt_utils import BatchRebalanceSampler

    def side(lengths: list[int], ranks: int, cap: int) -> Rows:
        turns = -(-sum(lengths) // (ranks * cap))
        rows = []
        for rank in range(ranks):
            sampler = BatchRebalanceSampler(
                lengths,
                effective_batch_size=len(lengths),
                dp_size=ranks,
                grad_accum=turns,
                shuffle=False,
                rank=rank,
            )
            rows.append([[lengths[at] for at in each] for each in sampler])
        return rows

    return side


def _grouped_side() -> Side:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.trainer_pt_utils import get_length_grouped_indices

    def side(lengths: list[int], ranks: int, cap: int) -> Rows:
        turns = -(-sum(lengths) // (ranks * cap))
        size = max(1, len(lengths) // (ranks * turns))
        draw = torch.Generator().manual_seed(0)
        order = get_length_grouped_indices(lengths, size * ranks * turns, generator=draw)
        batches = [[lengths[at] for at in order[i : i + size]] for i in range(0, len(order), size)]
        return [batches[rank::ranks] for rank in range(ranks)]

    return side


PEERS: dict[str, Callable[[], Side]] = {
    "verl 0.9.1, Karmarkar-Karp": _verl_side,
    "SkyRL 0.3, balanced packer of each rank": _skyrl_side,
    "TRL 1.16, bfd": _trl_side,
    "transformers 5.23, batch_rebalance": _rebalance_side,
    "transformers 5.23, group_by_length": _grouped_side,
}


def sides() -> tuple[dict[str, Side], list[str]]:
    """Sides that are installed, and the names of those that are not."""
    known: dict[str, Side] = {
        "equipoise, ranks meet in each micro-batch": _ours,
        "equipoise, ranks meet at the step's end": _ours_at_step,
        "next fit in order, as torchtitan's ChatDataset and Megatron": _in_order,
    }
    missing = []
    for name, make in PEERS.items():
        try:
            known[name] = make()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return known, missing


def score(rows: Rows, lengths: list[int], cap: int) -> dict[str, Any]:
    """How even a side's answer is, by work."""
    turns = max(map(len, rows))
    table = np.zeros((len(rows), turns))
    for rank, batches in enumerate(rows):
        for turn, batch in enumerate(batches):
            table[rank, turn] = float(CURVE.document_ns(np.array(batch, dtype=np.int64)).sum())
    mean = table.sum(1).mean()
    placed = sorted(n for rank in rows for batch in rank for n in batch)
    return {
        "skew of the step": table.sum(1).max() / mean,
        "skew where ranks meet in each micro-batch": table.max(0).sum() / mean,
        "micro-batches of the rank with most": turns,
        "equal counts": len({len(rank) for rank in rows}) == 1,
        "fullest over cap": max((sum(b) for rank in rows for b in rank), default=0) / cap,
        "empty micro-batches": int(sum(turns - len([b for b in rank if b]) for rank in rows)),
        "ranks without a sample": sum(not any(rank) for rank in rows),
        "samples left out": len(lengths) - len(placed),
    }


def compare(name: str, samples: int, ranks: int, cap: int, known: dict[str, Side]) -> Any:
    """Every side on one draw of lengths: how even, and how long it took."""
    drawn: Ints = np.minimum(draw_lengths(name, samples, seed=5), cap)
    lengths = drawn.tolist()
    times: dict[str, list[float]] = {side: [] for side in known}
    answers: dict[str, Rows] = {}
    for _ in range(3):
        for side, place in known.items():
            began = time.perf_counter()
            try:
                answers[side] = place(lengths, ranks, cap)
            except Exception as error:  # a peer that cannot take these lengths
                answers[side] = []
                times[side] = [f"{type(error).__name__}: {error}"[:200]]  # type: ignore[list-item]
                continue
            times[side].append(1e3 * (time.perf_counter() - began))
    return {
        "lengths": name,
        "samples": samples,
        "ranks": ranks,
        "cap_tokens": cap,
        "bound": largest_bin_bound(CURVE.document_ns(drawn), ranks)
        * ranks
        / float(CURVE.document_ns(drawn).sum()),
        "sides": {
            side: {"plan_ms (median)": statistics.median(times[side]), **score(rows, lengths, cap)}
            if (rows := answers[side])
            else {"failed": times[side][0]}
            for side in known
        },
    }


def two_thousand() -> dict[str, float]:
    """Median milliseconds for 2,000 samples over 64 ranks, warm."""
    spent = {}
    for name in distribution_names():
        lengths = np.minimum(draw_lengths(name, 2000, seed=1), 32_768).tolist()
        for turns in (1, 4):
            times = []
            for _ in range(21):
                began = time.perf_counter()
                balance.batch(lengths, 64, price=CURVE, min_micro_batches=turns)
                times.append(1e3 * (time.perf_counter() - began))
            spent[f"{name}, {turns} micro-batch{'es' * (turns > 1)} a rank"] = statistics.median(
                times
            )
    return spent


def dense_masks() -> dict[str, Any]:
    """Sixteen samples of 256 tokens under transformers' ``sdpa``: in one row, and one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    row = torch.randint(512, (1, 4096))
    restart = torch.arange(256).repeat(16)[None]

    def in_one_row() -> None:
        model(input_ids=row, position_ids=restart, labels=row, use_cache=False).loss.backward()

    def one_by_one() -> None:
        for part in row.split(256, dim=1):
            model(input_ids=part, labels=part, use_cache=False).loss.backward()

    times: dict[str, list[float]] = {"in one row": [], "one by one": []}
    for _ in range(3):
        for name, run in (("in one row", in_one_row), ("one by one", one_by_one)):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "seconds (median)": medians,
        "one row over one by one": medians["in one row"] / medians["one by one"],
    }


def measure() -> dict[str, Any]:
    """All parts."""
    stamp = LoadStamp()
    known, missing = sides()
    return {
        "what": "skew by predicted work of Llama 3 8B (max over mean), measured milliseconds",
        "goals": "2,000 samples over 64 ranks in 3 ms; no rank empty; the cap kept",
        "2,000 samples over 64 ranks (ms, median of 21)": two_thousand(),
        "cases": [compare(name, *case, known) for case in CASES for name in distribution_names()],
        "packing under dense masks (sdpa, one core)": dense_masks(),
        "peers_not_installed": missing,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
