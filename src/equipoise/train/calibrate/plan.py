"""Which sizes ``equipoise calibrate`` measures, on cores and on devices.

What it decides
    A product of more operations than ``most_flop`` is left out unless its inner side is the
    shortest: there the core or the device is full, and time goes with the inner side. A core
    computes one head after the other; a device all heads of all documents of a pack at once, so
    there their number is a size as well.

Kept true (tests/unit/cli/calibrate/test_verb.py, tests/unit/train/calibrate/test_plan.py)
    The sizes of a run are covered; every product and call has a size that its grid needs.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from equipoise.spec.device.spec import Dtype
from equipoise.spec.run.resolve import ResolvedRun

MOST_HEADS = 32
"""Heads of one call on a device; more units are more documents."""

_DRAWN_BYTES = 8
"""An element of a product's output or operand, drawn in fp32 and then narrowed."""

GemmSize = tuple[Dtype, int, int, int]
"""Dtype, m, n, k."""

AttentionSize = tuple[Dtype, int, int, int | None, int | None]
"""Dtype, tokens of a document, width of a head; on devices also sharing and units."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What is measured."""

    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    rows: tuple[int, ...] = (16, 128, 1024, 8192)
    widths: tuple[int, ...] = (64, 256, 1024, 4096)
    """Both other sizes of a product."""
    most_flop: float = 9e9
    doc_tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096, 8192)
    head_widths: tuple[int, ...] = (32, 64)
    """Widths of one head."""
    sharings: tuple[int, ...] = ()
    """Query heads for each key/value head; none on cores."""
    units: tuple[int, ...] = ()
    """Heads times documents of one call; none on cores."""
    pack_tokens: int = 1 << 16
    """Tokens of all documents of one call on a device, at most, unless it has one."""
    plain_tokens: int = 1 << 13
    """The same in fp32, which no flash operator takes; longer documents are left out."""
    stream_elements: int = 12 << 20
    """Three arrays of 96 MiB: what a core streams is seldom in its cache."""
    collective_bytes: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 4))
    disk_bytes: int = 32 << 20
    limit_s: float = 50.0
    """Time on the clock after which every point gets one sample a rank."""

    @classmethod
    def of_devices(cls) -> "CalibrationPlan":
        """The usual sizes of CUDA devices, which only products of 10^12 operations fill."""
        return cls(
            dtypes=("fp8", "bf16", "fp32"),
            rows=(16, 128, 1024, 8192, 32_768),
            widths=(256, 1024, 4096, 16_384),
            most_flop=5e12,
            doc_tokens=(128, 512, 2048, 8192, 32_768),
            head_widths=(64, 128),
            sharings=(1, 4, 8),
            units=(8, 32, 128, 512, 2048),
            stream_elements=1 << 26,
            collective_bytes=tuple(1 << power for power in range(10, 31, 4)),
            limit_s=120.0,
        )

    @classmethod
    def for_run(cls, run: ResolvedRun, usual: "CalibrationPlan | None" = None) -> "CalibrationPlan":
        """The usual sizes, those of cores unless given, and those of a run where they are larger.

        >>> from equipoise.spec.run.load import read_run
        >>> run = read_run(None, [("pack.context_tokens", "16384")])
        >>> CalibrationPlan.for_run(run).doc_tokens[-1]
        16384
        """
        usual, model, pack = usual or cls(), run.model, run.spec.pack
        query = model.heads * model.head_width
        widest = max(model.hidden, 2 * model.ffn, query * 3, model.vocab, 2 * model.expert_ffn)
        shared = {model.heads // model.kv_heads} if usual.sharings else set()
        return dataclasses.replace(
            usual,
            rows=_reaching(usual.rows, pack.most_tokens),
            widths=_reaching(usual.widths, widest),
            doc_tokens=_reaching(usual.doc_tokens, pack.context_tokens),
            head_widths=tuple(sorted({*usual.head_widths, model.head_width})),
            sharings=tuple(sorted({*usual.sharings, *shared})),
        )

    def within(self, memory_bytes: int) -> "CalibrationPlan":
        """Without the rows whose largest product would not fit into half of a device's memory.

        >>> CalibrationPlan.of_devices().within(8 << 30).rows
        (16, 128, 1024, 8192)
        """
        most = memory_bytes // (2 * _DRAWN_BYTES * self.widths[-1])
        return dataclasses.replace(self, rows=tuple(m for m in self.rows if m <= most))

    def products(self, dtype: Dtype, k: int) -> list[GemmSize]:
        """Products of one dtype and inner side."""
        return [
            (dtype, m, n, k)
            for m, n in itertools.product(self.rows, self.widths)
            if k == self.widths[0] or 2.0 * m * n * k <= self.most_flop
        ]

    def attentions(self, dtype: Dtype, head_width: int) -> list[AttentionSize]:
        """Calls of attention of one dtype and width of heads."""
        if not self.units:
            return [(dtype, tokens, head_width, None, None) for tokens in self.doc_tokens]
        return list(self._calls(dtype, head_width))

    def _calls(self, dtype: Dtype, head_width: int) -> Iterator[AttentionSize]:
        most = self.plain_tokens if dtype == "fp32" else self.pack_tokens
        for sharing, tokens in itertools.product(self.sharings, self.doc_tokens):
            if dtype == "fp32" and tokens > most:
                continue
            # Heads of one call are a multiple of the key/value heads.
            sizes = sorted({-(-units // sharing) * sharing for units in self.units})
            for units in sizes:
                documents = documents_of(units, sharing)
                if documents == 1 or documents * tokens <= most:
                    yield dtype, tokens, head_width, sharing, units


def documents_of(units: int, sharing: int) -> int:
    """Documents of a call of ``units``: one, until its heads are ``MOST_HEADS``."""
    return max(1, units // heads_of(units, sharing))


def heads_of(units: int, sharing: int) -> int:
    """Query heads of a call of ``units``, a multiple of ``sharing`` that divides them."""
    most = max(sharing, MOST_HEADS)
    return max(h for h in range(sharing, most + 1, sharing) if units % h == 0 or h == sharing)


def _reaching(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The sizes, the last of them grown to a power of two that is enough."""
    most = max(sizes[-1], 1 << (size - 1).bit_length())
    return (*sizes[:-1], most)
