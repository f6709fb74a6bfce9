"""One way to lay out a step, and the words for it.

Kept true (tests/unit/plan/space/test_columns.py)
    The words are those of ``equipoise simulate``.
"""

from dataclasses import dataclass

from equipoise.cost.step.request import StepOptions
from equipoise.spec.layout import ORDERS, Layout


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to lay out a step."""

    layout: Layout
    options: StepOptions

    def words(self) -> dict[str, str]:
        """As flags of the command line: ``layout``, ``micro-batch``, ``schedule`` and so on.

        >>> Choice(Layout(tp=8, pp=4, dp=2), StepOptions(8192, 64, virtual=2)).words()["layout"]
        'tp=8,pp=4,dp=2,zero=1,virtual=2'
        """
        degrees = {axis: self.layout.size(axis) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")}
        said = [f"{axis}={size}" for axis, size in degrees.items() if size > 1 or axis == "dp"]
        said.append(f"zero={self.layout.zero}")
        if self.layout.replicas > 1:
            said.append(f"replicas={self.layout.replicas}")
        if self.options.virtual > 1:
            said.append(f"virtual={self.options.virtual}")
        flags = {
            "layout": ",".join(said),
            "micro-batch": str(self.options.micro_batch),
            "recompute": self.options.recompute,
        }
        if self.options.offload != "none":
            flags["offload"] = self.options.offload
        if self.layout.pp > 1:
            flags["schedule"] = self.options.schedule
        if self.layout.order == ORDERS["pp-dp"]:
            flags["order"] = "pp-dp"
        if self.layout.cp > 1:
            flags["context-strategy"] = self.options.context_strategy
        return flags
