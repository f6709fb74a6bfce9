"""How a trace of requests would be served on a cluster that is not here: one call.

What it decides
    A trace, a model, a cluster and a layout by the names of ``equipoise simulate``. With a layout
    for generation, prompts are computed on the first devices and generation runs on the others.

    On this machine a replica is one process with a thread on each of tp cores, or cp such processes
    that share every sequence; the curve that such an engine measured of itself is used, and nothing
    else: a roofline is not what a CPU's engine does.

Kept true (tests/unit/sim/serve/test_request.py, tests/unit/cli/simulate/test_requests.py)
    The answer is what ``equipoise simulate --requests --json`` prints; each refusal has one
    sentence.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.fields import plain_fields
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.cost.step.request import Precision
from equipoise.data.progress import Progress
from equipoise.schedule.batching.fair.table import DEFAULT_POLICY, find_policy
from equipoise.schedule.batching.settings import BatchSettings, paced, page_tokens_of
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import Objective, ServingAnswer
from equipoise.sim.serve.curve import (
    MOST_SEQUENCES,
    ServingDevice,
    describe_replica,
    measured_replica,
)
from equipoise.sim.serve.layout import line_of
from equipoise.sim.serve.memory import windowed_layers
from equipoise.sim.serve.run import Pool, run_apart, run_trace
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.serving import read_serving, serving_file, serving_name
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.request_trace import TracedRequest, read_request_trace, require_traced
from equipoise.spec.words import read_layout, read_model

_MOST_SKEW = 1e6


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A trace to be served. Names and words are those of ``equipoise simulate``."""

    requests: str | Path | Sequence[TracedRequest]
    """A trace file, or the requests."""
    model: str | ModelSpec
    cluster: str | ClusterSpec
    layout: str | Layout
    """``tp=4,dp=2``: dp replicas of pp x cp x tp devices each."""
    precision: Precision = "bf16"
    fair: str = DEFAULT_POLICY
    """Policy of fairness between tenants."""
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By tenant; "" for those not named."""
    settings: BatchSettings | None = None
    """The limits of each scheduler, one for each stage of a pipeline; None: as many pages as the
    device has room for, 256 sequences a replica (64 on this machine, as its engine has), 50 ms of
    an iteration in each stage, and a queue without an end."""
    decode_layout: str | Layout | None = None
    """Replicas that only generate, on devices of their own; ``layout`` then computes prompts."""
    expert_skew: float = 1.0
    """Rows of the expert rank that the router prefers most, over the mean [ratio]."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingSite:
    """What a trace is served on: a model, a cluster, and how replicas are priced there."""

    model: ModelSpec
    machine: Machine
    precision: Precision
    settings: BatchSettings | None
    expert_skew: float
    queued: int
    """Requests that may wait, where the settings do not say it."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, whose engine was measured."""
        return self.machine.device.name == THIS_CPU

    def replica(self, layout: Layout, first: int = 0) -> ServingDevice:
        """One replica of a layout whose rank 0 stands on device ``first``.

        Raises:
            FitError: it does not fit.
            LayoutError: degrees do not divide.
            SpecError: it is not priced, or was not measured.
        """
        if self.is_here:
            return self._measured(layout)
        return describe_replica(
            self.model,
            self.machine,
            layout,
            self.precision,
            first=first,
            expert_skew=self.expert_skew,
            limits=self.settings,
        )

    def pool(self, replica: ServingDevice, layout: Layout) -> Pool:
        """All replicas of a layout."""
        settings = self.settings
        if settings is None:
            size = page_tokens_of(layout.cp)
            stages = replica.stages
            plain = BatchSettings(pages=1)
            settings = BatchSettings(
                replica.pages(size),
                size,
                most_sequences=64 if self.is_here else -(-MOST_SEQUENCES // stages),
                queued_requests=self.queued,
                iteration_s=stages * plain.iteration_s,
                prefill_iteration_s=stages * plain.prefill_iteration_s,
                shares_chunks=layout.cp > 1,
            )
            settings = paced(settings, replica.price, layout.cp)
        return Pool(settings, replica.price, layout.dp)

    def send_s(
        self, prompts: ServingDevice, outputs: ServingDevice, first: int
    ) -> Callable[[int], float]:
        """What it takes to send the keys and values of a number of tokens to the others [s].

        Every device sends its part at the same time, to the device that stands farthest.

        Args:
            prompts: A replica that sends.
            outputs: One that receives.
            first: Device on which the others' rank 0 stands.
        """
        model, machine = self.model, self.machine
        width = 4 if self.precision == "fp32" else 2
        layer_bytes = 2.0 * model.kv_heads * model.head_width * width
        windowed = windowed_layers(model, model.layers)
        window = model.window.tokens if model.window is not None else 0
        streams = min(prompts.devices, outputs.devices)
        ends = {first, machine.cluster.devices - 1}
        lines = [
            line_of(lambda size, end=end: machine.hop_s(0, end, size))  # type: ignore[misc]
            for end in ends
        ]
        latency_s, byte_s = max(lines, key=lambda line: line[1])

        def seconds(tokens: int) -> float:
            kept = (model.layers - windowed) * tokens + windowed * min(window, tokens)
            return latency_s + byte_s * layer_bytes * kept / streams

        return seconds

    def _measured(self, layout: Layout) -> ServingDevice:
        for axis, meaning in (("pp", "pipelines"), ("ep", "shared experts")):
            if getattr(layout, axis) > 1:
                raise SpecError(
                    f"layout: {axis} is {getattr(layout, axis)}, and this machine's engine has no "
                    f"{meaning}. Give tp, cp and dp."
                )
        threads, ranks = layout.tp, layout.cp
        wanted = serving_name(self.model), self.precision, threads, ranks
        for each in read_serving(serving_file()):
            if (each.model, each.dtype, each.threads, each.ranks) == wanted:
                return measured_replica(self.model, self.machine, each)
        cores = f"{threads} {'core' if threads == 1 else 'cores'}"
        over = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise SpecError(
            f"The serving engine was not measured on this machine for this model in "
            f"{self.precision} on {cores}{over}. Serve the model once, or name a device of the "
            "table."
        )


def read_trace(
    requests: str | Path | Sequence[TracedRequest],
    objectives: Mapping[str, Objective],
    model: str | ModelSpec,
) -> tuple[TracedRequest, ...]:
    """The requests of a trace, for whose tenants these objectives are.

    Args:
        requests: A file, or the requests.
        objectives: By tenant.
        model: Serves them; where a file has tokens, its vocabulary says whether they are its own.

    Raises:
        DataError: the file cannot be read.
        SpecError: there are no requests, or an objective is for a tenant without any.
    """
    given = requests
    if isinstance(given, str | Path):
        sizes = read_model(model) if isinstance(model, str) else model
        trace = read_request_trace(Path(given), vocab=sizes.vocab)
    else:
        trace = tuple(given) if isinstance(given, Iterable) else ()
        for each in trace:
            if not isinstance(each, TracedRequest):
                raise SpecError(f"A request is {shown(each)}. Give a TracedRequest.")
            require_traced(each)
    if not trace:
        raise SpecError("There are no requests. Give at least one.")
    tenants = {each.tenant for each in trace}
    for name in objectives:
        if name and name not in tenants:
            raise SpecError(
                f'An objective is for tenant "{name}", and the trace has no request of theirs. '
                f"Nearest: {nearest(name, sorted(tenants)) or '(none)'}."
            )
    return trace


def simulate_serving(request: ServingRequest, progress: Progress | None = None) -> ServingAnswer:
    """Serve a trace with predicted seconds.

    Args:
        request: What is asked.
        progress: Shown while requests arrive.

    Raises:
        DataError: the trace cannot be read.
        FitError: weights and activations do not fit.
        LayoutError: degrees do not match the cluster, or heads, layers or experts do not divide.
        SpecError: a name is wrong, or something is not priced in serving.

    Cost: about a second for 10,000 requests.
    """
    request = plain_fields(request)
    make_policy = find_policy(request.fair)
    trace = read_trace(request.requests, request.objectives, request.model)
    site = open_site(
        request.model,
        request.cluster,
        request.precision,
        requests=len(trace),
        settings=request.settings,
        expert_skew=request.expert_skew,
    )
    machine = site.machine
    layout, apart = _layout(request.layout), request.decode_layout
    decoding = None if apart is None else _layout(apart)
    _require_devices(layout, decoding, machine.cluster.devices)
    replica = site.replica(layout)
    pool = site.pool(replica, layout)
    decoder = None
    if decoding is None:
        run = run_trace(
            trace,
            pool.settings,
            pool.price,
            make_policy,
            replicas=layout.dp,
            progress=progress,
        )
    else:
        if site.is_here:
            raise SpecError(
                "This machine's engine computes prompts where it generates. Leave decode_layout "
                "out, or name a device of the table."
            )
        decoder = site.replica(decoding, layout.world)
        outputs, send_s = site.pool(decoder, decoding), site.send_s(replica, decoder, layout.world)
        run = run_apart(trace, pool, outputs, send_s, make_policy, progress=progress)
    return ServingAnswer(
        run,
        replica,
        machine.device,
        request.fair,
        request.objectives,
        site.model,
        machine.peak_flop_per_s(request.precision),
        decoder,
    )


def open_site(
    model: str | ModelSpec,
    cluster: str | ClusterSpec,
    precision: Precision,
    *,
    requests: int,
    settings: BatchSettings | None = None,
    expert_skew: float = 1.0,
) -> ServingSite:
    """What names and words stand for; arguments as in ``ServingRequest``.

    Raises:
        SpecError: a name is wrong, or the skew of experts is out of range.
        ModelError: the model cannot be read.
    """
    model = read_model(model) if isinstance(model, str) else model
    if not 1.0 <= expert_skew <= _MOST_SKEW:
        raise SpecError(
            f"expert_skew is {expert_skew:g}. Give a ratio from 1 (balanced) to {_MOST_SKEW:,.0f}."
        )
    if expert_skew > 1.0 and not model.experts:
        raise SpecError("expert_skew changes nothing for a model without experts. Leave it out.")
    machine = Machine(read_cluster(cluster) if isinstance(cluster, str) else cluster)
    machine.require_precision(precision)
    return ServingSite(model, machine, precision, settings, expert_skew, requests + 1)


def _layout(layout: str | Layout) -> Layout:
    if isinstance(layout, Layout):
        return layout
    words = read_layout(layout)
    if words.virtual > 1:
        raise SpecError(
            f"layout: virtual is {words.virtual}, and serving has one stage on every rank of a "
            "pipeline. Leave it out."
        )
    return words.layout


def _require_devices(layout: Layout, decoding: Layout | None, devices: int) -> None:
    if decoding is None:
        layout.require_world(devices)
        return
    if layout.world + decoding.world != devices:
        raise LayoutError(
            f"layout has {layout.world} ranks that compute prompts and decode_layout "
            f"{decoding.world} that generate, but there are {devices} devices. Give degrees whose "
            f"products add up to {devices}."
        )
