"""Attention cores of a search: each micro-batch of each layout that shares it out is priced once.

Why
    What travels between context ranks is replayed message by message, and takes a tenth of a
    second for one step's documents. It is the same whatever a choice computes again, however many
    stages it has, and whoever shares its weights.

What it decides
    Who shares a core: choices of the same documents, tensor ranks, context ranks and strategy. The
    micro-batch that layers are split for is priced first, as ``sim.step`` does: of many distinct
    micro-batches the first few are replayed, so times depend on no order of the search.

Kept true (tests/unit/plan/search/test_cores.py)
    Times are those of a step that is priced alone, whoever asked before.
"""

from equipoise.plan.search.packs import Packs
from equipoise.plan.space.choice import Choice
from equipoise.sim.attention import AttentionCore, Splits
from equipoise.sim.divided import DividedStep
from equipoise.sim.machine import Machine
from equipoise.sim.sharding import auto_price
from equipoise.sim.step import typical, uniform_documents
from equipoise.spec.model.presets import ModelSpec


class Cores:
    """Cores that were asked for."""

    def __init__(self, model: ModelSpec, machine: Machine, packs: Packs) -> None:
        self._model, self._machine, self._packs = model, machine, packs
        self._known: dict[tuple[object, ...], AttentionCore] = {}
        self._splits: dict[int, Splits] = {}

    def find(self, choice: Choice, *, in_windows: bool) -> tuple[tuple[object, ...], AttentionCore]:
        """The core of a choice, and what makes it another than that of others.

        Args:
            choice: Layout and options.
            in_windows: Whether of full windows, whatever documents there are.
        """
        layout, options = choice.layout, choice.options
        shared = (tuple(layout.group_of(0, "cp")), options.context_strategy)
        alone = in_windows or not self._packs.has_documents
        key = (
            *(options.micro_batch, () if alone else (layout.dp, options.policy)),
            *(layout.tp, shared if layout.cp > 1 else ()),
        )
        if key not in self._known:
            machine = self._machine.at(options.precision)
            links = machine.context_links(layout)
            splits = self._splits.setdefault(layout.cp, {})
            price = auto_price(self._model, machine, layout, options)
            core = AttentionCore(
                self._model, layout, options, machine, links, splits=splits, price=price
            )
            rows = uniform_documents(layout, options) if alone else self._packs.heaviest(choice)
            if not isinstance(rows, DividedStep):
                core.price(typical(rows))
            self._known[key] = core
        return key, self._known[key]
