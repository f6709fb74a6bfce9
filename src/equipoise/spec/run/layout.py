"""The `layout` section of run.toml: how a run is spread over ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from equipoise.base.errors import LayoutError
from equipoise.spec.catalog import LOSSY, SCHEDULES, Schedule
from equipoise.spec.layout import Layout

StrategyName = Literal[
    "needed-kv",
    "all-gather",
    "ring",
    "double-ring",
    "pass-q",
    "token-ring",
    "gather-q",
    "ulysses",
    "usp",
]
Sharding = Literal[
    "mixed", "head-tail-document", "head-tail", "by-work", "contiguous", "hierarchical", "auto"
]


ExpertPolicyName = Literal["fixed", "exact", "hecate", "eplb", "tutel", "auto", "speculative"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Which of the ranks that share experts compute which rows."""

    policy: Annotated[
        ExpertPolicyName,
        Field(
            description="fixed: every expert on its own rank; exact: copies of hot experts by each "
            "micro-batch's own counts; hecate: by earlier steps, corrected by the counts; eplb: by "
            "earlier steps alone; tutel: rows to weights or weights to rows, whatever is cheaper; "
            "auto: of all these the cheapest for each micro-batch; speculative: as fixed, with "
            "tokens on the tensor-parallel rank where experts.routes predicts their experts; "
            "unless fixed, layout.ep is as many ranks as can share experts, if not given"
        ),
    ] = "fixed"
    slots: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="most copies of experts that a rank holds at a time; under eplb, beside as "
            "many others as it owns, which it may give away; under tutel, all",
        ),
    ] = 1
    least_rows: Annotated[
        int,
        Field(
            ge=1,
            le=1 << 30,
            description="fewest rows that a copy is made for: F (2 b + g) / (6 B) for F FLOP/s, B "
            "bytes/s between ranks, b bytes a weight and g a gradient; 172 on two cores, 1333 on "
            "H100s of a node",
        ),
    ] = 172
    routes: Annotated[
        str,
        Field(
            description="of speculative: the table that equipoise convert --cluster-experts wrote; "
            "relative to run.toml; that of the folder of model.init if empty"
        ),
    ] = ""
    memory_mib: Annotated[
        float,
        Field(
            ge=0,
            description="memory of a rank for weights of experts, gathered layers and moments; the "
            "rest lies in a file, read and gathered ahead; 0: no limit [MiB]",
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """How the run is spread over ranks."""

    dp: Annotated[
        int | Literal["cores"],
        Field(
            description='data-parallel ranks, each with micro-batches of its own; "cores" makes '
            "dp x cp x tp x pp the cores of this machine, or its CUDA devices where it has some"
        ),
    ] = "cores"
    cp: Annotated[
        int,
        Field(
            ge=1,
            description="context-parallel ranks, which share the tokens of each micro-batch; "
            "there are dp x cp x tp x pp ranks",
        ),
    ] = 1
    tp: Annotated[
        int,
        Field(
            ge=1,
            description="tensor-parallel ranks, which share the weights of each layer; must "
            "divide the heads",
        ),
    ] = 1
    pp: Annotated[
        int,
        Field(
            ge=1,
            description="pipeline-parallel ranks, which share the layers; a step's "
            "micro-batches go from one to the next",
        ),
    ] = 1
    schedule: Annotated[
        Schedule, Field(description="of a pipeline: in which order a rank runs its micro-batches")
    ] = "1f1b"
    skip: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description=f"of {' and '.join(LOSSY)}, which train another model: share of "
            "the stages between the first and the last that each micro-batch leaves out",
        ),
    ] = 0.0
    virtual: Annotated[
        int | None,
        Field(
            ge=1,
            description="stages of each pipeline rank; unless given 2 for schedules that need or "
            "are made for it, else 1",
        ),
    ] = None
    ep: Annotated[
        int,
        Field(
            ge=1,
            description="expert-parallel ranks, which share the experts of each layer; they fold "
            "over the same ranks as dp x cp x tp, so ep x etp must divide the ranks "
            "of a pipeline stage",
        ),
    ] = 1
    etp: Annotated[
        int, Field(ge=1, description="ranks that share the hidden units of each expert")
    ] = 1
    strategy: Annotated[
        StrategyName,
        Field(description="of attention over a context's ranks: what moves between them"),
    ] = "needed-kv"
    sharding: Annotated[
        Sharding, Field(description="which of a context's ranks holds which tokens")
    ] = "mixed"
    ranks_per_node: Annotated[
        int | None,
        Field(
            ge=1,
            description="of double-ring, usp and hierarchical: ranks of a context that share a "
            "node; all of them unless given",
        ),
    ] = None
    zero: Annotated[
        Literal[0, 1, 2, 3],
        Field(description="ZeRO stage: what is sharded over all ranks besides the documents"),
    ] = 1
    replicas: Annotated[
        int,
        Field(
            ge=1,
            description="copies of what ZeRO shards over dp x cp ranks (hybrid sharding); "
            "must divide them",
        ),
    ] = 1
    parts: Annotated[
        Annotated[int, Field(ge=1, le=64)] | Literal["auto"],
        Field(
            description="parts in which rows travel between ranks that share blocks or experts, "
            "each while the part before it is computed; "
            '"auto" chooses for each number of rows by the price of this machine',
        ),
    ] = 1
    pin: Annotated[bool, Field(description="pin each rank to a core of its own")] = False
    deadline_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=36_000,
            description="longest wait of one rank for another; the ranks then end and say for "
            "whom; ten steps and at least 30 s unless given, 600 s where saving or starting",
        ),
    ] = None

    @property
    def sharing(self) -> int:
        """Ranks that compute each micro-batch together: cp x tp x pp."""
        return self.cp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Stages of the pipeline, over all its ranks."""
        usual = SCHEDULES[self.schedule].least_stages if self.pp > 1 else 1
        return self.pp * (self.virtual or usual)

    def of_ranks(self, ranks: int) -> Layout:
        """The layout of ``ranks`` ranks: data parallelism outermost, tensor parallelism innermost.

        >>> LayoutSpec(cp=2, tp=2).of_ranks(8).coordinates(5)["cp"]
        0
        """
        stage_ranks = ranks // self.pp
        if stage_ranks % (self.ep * self.etp):
            divisors = ", ".join(str(n) for n in range(1, stage_ranks + 1) if stage_ranks % n == 0)
            raise LayoutError(
                f"layout.ep x layout.etp = {self.ep} x {self.etp} does "
                f"not divide the {stage_ranks} ranks of dp x cp x tp. Give degrees whose "
                f"product is one of {divisors}."
            )
        layout = Layout(
            dp=max(1, ranks // self.sharing),
            cp=self.cp,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            zero=self.zero,
            replicas=self.replicas,
        )
        layout.require_world(ranks)
        return layout

    def count_ranks(self, cores: int) -> int:
        """All ranks: ``dp`` times those that share each micro-batch.

        Args:
            cores: Of this machine, or its CUDA devices; they are the ranks where ``dp`` is
                ``"cores"``.

        Raises:
            LayoutError: the ranks that share a micro-batch do not divide the cores.

        >>> LayoutSpec(dp=2, cp=2).count_ranks(cores=8), LayoutSpec().count_ranks(cores=8)
        (4, 8)
        """
        if self.dp != "cores":
            return self.dp * self.sharing
        if cores % self.sharing and self.sharing > self.cp:
            degrees = {"cp": self.cp, "tp": self.tp}
            if self.pp > 1:
                degrees["pp"] = self.pp
            raise LayoutError(
                f"{' x '.join(f'layout.{name}' for name in degrees)} = "
                f"{' x '.join(map(str, degrees.values()))} does not divide "
                f'the {cores} ranks of layout.dp = "cores", one for each core of this machine. '
                f"Set layout.dp = 1 for {self.sharing} ranks in all."
            )
        if cores % self.cp:
            divisors = [count for count in range(1, cores + 1) if cores % count == 0]
            closest = min(divisors, key=lambda count: abs(count - self.cp))
            raise LayoutError(
                f"layout.cp = {self.cp} does not divide the {cores} ranks of layout.dp "
                f'= "cores", one for each core of this machine. Set layout.cp = {closest}, '
                f"or layout.dp = 1 for {self.cp} ranks in all."
            )
        return cores


def idle_parts(layout: LayoutSpec, policy: ExpertPolicyName) -> str | None:
    """Why ``layout.parts`` would have no effect; None where rows travel.

    Args:
        layout: With its parts.
        policy: Of experts.
    """
    travel = layout.ep > 1 and (layout.etp == 1 or policy == "tutel")
    if layout.parts == 1 or layout.tp > 1 or travel:
        return None
    return (
        "cuts rows of blocks with layout.tp > 1, and of experts with layout.ep > 1 and "
        f'layout.etp = 1 or experts.policy = "tutel"; here are none (tp = {layout.tp}, '
        f'ep = {layout.ep}, etp = {layout.etp}, policy = "{policy}"). Set layout.parts = 1.'
    )
