"""Seconds of keeping optimizer states or activations in host memory.

Why
    What does not fit on a device may fit on its host, behind a link some fifty times slower than
    device memory. That price decides whether more devices are cheaper.

What it decides
    *Optimizer*: gradients go to the host, its cores update fp32 weights and moments, and narrow
    weights come back, one after the other and after the last backward; no device computes
    meanwhile. Adam is bound by host memory: it moves ``ADAM_BYTES`` per weight, as on a device.

    *Activations*: what a layer keeps is copied out during its own forward and in during its own
    backward, and ranks wait for the rest. Without stages the last ``KEPT_LAYERS`` layers are
    needed again at once, and stay. Copies of all devices of a host share its memory.

    The model is not fitted to training runs. ``bench/published/offload.py`` compares it with
    Megatron's published runs, where offloading adds up to twice these seconds because the host's
    update is not bound by memory.

Kept true (tests/unit/cost/test_offload.py, tests/unit/plan/search/test_offload.py)
    More weights and tokens take longer; what a pass hides costs nothing; the host is never faster
    than the device; no choice is faster than the same one without offloading.

Sources
    Order of the optimizer's parts: ZeRO-Offload, arXiv:2101.06840, section 4. That little of them
    overlaps in practice, 7%: Megatron-Bridge, docs/training/cpu-offloading.md. Layers whose copies
    hide under their compute: ByteScale, arXiv:2502.21231, equation 3.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import SpecError
from equipoise.cost.memory.device import kept_bytes, weight_bytes
from equipoise.cost.step.layer import add
from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.spec.device.spec import THIS_CPU, DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import KEPT_LAYERS, offloads_activations, offloads_optimizer

ADAM_BYTES = 30.0
"""Bytes that Adam moves per weight: it reads weight, gradient and two moments, writes all but the
gradient in fp32, and a bf16 copy."""

COPIES = TERMS.index("offload traffic")
"""The column of copies in a table of parts."""

_LINK_SHARE = 0.87
"""Share of the link's peak: nvbandwidth's host_to_device_memcpy_ce reads 55.4 of 64 GB/s on each of
eight devices behind PCIe 5. A rate that was measured here needs no share."""

_MEMORY_SHARE = 0.6
"""Share of the host memory's peak that a fused Adam reaches: 171e9 weights of 28 bytes took 12.8 s
on the host of eight H200s (PrimeIntellect prime-rl, pull request 3248), 374 of 614 GB/s."""


def require_host(device: DeviceSpec, offload: str) -> None:
    """Refuse to offload from a device whose memory is the host's.

    Raises:
        SpecError: names the device.
    """
    if offload != "none" and device.name == THIS_CPU:
        raise SpecError(
            f"{THIS_CPU} computes in host memory, so there is nowhere to offload to. Omit "
            f"--offload."
        )


def copy_bytes_per_s(device: DeviceSpec) -> float:
    """Rate of a copy between device and host memory, one direction [bytes/s].

    >>> from equipoise.spec.device.by_name import find_device
    >>> round(copy_bytes_per_s(find_device("h100-sxm")) / 1e9, 1)
    46.1
    """
    link, memory = device.host_bytes_per_s, device.host_memory_bytes_per_s
    if device.is_here:  # measured while every device copied
        return link
    return min(_LINK_SHARE * link, _MEMORY_SHARE * memory)


def host_update_s(device: DeviceSpec, weights: float, options: StepOptions) -> tuple[float, float]:
    """Seconds to copy a rank's shard of ``weights`` to the host and back, and to update it [s].

    >>> from equipoise.spec.device.by_name import find_device
    >>> copies, update = host_update_s(find_device("h100-sxm"), 1e9, StepOptions(8192, 1))
    >>> round(copies, 3), round(update, 3)
    (0.13, 0.651)
    """
    of_param, of_grad, _ = weight_bytes(options)
    copies = weights * (of_grad + of_param) / copy_bytes_per_s(device)
    return copies, weights * ADAM_BYTES / (_MEMORY_SHARE * device.host_memory_bytes_per_s)


def copies_share(device: DeviceSpec, options: StepOptions) -> float:
    """Share of the optimizer's time spent on copies to and from the host."""
    if not offloads_optimizer(options.offload):
        return 0.0
    copies, update = host_update_s(device, 1.0, options)
    return copies / (copies + update)


def add_copies(
    parts: Floats,
    model: ModelSpec,
    device: DeviceSpec,
    layout: Layout,
    options: StepOptions,
    kind: tuple[bool, str],
    tokens: float,
) -> None:
    """Add the time that a layer waits for copies of its activations.

    ``parts`` are the layer's passes with all other compute and waits, float64 [PASSES, TERMS] [s];
    ``tokens`` are those of the micro-batch on this rank's context share.
    """
    if not offloads_activations(options.offload):
        return
    each = kept_bytes(
        model,
        layout,
        options,
        sparse=kind[0],
        recompute=kind[1],
        doc_tokens=float(options.context_tokens),
        received_rows=options.skew_of(layout),
    )
    seconds = each * tokens / copy_bytes_per_s(device)
    goes = 1.0 if layout.pp > 1 else max(0.0, 1.0 - KEPT_LAYERS / model.layers)
    forward, backward = float(parts[0].sum()), float(parts[1:].sum())
    for row, hides in ((0, forward), (1, backward)):
        add(parts, row, "offload traffic", goes * max(0.0, seconds - hides))


def loads_without_copies(layers: Sequence[Floats]) -> Floats:
    """Seconds of every layer's parts without waits for copies, float64 [layers]."""
    kinds = {id(layer): layer for layer in layers}
    load = {key: layer.sum() - layer[:, COPIES].sum() for key, layer in kinds.items()}
    return np.array([load[id(layer)] for layer in layers])
