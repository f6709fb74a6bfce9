"""How a training program runs a layout: facts that its authors publish.

Why
    The same layout takes half as long again in one program as in another. What makes the difference
    is written down in their documents: which attention kernel, what is fused, what travels beside
    computing.

What it decides
    Nothing: the nouns. Each field is one fact, its default that of equipoise's own runs.
    ``spec.program.file`` reads the shipped programs, a TOML file each.

Kept true (tests/unit/spec/program)
    Every program's facts have a source; the default is the program ``equipoise``.
"""

from dataclasses import dataclass
from typing import Literal

Attention = Literal["flash", "flash-mx", "flash-2", "flash-1", "unfused"]
Fp8 = Literal["per-product", "per-tensor", "per-block", "mx"]


@dataclass(frozen=True, slots=True)
class Stack:
    """How a training program runs a layout."""

    attention: Attention = "flash"
    """``unfused`` writes scores to memory, masked ones included; ``flash`` is the device's fastest
    kernel, which is the measured one, and its older versions run at a share of it; ``flash-mx``
    multiplies in MXFP8."""
    repeats_keys: bool = False
    """Keys and values are copied for every query head before attention, and travel as copies."""
    fused: bool = True
    """Neighbouring element-wise operations are one kernel."""
    norm_bytes: float = 4.0
    """Bytes that the forward of a norm moves for each element: read and written once in 16 bits,
    or some passes in fp32."""
    rotation_bytes: float = 4.0
    """The same for rotated queries and keys."""
    scaled_rotation_bytes: float = 0.0
    """The same where the rotation also scales them (YaRN of GPT-OSS), if a kernel does not; never
    less than ``rotation_bytes``."""
    sequence_parallel: bool = True
    """Norms and residuals are divided over tensor-parallel ranks."""
    tensor_overlap: float = 0.0
    """Share of tensor-parallel traffic that overlaps the products it feeds, 0 to 1."""
    weight_overlap: bool = False
    """An input's gradient is summed over tensor ranks beside the gradient of the weight."""
    message_overlap: Literal["all", "interleaved", "none"] = "all"
    """Where messages between stages travel beside computing; elsewhere the sender waits."""
    data_overlap: bool = True
    """Traffic of gradients and parameters overlaps backward and forward."""
    stage_overlap: bool = False
    """Gradients of a virtual stage travel from its own last backward on, and parameters until its
    own first forward, not only beside the last and the first micro-batch of the rank."""
    grad_bytes: int = 4
    """Bytes of a gradient's element as it is reduced."""
    master: Literal["whole", "rest", "none"] = "whole"
    """What the optimizer keeps beside a weight in 16 bits: the weight in fp32, or under bf16 only
    the 16 bits that the narrow one lacks, or nothing, so that it updates the narrow one."""
    moment_bytes: Literal[4, 8] = 8
    """Bytes of Adam's two moments of a weight; in fp32 they are 8."""
    gathers: Literal["layer", "product"] = "layer"
    """What ZeRO 3 gathers, and reduces, at once: a layer, or the weights of one product."""
    sum_bytes: float = 8.0
    """Bytes moved per weight to accumulate a micro-batch's gradient: a sum in fp32 read and
    written, or one in 16 bits plus a gradient written separately; 0 if the product adds to the sum
    as it writes, which it does beside its own work."""
    fp8: Fp8 = "per-product"
    """How a step in FP8 scales what it multiplies (``cost.step.fp8``)."""
    keeps_fp8: bool = False
    """Under FP8, what a product reads is kept for its backward in 8 bits."""
    gather_fp8: bool = False
    """Under FP8, what tensor ranks gather and what ZeRO 3 gathers travels in 8 bits."""
    experts: Literal["as-one", "by-expert"] = "as-one"
    """How grouped products are priced: like one product of all rows, or of each expert's own rows
    in tiles, its weights read once (``cost.step.layer``)."""
    dispatch: Literal["per-expert", "per-node"] = "per-expert"
    """What reaches the experts: a copy of a row for each expert, or one for each node and within it
    one for each device (``cost.step.dispatch``)."""
    dispatch_fp8: bool = False
    """Under FP8 a row travels to its experts in 8 bits; results come back in 16."""
    dispatch_beside: Literal["nothing", "shared", "layer"] = "nothing"
    """What a row's travel to and from experts runs beside: nothing, the shared expert, or the layer
    of another micro-batch."""
    dispatch_share: float = 0.0
    """Share of a device's multiprocessors that carry rows to and from experts, 0 to 1; what
    computes beside them has the rest."""
    weighs_hidden: bool = False
    """A router's weight scales an expert's hidden units as the activation writes them, so that no
    gradient reads what the expert gives back; elsewhere it scales that, which is kept."""
    bias_gate_bytes: float = 0.0
    """Bytes moved per hidden unit of an expert that has biases, to add them or to clamp gate and up
    in front of the activation; 0 where the product and the activation do it."""
    bias_row_bytes: float = 0.0
    """Bytes moved per element of what such an expert gives back, to add its bias; 0 likewise."""
    bias_kept_bytes: float = 0.0
    """Bytes kept per hidden unit of such an expert beside gate and up, as clamped copies."""
    recompute_stops: bool = False
    """Layers are computed again up to what their backward reads last: not their last product, nor
    the sum over tensor ranks that follows it."""
    context_waits: bool = False
    """Nothing is computed while keys or their gradients travel between context ranks; keys are
    gathered once more for the backward, and gradients go around the whole ring."""
    merge_bytes: float = 0.0
    """Bytes moved per chunk of keys after the first to add what it gives: for each element of an
    output, and of each of the three gradients."""
    host_launch_s: float = 0.0
    """What the host takes to launch a kernel, where it does not run ahead of the device [s]."""
    host_experts_s: float = 0.0
    """What the host takes to launch forward and backward of a layer of experts, likewise [s]."""
    rails: float = 1.0
    """Share of a node's network ports that carry ZeRO 3's parameters."""
    dropout: bool = False
    """Layers use dropout, and keep its masks."""
    offloads_master: bool = True
    """An optimizer in host memory holds fp32 weights there, and not only its moments."""
    logit_bytes: float = 6.0
    """Bytes held per logit: one copy in 16 bits and one in fp32; 0 if the loss is computed in
    chunks."""
    slack_share: float = 0.04
    """Memory lost to a caching allocator, as a share of what comes and goes: 2 to 5 percent."""
    split: Literal["exact", "equal"] = "exact"
    """How layers are split into stages: slowest stage fastest, or equally many in each."""
