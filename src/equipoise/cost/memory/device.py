"""Peak memory of one pipeline rank under a described program, term by term.

Why
    ``cost.memory.forecast`` forecasts this package's own ranks, byte by byte. A cluster that is not
    here runs whatever program its owners run, and programs differ in what a layer keeps: scores or
    none, a gathered or a divided copy of a norm's output, whole logits or chunks.

What it decides
    What a layer keeps of a token, with D the model's width, q and k those of a rank's query and
    key heads, F a rank's hidden units, t tensor-parallel ranks::

        2 x 2D        inputs of both norms                  / t with sequence parallelism
        2 x 2D        what the projections read             / t with sequence parallelism
        2 q + 4 k     queries, keys, values
        2 q           the core's output
        4 a           log-sum-exps of a heads (flash); 5 a s of s keys (unfused)
        2 F x 3 or 2  gate, up and product, or before and after the activation
        2 D           masks of two dropouts, one byte each  / t with sequence parallelism

    Latent attention also keeps the latent vectors, before and after their norms. A layer of experts
    keeps for each of a token's choices the row that its expert reads, the hidden units, and what
    comes back, unless the router's weight scales hidden units (``Stack.weighs_hidden``); where it
    has biases, copies of gate and up that are clamped apart (``Stack.bias_kept_bytes``).

    With recomputation a layer keeps its input (``full``), or all but the core (``attention``),
    or its input and the core (``selective``), or all but what modules drop (``spec.recompute``).
    At the peak a rank holds what its schedule has in
    flight and, on the last stage, the logits of one micro-batch.

    States of a weight: 2 bytes to compute with, ``grad_bytes`` of gradient, and 12 of master
    copy and Adam's moments, each divided as ZeRO's stage says. Some programs keep only the half of
    the master that the narrow weight lacks, or no master and narrow moments (``Stack.master``). In
    fp32 every 2 above is 4, and weights need no master copy beside them.

    ZeRO 3 holds two layers gathered and the gradients of one on their way, or, where products are
    gathered one by one, two products' weights and a bucket of gradients.

    What is offloaded is in host memory: master copies and moments, each with a gradient and a
    narrow weight that are copied from and to the device; activations of all layers but those that
    go or come (``spec.offload``).

Kept true (tests/unit/cost/memory/test_device.py)
    Korthikanti's 34, 10 + 24/t and 5 a s, exactly; terms grow with tokens and vocabulary and
    shrink with ranks; in fp32 activations are twice what they are in bf16, masks and fp32 apart.
    Beside published peaks: ``bench/published/memory.py``.

Sources
    arXiv:2205.05198, section 4 and table 2. States: arXiv:1910.02054, section 3.
"""

import dataclasses

from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.cost.step.work import layer_work
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import offloads_activations, offloads_optimizer, resident_layers
from equipoise.spec.recompute import Module, layer_recompute, modules_of, repeats_core

_MOMENTS_BYTES = 8.0
_MASTER_BYTES = 4.0
_LIVE_WEIGHTS = 1e9
"""Gathered weights that are kept until their next use, by products:
``stage3_max_live_parameters``, deepspeed/runtime/zero/config.py."""
_BUCKET_WEIGHTS = 5e8
"""Gradients that are reduced together: ``reduce_bucket_size`` of the same file."""
_ROUTE_BYTES = 8.0
"""Kept of a token's choice of an expert, to bring the row back."""


def weight_bytes(options: StepOptions) -> tuple[float, float, float]:
    """Bytes of a weight as it is computed with, of its gradient and of its optimizer states.

    Where some weights are frozen, gradients and states are those of the part of which most are: a
    bound from below, beside which ``cost.memory.forecast`` has each rank's own.

    >>> weight_bytes(StepOptions(8192, 1)), weight_bytes(StepOptions(8192, 1, precision="fp32"))
    ((2.0, 4.0, 12.0), (4.0, 4.0, 8.0))
    """
    stack, width = options.stack, float(element_bytes(options.precision))
    gradient = max(width, float(stack.grad_bytes))
    least = 1.0 if options.trained is None else options.trained.least
    if width == _MASTER_BYTES:
        return width, least * gradient, least * _MOMENTS_BYTES
    is_rest = stack.master == "rest" and options.precision == "bf16"
    master = 0.0 if stack.master == "none" else _MASTER_BYTES - (width if is_rest else 0.0)
    return width, least * gradient, least * (stack.moment_bytes + master)


