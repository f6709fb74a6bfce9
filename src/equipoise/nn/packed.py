"""What trains here: a module that takes packed tokens and returns a summed loss.

Why
    Steps, checks and evaluation run our own decoder and models of transformers alike, so both offer
    this one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from equipoise.nn.attention import PackAttention
from equipoise.nn.lora import add_adapters
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import Recompute


class PackedModel(nn.Module, ABC):
    """Tokens in, summed loss or logits out."""

    model: ModelSpec
    """Its sizes, by which packs are priced."""
    norm: nn.Module
    """What computes the states that ``logits`` takes."""

    @property
    def params(self) -> int:
        """Weights of the whole model."""
        return self.model.params

    @property
    def texts(self) -> dict[str, str]:
        """Small files, by name, that belong with its weights in a checkpoint."""
        return {}

    @property
    @abstractmethod
    def stack(self) -> Sequence[nn.Module]:
        """Its layers, in order."""

    @abstractmethod
    def forward(
        self,
        tokens_T: Tensor,
        pack: Sequence[int] | PackAttention,
        *,
        labels_T: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy against ``labels_T``, or the logits [T, V] without labels.

        Args:
            tokens_T: Packed token ids, int64 [T]; T may be 0.
            pack: Length of each document in the pack [tokens]; positions restart at each. Or a
                ``PackAttention``, for tokens of a pack that is spread over ranks.
            labels_T: Next token of each token, ``loss.IGNORED`` where there is none.
        """

    def reference(
        self, tokens_T: Tensor, doc_tokens: Sequence[int], labels_T: Tensor | None = None
    ) -> Tensor:
        """What every layout must equal: ``forward`` on one rank, in the plainest way there is."""
        return self.forward(tokens_T, doc_tokens, labels_T=labels_T)

    @abstractmethod
    def logits(self, x_tD: Tensor) -> Tensor:
        """Logits [t, V] of what ``norm`` returned."""

    @abstractmethod
    def set_recompute(self, setting: Recompute) -> None:
        """Set what every layer makes again in the backward instead of keeping it."""

    def add_adapters(self, lora: LoraSpec, seed: int) -> None:
        """Give layers their adapters, in place, and let nothing else train."""
        add_adapters(self, lora, seed)
