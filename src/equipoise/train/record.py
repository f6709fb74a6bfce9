"""What a run writes down: its start, each pack, each step, its memory; predicted and measured.

Kept true (tests/multi/train/test_train.py, tests/unit/dash)
    The overhead of a step is fitted on earlier steps of its process alone.
"""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import equipoise
from equipoise.balance.expert.policies import AUTO, EXPERT_POLICIES
from equipoise.balance.expert.regret import PolicyTimes
from equipoise.balance.packing.pack import skew
from equipoise.balance.packing.windows import pack_in_order
from equipoise.comm.group import Ranks, name_device
from equipoise.cost.curve import LoadCurve
from equipoise.cost.memory.forecast import forecast_memory
from equipoise.data.cache.store import TokenStore
from equipoise.launch.last_words import say_step
from equipoise.nn.device.memory import held_bytes, overhead_of, peak_bytes
from equipoise.observe.journal import Journal
from equipoise.observe.machine import describe_machine
from equipoise.optim.rate import learning_rate
from equipoise.parallel.expert.loads import ExpertLoads
from equipoise.parallel.expert.planned import PlannedLoads
from equipoise.schedule.expert.skew import layer_skews
from equipoise.sim.modality.price import ENCODERS
from equipoise.sim.rank_loads import RankLoads
from equipoise.spec.model.experts import split_experts
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import RunSpec
from equipoise.train.context import ContextGroup
from equipoise.train.modality.runner import EncoderLoads
from equipoise.train.step import StepResult
from equipoise.train.together import Partners
from equipoise.train.trained import count_trained

_OVERHEAD_STEPS = 31
"""Steps whose median overhead is added to the next prediction: one slow step decides nothing."""

_CURVE_MATTERS_S = 0.1
"""Shorter steps are mostly overhead, which no price curve knows."""


