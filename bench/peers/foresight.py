"""Predictions beside peers', on the same inputs: published steps, and collectives.

Steps. Each peer prices the published steps that it can describe, with the settings that we use for
the row; ours is scored on the same rows. Ours has two residuals fitted on the other sources. So
each peer has two lines: unmodified, and times one factor that is fitted the same way, on the other
sources that it covers.

    closed forms          Calculon's, of ``bench/peers/closed_forms.py``
    llm-analysis 0.2.2    its ``training``: FLOP over the device's peak. Dense models; it counts 16
                          hidden^2 FLOP a token for every feed-forward, gated or not, and no bubble,
                          traffic or context parallelism
    aiconfigurator-core 0.12.0
                          prices serving: its prefill of one micro-batch, per operation, is taken as
                          the forward. We complete it to a step, in its favour: backward twice the
                          forward, 1F1B's bubble, context ranks that share evenly at no cost.
                          It has no optimizer and no traffic of data-parallel ranks

Collectives. torch's ``redistribute_cost`` and aiconfigurator-core's NCCL tables beside ours on H100
and H200 nodes of a laboratory whose measurements none of them was fitted on. Our shipped curve and
aiconfigurator-core's table are the same measurements, read by other rules.

Peers are not dependencies::

    pip install --no-deps --target PEERS aiconfigurator-core==0.12.0 llm-analysis==0.2.2 \\
        fire==0.7.0 termcolor
    PYTHONPATH=PEERS python -m bench.run peers.foresight

Without them their lines are left out.
"""

import csv
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment
from bench.peers import closed_forms as peers_closed_forms
from bench.published.collectives import APEX, LARGE, node_level, torch_cost
from bench.published.price import Priced, leave_one_out, table_of
from bench.published.rows import rows
from equipoise.cost.link import Group, collective_s
from equipoise.spec.model.presets import PLANNED

Peer = Callable[[Priced], float | None]
"""Seconds of a published step; None if the peer cannot describe it."""

_LEAST = 5
"""Rows of other sources that a factor is fitted on."""


def closed_forms(each: Priced) -> float | None:
    """Seconds by Calculon's closed forms."""
    if not peers_closed_forms.covers(each.row, each.options):
        return None
    return peers_closed_forms.step_s(each.row, each.options)


