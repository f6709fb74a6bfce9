"""The ``lora`` section of run.toml: low-rank adapters beside weights that stay as they are.

Sources
    LoRA: arXiv:2106.09685. Names of layers and of the keys of its configuration: peft 0.21.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

TARGETS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Layers that an adapter may join, and their names in Hugging Face folders and in peft."""

FEED_FORWARD = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Adapters that are trained instead of the model's own weights."""

    rank: Annotated[
        int, Field(ge=0, description="rank of each adapter; 0 trains the model's own weights")
    ] = 0
    alpha: Annotated[
        float, Field(gt=0, description="an adapter's output is multiplied by alpha / rank")
    ] = 16.0
    targets: Annotated[
        tuple[str, ...],
        Field(
            description="layers with an adapter: query, key, value, output, gate, up, down, or "
            'q_proj, ...; all of them unless given. With model.engine = "transformers", any '
            "names of linear layers"
        ),
    ] = ()

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank

    @property
    def layers(self) -> tuple[str, ...]:
        """The targets by our names, in the order of the table; experts have none."""
        return tuple(
            ours
            for ours, theirs in TARGETS.items()
            if not self.targets or ours in self.targets or theirs in self.targets
        )
