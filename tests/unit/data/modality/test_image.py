"""Images as patches: sizes, order, transparency, and files that are not images."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from equipoise.base.grid import places_of
from equipoise.data.modality import image
from equipoise.data.modality.image import ItemError, fit_image, image_size, read_image
from equipoise.spec.modality.sections import VisionSpec

VISION = VisionSpec(layers=1, patch=4, least_tokens=2, most_tokens=30)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_whole_blocks_within_the_bounds(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    rows, columns = fit_image(height, width, VISION)
    assert rows % 2 == columns % 2 == 0
    tokens = rows * columns // 4
    longest = max(rows, columns) // 2  # a strip of one block in height may be longer
    assert 2 <= tokens <= 30 or min(rows, columns) == 2
    assert longest <= 30 * 8


def test_an_image_within_the_bounds_keeps_its_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    file = tmp_path / "a.png"
    Image.fromarray(pixels).save(file)
    data = file.read_bytes()
    assert image_size(data) == (16, 24)
    grid = fit_image(16, 24, VISION)
    assert grid == (4, 6)
    patches = read_image(data, grid, VISION)
    assert patches.shape == (24, 48)
    scaled = pixels.astype(np.float32) / 127.5 - 1
    for patch, (row, column) in zip(patches, places_of(grid, (2, 2)), strict=True):
        whole = scaled[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
        np.testing.assert_array_equal(patch, whole.reshape(-1))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA"])
def test_every_mode_is_read_as_colours(tmp_path: Path, mode: str) -> None:
    file = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new(mode, (16, 16)).save(file)
    patches = read_image(file.read_bytes(), (4, 4), VISION)
    assert patches.shape == (16, 48)
    is_clear = mode in ("RGBA", "LA")
    expected = 1.0 if is_clear or mode == "CMYK" else -1.0  # white shows through; no ink is white
    np.testing.assert_array_equal(patches, expected)


def test_gray_of_16_bits_keeps_its_scale(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    gray = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(gray).save(file)
    deep = read_image(file.read_bytes(), (4, 4), VISION)
    Image.fromarray((gray // 257).astype(np.uint8)).save(file)
    np.testing.assert_array_equal(deep, read_image(file.read_bytes(), (4, 4), VISION))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.int32, "whole numbers"), (np.float32, "fractions")]
)
def test_pixels_without_a_white_are_refused(
    tmp_path: Path, dtype: type[np.generic], kind: str
) -> None:
    file = tmp_path / "a.tiff"
    Image.fromarray(np.ones((16, 16), dtype=dtype)).save(file)
    with pytest.raises(ItemError) as refused:
        image_size(file.read_bytes())
    assert str(refused.value) == (
        f"has pixels that are {kind} of 32 bits, which say nothing of what is white. Save it with "
        "8 or 16 bits a channel."
    )


def test_a_larger_image_is_reduced(picture: Callable[..., Path]) -> None:
    data = picture("big.png", 400, 200).read_bytes()
    grid = fit_image(*image_size(data), VISION)
    assert grid == (6, 14)
    patches = read_image(data, grid, VISION)
    top, bottom = patches[:4].mean(), patches[-4:].mean()
    assert top < bottom  # its red grows downwards


@pytest.mark.parametrize("orientation", range(1, 10))  # 9 is not one
def test_a_camera_held_sideways_takes_upright_images(tmp_path: Path, orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    lying = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying.save(tmp_path / "lying.png", exif=exif)
    ImageOps.exif_transpose(Image.open(tmp_path / "lying.png")).save(tmp_path / "upright.png")
    lies, stands = ((tmp_path / name).read_bytes() for name in ("lying.png", "upright.png"))
    size = image_size(lies)
    assert size == image_size(stands) == ((24, 16) if 5 <= orientation <= 8 else (16, 24))
    grid = fit_image(*size, VISION)
    np.testing.assert_array_equal(read_image(lies, grid, VISION), read_image(stands, grid, VISION))
    if size == (24, 16):
        with pytest.raises(ItemError) as refused:
            read_image(lies, (4, 6), VISION)
        assert str(refused.value) == (
            "is 16 x 24 pixels upright, but its corpus was tokenized for it as it lies, by an "
            "earlier version. Delete data.cache; the next run makes it again."
        )


@pytest.mark.filterwarnings("ignore")  # Pillow's, of what it can still read
@pytest.mark.parametrize(
    "kind", ["png", "jpeg", "gif", "tiff", "bmp", "webp", "dds", "tga", "pcx", "ppm", "psd"]
)
def test_files_with_flipped_bytes_are_read_or_refused(
    picture: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(image, "MOST_PIXELS", 1 << 12)  # a header of gigabytes takes seconds
    if kind == "psd":  # which Pillow reads alone
        head = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 12, 16, 8, 3)
        whole = head + bytes(12) + bytes(2) + bytes(3 * 12 * 16)
    else:
        whole = picture(f"a.{kind}", 16, 12).read_bytes()
    assert image_size(whole) == (12, 16)
    draw = np.random.default_rng(0)
    for _ in range(40):
        data = bytearray(whole)
        for at in draw.integers(min(len(whole), 160), size=3):
            data[at] = draw.integers(256)
        for read in (image_size, lambda data: read_image(data, (4, 4), VISION)):
            try:
                read(bytes(data))
            except ItemError as error:
                assert str(error).endswith(".")


def test_files_that_are_no_images_are_refused(picture: Callable[..., Path]) -> None:
    with pytest.raises(ItemError) as refused:
        image_size(b"GIF89a, but not really")
    assert str(refused.value) == (
        "is not an image that Pillow reads. Save it as PNG or JPEG, or remove the row."
    )
    data = picture("a.png", 40, 40).read_bytes()
    half = data[: len(data) // 2]
    for read in (image_size, lambda data: read_image(data, (4, 4), VISION)):
        with pytest.raises(ItemError) as refused:
            read(half)
        assert str(refused.value).startswith("is a damaged image (")
        assert str(refused.value).endswith("). Replace it.")
    data = bytearray(picture("a.dds", 40, 40).read_bytes())
    data[80:88] = (4).to_bytes(4, "little") + b"ABCD"  # pixels compressed in no known way
    with pytest.raises(ItemError) as refused:
        image_size(bytes(data))
    assert str(refused.value) == (
        "is not an image that Pillow reads. Save it as PNG or JPEG, or remove the row."
    )
    with pytest.raises(ItemError) as refused:
        fit_image(3, 900, VISION)
    assert str(refused.value) == (
        "is 900 x 3 pixels, and one side may be 200 times the other at most. Cut it into several "
        "images."
    )
