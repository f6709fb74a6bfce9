"""run.toml as frozen dataclasses: the wish of a run, with a description of every key.

Kept true (tests/unit/spec/run/test_load.py)
    The defaults alone are a run that works on any machine with two cores; each key has a
    description; ``spec.run.load`` refuses everything that is not written here.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from equipoise.base.errors import LayoutError
from equipoise.spec.catalog import LOSSY, POLICIES, SCHEDULES, Policy, Schedule
from equipoise.spec.layout import Layout
from equipoise.spec.run.model import ModelSection

Source = Literal["python-stdlib", "text", "jsonl", "parquet", "datasets"]
Format = Literal["text", "messages", "prompt-completion"]
Loss = Literal["answers", "last-answer", "all"]
Precision = Literal["fp32", "bf16"]
StrategyName = Literal[
    "needed-kv", "all-gather", "ring", "double-ring", "pass-q", "token-ring", "ulysses", "usp"
]
Sharding = Literal[
    "mixed", "head-tail-document", "head-tail", "by-work", "contiguous", "hierarchical", "auto"
]
RateSchedule = Literal["cosine", "linear", "wsd", "constant", "inverse-sqrt"]
Recompute = Literal["none", "attention", "selective", "every-2", "every-3", "every-4", "full"]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where documents come from and how they become tokens."""

    source: Annotated[
        Source,
        Field(description="python-stdlib, or the kind of thing that data.path names"),
    ] = "python-stdlib"
    path: Annotated[str, Field(description="file or folder to read; relative to run.toml")] = ""
    field: Annotated[
        str, Field(description="name of the text column of jsonl, parquet and datasets")
    ] = "text"
    format: Annotated[
        Format,
        Field(
            description="of a row: one text; a conversation (column messages, or conversations); "
            "or a prompt and its completion (columns prompt and completion)"
        ),
    ] = "text"
    loss: Annotated[
        Loss,
        Field(
            description="tokens of a conversation that are learned: its answers, its last answer, "
            "or all of them; every token of a text is"
        ),
    ] = "answers"
    tokenizer: Annotated[
        str,
        Field(
            description='"train" trains a byte-level BPE; else a tokenizer.json, or a folder with '
            'one; with model.init = "hf:DIR" that folder\'s own unless given'
        ),
    ] = "train"
    vocab: Annotated[
        int, Field(ge=260, le=1_000_000, description="size of the BPE that is trained")
    ] = 4096
    cache: Annotated[str, Field(description="folder of trained tokenizers and token caches")] = (
        "~/.cache/equipoise"
    )

    @property
    def holds_conversations(self) -> bool:
        """Whether rows are conversations, or prompts with completions, rather than texts."""
        return self.format != "text"

    @property
    def masks(self) -> bool:
        """Whether only some tokens are learned."""
        return self.holds_conversations and self.loss != "all"


@dataclass(frozen=True, slots=True)
class PackSpec:
    """How a step's documents are shared out."""

    policy: Annotated[Policy, Field(description="how documents become micro-batches")] = "by-work"
    context_tokens: Annotated[
        int,
        Field(ge=2, description="window: longer documents are cut; tokens of an in-order pack"),
    ] = 8192
    step_tokens: Annotated[
        int, Field(ge=2, description="tokens of one optimizer step, over all ranks")
    ] = 32_768
    cut: Annotated[
        Literal["documents", "windows"],
        Field(
            description='where documents are cut: "documents" only those longer than a window, '
            '"windows" also at each window\'s edge, as in-order always does'
        ),
    ] = "documents"
    max_tokens: Annotated[
        int | None,
        Field(
            ge=2,
            description="most tokens in one micro-batch, of policies that do not fill windows; "
            "1.25 windows unless given",
        ),
    ] = None
    queues: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description="of delayed: queues of outliers; the last holds documents from half a "
            "window on, each one before it from half that length on",
        ),
    ] = 2
    max_delay_steps: Annotated[
        int, Field(ge=0, description="of delayed: steps that a document waits at most")
    ] = 16

    @property
    def most_tokens(self) -> int:
        """Most tokens that one micro-batch may hold under this policy."""
        if POLICIES[self.policy].fills_windows:
            return self.context_tokens
        if self.max_tokens is not None:
            return self.max_tokens
        return self.context_tokens + self.context_tokens // 4


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """The optimisation."""

    steps: Annotated[int, Field(ge=1, description="optimizer steps")] = 100
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seed of weights and of order")] = 0
    lr: Annotated[float, Field(gt=0, description="peak learning rate")] = 3e-3
    schedule: Annotated[RateSchedule, Field(description="learning rate after the warm-up")] = (
        "cosine"
    )
    warmup_steps: Annotated[
        int,
        Field(
            ge=0,
            description="steps of linear warm-up; unless given, half of train.steps where these "
            "are fewer than 10",
        ),
    ] = 10
    decay_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description="of wsd: last steps, in which the learning rate falls; a tenth of "
            "train.steps unless given",
        ),
    ] = None
    final_lr_ratio: Annotated[
        float,
        Field(ge=0, le=1, description="last learning rate over peak, of cosine, linear and wsd"),
    ] = 0.1
    weight_decay: Annotated[float, Field(ge=0, description="AdamW's, on matrices only")] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1, description="AdamW's first moment")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="AdamW's second moment")] = 0.95
    eps: Annotated[float, Field(gt=0, description="AdamW's epsilon")] = 1e-8
    clip_norm: Annotated[float, Field(gt=0, description="largest global gradient norm")] = 1.0
    precision: Annotated[
        Precision, Field(description="of activations and matmuls; master weights are fp32")
    ] = "fp32"
    recompute: Annotated[
        Recompute,
        Field(
            description="what layers make again in the backward instead of keeping it: the "
            "attention core; all else (selective); every N-th layer; or every layer (full)"
        ),
    ] = "none"

    @property
    def falling_steps(self) -> int:
        """Last steps of a ``wsd`` schedule, in which the learning rate falls."""
        usual = min(max(1, self.steps // 10), self.steps - self.warmup_steps)
        return usual if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """How the run is spread over ranks."""

    dp: Annotated[
        int | Literal["cores"],
        Field(
            description='data-parallel ranks, each with micro-batches of its own; "cores" makes '
            "dp x cp x tp x pp the cores of this machine"
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
    pin: Annotated[bool, Field(description="pin each rank to a core of its own")] = False
    deadline_s: Annotated[
        float,
        Field(
            gt=0,
            le=36_000,
            description="longest wait of one rank for another; the run then ends and says for whom",
        ),
    ] = 600.0

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
            cores: Of this machine; they are the ranks where ``dp`` is ``"cores"``.

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


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """When to save, and what to keep."""

    every_steps: Annotated[int, Field(ge=1, description="steps between checkpoints")] = 50
    keep: Annotated[int, Field(ge=1, description="newest checkpoints that are kept")] = 2


@dataclass(frozen=True, slots=True)
class JournalSpec:
    """What is written down beside the journal itself."""

    tensorboard: Annotated[bool, Field(description="also write TensorBoard scalars")] = False
    wandb: Annotated[
        bool,
        Field(description="also write a run of Weights & Biases, offline unless WANDB_MODE is set"),
    ] = False
    mlflow: Annotated[
        bool,
        Field(description="also write a run of MLflow, to files unless MLFLOW_TRACKING_URI is set"),
    ] = False


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A whole run.toml."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder of the run")
    ] = "run"
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSection = field(default_factory=ModelSection)
    pack: PackSpec = field(default_factory=PackSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    journal: JournalSpec = field(default_factory=JournalSpec)
