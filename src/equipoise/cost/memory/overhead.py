"""What a device and its libraries hold beside the bytes that a forecast counts.

What it decides
    Counted bytes are the same on any device; these are measured on one. On a CPU rank three
    things hold more than tensors do. *malloc*: what stays between micro-batches of unlike sizes
    leaves holes that the next activations do not fit; working with tensors that come and go
    leaves holes in any step. *Kernels*: in bf16 oneDNN compiles kernels for every size of a
    product and keeps each in a buffer of 256 KiB, 40 to 90 of them for a new size of a
    micro-batch, fewest where it is a multiple of the kernels' tiles. *Gloo* reduces a copy of its
    input.

Kept true (tests/unit/cost/memory/test_forecast.py)
    Without overhead nothing is added; each part grows with what it is a part of.

Sources
    ``bench/local/memory.py`` measures, fits on one set of runs and scores on another.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
    """One kind of device; by default it holds what is counted and nothing else."""

    fixed_bytes: int = 0
    """Contexts, workspaces and what libraries load at their first use."""
    kept_share: float = 0.0
    """Share of activations, where a rank runs several micro-batches in a step."""
    passing_share: float = 0.0
    """Share of the loss, working space, messages and, under ZeRO 3, gathered parameters."""
    size_bytes: int = 0
    """For each size of a micro-batch that a rank has seen, in bf16."""
    message_copies: float = 0.0
    """Copies of a reduced buffer that the message library makes."""

    def taken_bytes(self, *, kept: float, passing: float, narrow_sizes: int) -> float:
        """Beside counted bytes, message copies left out.

        Args:
            kept: Activations, 0 where a step is one micro-batch [bytes].
            passing: What comes and goes while they are kept [bytes].
            narrow_sizes: Sizes of micro-batches that were seen, 0 unless in bf16.
        """
        shares = self.kept_share * kept + self.passing_share * passing
        return self.fixed_bytes + shares + self.size_bytes * narrow_sizes


CPU_OVERHEAD = DeviceOverhead(
    fixed_bytes=2_153_886,
    kept_share=0.035,
    passing_share=0.547,
    size_bytes=20_276_766,
    message_copies=1.0,
)
"""A rank on a CPU: glibc 2.36 as ``train.process`` sets it, oneDNN of torch 2.13, gloo.

Fitted on the runs that ``bench/local/memory.py`` names as fitted, all but one of them of the 2M
preset. In bf16 a size is taken for 77 kernels. Counted in one run were 38 for 2,048 tokens, the
first size, 50 for 1,978 and 92 for 2,223, whose number is odd; sizes are not distinguished.
"""
