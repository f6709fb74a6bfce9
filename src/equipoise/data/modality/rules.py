"""How large items become: what of run.toml decides the tokens of an image or of sound.

Kept true (tests/unit/data/modality/test_items.py)
    Keys that change no token, such as an encoder's width, leave a token cache as it is.
"""

from dataclasses import dataclass

from equipoise.base.digest import digest
from equipoise.spec.modality.encoder import KINDS, EncoderSpec, ItemKind
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.run.spec import RunSpec

_READ = "upright"
"""How images are read: another word where that changes how large they are."""


@dataclass(frozen=True, slots=True)
class ItemRules:
    """Which kinds of items a run reads, and their sizes."""

    vision: VisionSpec
    audio: AudioSpec

    @classmethod
    def of(cls, spec: RunSpec) -> "ItemRules":
        """Those of a run."""
        return cls(spec.vision, spec.audio)

    @property
    def digest(self) -> str:
        """Equal for rules that make the same tokens."""
        vision, has_sound = self.vision, bool(self.audio.layers)
        sizes = [vision.patch, vision.least_tokens, vision.most_tokens, _READ]
        sizes = sizes if vision.layers else []
        return digest([sizes, has_sound])

    def encoder(self, kind: ItemKind) -> EncoderSpec | None:
        """What encodes items of a kind, if the run has it."""
        section = self.vision if kind == KINDS[0] else self.audio
        return section.encoder if section.layers else None
