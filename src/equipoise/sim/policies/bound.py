"""What no packing policy can undercut on these devices, and the prices that policies pack by.

Why
    A gain says little without the gain that is possible. Where one document is heavier than a
    step's even share, no policy that keeps documents whole comes near it.

What it decides
    *Even share*: each document's attention at the rate that it has whole, each token's other
    kernels at the best size among powers of two, shared evenly by all groups of ``tp`` devices,
    which none ever waits. It holds for every policy that keeps ``tp``.

    *Path*: a document that is kept whole goes through every layer forward and backward, one after
    the other, on ``cp`` ranks at most. Stages of a pipeline do not shorten it.

    *Prices*: the load curve that a run on these devices would have measured, and what the keys of
    a token take to another rank. By counted FLOP, attention and messages would be misjudged by
    what kernels and links make of them.

Kept true (tests/unit/sim/test_policies.py)
    No priced step of any policy is faster than its bound; whole documents have no lower one than
    divided ones.
"""

import numpy as np
from numpy.typing import ArrayLike

from equipoise.base.arrays import Floats
from equipoise.cost.curve import LoadCurve
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.divided import batch_s
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

_LEAST_TOKENS = 256
"""Micro-batches of fewer tokens run every kernel slower."""

_SUM_BYTES = 4
"""Bytes of a key's gradient while it is summed."""


class _NoCore:
    """Prices tokens without their attention core."""

    def price(self, doc_tokens: Floats) -> CoreTimes:
        return CoreTimes(float(doc_tokens.sum()), 0.0, 0.0, 0.0, 0.0)


class PolicyBounds:
    """Lower bounds of steps under one ``tp``, on all devices of a cluster."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        layout: Layout,
        options: StepOptions,
        most_tokens: int,
    ) -> None:
        """What the bounds of all steps share.

        Args:
            model: Sizes.
            machine: Device and links.
            layout: Every rank on the data axis but those that share weights or experts.
            options: Of the steps, without recomputation.
            most_tokens: Of a micro-batch on one rank, of any policy.
        """
        self.model = model
        self._groups, self._layers = layout.dp * layout.cp * layout.pp, model.layers
        self._machine, self._layout = machine, layout
        self._wire_bytes = element_bytes(options.precision) + _SUM_BYTES
        at = machine.at(options.precision)
        self._core = AttentionCore(model, layout, options, at, at.context_links(layout))
        parts = StepParts(model, machine, layout, options, core=_NoCore())
        sizes, size = [], _LEAST_TOKENS
        while size < most_tokens:
            sizes.append(size)
            size *= 2
        sizes.append(most_tokens)
        self._token_s = min(batch_s(parts.price(np.array([each]))) / each for each in sizes)

    def documents_s(self, doc_tokens: ArrayLike) -> Floats:
        """Seconds of each document on one group of ``tp`` devices, float64 [documents]."""
        sizes = np.asarray(doc_tokens, dtype=np.float64)
        forward, backward = self._core.price_each(sizes)
        whole = self._layers * (forward + backward) + sizes * self._token_s
        return np.asarray(whole)

    def load_curve(self, most_tokens: int) -> LoadCurve:
        """Prices of documents on one group of ``tp`` devices, as a run would measure them.

        Args:
            most_tokens: Of a document.
        """
        sizes = [float(_LEAST_TOKENS)]
        while 2 * sizes[-1] < most_tokens:
            sizes.append(2 * sizes[-1])
        lengths = np.array([*sizes, float(most_tokens)])
        whole = np.full(len(lengths), float(most_tokens))
        forward, backward = self._core.price_each(lengths, pack_tokens=whole)
        return LoadCurve(
            fixed_ns=0.0,
            ns_per_token=1e9 * self._token_s,
            doc_tokens=tuple(lengths.tolist()),
            doc_ns=tuple((1e9 * self._layers * (forward + backward)).tolist()),
            peak_flop_per_s=self._machine.device.peak_flop_per_s("bf16"),
            measured=True,
        )

    @property
    def travel_ns(self) -> float:
        """What the keys, values and their gradients of a token take to another rank [ns]."""
        links = self._machine.data_links(self._layout)
        link = links.far if len(set(links.node_of)) > 1 else links.near
        heads = max(1, self.model.kv_heads // self._layout.tp)
        values = heads * (self.model.score_width + self.model.head_width)
        return 1e9 * self._layers * values * self._wire_bytes / link.bytes_per_s

    def even_s(self, doc_tokens: ArrayLike) -> float:
        """A step of these documents if no device ever waits [s]."""
        return float(self.documents_s(doc_tokens).sum()) / self._groups

    def whole_s(self, doc_tokens: ArrayLike, context: int) -> float:
        """A step of these documents if each stays whole on ``context`` ranks [s]."""
        each = self.documents_s(doc_tokens)
        return max(float(each.sum()) / self._groups, float(each.max()) / context)
