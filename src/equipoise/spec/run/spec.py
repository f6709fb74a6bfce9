"""run.toml as frozen dataclasses: the wish of a run, with a description of every key.

Kept true (tests/unit/spec/run/test_load.py)
    The defaults alone are a run that works on any machine with two cores; each key has a
    description; ``spec.run.load`` refuses everything that is not written here.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.run.layout import ExpertsSpec as ExpertsSpec
from equipoise.spec.run.layout import LayoutSpec as LayoutSpec
from equipoise.spec.run.layout import Sharding as Sharding
from equipoise.spec.run.layout import StrategyName as StrategyName
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.mix import MixRow
from equipoise.spec.run.model import ModelSection

Source = Literal["python-stdlib", "python-functions", "text", "jsonl", "parquet", "datasets"]
PYTHON_SOURCES = ("python-stdlib", "python-functions")
"""Sources that are this Python's own files, and read no path."""
Format = Literal["text", "messages", "prompt-completion", "parts"]
Loss = Literal["answers", "last-answer", "all"]
Precision = Literal["fp32", "bf16", "fp8"]
RateSchedule = Literal["cosine", "linear", "wsd", "constant", "inverse-sqrt"]
FaultKind = Literal["killed", "failed", "hung", "corrupt", "non-finite"]
SpareRanks = Literal["never", "auto", "at-once"]
Recompute = Literal["none", "attention", "selective", "every-2", "every-3", "every-4", "full"]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where documents come from and how they become tokens."""

    source: Annotated[
        Source,
        Field(
            description="python-stdlib, python-functions, or the kind of thing that data.path names"
        ),
    ] = "python-stdlib"
    path: Annotated[str, Field(description="file or folder to read; relative to run.toml")] = ""
    field: Annotated[
        str,
        Field(
            description="text of jsonl, parquet and datasets: a column or key, or the path of one "
            "inside it, as payload.text"
        ),
    ] = "text"
    format: Annotated[
        Format,
        Field(
            description="of a row: one text; a conversation (column messages, or conversations); "
            "a prompt and its completion (columns prompt and completion); or parts, each a text, "
            "an image or sound (column parts)"
        ),
    ] = "text"
    loss: Annotated[
        Loss,
        Field(
            description="tokens of a conversation that are learned: its answers, its last answer, "
            "or all of them; every token of a text is"
        ),
    ] = "answers"
    mix: Annotated[
        tuple[MixRow, ...],
        Field(
            description="sources instead of data.path, mixed by weight: a [[data.mix]] table for "
            "each, with path, weight and, unless as above, source, field, format and loss"
        ),
    ] = ()
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
    def is_mixed(self) -> bool:
        """Whether sources are mixed; a path beside them is another corpus, in their tokens."""
        return bool(self.mix) and not self.path

    @property
    def members(self) -> tuple["DataSpec", ...]:
        """The sources of a corpus, each as the only one."""
        return tuple(self._member(row) for row in self.mix) if self.is_mixed else (self,)

    @property
    def whole(self) -> tuple[bool, ...]:
        """Whether each source's documents are whole in a step: all but texts are.

        Rows are then conversations, or prompts with completions.
        """
        return tuple(each.format != "text" for each in self.members)

    @property
    def masks(self) -> bool:
        """Whether only some tokens are learned."""
        return any(
            each.format == "parts" or (each.format != "text" and each.loss != "all")
            for each in self.members
        )

    def _member(self, row: MixRow) -> "DataSpec":
        own = {name: getattr(row, name) for name in ("source", "field", "format", "loss")}
        given = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(self, path=row.path, mix=(), **given)


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """Documents that are not trained, and when their loss is measured."""

    path: Annotated[
        str,
        Field(
            description="held-out documents: file or folder; relative to run.toml; none if empty"
        ),
    ] = ""
    source: Annotated[
        Source | Literal["by-path"],
        Field(description="what eval.path names; by-path: by its suffix, else as data.source"),
    ] = "by-path"
    field: Annotated[str, Field(description="name of its text column; empty: data.field")] = ""
    every_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description="steps between evaluations, beside those before the first step and after "
            "the last; checkpoint.every_steps unless given, or 50 where that is auto",
        ),
    ] = None
    tokens: Annotated[
        int | Literal["all"],
        Field(description="most tokens of an evaluation: whole documents, always the same ones"),
    ] = "all"


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

    steps: Annotated[
        int, Field(ge=0, description="optimizer steps; 0 saves the first weights and ends")
    ] = 100
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
    freeze: Annotated[
        tuple[str, ...],
        Field(
            description="weights that are not trained: names or beginnings of names, with * and "
            'ranges, as in ["embed", "layers.0-3", "*.attention"]'
        ),
    ] = ()
    precision: Annotated[
        Precision,
        Field(
            description="of activations and matmuls; master weights are fp32; fp8 is bf16 with "
            "float8 products in attention projections and feed-forwards"
        ),
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
class CheckpointSpec:
    """When to save, and what to keep."""

    every_steps: Annotated[
        int | Literal["auto"],
        Field(
            description='steps between checkpoints; "auto" follows from what a save costs and '
            "how often ranks fail"
        ),
    ] = 50
    rank_mtbf_hours: Annotated[
        float,
        Field(gt=0, le=1e9, description='of "auto": mean hours between failures of one rank'),
    ] = 8000.0
    """Llama 3 on 1,024 GPUs was interrupted every 7.9 h."""
    keep: Annotated[int, Field(ge=1, description="newest checkpoints that are kept")] = 2
    second_path: Annotated[
        str,
        Field(
            description="second folder, on another disk, into which checkpoints are copied; "
            "relative to run.toml; none if empty"
        ),
    ] = ""

    @property
    def usual_steps(self) -> int:
        """Steps between checkpoints, as far as they are known before the run."""
        return 50 if self.every_steps == "auto" else self.every_steps


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """What follows a fault: all ranks start again from the newest whole checkpoint, or the end."""

    on: Annotated[
        tuple[FaultKind, ...],
        Field(
            description="faults after which ranks start again: a rank was killed, raised an "
            "exception or hung, or its memory was corrupt; non-finite: a loss or gradient was not "
            "a number"
        ),
    ] = ("killed", "failed", "hung", "corrupt")
    restarts: Annotated[
        int, Field(ge=0, le=10_000, description="most restarts within fault.within_s; 0: none")
    ] = 8
    within_s: Annotated[
        float, Field(gt=0, le=3.2e7, description="seconds for which a restart counts")
    ] = 3600.0
    least_dp: Annotated[
        int | None,
        Field(
            ge=1,
            description="fewest data-parallel ranks to go on with where a fault repeats and "
            "starting again did not help; never fewer unless given",
        ),
    ] = None
    fingerprint_steps: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="steps after which ranks compare fingerprints of weights and moments that "
            "several hold; what one holds alone is compared with itself in every step; 0: neither",
        ),
    ] = 50
    spares: Annotated[
        SpareRanks,
        Field(
            description="ranks of the next start that wait with their imports done: never; auto, "
            "once the run has trained for half a minute and if the host has memory for them; "
            "at-once, from the first step on"
        ),
    ] = "never"
    wait_s: Annotated[
        float | None,
        Field(
            ge=0,
            le=3.2e7,
            description="longest wait for a spare before going on without it [s]: for such ranks "
            "(60 unless given), and in the forms of equipoise launch for a node that comes back "
            "(the agents' 600 unless given)",
        ),
    ] = None


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
    eval: EvalSpec = field(default_factory=EvalSpec)
    model: ModelSection = field(default_factory=ModelSection)
    vision: VisionSpec = field(default_factory=VisionSpec)
    audio: AudioSpec = field(default_factory=AudioSpec)
    pack: PackSpec = field(default_factory=PackSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    experts: ExpertsSpec = field(default_factory=ExpertsSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    fault: FaultSpec = field(default_factory=FaultSpec)
    journal: JournalSpec = field(default_factory=JournalSpec)

    @property
    def encoders(self) -> tuple[EncoderSpec, ...]:
        """Encoders of images and of sound, as far as there are any, with what stays frozen."""
        given = [each.encoder for each in (self.vision, self.audio) if each.layers]
        return tuple(each.with_frozen(self.train.freeze) for each in given)
