"""What ``equipoise explain --schedule --json`` prints: all that is shown, as plain values."""

from typing import TYPE_CHECKING, Any

from equipoise.cli.explain.pipeline_score import LeftOut, PipelineScore
from equipoise.schedule.pipeline.instruction import Op

if TYPE_CHECKING:
    from equipoise.cli.explain.pipeline_setting import PipelineSetting

Row = dict[str, Any]


def explain_rows(scores: list[PipelineScore], left_out: LeftOut, setting: "PipelineSetting") -> Row:
    """One document: what was asked and assumed, and each strategy with its whole schedule."""
    machine, layers = setting.machine, setting.layers
    attention = layers.attention_ns
    return {
        "origin": setting.origin,
        "policy": setting.policy,
        "documents": setting.documents,
        "ranks": setting.ranks,
        "model": {"name": setting.model_name, "layers": setting.model.layers},
        "dtype": setting.dtype,
        "recompute": setting.recompute,
        "assumed": {
            "flop_per_s": machine.flop_per_s,
            "link": {
                "latency_s": machine.link.latency_s,
                "bytes_per_s": machine.link.bytes_per_s,
            },
        },
        "most_held_bytes": setting.most_bytes,
        "arranged": setting.is_arranged,
        "micro_batches": [
            {
                "documents": batch.doc_tokens.tolist(),
                "history_tokens": batch.history_tokens.tolist(),
                "layer_forward_s": float(layers.linear_ns[at] + attention[at]) / 1e9,
                "activation_bytes": batch.tokens * setting.token_bytes * setting.model.layers,
                "hop_s": int(setting.hop_ns[at]) / 1e9,
            }
            for at, batch in enumerate(setting.batches)
        ],
        "units": [list(unit) for unit in setting.units],
        "strategies": [_strategy(score, setting) for score in scores],
        "left_out": [{"strategy": name, "reason": reason} for name, reason in left_out],
    }


def _strategy(score: PipelineScore, setting: "PipelineSetting") -> Row:
    timeline, schedule = score.timeline, score.schedule
    columns = (
        timeline.op.tolist(),
        timeline.stage.tolist(),
        timeline.micro_batch.tolist(),
        timeline.begin_ns.tolist(),
        timeline.end_ns.tolist(),
    )
    lists: list[list[Row]] = [[] for _ in range(timeline.ranks)]
    for rank, op, stage, micro_batch, begin, end in zip(
        timeline.rank.tolist(), *columns, strict=True
    ):
        lists[rank].append(
            {
                "op": Op(op).words,
                "stage": stage,
                "micro_batch": micro_batch,
                "begin_s": begin / 1e9,
                "end_s": end / 1e9,
            }
        )
    return {
        "name": score.name,
        "stages_a_rank": score.chunks,
        "digest": schedule.digest,
        "lossy": schedule.is_lossy,
        "layers": score.split.layers.tolist(),
        "rank_of_stage": schedule.rank_of.tolist(),
        "predicted_s": timeline.makespan_ns / 1e9,
        "predicted_bubble_rate": timeline.bubble_rate,
        "predicted_span_bubble_rate": timeline.span_bubble_rate,
        "bound_s": None if score.bound_ns is None else score.bound_ns / 1e9,
        "by_rank": [
            {
                "held_bytes": held,
                "held_micro_batches": held / setting.share_bytes,
                "predicted_busy_s": busy / 1e9,
                "instructions": instructions,
            }
            for held, busy, instructions in zip(
                score.held_bytes.tolist(), timeline.busy_ns.tolist(), lists, strict=True
            )
        ],
    }
