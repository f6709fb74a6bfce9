"""What encodes images or sound for a decoder: sizes, and what an item costs.

Why
    An *item* is an image or a stretch of sound within a document. Items differ in size a
    hundredfold, so whoever shares them out needs their cost before anything is read.

What it decides
    An item is a grid of patches, and ``merge`` neighbouring patches become one token of the
    decoder. All numbers are counted from the sizes; nothing is measured.

    Weights of an encoder that ``train.freeze`` names are part of its sizes: whoever counts its
    work, its bytes or its messages needs to know which of them are trained.

Kept true (tests/unit/balance/modality/test_deal.py, tests/unit/nn/modality/test_encoder.py)
    Counted operations equal those of the products that an encoder computes; names and shapes are
    those of its modules.

Sources
    Native resolution, merged 2 x 2: Qwen2-VL, arXiv:2409.12191; MindVL, arXiv:2509.11662.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.base.arrays import Ints
from equipoise.spec.model.match import match_any

ItemKind = Literal["image", "audio"]
KINDS: tuple[ItemKind, ...] = ("image", "audio")

ENCODERS = "encoders"
"""What the names of encoders' weights begin with among a model's."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes of an encoder."""

    kind: ItemKind
    layers: int
    hidden: int
    heads: int
    values: int
    """Numbers in one patch."""
    merge: tuple[int, int]
    """Rows and columns of patches that become one token."""
    frozen: tuple[str, ...] = ()
    """Weights that are not trained, by their names within the encoder."""

    @property
    def sizes(self) -> dict[str, Any]:
        """All but what is frozen, by name: what it was called and timed by is known by these."""
        names = (each.name for each in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name != "frozen"}

    @property
    def ffn(self) -> int:
        """Width of the feed-forward."""
        return 4 * self.hidden

    @property
    def merged(self) -> int:
        """Patches that become one token."""
        return self.merge[0] * self.merge[1]

    def multiplications(self, patches: Ints, width: int) -> Ints:
        """Multiplications of a forward pass over items, each on its own, int64 [items].

        Args:
            patches: Patches of each item.
            width: Hidden width of the decoder.
        """
        hidden, joined = self.hidden, self.merged * self.hidden
        layer = 4 * hidden * hidden + 2 * hidden * self.ffn
        rows = self.values * hidden + self.layers * layer
        join = (joined * joined + joined * width) // self.merged
        total: Ints = patches * (rows + join) + 2 * self.layers * hidden * patches * patches
        return total

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, in the order of its modules.

        Args:
            width: Hidden width of the decoder.

        >>> audio = EncoderSpec("audio", layers=1, hidden=8, heads=1, values=160, merge=(2, 1))
        >>> audio.shapes(16)["project.weight"], len(audio.shapes(16))
        ((16, 16), 20)
        """
        hidden, joined = self.hidden, self.merged * self.hidden
        layer = {
            **_norm("attention_norm", hidden),
            **_linear("query_key_value", 3 * hidden, hidden),
            **_linear("output", hidden, hidden),
            **_norm("feed_forward_norm", hidden),
            **_linear("up", self.ffn, hidden),
            **_linear("down", hidden, self.ffn),
        }
        return {
            **_linear("embed", hidden, self.values),
            **{
                f"layers.{at}.{name}": shape
                for at in range(self.layers)
                for name, shape in layer.items()
            },
            **_norm("norm", hidden),
            **_linear("join", joined, joined),
            **_linear("project", width, joined),
        }

    @property
    def is_frozen(self) -> bool:
        """Whether none of its weights is trained: it has no backward then."""
        return bool(self.frozen) and len(self.frozen) == len(self.shapes(1))

    def trains(self, *parts: str) -> bool:
        """Whether some weight of these modules is trained.

        >>> audio = EncoderSpec("audio", layers=2, hidden=8, heads=1, values=160, merge=(2, 1))
        >>> half = audio.with_frozen(["encoders.audio.embed", "encoders.audio.layers.0"])
        >>> half.trains("embed", "layers.0"), half.trains("layers.1"), half.is_frozen
        (False, True, False)
        """
        return not self.frozen or bool(set(match_any(parts, self.shapes(1))) - set(self.frozen))

    @property
    def layers_back(self) -> tuple[bool, ...]:
        """Whether the backward runs through each layer: it, or something before it, is trained."""
        if not self.frozen or self.trains("embed"):
            return (True,) * self.layers
        own = [name.split(".") for name in self.shapes(1).keys() - set(self.frozen)]
        first = min((int(at) for part, at, *_ in own if part == "layers"), default=self.layers)
        return tuple(at >= first for at in range(self.layers))

    def with_frozen(self, patterns: Sequence[str]) -> "EncoderSpec":
        """The same with the weights frozen that patterns of ``train.freeze`` name."""
        start = f"{ENCODERS}.{self.kind}."
        names = match_any(patterns, [start + name for name in self.shapes(1)])
        return dataclasses.replace(self, frozen=tuple(name.removeprefix(start) for name in names))


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
