"""How a trace of requests would be served on a cluster that is not here: one call.

What it decides
    A trace, a model, a cluster and a layout by the names of ``equipoise simulate``. On this machine
    the curve that the engine measured of itself is used, and nothing else: a roofline is not what
    a CPU's engine does.

Kept true (tests/unit/sim/serve/test_request.py, tests/unit/cli/simulate/test_requests.py)
    The answer is what ``equipoise simulate --requests --json`` prints; each refusal has one
    sentence.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cost.serving import CurvePrice
from equipoise.cost.step.request import Precision
from equipoise.data.progress import Progress
from equipoise.schedule.batching.fair.table import find_policy
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import Objective, ServingAnswer
from equipoise.sim.serve.curve import ServingDevice, describe_replica
from equipoise.sim.serve.run import run_trace
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.serving import read_serving, serving_file, serving_name
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.request_trace import TracedRequest, read_request_trace
from equipoise.spec.words import read_layout, read_model

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A trace to be served. Names and words are those of ``equipoise simulate``."""

    requests: str | Path | Sequence[TracedRequest]
    """A trace file, or the requests."""
    model: str | ModelSpec
    cluster: str | ClusterSpec
    layout: str | Layout
    """``tp=4,dp=2``: dp replicas of tp devices each."""
    precision: Precision = "bf16"
    fair: str = "uwfq"
    """Policy of fairness between tenants."""
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By tenant; "" for those not named."""
    settings: BatchSettings | None = None
    """The scheduler's limits; None: as many pages as the device has room for, 256 sequences, and a
    queue without an end."""


def simulate_serving(request: ServingRequest, progress: Progress | None = None) -> ServingAnswer:
    """Serve a trace with predicted seconds.

    Args:
        request: What is asked.
        progress: Shown while requests arrive.

    Raises:
        DataError: the trace cannot be read.
        FitError: the weights do not fit.
        LayoutError: degrees do not match the cluster, or heads do not divide.
        SpecError: a name is wrong, or something is not priced in serving yet.

    Cost: about a second for 10,000 requests.
    """
    make_policy = find_policy(request.fair)
    given = request.requests
    trace = read_request_trace(Path(given)) if isinstance(given, str | Path) else tuple(given)
    model = read_model(request.model) if isinstance(request.model, str) else request.model
    layout = _layout_of(request.layout)
    cluster = request.cluster
    machine = Machine(read_cluster(cluster) if isinstance(cluster, str) else cluster)
    layout.require_world(machine.cluster.devices)
    replica = _replica(request, model, machine, layout)
    settings = request.settings or BatchSettings(
        replica.pages(PAGE_TOKENS),
        PAGE_TOKENS,
        most_sequences=256,
        queued_requests=len(trace) + 1,
    )
    price = CurvePrice(replica.curve)
    run = run_trace(trace, settings, price, make_policy, replicas=layout.dp, progress=progress)
    return ServingAnswer(run, replica, machine.device, request.fair, request.objectives)


def _layout_of(given: str | Layout) -> Layout:
    if isinstance(given, Layout):
        return given
    words = read_layout(given)
    if words.virtual > 1:
        raise SpecError("layout: virtual has no meaning in serving. Give tp and dp.")
    return words.layout


def _replica(
    request: ServingRequest, model: ModelSpec, machine: Machine, layout: Layout
) -> ServingDevice:
    if machine.device.name != THIS_CPU:
        return describe_replica(model, machine, layout, request.precision)
    name = serving_name(model)
    measured = [
        each
        for each in read_serving(serving_file())
        if each.model == name and each.dtype == request.precision and each.ranks == layout.tp
    ]
    if not measured:
        raise SpecError(
            f"The serving engine was not measured on this machine for this model in "
            f"{request.precision} with tp={layout.tp}. Serve the model once, or name a device of "
            "the table."
        )
    described = describe_replica(model, machine, layout, request.precision)
    return dataclasses.replace(described, curve=measured[-1].curve)