def llm_analysis() -> Peer:
    """llm-analysis, at its own efficiency of 1."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import (
        ModelConfig,
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
    )

    logging.disable(logging.CRITICAL)
    devices = {
        "h100-sxm": "h100-sxm-80gb",
        "a100-80": "a100-sxm-80gb",
        "a100-40": "a100-sxm-40gb",
        "v100-32": "v100-sxm-32gb",
    }
    again = {
        "none": ActivationRecomputation.NONE,
        "attention": ActivationRecomputation.SELECTIVE,
        "full": ActivationRecomputation.FULL,
    }

    def price(each: Priced) -> float | None:
        model, layout, options = each.row.model, each.row.layout, each.options
        device = devices.get(each.row.cluster.partition(":")[0])
        if device is None or model.experts or layout.cp > 1 or options.recompute not in again:
            return None
        config = ModelConfig(
            name="published",
            num_layers=model.layers,
            n_head=model.heads,
            hidden_dim=model.hidden,
            vocab_size=model.vocab,
            max_seq_len=options.context_tokens,
            num_key_value_heads=model.kv_heads,
            ffn_embed_dim=model.ffn,
            expansion_ratio=model.ffn / model.hidden,
        )
        analysis = LLMAnalysis(
            config,
            get_gpu_config_by_name(device),
            get_dtype_config_by_name("w8a8e16" if options.precision == "fp8" else "w16a16e16"),
            ParallelismConfig(tp_size=layout.tp, pp_size=layout.pp, dp_size=layout.dp),
        )
        trained = analysis.training(
            batch_size_per_gpu=options.micro_batch,
            gradient_accumulation_steps=options.count_micro_batches(layout),
            global_batch_size=options.step_sequences,
            seq_len=options.context_tokens,
            activation_recomputation=again[options.recompute],
            ds_zero=DSZeRO(layout.zero),
        )
        return float(trained["latency_per_iter"])

    return price


_THEIR_MODELS = {
    "llama3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
}


def aiconfigurator() -> Peer:
    """aiconfigurator-core's prefill, completed to a step."""
    from aiconfigurator_core.sdk.engine import EngineHandle

    names = {PLANNED[ours]: theirs for ours, theirs in _THEIR_MODELS.items()}
    engines: dict[tuple[str, int, str], Any] = {}

    def price(each: Priced) -> float | None:
        model, layout, options = each.row.model, each.row.layout, each.options
        name = names.get(model)
        is_known = options.recompute == "none" and each.row.cluster.startswith("h100-sxm:")
        if name is None or not is_known or layout.zero == 3:
            return None
        key = name, layout.tp, options.precision
        if key not in engines:
            mode = "fp8" if options.precision == "fp8" else "bfloat16"
            engines[key] = EngineHandle.compile(
                name, "h100_sxm", "trtllm", tp_size=layout.tp, gemm_quant_mode=mode
            )
        parts, _ = engines[key].run_static_per_op(
            batch_size=options.micro_batch, isl=options.context_tokens, osl=1, mode="static_ctx"
        )
        forward = 1e-3 * sum(latency for _, latency, _, _ in parts) / layout.cp
        rounds = options.count_micro_batches(layout) + (layout.pp - 1) / options.virtual
        return 3.0 * forward / layout.pp * rounds

    return price


INSTALLED: dict[str, Callable[[], Peer]] = {
    "llm-analysis 0.2.2": llm_analysis,
    "aiconfigurator-core 0.12.0, completed to a step": aiconfigurator,
}


def fit_factors(ratios: Sequence[tuple[str, float]]) -> dict[str, float | None]:
    """For each source, the factor of least mean |log error| on the others, weighted equally.

    Args:
        ratios: Source, and predicted over measured.

    >>> fit_factors([("a", 0.5)] * 5 + [("b", 0.25)] * 5)
    {'a': 4.0, 'b': 2.0}
    """
    factor_of: dict[str, float | None] = {}
    for source in dict.fromkeys(name for name, _ in ratios):
        others = sorted((ratio, name) for name, ratio in ratios if name != source)
        if len(others) < _LEAST:
            factor_of[source] = None
            continue
        names = [name for _, name in others]
        weights = np.cumsum([1.0 / names.count(name) for name in names])
        middle = int(np.searchsorted(weights, weights[-1] / 2))
        factor_of[source] = 1.0 / others[middle][0]
    return factor_of


def _score(ratios: Sequence[float]) -> dict[str, Any]:
    errors = np.array(ratios) - 1.0
    return {
        "mape": round(float(np.abs(errors).mean()), 4),
        "worst": round(float(errors[np.abs(errors).argmax()]), 4),
        "rows": len(errors),
    }


