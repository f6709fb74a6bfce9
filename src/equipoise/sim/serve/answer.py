"""What ``sim.serve.request.simulate_serving`` answers: latencies, rates, pressure, energy, money.

What it decides
    Percentiles are over requests, each counted once, wherever it ran. Goodput counts requests whose
    time to first token and mean time per token both meet their tenant's objective. Energy is full
    power while an iteration runs and idle power otherwise, from the first arrival to the last
    token. MFU counts a forward's FLOP, 2 for each weight that multiplies a token and those of
    attention's pairs, once for every token however often a preemption had it computed.

Kept true (tests/unit/sim/serve/test_request.py)
    ``as_row`` is what ``equipoise simulate --requests --json`` prints; tenants add up to the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.units import GIB
from equipoise.cost.work import forward_flop
from equipoise.sim.serve.curve import ServingDevice
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord
from equipoise.sim.serve.run import ServedTrace
from equipoise.spec.device.spec import DeviceSpec
from equipoise.spec.model.presets import ModelSpec

_SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a tenant's requests should meet.

    Raises:
        SpecError: a time is not above 0.
    """

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not value > 0:  # nor is NaN, which no request would meet
                raise SpecError(f"{name} of an objective is {value:g}. Give seconds above 0.")

    def is_met(self, request: RequestRecord) -> bool:
        """Whether a request met both."""
        return request.ttft_s <= self.ttft_s and (request.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True, eq=False)
class ServingAnswer:
    """A trace, served."""

    run: ServedTrace
    replica: ServingDevice
    """A replica that computes prompts; one of all, where prompts and generation are together."""
    device: DeviceSpec
    policy: str
    objectives: Mapping[str, Objective]
    """By tenant; "" for those not named."""
    model: ModelSpec
    peak_flop_per_s: float
    """Dense peak of a device."""
    decoder: ServingDevice | None = None
    """A replica that only generates."""

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return sum(devices for _, devices in self._replicas)

    @property
    def _replicas(self) -> list[tuple[ReplicaRecord, int]]:
        """Every replica with its number of devices, those that compute prompts first."""
        pairs = [(each, self.replica.devices) for each in self.run.replicas]
        if self.decoder is not None:
            pairs += [(each, self.decoder.devices) for each in self.run.decoders]
        return pairs

    def objective_of(self, tenant: str) -> Objective:
        """What this tenant's requests should meet."""
        return self.objectives.get(tenant, self.objectives.get("", Objective()))

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise simulate --requests --json`` prints."""
        run, replicas = self.run, [each for each, _ in self._replicas]
        span_s = run.makespan_s
        output = sum(each.traced.output_tokens for each in run.requests)
        energy_j, usd = self._energy_and_money(span_s)
        tenants = sorted({each.traced.tenant for each in run.requests})
        row = {
            **self._summary(run.requests, span_s),
            "makespan_s": span_s,
            "refused": len(run.refused),
            "tenants": {
                each: self._summary(
                    [one for one in run.requests if one.traced.tenant == each], span_s
                )
                for each in tenants
            },
            "gap_s": self._gaps(),
            "iterations": sum(each.iterations for each in replicas),
            "busy": [each.busy_s / span_s if span_s else 0.0 for each in replicas],
            "requests_by_replica": [
                sum(one.replica == at for one in run.requests) for at in range(len(run.replicas))
            ],
            "preemptions": sum(each.preemptions for each in replicas),
            "computed_prompt_tokens": sum(each.prompt_tokens for each in replicas),
            "cached_tokens": sum(each.hit_tokens for each in replicas),
            "kv_peak": [each.most_pages / each.pages for each in replicas],
            "kv_pages": run.replicas[0].pages,
            **_gib(self.replica),
            "mfu": self._flop() / (span_s * self.devices * self.peak_flop_per_s) if span_s else 0.0,
            "devices": self.devices,
            "policy": self.policy,
            "energy_j": energy_j,
            "energy_j_per_output_token": energy_j / output if output else None,
            "usd": usd,
            "usd_per_million_output_tokens": None
            if usd is None or not output
            else 1e6 * usd / output,
        }
        if self.decoder is not None:
            row["decode"] = {
                "replicas": len(run.decoders),
                "kv_pages": run.decoders[0].pages,
                **_gib(self.decoder),
            }
            row["sent_s"] = _spread([seconds for _, seconds in run.sent])
            row["sent_tokens"] = sum(tokens for tokens, _ in run.sent)
        return row

    def _flop(self) -> float:
        """A forward's FLOP of every token that came out, and of every prompt that was not cached.

        A prompt's tokens need no head but for the last.
        """
        cached = sum(each.hit_tokens for each, _ in self._replicas)
        prompt = sum(each.traced.prompt_tokens for each in self.run.requests)
        share = 1.0 - min(1.0, cached / prompt) if prompt else 0.0
        total = 0.0
        for each in self.run.requests:
            size, output = each.traced.prompt_tokens, each.traced.output_tokens
            total += share * forward_flop(self.model, 0, size, 0)
            total += forward_flop(self.model, size, max(0, output - 1), output)
        return total

    def _summary(self, requests: Sequence[RequestRecord], span_s: float) -> dict[str, Any]:
        prompt = sum(each.traced.prompt_tokens for each in requests)
        output = sum(each.traced.output_tokens for each in requests)
        good = sum(self.objective_of(each.traced.tenant).is_met(each) for each in requests)
        return {
            "requests": len(requests),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "ttft_s": _spread([each.ttft_s for each in requests]),
            "tpot_s": _spread([each.tpot_s for each in requests if each.tpot_s is not None]),
            "latency_s": _spread([each.latency_s for each in requests]),
            "requests_per_s": len(requests) / span_s if span_s else None,
            "output_tokens_per_s": output / span_s if span_s else None,
            "good_share": good / len(requests) if requests else None,
            "good_requests_per_s": good / span_s if span_s else None,
        }

    def _gaps(self) -> dict[str, float] | None:
        """Times between two tokens of a request, over all tokens but the first ones."""
        pairs = [pair for each, _ in self._replicas for pair in each.gaps]
        if not pairs:
            return None
        seconds, counts = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
        order = np.argsort(seconds, kind="stable")
        reached = np.cumsum(counts[order])
        at = [int(np.searchsorted(reached, share * reached[-1])) for share in _SHARES]
        mean = float((seconds * counts).sum() / counts.sum())
        return {"mean": mean, **_named([float(seconds[order[each]]) for each in at])}

    def _energy_and_money(self, span_s: float) -> tuple[float, float | None]:
        device = self.device
        watts = device.power_w - device.idle_power_w
        energy_j = sum(watts * each.busy_s * devices for each, devices in self._replicas)
        energy_j += (device.idle_power_w + device.host_power_w) * span_s * self.devices
        if device.usd_per_hour is None:
            return energy_j, None
        return energy_j, device.usd_per_hour * self.devices * span_s / 3600


def _gib(replica: ServingDevice) -> dict[str, float]:
    """Memory of the fullest device by part."""
    return {
        "kv_gib": replica.kv_bytes / GIB,
        "weights_gib": replica.weights_bytes / GIB,
        "activations_gib": replica.activation_bytes / GIB,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    known = np.array(values)
    return {"mean": float(known.mean()), **_named(np.quantile(known, _SHARES).tolist())}


def _named(points: Sequence[float]) -> dict[str, float]:
    return {f"p{share * 100:.0f}": each for share, each in zip(_SHARES, points, strict=True)}
