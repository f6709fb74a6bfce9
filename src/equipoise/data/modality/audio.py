"""Sound as patches: WAV files as spectrograms of mel bands.

What it decides
    Frames of 25 ms begin every 10 ms; bands are of HTK's mel scale, up to 8 kHz or half the rate.
    So the length in seconds decides the tokens, whatever the rate. Channels are averaged. The end
    is padded with silence to whole tokens of 80 ms. Numbers are decadic logarithms of power, at
    most 8 below the loudest, shifted and scaled as Whisper does.

Kept true (tests/unit/data/modality/test_audio.py)
    A tone is loudest in its own band; widths of samples and numbers of channels change nothing
    that they should not.

Sources
    Whisper, arXiv:2212.04356; HTK's mel scale.
"""

import wave
from io import BytesIO

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.grid import Grid
from equipoise.data.modality.image import ItemError
from equipoise.spec.modality.items import Patches
from equipoise.spec.modality.sections import FRAME_S, FRAMES, HOP_S, MELS

_HIGHEST_HZ = 8000.0
_LEAST_POWER = 1e-10
_BLOCK_FRAMES = 2 * FRAMES
"""Frames of one token."""
_MOST_NUMBERS = 1 << 20
"""Samples of frames that are transformed at a time: all frames of ten minutes at 768 kHz, which
overlap, would fill 9 GiB, and their transform as many."""
MOST_S = 600.0
"""Longest sound of one item [s]: its attention is quadratic."""
MOST_HZ = 768_000
"""Highest rate: a damaged header may say 4 GHz, and a frame of that fills a machine's memory."""


def audio_grid(data: bytes) -> Grid:
    """Rows and columns of patches of a WAV file.

    Raises:
        ItemError: it is not a WAV file of whole numbers, too short or long, or ends too soon.
    """
    with _open(data) as sound:
        grid = _grid(sound)
        _samples(sound)
        return grid


def read_audio(data: bytes) -> Patches:
    """The patches of a WAV file.

    Raises:
        ItemError: it is not a WAV file of whole numbers, or ends too soon.
    """
    with _open(data) as sound:
        rate, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
        patches, raw = _grid(sound)[0], _samples(sound)
    x = _numbers(raw, width).reshape(-1, channels).mean(axis=1)
    frame, hop = _frame(rate)
    frames = patches * FRAMES
    padded = np.zeros((frames - 1) * hop + frame)
    padded[: min(len(x), len(padded))] = x[: len(padded)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, frame)[::hop][:frames]
    taper, mel, some = np.hanning(frame), _mel_bands(rate, frame), max(1, _MOST_NUMBERS // frame)
    powers = [
        np.abs(np.fft.rfft(windows[first : first + some] * taper)) ** 2 @ mel
        for first in range(0, frames, some)
    ]
    bands = np.log10(np.maximum(np.concatenate(powers), _LEAST_POWER))
    scaled = (np.maximum(bands, bands.max() - 8.0) + 4.0) / 4.0
    out: Patches = scaled.reshape(patches, FRAMES * MELS).astype(np.float32)
    return out


def _samples(sound: wave.Wave_read) -> bytes:
    """All bytes of sound, as many as its header says."""
    said = sound.getnframes() * sound.getsampwidth() * sound.getnchannels()
    raw = sound.readframes(sound.getnframes())
    if len(raw) != said:
        raise ItemError(
            f"ends after {len(raw):,} bytes of sound, and its header says {said:,}. Replace it."
        )
    return raw


def _grid(sound: wave.Wave_read) -> Grid:
    rate, samples = sound.getframerate(), sound.getnframes()
    if rate > MOST_HZ:
        raise ItemError(
            f"has {rate:,} samples a second, and sound may have up to {MOST_HZ:,}. Convert it: "
            "ffmpeg -i FILE -ar 16000 -c:a pcm_s16le OUT.wav"
        )
    if not samples:
        raise ItemError("has no samples of sound. Replace it, or remove the row.")
    if samples > MOST_S * rate:
        raise ItemError(
            f"lasts {samples / rate:.1f} s, and sound may last up to {MOST_S:.0f} s. Cut it into "
            "several files."
        )
    _, hop = _frame(rate)
    frames = -(-samples // hop)
    return 2 * -(-frames // _BLOCK_FRAMES), 1


def _frame(rate: int) -> tuple[int, int]:
    """Samples of a frame, and between the beginnings of two."""
    return max(2, round(rate * FRAME_S)), max(1, round(rate * HOP_S))


def _open(data: bytes) -> wave.Wave_read:
    try:
        sound = wave.Wave_read(BytesIO(data))
        if sound.getframerate() > 0 and sound.getsampwidth() in (1, 2, 3, 4):
            return sound
    except (wave.Error, EOFError, ValueError, RuntimeError):  # the last: chunks beyond the end
        pass
    raise ItemError(
        "is not a WAV file of whole numbers (8 to 32 bits). Convert it: ffmpeg -i FILE -c:a "
        "pcm_s16le OUT.wav"
    )


def _numbers(raw: bytes, width: int) -> Floats:
    """Samples from -1 to 1."""
    if width == 1:  # the only width without a sign
        return np.frombuffer(raw, np.uint8) / 128.0 - 1.0
    if width == 3:
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4") / 2.0**31
    numbers: Floats = np.frombuffer(raw, f"<i{width}") / 2.0 ** (8 * width - 1)
    return numbers


def _mel_bands(rate: int, frame: int) -> Floats:
    """Triangles over the frequencies of a frame, float64 [frequencies, bands]."""
    highest = min(_HIGHEST_HZ, rate / 2)
    edges = _hz(np.linspace(0.0, float(_mel(np.array(highest))), MELS + 2))
    at = np.fft.rfftfreq(frame, 1 / rate)[:, None]
    up = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    bands: Floats = np.maximum(0.0, np.minimum(up, down))
    return bands


def _mel(hz: Floats) -> Floats:
    mel: Floats = 2595.0 * np.log10(1.0 + hz / 700.0)
    return mel


def _hz(mel: Floats) -> Floats:
    hz: Floats = 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return hz