def steps() -> dict[str, Any]:
    """Every peer on the published steps that it covers, and ours on the same ones."""
    every = rows()
    plain, scored, _ = leave_one_out(every)
    peers: dict[str, Peer] = {"closed forms as Calculon's": closed_forms}
    absent = []
    for name, make in INSTALLED.items():
        try:
            peers[name] = make()
        except ImportError:
            absent.append(name)
    table: list[dict[str, Any]] = [
        {
            "who": "equipoise",
            "fitted": "two residuals, on the other sources",
            **_score([each.ratio for each in scored]),
        },
        {"who": "equipoise", "fitted": "nothing", **_score([each.ratio for each in plain])},
    ]
    lines: list[str] = ["who,source,row,measured_s,predicted_s,ours_s"]
    for name, peer in peers.items():
        priced = [(peer(each), each) for each in scored]
        known = [(seconds, each) for seconds, each in priced if seconds is not None]
        ratios = [(table_of(each.row), seconds / each.row.step_s) for seconds, each in known]
        ours = _score([each.ratio for _, each in known])
        beside = {"ours, same rows": {key: ours[key] for key in ("mape", "worst")}}
        sources = sorted({source for source, _ in ratios})
        table.append({"who": name, "fitted": "nothing", **_score([r for _, r in ratios]), **beside})
        table[-1]["sources"] = sources
        factors = fit_factors(ratios)
        paired = [(factors[source], ratio) for source, ratio in ratios]
        fitted = [factor * ratio for factor, ratio in paired if factor is not None]
        if fitted:
            line = {"who": name, "fitted": "one factor, on the other sources"}
            table.append({**line, **_score(fitted), **beside})
        for seconds, each in known:
            figures = (each.row.step_s, seconds, each.price.step_s)
            where = f'{name},{each.row.source},"{each.row.name}"'
            lines.append(",".join([where, *(f"{value:.5g}" for value in figures)]))
    return {"table": table, "not installed": absent, "rows": lines}


def _their_collectives() -> Callable[[str, str, int, int], float]:
    """aiconfigurator-core's NCCL tables, in seconds."""
    from aiconfigurator_core.sdk import common
    from aiconfigurator_core.sdk.engine import _evaluate_single_op
    from aiconfigurator_core.sdk.operations import NCCL
    from aiconfigurator_core.sdk.perf_database import get_database, get_latest_database_version

    known = {
        name: get_database(name, "trtllm", get_latest_database_version(name, "trtllm"))
        for name in ("h100_sxm", "h200_sxm")
    }

    def cost_s(gpu: str, op: str, ranks: int, size: int) -> float:
        asked = NCCL(
            "asked",
            1.0,
            op.replace("all_to_all", "alltoall"),
            num_elements_per_token=size // 2,
            num_gpus=ranks,
            comm_quant_mode=common.CommQuantMode.half,
        )
        database = known["h200_sxm" if gpu.startswith("H200") else "h100_sxm"]
        cost_ms = _evaluate_single_op(database, asked, is_context=True, batch_size=1, s=1, x=1)
        return 1e-3 * float(cost_ms)

    return cost_s


def collectives() -> dict[str, Any]:
    """One node of another laboratory's H100s and H200s, which no side was fitted on."""
    torch_s = torch_cost()
    try:
        theirs = _their_collectives()
    except ImportError:
        theirs = None
    ratios: dict[tuple[str, bool], list[float]] = {}
    with APEX.open() as file:
        points = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for row in points:
        if row["nodes"] != "1" or row["gpu"].startswith("V100") or row["op"] == "send":
            continue
        op, ranks, size = row["op"], int(row["ranks_per_node"]), int(row["bytes"])
        group = Group(np.asarray(ranks), (node_level("nvlink4", ranks),))
        costs_s = {
            "equipoise": float(collective_s(row["op"], size, group).s),
            "torch redistribute_cost": torch_s(op, ranks, size),
        }
        if theirs is not None:
            costs_s["aiconfigurator-core 0.12.0"] = theirs(row["gpu"], op, ranks, size)
        for name, seconds in costs_s.items():
            ratio = seconds / (1e-6 * float(row["us"]))
            ratios.setdefault((name, size >= LARGE), []).append(ratio)
    return {
        "table": [
            {"who": name, "bytes": "4 MiB and more" if large else "less", **_score(scored)}
            for (name, large), scored in sorted(ratios.items(), key=lambda each: not each[0][1])
        ]
    }


def measure() -> dict[str, Any]:
    """Both tables."""
    stamp = LoadStamp()
    return {
        "what": "predicted over published - 1, on the same rows; predictions simulated, rows "
        "published measurements",
        "steps": steps(),
        "collectives of one node, fitted on other measurements": collectives(),
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