class RunRecorder:
    """Journals one rank's part of a run, and keeps what one entry needs of those before it."""

    def __init__(
        self,
        resolved: ResolvedFile,
        sharing: ContextGroup | Partners,
        ranks: Ranks,
        journal: Journal,
        store: TokenStore,
        curve: LoadCurve,
        compared: Mapping[str, Any],
    ) -> None:
        self.resolved, self.sharing, self.compared = resolved, sharing, compared
        self.ranks, self.journal = ranks, journal
        self.spec, self.model = resolved.spec, resolved.model
        self.store, self.curve = store, curve
        self.busy_over_predicted: list[float] = []
        self._base_bytes = held_bytes(ranks.device)
        self._overheads_s: deque[float] = deque(maxlen=_OVERHEAD_STEPS)
        self._largest_tokens = 0
        self._received_bytes = 0
        self._turns = 0
        self._sizes: set[int] = set()
        is_open = self.spec.experts.policy == AUTO
        self._policy_times = PolicyTimes(list(EXPERT_POLICIES)) if is_open else None
        self._kept_layer_tokens = 0
        self._peak_bytes = 0
        self._encoder_bytes = 0
        self.beside_bytes = 0
        """Memory of this process that steps do not use: the arena of its checkpoints."""

    def write_start(self, resumed_step: int) -> None:
        """What this process is about to run, on rank 0."""
        if self.ranks.rank != 0:
            return
        stages = self.sharing.stages if isinstance(self.sharing, ContextGroup) else None
        edges = [0, *(2**power for power in range(4, 41))]
        lengths = self.store.doc_tokens
        edges = edges[: int(np.searchsorted(edges, lengths.max(), side="right")) + 1]
        documents, _ = np.histogram(lengths, edges)
        tokens, _ = np.histogram(lengths, edges, weights=lengths)
        self.journal.write(
            "instant",
            "start",
            version=equipoise.__version__,
            spec=dataclasses.asdict(self.spec),
            origins=self.resolved.origins,
            model=dataclasses.asdict(self.model),
            environment=describe_machine()
            | {"torch": torch.__version__, "device": str(self.ranks.device)}
            | self._accelerator(),
            world=self.ranks.world,
            resumed_step=resumed_step,
            epoch=None if self.journal.fence is None else self.journal.fence.epoch,
            corpus={
                "documents": self.store.documents,
                "tokens": int(lengths.sum()),
                "longest_tokens": int(lengths.max()),
                "histogram": {
                    "edges": edges,
                    "documents": documents.tolist(),
                    "tokens": tokens.astype(np.int64).tolist(),
                },
            },
            curve=dataclasses.asdict(self.curve.plain),
            stages={} if stages is None else dataclasses.asdict(stages.placed),
            compared=self.compared,
        )
        self.journal.flush()

    def _accelerator(self) -> dict[str, str]:
        device = self.ranks.device
        return {"accelerator": name_device(device)} if device.type != "cpu" else {}

    def write_pack(
        self,
        step: int,
        packed: PackedStep,
        pieces: Pieces,
        loads: RankLoads,
        plan_s: float,
    ) -> None:
        """A packing decision, on rank 0, beside what a plain pack would have been."""
        turns = len(self.sharing.turns(packed))
        self._turns = max(self._turns, turns)
        for turn in range(turns):
            tokens, received_bytes = self.sharing.holds(packed, turn)
            self._sizes.add(tokens)
            self._largest_tokens = max(self._largest_tokens, tokens)
            self._received_bytes = max(self._received_bytes, received_bytes)
        if loads.kept_layer_tokens:
            kept = loads.kept_layer_tokens[self.ranks.rank]
            self._kept_layer_tokens = max(self._kept_layer_tokens, kept)
        if self.ranks.rank != 0:
            return
        plain = pack_in_order(pieces, self.spec.pack, len(packed.ranks), self.curve)
        plain_loads = self.sharing.loads(plain, self.curve)
        plain_s = plain_loads.predicted_s
        self.journal.write(
            "decision",
            "pack",
            step=step,
            policy=packed.policy,
            plan_s=plan_s,
            micro_batches=packed.micro_batches,
            rank_tokens=loads.tokens,
            rank_documents=loads.pieces,
            rank_flop=loads.flop,
            predicted_s=loads.predicted_s,
            predicted_step_s=self._predict_step(loads),
            in_order_predicted_s=plain_s,
            longest_s=loads.longest_s,
            in_order_longest_s=plain_loads.longest_s,
            skew=skew(loads.predicted_s),
            turn_skew=loads.turn_skew,
            in_order_skew=skew(plain_s),
            digest=packed.digest,
        )

    def write_step(
        self,
        packed: PackedStep,
        loads: RankLoads,
        result: StepResult,
        *,
        step: int,
        tokens_seen: int,
    ) -> dict[str, float]:
        """A finished step, predicted beside measured; its figures."""
        tokens = sum(packed.rank_tokens)
        flop, predicted_s = sum(loads.flop), loads.predicted_s
        device = self.ranks.device
        base_bytes = self._base_bytes + self.beside_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes(device) - base_bytes)
        figures: dict[str, float] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": learning_rate(self.spec.train, step),
            "tokens": tokens,
            "labels": result.labels,
            "tokens_seen": tokens_seen,
            "step_s": result.step_s,
            "tokens_per_s": tokens / result.step_s,
            "mfu": flop / result.step_s / (self.curve.peak_flop_per_s * self.ranks.world),
            "busy_s": result.rank_busy_s[self.ranks.rank],
            "wait_s": result.wait_s,
            "memory_bytes": held_bytes(device) - base_bytes,
            "peak_memory_bytes": self._peak_bytes,
        }
        if max(result.rank_busy_s) >= _CURVE_MATTERS_S:
            self.busy_over_predicted.append(max(result.rank_busy_s) / max(predicted_s))
        predicted_step_s = self._predict_step(loads)
        own = dataclasses.asdict(result.rank_own[self.ranks.rank])
        del own["host"]  # an alarm says it in words
        self.journal.write(
            "scalar",
            "step",
            step=step,
            **figures,
            predicted_s=predicted_s[self.ranks.rank],
            predicted_step_s=predicted_step_s,
            run_delay_s=None if math.isnan(result.run_delay_s) else result.run_delay_s,
            own=own,
            **_parted(self.spec, result),
        )
        self._overheads_s.append(max(0.0, result.step_s - result.computed_s))
        if len(self._overheads_s) == 1:
            self.journal.write("decision", "overhead", overhead_s=self._overheads_s[0])
        if result.experts is not None and self.ranks.rank == 0:
            self._write_experts(result.experts, step, result.step_s)
        if result.encoders is not None:
            self._encoder_bytes = max(self._encoder_bytes, result.encoders.held_bytes)
            if self.ranks.rank == 0:
                self._write_encoders(result.encoders, step)
        self.journal.flush()
        if self.ranks.rank == 0:
            say_step(step)
        return figures

    def _write_encoders(self, encoders: EncoderLoads, step: int) -> None:
        """What every rank had to encode, and what crossed the bridge."""
        self.journal.write(
            "scalar",
            "encoders",
            step=step,
            items=encoders.items,
            patches=encoders.patches,
            rows=encoders.rows,
            gap=encoders.gap,
            work=encoders.work,
            work_in_turn=encoders.work_in_turn,
            encode_s=encoders.encode_s,
            encode_core_s=encoders.encode_core_s,
            bridge_s=encoders.bridge_s,
            bridge_bytes=encoders.bytes,
            bridge_messages=encoders.messages,
            weight_bytes=encoders.weight_bytes,
            weight_messages=encoders.weight_messages,
        )

    def _write_experts(self, experts: ExpertLoads, step: int, step_s: float) -> None:
        """What the experts of each layer were given, and the ranks that compute them."""
        shares = split_experts(self.model.experts, ranks=self.spec.layout.ep)
        ends = np.cumsum(shares)[:-1]
        real = [layer[: self.model.experts] for layer in experts.loads]
        of_ranks = [[int(part.sum()) for part in np.split(np.array(each), ends)] for each in real]
        self.journal.write(
            "scalar",
            "experts",
            step=step,
            loads=real,
            expert_skew=list(layer_skews(real)),
            rank_skew=list(layer_skews(of_ranks)),
            balance_loss=experts.balance_loss,
            **_planned(experts),
            **self._identities(experts),
            **_travelled(experts),
            **_file(experts, step_s),
            **self._chosen(experts, step_s),
        )

    def _identities(self, experts: ExpertLoads) -> dict[str, Any]:
        """Experts with weights that a token passed through on average, by layer."""
        if not self.model.identity_experts:
            return {}
        real, top_k = self.model.experts, self.model.top_k
        means = [top_k * sum(each[:real]) / max(1, sum(each)) for each in experts.loads]
        return {"real_experts": means}

    def _chosen(self, experts: ExpertLoads, step_s: float) -> dict[str, Any]:
        """What was chosen between policies of experts, where a run leaves the choice open."""
        if self._policy_times is None:
            return {}
        layers = [PlannedLoads.of_numbers(each) for each in experts.planned]
        chosen, priced = [each.chosen for each in layers], [each.priced for each in layers]
        return self._policy_times.add(chosen, priced, step_s)

    def _predict_step(self, loads: RankLoads) -> float | None:
        """When the last has computed, plus the median overhead of this process's steps so far."""
        if not self._overheads_s:
            return None
        return loads.step_s(statistics.median(self._overheads_s))

    def write_memory(self) -> None:
        """Forecast and measured peak of this rank's fullest micro-batch."""
        if not self._largest_tokens:
            return
        stage = None
        if isinstance(self.sharing, ContextGroup) and self.sharing.stages is not None:
            stage = self.sharing.stages.share_of(
                self.sharing.mesh.coordinates["pp"], self._kept_layer_tokens, self._largest_tokens
            )
        forecast = forecast_memory(
            self.model,
            self.spec.layout.of_ranks(self.ranks.world),
            tokens=self._largest_tokens,
            precision=self.spec.train.precision,
            recompute=self.spec.train.recompute,
            stage=stage,
            received_values=self._received_bytes // 4,
            micro_batches=self._turns,
            sizes=len(self._sizes),
            trained=count_trained(self.spec, self.model) / self.model.params,
            overhead=overhead_of(self.ranks.device),
        )
        self.journal.write(
            "decision",
            "memory",
            forecast_bytes=forecast.total_bytes + self._encoder_bytes,
            terms=forecast.terms | ({ENCODERS: self._encoder_bytes} if self._encoder_bytes else {}),
            tokens=self._largest_tokens,
            micro_batches=self._turns,
            sizes=len(self._sizes),
            most_tokens=self.spec.pack.most_tokens,
            measured_bytes=self._peak_bytes,
        )


