"""The ``vision`` and ``audio`` sections of run.toml: encoders beside the decoder.

Sources
    Pixels of the smallest and largest image: Qwen2-VL's processor. Frames of 25 ms every 10 ms:
    HTK's defaults, which most recognisers keep.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from equipoise.spec.modality.encoder import EncoderSpec

CHANNELS = 3
MELS = 40
"""Bands of a spectrogram."""
FRAMES = 4
"""Frames of a spectrogram in one patch."""
FRAME_S, HOP_S = 0.025, 0.010


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder of images at their own resolution."""

    layers: Annotated[
        int, Field(ge=0, le=256, description="layers of the encoder of images; 0: no images")
    ] = 0
    hidden: Annotated[int, Field(ge=8, description="width of the encoder")] = 64
    heads: Annotated[int, Field(ge=1, description="heads of the encoder")] = 4
    patch: Annotated[
        int,
        Field(ge=2, le=64, description="pixels along a patch's side; 2 x 2 patches make a token"),
    ] = 14
    least_tokens: Annotated[
        int, Field(ge=1, description="tokens of the smallest image; smaller ones are enlarged")
    ] = 4
    most_tokens: Annotated[
        int, Field(ge=1, description="tokens of the largest image; larger ones are reduced")
    ] = 1280

    @property
    def encoder(self) -> EncoderSpec:
        """Its sizes."""
        values = CHANNELS * self.patch**2
        return EncoderSpec("image", self.layers, self.hidden, self.heads, values, (2, 2))


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """An encoder of sound, read as spectrograms."""

    layers: Annotated[
        int, Field(ge=0, le=256, description="layers of the encoder of sound; 0: no sound")
    ] = 0
    hidden: Annotated[int, Field(ge=8, description="width of the encoder")] = 64
    heads: Annotated[int, Field(ge=1, description="heads of the encoder")] = 4

    @property
    def encoder(self) -> EncoderSpec:
        """Its sizes: 80 ms of sound make a token."""
        return EncoderSpec("audio", self.layers, self.hidden, self.heads, MELS * FRAMES, (2, 1))
