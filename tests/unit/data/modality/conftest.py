"""Small real files: pictures drawn with Pillow, tones written with the standard library."""

import math
import struct
import wave
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

MakeTone = Callable[..., Path]


@pytest.fixture
def tone(tmp_path: Path) -> MakeTone:
    """Write a WAV file of a tone: ``tone("a.wav", hz=440, rate=8000, seconds=0.5)``."""

    def make(
        name: str,
        *,
        hz: float = 440.0,
        rate: int = 8000,
        seconds: float = 0.5,
        width: int = 2,
        channels: int = 1,
    ) -> Path:
        top = 2.0 ** (8 * width - 1) - 1
        data = bytearray()
        for at in range(int(seconds * rate)):
            value = round(0.5 * top * math.sin(2 * math.pi * hz * at / rate))
            sample = struct.pack("<i", value)[:width] if width > 1 else bytes([value + 128])
            data += sample * channels
        file = tmp_path / name
        with wave.open(str(file), "wb") as out:
            out.setnchannels(channels)
            out.setsampwidth(width)
            out.setframerate(rate)
            out.writeframes(bytes(data))
        return file

    return make


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """Write an image file: ``picture("a.png", 40, 30)`` is 40 wide; its red grows downwards."""

    def make(name: str, width: int, height: int, mode: str = "RGB") -> Path:
        image = Image.new(mode, (width, height))
        red = Image.linear_gradient("L").resize((width, height))
        if mode == "RGB":
            image = Image.merge("RGB", (red, Image.new("L", red.size, 40), red))
        file = tmp_path / name
        image.save(file)
        return file

    return make