def _parted(spec: RunSpec, result: StepResult) -> dict[str, Any]:
    """Forward passes by their number of parts, where a run asks for parts."""
    ran = {str(parts): passes for parts, passes in result.parted.items()}
    return {} if spec.layout.parts == 1 else {"parted": ran}


def _travelled(experts: ExpertLoads) -> dict[str, Any]:
    """What rows of this rank took beside its other work, and what it then waited for them."""
    took = experts.travelled
    return {} if took is None else {"rows_beside_s": took.beside_s, "rows_waited_s": took.waited_s}


def _file(experts: ExpertLoads, step_s: float) -> dict[str, Any]:
    """What experts in a file took on this rank, and the share of the step that it waited."""
    if (file := experts.file) is None:
        return {}
    waited_s = file.storage_wait_s + file.network_wait_s
    return {"file": dataclasses.asdict(file) | {"waited": waited_s / step_s}}


def _planned(experts: ExpertLoads) -> dict[str, Any]:
    """What policies made of the loads, by sparse layer; empty where experts stay on their ranks."""
    layers = [PlannedLoads.of_numbers(each) for each in experts.planned if each[2]]
    return {
        "owner_skew": [each.before / each.rows for each in layers],
        "planned_skew": [each.after / each.rows for each in layers],
        "copies": [each.copies for each in layers],
        "copied_bytes": [each.copied_bytes for each in layers],
    }