def hosted_bytes(options: StepOptions) -> float:
    """Bytes of a weight that an optimizer in host memory frees on the device.

    >>> hosted_bytes(StepOptions(8192, 1)), hosted_bytes(StepOptions(8192, 1, offload="both"))
    (0.0, 12.0)
    """
    if not offloads_optimizer(options.offload):
        return 0.0
    of_optimizer = weight_bytes(options)[2]
    return of_optimizer if options.stack.offloads_master else min(_MOMENTS_BYTES, of_optimizer)


def logit_bytes(options: StepOptions) -> float:
    """Held of each logit at once; the one in 16 bits is wider in fp32."""
    held = options.stack.logit_bytes
    return held + element_bytes(options.precision) - 2 if held else 0.0


def read_bytes(options: StepOptions) -> float:
    """Kept of each number that a product reads, for its backward.

    >>> from equipoise.cost.step.request import Stack
    >>> read_bytes(StepOptions(8192, 1, precision="fp8", stack=Stack(keeps_fp8=True)))
    1.0
    """
    if options.stack.keeps_fp8 and options.precision == "fp8":
        return 1.0
    return float(element_bytes(options.precision))


def kept_bytes(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    *,
    sparse: bool,
    recompute: str,
    doc_tokens: float,
    received_rows: float = 1.0,
) -> float:
    """What a layer keeps of one token for its backward [bytes].

    >>> from equipoise.cost.step.request import Stack
    >>> from equipoise.spec.model.presets import PLANNED
    >>> stack = Stack(attention="unfused", dropout=True, sequence_parallel=False)
    >>> options = StepOptions(2048, 1, stack=stack)
    >>> model = PLANNED["gpt3-175b"]
    >>> kept = kept_bytes(
    ...     model, Layout(tp=8), options, sparse=False, recompute="attention", doc_tokens=2048
    ... )
    >>> kept / model.hidden  # 10 + 24 / 8
    13.0
    """
    stack, hidden, width = options.stack, model.hidden, element_bytes(options.precision)
    beside = 1 / layout.tp if stack.sequence_parallel else 1.0
    heads = -(-model.heads // layout.tp)
    query = heads * model.score_width
    key = max(model.kv_heads / layout.tp, 1.0) * (model.score_width + model.head_width) / 2
    value = heads * model.head_width
    if model.latent is not None:
        key = heads * (model.score_width + model.head_width) / 2
    read = read_bytes(options)
    given = width * hidden * beside
    output = width * value
    scores = (2.0 * width + 1.0) * heads * doc_tokens
    core = scores if stack.attention == "unfused" else 4.0 * heads
    inputs = width * query + 2.0 * width * key
    # The stream between, and both norms' outputs.
    norms = given + 2.0 * read * hidden * beside + (2.0 * hidden * beside if stack.dropout else 0.0)
    modules = modules_of(recompute)
    feed = _feed_bytes(
        model, layout, options, sparse=sparse, received_rows=received_rows, modules=modules
    )
    if recompute == "full":
        return given
    if recompute == "selective":
        return given + inputs + output + (0.0 if stack.attention == "unfused" else core)
    # Attention reads its own output again, and the product after it a narrower copy.
    narrowed = read * value if read < width else 0.0
    norms -= _dropped_norms(model, sparse=sparse, modules=modules) * read * hidden * beside
    latents = _latent_bytes(model, width, read) * beside
    if model.latent is not None and "mla_up_proj" in modules:
        inputs, latents = 0.0, width * sum(dataclasses.astuple(model.latent)) * beside
    whole = given + norms + inputs + latents + output + narrowed + feed
    return whole if repeats_core(recompute) else whole + core


def _latent_bytes(model: ModelSpec, width: float, read: float) -> float:
    """Latent vectors, and what their norms give to the products that follow [bytes a token]."""
    if model.latent is None:
        return 0.0
    normed = model.latent.query + model.latent.key_value
    return width * (normed + model.latent.rope) + read * normed


def _dropped_norms(model: ModelSpec, *, sparse: bool, modules: frozenset[Module]) -> int:
    """Norms of a layer whose output is dropped.

    A norm before a product is a part of its kernel, which keeps it. Those that several products
    read are kernels of their own: the first of latent attention, and that of a sparse layer.
    """
    alone = (model.latent is not None) + sparse if "layernorm" in modules else 0
    return alone + ("mlp" in modules and not sparse)


def _feed_bytes(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    *,
    sparse: bool,
    received_rows: float,
    modules: frozenset[Module],
) -> float:
    """What the feed-forward keeps, without its normed input [bytes a token]."""
    width, read = element_bytes(options.precision), read_bytes(options)
    # Of each hidden unit what its activation reads, and what the last product does.
    unit = width * (model.products - 1) + read
    if not sparse:
        return 0.0 if "mlp" in modules else unit * model.ffn / layout.tp
    if "moe" in modules:
        return 0.0
    # Each of a token's choices: the row that an expert reads, its hidden units, what comes back.
    returned = 0.0 if options.stack.weighs_hidden else float(width)
    active = unit + options.stack.bias_kept_bytes * width / 2 * model.has_sinks
    if "moe_act" in modules:
        active = unit - read
    units = active * model.expert_ffn / layout.etp + (read + returned) * model.hidden
    beside = 1 / layout.tp if options.stack.sequence_parallel else 1.0
    routed = model.mean_top_k * (units * layout.etp * received_rows + _ROUTE_BYTES) * beside
    shared = 0.0 if "shared_experts" in modules else unit * model.shared_ffn / layout.tp
    return routed + shared + 4.0 * model.choices * beside


def rank_memory(
    model: ModelSpec, layout: Layout, options: StepOptions, share: StageShare, tokens: float
) -> dict[str, float]:
    """Peak of one rank by term [bytes].

    Args:
        model: Sizes.
        layout: Degrees.
        options: The program, the window (what unfused scores are written over) and how many more
            rows than the mean the fullest expert rank receives.
        share: What the rank holds.
        tokens: Tokens of the largest micro-batch, this rank's share of it along cp.

    Cost: microseconds a layer.
    """
    dense, experts, largest = _weights(model, layout, share)
    stack, kept, widest = options.stack, 0.0, 0.0
    width = element_bytes(options.precision)
    of_param, of_grad, of_optimizer = weight_bytes(options)
    kinds = [
        (model.is_sparse(layer), layer_recompute(options.recompute, layer))
        for layer in share.layers
    ]
    keeps = {
        (sparse, how): kept_bytes(
            model,
            layout,
            options,
            sparse=sparse,
            recompute=how,
            doc_tokens=float(options.context_tokens),
            received_rows=options.skew_of(layout),
        )
        for sparse, how in {*kinds, *((sparse, "none") for sparse, _ in kinds)}
    }
    for sparse, how in kinds:
        each, whole = keeps[sparse, how], keeps[sparse, "none"]
        kept += each
        # The layer that runs backward has all of it again, and gradients of what it works on.
        widest = max(widest, whole - each + 3.0 * width * model.hidden)
    held = kept * tokens * share.kept_micro_batches
    largest_kept = max((keeps[kind] for kind in kinds), default=0.0) * tokens
    activations = resident_bytes(layout, options, held, largest_kept)
    tables = (share.embeds + share.has_head) - (model.tied and share.embeds and share.has_head)
    dense += tables * model.hidden * model.vocab / layout.tp
    sharers = layout.zero_ranks // layout.replicas
    alike = layout.edp
    states = dense / (sharers if layout.zero else 1) + experts / (alike if layout.zero else 1)
    own = dense + experts
    at_once, in_flight = _travelling(model, layout, options, largest)
    moved = tables * model.hidden * model.vocab / layout.tp + at_once
    params = of_param * (own if layout.zero < 3 else moved)
    scattered = dense / sharers + experts / alike
    gradients = of_grad * (own if layout.zero < 2 else scattered)
    reduced = of_grad * in_flight if layout.zero >= 2 else 0.0
    words = model.vocab / layout.tp if share.has_head else 0.0
    logits = logit_bytes(options) * tokens * words
    streams = (2.0 * width if share.has_head else 0.0) * tokens * model.hidden
    passing = activations + logits + streams + widest * tokens + reduced
    return {
        "parameters": params,
        "gradients": gradients,
        "optimizer": (of_optimizer - hosted_bytes(options)) * states,
        "activations": activations,
        "logits": logits + streams,
        "working space": widest * tokens + _copies_bytes(model, layout, options),
        "communication": reduced,
        "allocator": stack.slack_share * passing,
    }


def _travelling(
    model: ModelSpec, layout: Layout, options: StepOptions, largest: float
) -> tuple[float, float]:
    """Weights that ZeRO gathers at once, and gradients on their way, of a layer's ``largest``."""
    if options.stack.gathers == "layer":
        return 2 * largest, largest
    products = layer_work(model, layout, 1.0, sparse=False).products
    if model.sparse_layers:
        products += layer_work(model, layout, 1.0, sparse=True).products
    # One runs and the next is fetched; a gradient waits for its bucket to fill.
    product = max(each.weights for each in products)
    live = max(2 * product, _LIVE_WEIGHTS)
    return min(2 * largest, live), min(largest, product + _BUCKET_WEIGHTS)


def _copies_bytes(model: ModelSpec, layout: Layout, options: StepOptions) -> float:
    """Copies of experts of one layer, and their gradients [bytes]."""
    each = element_bytes(options.precision) + options.stack.grad_bytes
    return options.slots_of(layout) * model.expert_params * each


def resident_bytes(layout: Layout, options: StepOptions, held: float, largest: float) -> float:
    """The part of a rank's activations that is on the device at once [bytes].

    Args:
        layout: Degrees.
        options: What is offloaded.
        held: All that is in flight.
        largest: The most that one layer keeps of one micro-batch.
    """
    if not offloads_activations(options.offload):
        return held
    return min(held, resident_layers(layout.pp) * largest)


def host_memory(
    model: ModelSpec, layout: Layout, options: StepOptions, share: StageShare, tokens: float
) -> dict[str, float]:
    """What one rank keeps in host memory, by term [bytes]; nothing where nothing is offloaded.

    Cost: twice that of ``rank_memory``.
    """
    if options.offload == "none":
        return {}
    here = rank_memory(model, layout, options, share, tokens)
    all_here = dataclasses.replace(options, offload="none")
    whole = rank_memory(model, layout, all_here, share, tokens)
    terms = {"activations": whole["activations"] - here["activations"]}
    if offloads_optimizer(options.offload):
        of_param, of_grad, of_optimizer = weight_bytes(options)
        states = whole["optimizer"] / of_optimizer
        terms["optimizer"] = states * (hosted_bytes(options) + of_grad + of_param)
    return terms


def _weights(model: ModelSpec, layout: Layout, share: StageShare) -> tuple[float, float, float]:
    """Weights of a rank's layers without experts, of its experts, and of its largest layer."""
    dense = experts = largest = 0.0
    for layer in share.layers:
        sparse = model.is_sparse(layer)
        routed = model.experts * model.expert_params if sparse else 0
        whole = model.count_layer(sparse=sparse, active=False)
        here = (whole - routed) / layout.tp
        away = routed / (layout.ep * layout.etp)
        dense, experts, largest = dense + here, experts + away, max(largest, here + away)
    return dense, experts, largest
