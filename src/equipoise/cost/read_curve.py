"""The load curve of a device or of one's own measurements, without measuring anything here.

Why
    A trainer elsewhere knows its GPU by name, or has timed a few samples of its own. Both are
    closer to its seconds than a count of FLOP.

What it decides
    ``device_curve`` adds up a model's products and its attention as measured on a device, by
    ``cost.kernel``; what lies between kernels is not in it. ``fit_curve`` fits three terms that
    cannot be negative.

Kept true (tests/unit/cost/test_read_curve.py)
    A fitted curve meets a table that it can meet; a device's curve meets the prices of its
    kernels at the lengths it was read at.
"""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import DataError, SpecError
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve
from equipoise.cost.kernel import attention_s, gemm_s
from equipoise.cost.step.work import Product, head_work, layer_work
from equipoise.spec.device.by_name import find_device
from equipoise.spec.device.file import read_device_file
from equipoise.spec.device.here import calibrated_device
from equipoise.spec.device.spec import DeviceSpec, Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset

_TOKENS = 8192
"""Tokens of the micro-batch whose products are read: enough to fill any device."""

_LENGTHS = tuple(float(128 << power) for power in range(11))
"""Lengths at which a device's attention is read [tokens]."""


def device_curve(
    model: ModelSpec | str, device: DeviceSpec | Path | str, dtype: Dtype | None = None
) -> LoadCurve:
    """The curve of a model on a device whose products and attention were measured.

    Args:
        model: Sizes, or a preset's name.
        device: A name such as h100-sxm, a file that ``equipoise calibrate`` wrote, or a device.
        dtype: Dtype of the products; bf16 unless given, or the first that the device has.

    Raises:
        SpecError: no such preset, device or dtype, the file is not a device file, or the model has
            windows.
    """
    if not isinstance(model, str | ModelSpec) or not isinstance(device, str | Path | DeviceSpec):
        raise SpecError(
            f"A curve needs a model and a device, not {shown(model)} and {shown(device)}. Give "
            f'their names, as in device_curve("llama3-8b", "h100-sxm").'
        )
    sizes = preset(model) if isinstance(model, str) else model
    if sizes.window is not None:
        raise SpecError(
            f"Some layers of the model read {sizes.window.tokens:,} tokens at most, and attention "
            f"is measured over whole documents. Give counted_curve(model), which counts windows."
        )
    if isinstance(device, Path):
        where = calibrated_device(read_device_file(device), device)
    else:
        where = find_device(device) if isinstance(device, str) else device
    asked: Dtype = dtype or ("bf16" if "bf16" in where.dtypes else where.dtypes[0])
    one = Layout()
    dense = sizes.layers - sizes.sparse_layers
    products = [(1, head_work(sizes, one, _TOKENS))]
    for layers, sparse in ((dense, False), (sizes.sparse_layers, True)):
        if layers:
            work = layer_work(sizes, one, _TOKENS, sparse=sparse)
            products += [(layers, each) for each in work.products]
    product_s = sum(layers * _passes_s(each, where, asked) for layers, each in products)
    attention = np.zeros(len(_LENGTHS))
    for backward in (False, True):
        attention += [
            attention_s(
                where,
                [tokens],
                heads=sizes.heads,
                kv_heads=sizes.kv_heads,
                head_width=(sizes.score_width + sizes.head_width) // 2,
                dtype=asked,
                backward=backward,
                pack_tokens=max(tokens, float(_TOKENS)),
            ).total_s
            for tokens in _LENGTHS
        ]
    return LoadCurve(
        fixed_ns=0.0,
        ns_per_token=1e9 * product_s / _TOKENS,
        doc_tokens=_LENGTHS,
        doc_ns=tuple((1e9 * sizes.layers * attention).tolist()),
        peak_flop_per_s=where.peak_flop_per_s(asked),
        measured=True,
    )


def _passes_s(product: Product, device: DeviceSpec, dtype: Dtype) -> float:
    """A product's forward and its two gradients [s]."""
    rows, columns, inner = product.rows * product.count, product.columns, product.inner
    passes = ((rows, columns, inner), (rows, inner, columns), (inner, columns, rows))
    return sum(float(gemm_s(device, m, n, k, dtype).s) for m, n, k in passes)


def fit_curve(lengths: npt.ArrayLike, seconds: npt.ArrayLike) -> LoadCurve:
    """The curve ``fixed + tokens + pairs`` nearest to measured times of single samples.

    Relative errors are what is made small, and no term is negative. The fixed part is paid once
    in each micro-batch.

    Args:
        lengths: Length of each measured sample [tokens], each >= 1; two different ones or more.
        seconds: Forward and backward of each, alone in its micro-batch [s], above 0.

    Raises:
        DataError: the columns differ in length, or hold what no measurement has.

    >>> tokens = np.array([256, 1024, 4096])
    >>> curve = fit_curve(tokens, 1e-3 + 1e-6 * tokens)
    >>> round(curve.fixed_ns), round(curve.ns_per_token)
    (1000000, 1000)
    """
    try:
        tokens = np.asarray(lengths, dtype=np.float64).reshape(-1)
        times = np.asarray(seconds, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise DataError(
            "Measured lengths and seconds must be numbers. Give one length and one time for each "
            "sample that was measured."
        ) from None
    if len(tokens) != len(times) or len(np.unique(tokens)) < 2:
        raise DataError(
            f"{len(tokens)} lengths and {len(times)} times make no curve. Give a time for each "
            f"length, and two or more different lengths."
        )
    for name, column, least in (("length", tokens, 1.0), ("time", times, 1e-12)):
        wrong = column[~((column >= least) & (column < 2**31))]
        if len(wrong):
            raise DataError(
                f"A measured {name} is {wrong[0]:g}. Lengths are 1 token or more, and times are "
                f"seconds above 0."
            )
    columns = np.stack((np.ones_like(tokens), tokens, tokens * (tokens + 1) / 2), axis=1)
    weighted = columns / times[:, None]
    best, least_error = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            terms, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones_like(times), rcond=None)
            error = float(((weighted[:, chosen] @ terms - 1) ** 2).sum())
            if (terms >= 0).all() and error < least_error - 1e-12:
                best, least_error = np.zeros(3), error
                best[list(chosen)] = terms
    fixed, per_token, per_pair = (1e9 * best).tolist()
    return LoadCurve(fixed, per_token, (1.0,), (max(per_pair, 1e-300),), 1.0, measured=True)
