"""Sound as patches: bands, lengths, widths of samples, and files that are no WAV."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.data.modality.audio import audio_grid, read_audio
from equipoise.data.modality.image import ItemError


def test_a_tone_is_loudest_in_its_own_band(tone: Callable[..., Path]) -> None:
    loudest = []
    for hz in (200, 800, 2400):
        bands = read_audio(tone("a.wav", hz=hz).read_bytes()).reshape(-1, 40)
        (peak,) = np.unique(bands[5:40].argmax(axis=1))
        mel = 2595 * np.log10(1 + hz / 700) / (2595 * np.log10(1 + 4000 / 700))
        assert abs(int(peak) - (mel * 41 - 1)) <= 1
        loudest.append(int(peak))
    assert loudest == sorted(loudest)


def test_seconds_make_tokens_whatever_the_rate(tone: Callable[..., Path]) -> None:
    for rate in (8000, 16_000, 44_100):
        data = tone("a.wav", rate=rate, seconds=1.0).read_bytes()
        grid = audio_grid(data)
        assert grid == (26, 1)  # 13 tokens of 80 ms
        assert read_audio(data).shape == (26, 160)


def test_a_high_rate_needs_little_more_memory_than_its_samples(tone: Callable[..., Path]) -> None:
    """Frames overlap: all of them at once are two and a half times the samples, and spectra."""
    data = tone("a.wav", rate=384_000, seconds=0.01).read_bytes()
    silence = bytes(2 * 384_000 * 8)
    sizes = [(len(each) + len(silence)).to_bytes(4, "little") for each in (data[8:], data[44:])]
    long = data[:4] + sizes[0] + data[8:40] + sizes[1] + data[44:] + silence
    tracemalloc.start()
    patches = read_audio(long)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(patches) == 202 and peak < 5 * 8 * (len(long) // 2)
    short = read_audio(data)
    np.testing.assert_allclose(patches[0, :40], short[0, :40].clip(patches.min()), rtol=1e-6)


def test_widths_and_channels_change_little_or_nothing(tone: Callable[..., Path]) -> None:
    plain = read_audio(tone("a.wav").read_bytes())
    np.testing.assert_allclose(
        read_audio(tone("b.wav", channels=2).read_bytes()), plain, rtol=0, atol=1e-6
    )
    for width in (3, 4):  # the bands that have sound; the floor is of rounding
        wide = read_audio(tone("c.wav", width=width).read_bytes())
        np.testing.assert_allclose(wide.max(axis=1)[:-2], plain.max(axis=1)[:-2], atol=1e-3)
    narrow = read_audio(tone("d.wav", width=1).read_bytes())
    np.testing.assert_allclose(narrow.max(axis=1)[:-2], plain.max(axis=1)[:-2], atol=0.02)


def test_files_that_are_no_sound_are_refused(tone: Callable[..., Path]) -> None:
    said = (
        "is not a WAV file of whole numbers (8 to 32 bits). Convert it: ffmpeg -i FILE -c:a "
        "pcm_s16le OUT.wav"
    )
    data = tone("a.wav").read_bytes()
    for wrong in (b"", b"RIFF", b"ID3 not a wave", data[:20]):
        with pytest.raises(ItemError) as refused:
            audio_grid(wrong)
        assert str(refused.value) == said
    for read in (audio_grid, read_audio):  # the first, so that no run begins with it
        with pytest.raises(ItemError) as refused:
            read(data[:-100])
        assert str(refused.value) == (
            "ends after 7,900 bytes of sound, and its header says 8,000. Replace it."
        )
    with pytest.raises(ItemError) as refused:
        audio_grid(data[:24] + (4_000_000_000).to_bytes(4, "little") + data[28:])
    assert str(refused.value) == (
        "has 4,000,000,000 samples a second, and sound may have up to 768,000. Convert it: "
        "ffmpeg -i FILE -ar 16000 -c:a pcm_s16le OUT.wav"
    )
    with pytest.raises(ItemError) as refused:
        audio_grid(tone("b.wav", seconds=0).read_bytes())
    assert str(refused.value) == "has no samples of sound. Replace it, or remove the row."
    with pytest.raises(ItemError) as refused:  # 601 s of 8 samples a second
        audio_grid(tone("c.wav", seconds=601, rate=8).read_bytes())
    assert str(refused.value) == (
        "lasts 601.0 s, and sound may last up to 600 s. Cut it into several files."
    )


def test_headers_with_flipped_bytes_are_read_or_refused(tone: Callable[..., Path]) -> None:
    whole, draw = tone("a.wav").read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in draw.integers(44, size=2):
            data[at] = draw.integers(256)
        try:
            audio_grid(bytes(data))
        except ItemError:
            refused += 1
    assert refused > 100
