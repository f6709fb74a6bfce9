"""The ``model`` section of run.toml: a preset or a folder, and sizes that replace its own."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from equipoise.spec.limits import MOST_EXPERTS, MOST_LAYERS
from equipoise.spec.model.presets import Balance

Engine = Literal["equipoise", "transformers"]


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which decoder to train. Any size given here replaces the preset's."""

    preset: Annotated[str, Field(description="name of a ModelSpec preset")] = "2m"
    init: Annotated[
        str,
        Field(
            description='"random", or "hf:DIR" for the weights and sizes of a Hugging Face folder'
        ),
    ] = "random"
    engine: Annotated[
        Engine,
        Field(
            description='whose code computes the model: "equipoise", or "transformers" for any '
            "decoder in model.init that is exact"
        ),
    ] = "equipoise"
    layers: Annotated[int | None, Field(ge=1, le=MOST_LAYERS, description="decoder layers")] = None
    hidden: Annotated[int | None, Field(ge=2, description="model width")] = None
    heads: Annotated[int | None, Field(ge=1, description="query heads")] = None
    kv_heads: Annotated[int | None, Field(ge=1, description="key/value heads")] = None
    ffn: Annotated[int | None, Field(ge=1, description="feed-forward width")] = None
    vocab: Annotated[int | None, Field(ge=2, description="rows of the embedding")] = None
    head_width: Annotated[int | None, Field(ge=2, description="width of one head")] = None
    tied: Annotated[bool | None, Field(description="the head shares the embedding's weights")] = (
        None
    )
    rope_theta: Annotated[float | None, Field(gt=1, description="base of rotary angles")] = None
    experts: Annotated[
        int | None,
        Field(
            ge=0,
            le=MOST_EXPERTS,
            description="experts of a layer; 0 for one feed-forward instead",
        ),
    ] = None
    top_k: Annotated[
        int | None, Field(ge=0, description="experts that a token passes through; 2 unless given")
    ] = None
    expert_ffn: Annotated[
        int | None,
        Field(ge=0, description="width of an expert; model.ffn over model.top_k unless given"),
    ] = None
    shared_ffn: Annotated[
        int | None,
        Field(ge=0, description="width of the expert that every token passes through; 0 for none"),
    ] = None
    shared_gate: Annotated[
        bool | None, Field(description="scale the shared expert's output by a gate of its input")
    ] = None
    dense_layers: Annotated[
        int | None, Field(ge=0, description="number of first layers without experts")
    ] = None
    expert_every: Annotated[
        int | None, Field(ge=1, description="among later layers, every n-th has experts")
    ] = None
    norm_top_k: Annotated[
        bool | None, Field(description="scale the weights of a token's experts to sum to one")
    ] = None
    balance: Annotated[
        Balance | None,
        Field(description="what keeps experts equally busy: a loss, or a bias of their scores"),
    ] = None
    balance_rate: Annotated[
        float | None,
        Field(gt=0, description="weight of the auxiliary loss, or what a step adds to a bias"),
    ] = None
    identity_experts: Annotated[
        int | None,
        Field(
            ge=0,
            le=MOST_EXPERTS,
            description="experts without weights, among which a router chooses too; they return "
            "their input",
        ),
    ] = None
    real_top_k: Annotated[
        float | None,
        Field(
            ge=0,
            description="experts with weights that a token passes through on average, held there "
            "by a bias; what an even choice makes unless given",
        ),
    ] = None
    shortcut: Annotated[
        bool | None,
        Field(
            description="experts read what attention of their layer reads: their rows travel while "
            "attention and the shared expert are computed"
        ),
    ] = None
    capacity_factor: Annotated[
        float | None,
        Field(
            ge=0,
            description="most tokens of an expert, over its even share of a rank's micro-batch; "
            "others are dropped. 0 drops none",
        ),
    ] = None
