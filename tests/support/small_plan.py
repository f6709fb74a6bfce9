"""A calibration that takes a second."""

from equipoise.train.calibrate.plan import CalibrationPlan

SMALL = CalibrationPlan(
    rows=(16, 64),
    widths=(32, 64),
    most_flop=2.0 * 64 * 64 * 32,  # with 8 products, leaves one out
    doc_tokens=(16, 32),
    head_widths=(16,),
    stream_elements=1 << 12,
    collective_bytes=(1 << 10, 1 << 12),
    disk_bytes=1 << 20,
)
