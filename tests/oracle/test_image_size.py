"""Sizes of images beside those of Qwen2-VL's processor."""

import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from equipoise.data.modality.image import fit_image
from equipoise.spec.modality.sections import VisionSpec


def test_sizes_equal_those_of_the_processor() -> None:
    vision = VisionSpec(layers=1)
    least, most = vision.least_tokens * 28**2, vision.most_tokens * 28**2
    for height, width in np.random.default_rng(0).integers(10, 2500, (400, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            size = smart_resize(height, width, 28, least, most)
            assert fit_image(height, width, vision) == (size[0] // 14, size[1] // 14)
