"""How a trace of requests would be served on a cluster that is not here: one call.

What it decides
    A trace, a model, a cluster and a layout by the names of ``equipoise simulate``. On this machine
    a replica is one process with a thread on each of tp cores, and the curve that such an engine
    measured of itself is used, and nothing else: a roofline is not what a CPU's engine does.

Kept true (tests/unit/sim/serve/test_request.py, tests/unit/cli/simulate/test_requests.py)
    The answer is what ``equipoise simulate --requests --json`` prints; each refusal has one
    sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cost.serving import CurvePrice
from equipoise.cost.step.request import Precision
from equipoise.data.progress import Progress
from equipoise.schedule.batching.fair.table import find_policy
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import Objective, ServingAnswer
from equipoise.sim.serve.curve import (
    ServingDevice,
    describe_replica,
    measured_replica,
    require_served,
)
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
    """The scheduler's limits; None: as many pages as the device has room for, 256 sequences (64 on
    this machine, as its engine has), and a queue without an end."""


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
    tenants = {each.tenant for each in trace}
    for name in request.objectives:
        if name and name not in tenants:
            raise SpecError(
                f'An objective is for tenant "{name}", and the trace has no request of theirs. '
                f"Nearest: {nearest(name, sorted(tenants)) or '(none)'}."
            )
    model = read_model(request.model) if isinstance(request.model, str) else request.model
    layout = request.layout
    if isinstance(layout, str):
        layout = read_layout(layout).layout
    cluster = request.cluster
    machine = Machine(read_cluster(cluster) if isinstance(cluster, str) else cluster)
    layout.require_world(machine.cluster.devices)
    require_served(layout)
    replica = _replica(request, model, machine, layout)
    settings = request.settings or BatchSettings(
        replica.pages(PAGE_TOKENS),
        PAGE_TOKENS,
        most_sequences=64 if machine.device.name == THIS_CPU else 256,
        queued_requests=len(trace) + 1,
    )
    price = CurvePrice(replica.curve)
    run = run_trace(trace, settings, price, make_policy, replicas=layout.dp, progress=progress)
    return ServingAnswer(run, replica, machine.device, request.fair, request.objectives)


def _replica(
    request: ServingRequest, model: ModelSpec, machine: Machine, layout: Layout
) -> ServingDevice:
    if machine.device.name != THIS_CPU:
        return describe_replica(model, machine, layout, request.precision)
    threads = layout.tp
    wanted = serving_name(model), request.precision, threads, 1
    for each in read_serving(serving_file()):
        if (each.model, each.dtype, each.threads, each.ranks) == wanted:
            return measured_replica(model, machine, each)
    raise SpecError(
        f"The serving engine was not measured on this machine for this model in "
        f"{request.precision} on {threads} {'core' if threads == 1 else 'cores'}. Serve the model "
        "once, or name a device of the table."
    )
