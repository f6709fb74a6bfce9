"""Images as patches, at their own resolution.

What it decides
    Sides are rounded to whole blocks of patches, and an image is scaled, in its own proportions,
    where it would have fewer or more tokens than a run allows. An image that its camera took
    sideways is turned upright, as EXIF says. Transparent pixels lie on white. Gray of 16 bits keeps
    its highest 8. Numbers are from -1 to 1.

Kept true (tests/unit/data/modality/test_image.py, tests/oracle/test_image_size.py)
    Sizes equal those of Qwen2-VL's processor; each pixel is in one patch.

Sources
    ``smart_resize`` of Qwen2-VL's image processor and ``image_utils.load_image``, transformers.
"""

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.errors import DataError
from equipoise.base.grid import Grid, in_blocks
from equipoise.base.read import read_bytes, reason
from equipoise.spec.modality.items import Patches
from equipoise.spec.modality.sections import CHANNELS, VisionSpec

_MOST_ASPECT = 200
"""Longer side over shorter, as Qwen2-VL's processor has it."""

MOST_PIXELS = 178_956_970
"""Pillow's own limit, beyond which a small file may fill a machine's memory."""


_DEEP = "I;16"
"""Modes of 16 bits, whatever their byte order."""
_UNBOUNDED = ("I", "F")
"""Modes of whole numbers and fractions of 32 bits, whose white no file says."""


_ORIENTATION = 0x0112
"""EXIF's tag for how a camera was held."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's names of what makes an image upright, by its orientation; from 5 on sides change."""


class ItemError(Exception):
    """A file is not the image or sound that it should be; with the reason and the fix."""


def fit_image(height: int, width: int, vision: VisionSpec) -> Grid:
    """Rows and columns of patches of an image.

    Raises:
        ItemError: one side is more than 200 times the other.

    >>> fit_image(512, 512, VisionSpec(layers=1)), fit_image(25, 14, VisionSpec(layers=1))
    ((36, 36), (6, 4))
    """
    block = 2 * vision.patch
    if max(height, width) > _MOST_ASPECT * min(height, width):
        raise ItemError(
            f"is {width:,} x {height:,} pixels, and one side may be {_MOST_ASPECT} times the other "
            "at most. Cut it into several images."
        )
    least, most = vision.least_tokens * block**2, vision.most_tokens * block**2
    rows, columns = (round(side / block) for side in (height, width))
    if rows * columns * block**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / scale / block)) for side in (height, width))
    elif rows * columns * block**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / block) for side in (height, width))
    return 2 * rows, 2 * columns


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width of an upright image [pixels]; reads it whole, so that training cannot fail.

    Raises:
        ItemError: it is not an image, too large or damaged, or has pixels without a white.
    """
    with _open(data) as image:
        try:
            image.load()
        except Exception as error:  # each of Pillow's 40 readers raises what its format brings
            raise ItemError(f"is a damaged image ({_words(error)}). Replace it.") from None
        width, height = image.size
        return (width, height) if _orientation(image) >= 5 else (height, width)


def read_image(data: bytes, grid: Grid, vision: VisionSpec) -> Patches:
    """The patches of an image file, in blocks of those that are merged.

    Args:
        data: The file.
        grid: As ``fit_image`` returned it.
        vision: The run's keys.

    Raises:
        ItemError: the file is damaged, or has another grid.
    """
    from PIL import Image

    patch = vision.patch
    with _open(data) as image:
        try:
            image.load()
            turn = _TURNS.get(_orientation(image))
            if image.has_transparency_data:
                over = image.convert("RGBA")
                plain = Image.new("RGBA", over.size, "white")
                plain.alpha_composite(over)
                image = plain
            if image.mode.startswith(_DEEP):  # Pillow would cut all above 255 off
                image = Image.fromarray((np.asarray(image, np.uint32) // 257).astype(np.uint8))
            plain = image.convert("RGB")
            upright = plain if turn is None else plain.transpose(Image.Transpose[turn])
            small = upright.resize((grid[1] * patch, grid[0] * patch), Image.Resampling.BICUBIC)
        except Exception as error:  # as in image_size
            raise ItemError(f"is a damaged image ({_words(error)}). Replace it.") from None
    if fit_image(upright.height, upright.width, vision) != grid:
        raise ItemError(
            f"is {upright.width:,} x {upright.height:,} pixels upright, but its corpus was "
            f"tokenized for it as it lies, by an earlier version. Delete data.cache; the next run "
            f"makes it again."
        )
    pixels = np.asarray(small, dtype=np.float32) / 127.5 - 1
    tiles = pixels.reshape(grid[0], patch, grid[1], patch, CHANNELS).swapaxes(1, 2)
    patches: Patches = in_blocks(tiles, vision.encoder.merge).reshape(grid[0] * grid[1], -1)
    return patches


def _open(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Reading images needs Pillow, which is not installed. Run: pip install "
            "'equipoise[images]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data))
    except Exception:  # as in image_size
        raise ItemError(
            "is not an image that Pillow reads. Save it as PNG or JPEG, or remove the row."
        ) from None
    pixels = image.width * image.height
    if pixels > MOST_PIXELS or not pixels:
        raise ItemError(
            f"has {pixels:,} pixels, and an image may have from 1 to {MOST_PIXELS:,}. Scale it."
        )
    if image.mode in _UNBOUNDED:
        kind = "whole numbers" if image.mode == "I" else "fractions"
        raise ItemError(
            f"has pixels that are {kind} of 32 bits, which say nothing of what is white. Save it "
            "with 8 or 16 bits a channel."
        )
    return image


def _orientation(image: Any) -> int:
    """From 1, upright, to 8; EXIF that cannot be read says nothing."""
    try:
        number: int = image.getexif().get(_ORIENTATION, 1)
        return number if number in _TURNS else 1
    except Exception:  # as in image_size
        return 1


def _words(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__


def item_file(path: Path) -> bytes:
    """The bytes of an item's file.

    Raises:
        ItemError: it cannot be read.
    """
    try:
        return read_bytes(path)
    except OSError as error:
        raise ItemError(f"cannot be read ({reason(error)}). Correct the path.") from None
