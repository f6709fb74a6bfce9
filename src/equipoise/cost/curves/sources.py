"""The sources of every number that prices a step on a cluster.

Why
    A price can only be questioned if its sources are known. The tables keep a source beside each
    number; here they are collected for one cluster, with the measured curves of its kernels and
    messages.

What it decides
    Nothing: names and sources, in the order in which a step asks for them.

Kept true (tests/unit/cost/curves/test_sources.py)
    Every device, link and curve of a cluster is named once; stand-ins and unmeasured numbers are
    marked.
"""

from collections.abc import Iterator, Mapping

from equipoise.cost.curves.grid import provenance
from equipoise.cost.curves.measured import (
    ATTENTION_TABLES,
    GEMM_TABLES,
    LINK_OF,
    attention_curves,
    gemm_curve,
)
from equipoise.cost.kernel import UNMEASURED_EFFICIENCY
from equipoise.cost.step.request import Stack, residuals_of
from equipoise.spec.cluster.link import LinkSpec
from equipoise.spec.cluster.spec import CLUSTERS, ClusterSpec, NodeClass
from equipoise.spec.device.spec import DeviceSpec, Dtype

_FITTED = "fitted on 475 published steps of nine sources, each left out in turn"


def sources_of(
    cluster: ClusterSpec,
    dtype: Dtype,
    stack: Stack = Stack(),  # noqa: B008
) -> dict[str, str]:
    """Sources by what they describe; with several node classes, names begin with the class.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> found = sources_of(find_cluster("h100-sxm:16"), "bf16")
    >>> found["usd_per_hour"]
    'AWS p5.48xlarge on demand, us-east-1, second half of 2025, over 8 GPUs'
    >>> found["link ib-ndr"].partition(".")[0]
    'NVIDIA ConnectX-7: 400 Gb/s'
    """
    several = len(cluster.classes) > 1
    sources: dict[str, str] = {}
    for each in cluster.classes:
        prefix = f"{each.name}: " if several else ""
        sources |= {prefix + name: source for name, source in _of_class(each, dtype, stack)}
    if cluster.between is not None:
        sources[f"link {cluster.between.name}"] = cluster.between.source
    if cluster.trunk_bytes_per_s is not None:
        sources["trunk"] = "the cluster file: trunk_gbit_per_s"
    if cluster.node_bytes_per_s is not None:
        sources["links between nodes"] = "the cluster file: node_gbyte_per_s"
    return sources


def _of_class(nodes: NodeClass, dtype: Dtype, stack: Stack) -> Iterator[tuple[str, str]]:
    device = nodes.device
    yield from device.sources
    if dtype not in device.dtypes:
        yield "precision", f"{device.dtypes[0]}, for {device.name} multiplies no {dtype}"
    yield "node", CLUSTERS[device.name] if device.like is None else f"as {device.like}, or given"
    links = [tier.link for tier in nodes.tiers]
    for link in [*links, *([nodes.nic] if nodes.nic is not None and nodes.nodes > 1 else [])]:
        yield f"link {link.name}", link.source
    yield "matrix products", _products(device, dtype)
    yield "attention", _attention(device, dtype)
    for link in links:
        if link.curve is not None:
            yield f"collectives over {link.name}", _collectives(device, link)
    factors = residuals_of(device, stack)
    if (factors.products, factors.traffic) != (1.0, 1.0):
        said = f"products x {factors.products:g}, messages x {factors.traffic:g}"
        yield "under load", f"{said}: {_FITTED}"


def _products(device: DeviceSpec, dtype: Dtype) -> str:
    curve = gemm_curve(device, dtype)
    if curve is None:
        return _unmeasured(device, dtype)
    return _measured(device, curve[1], "gemm", GEMM_TABLES)


def _attention(device: DeviceSpec, dtype: Dtype) -> str:
    curves = attention_curves(device, dtype)
    if curves is None:
        return _unmeasured(device, dtype)
    return _measured(device, curves[2], "attention", ATTENTION_TABLES)


def _unmeasured(device: DeviceSpec, dtype: Dtype) -> str:
    return f"a guess: {UNMEASURED_EFFICIENCY:.0%} of the {dtype} peak of {device.name}"


def _measured(device: DeviceSpec, on: str, kind: str, tables: Mapping[str, str]) -> str:
    """The source of a shipped table, or of what ``calibrate`` wrote on this machine."""
    if device.curve_file is not None:
        return dict(device.sources)["peaks"]
    table = _table(f"{kind}_{tables[on]}")
    return table if on == device.name else f"{table}; taken over to {device.name} by its roofline"


def _collectives(device: DeviceSpec, link: LinkSpec) -> str:
    if link.curve not in LINK_OF:
        return dict(device.sources)["peaks"]
    table = _table(f"nccl_{link.curve}")
    return table if LINK_OF[link.curve] == link.name else f"{table}; taken over by the links' rates"


def _table(name: str) -> str:
    """A table's first sentence: what was measured, on what, and by whom."""
    first = provenance(f"{name}.csv").partition(". ")[0]
    return first[0].lower() + first[1:]
