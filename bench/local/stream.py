"""STREAM's kernels through tensors beside the same loops in C, interleaved, on one core.

The loops are STREAM's own, compiled by the system's ``cc -O3 -march=native`` and called over
the very same arrays, turn by turn. The row of the paper on modern C++ is triad: an abstraction
is free when it reaches 97% of the raw loop.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.lib.stamp import LoadStamp, environment
from equipoise.nn.stream import KERNELS, StreamArrays
from equipoise.train.process import settle

GOAL = 0.97
ELEMENTS = 12 << 20
TURNS = 41

SOURCE = """
void copy(const double *restrict a, double *restrict b, double *restrict c, long n)
{ for (long i = 0; i < n; i++) c[i] = a[i]; }
void scale(const double *restrict a, double *restrict b, double *restrict c, long n)
{ for (long i = 0; i < n; i++) b[i] = 3.0 * c[i]; }
void add(const double *restrict a, double *restrict b, double *restrict c, long n)
{ for (long i = 0; i < n; i++) c[i] = a[i] + b[i]; }
void triad(double *restrict a, double *restrict b, double *restrict c, long n)
{ for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i]; }
"""
COMMAND = ("cc", "-O3", "-march=native", "-fno-builtin", "-shared", "-fPIC")


def _raw(folder: Path, arrays: StreamArrays) -> dict[str, Callable[[], object]]:
    source, library = folder / "stream.c", folder / "stream.so"
    source.write_text(SOURCE)
    subprocess.run([*COMMAND, "-o", str(library), str(source)], check=True)
    loops = ctypes.CDLL(str(library))
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (arrays.a, arrays.b, arrays.c)]
    count = ctypes.c_long(arrays.a.numel())

    def loop(name: str) -> Callable[[], object]:
        function = getattr(loops, name)
        return lambda: function(*pointers, count)

    return {name: loop(name) for name in KERNELS}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measure() -> dict[str, object]:
    """Both sides of each kernel, turn by turn."""
    settle(0, pin=True)
    stamp = LoadStamp()
    arrays = StreamArrays.allocate(ELEMENTS)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        raw = _raw(Path(name), arrays)
        for kernel in KERNELS:
            ours = arrays.kernel(kernel)
            pairs = [(_seconds(ours), _seconds(raw[kernel])) for _ in range(TURNS + 2)][2:]
            size = arrays.bytes_of(kernel)
            rows[kernel] = {
                "ours_gb_per_s": size / statistics.median(own for own, _ in pairs) / 1e9,
                "raw_gb_per_s": size / statistics.median(other for _, other in pairs) / 1e9,
                "ours_over_raw, median of turns": statistics.median(
                    other / own for own, other in pairs
                ),
            }
    _check(arrays)
    return {
        "what": "STREAM on one core, tensors beside loops in C (measured, processor time)",
        f"triad, ours over raw (goal {GOAL})": rows["triad"]["ours_over_raw, median of turns"],
        "kernels": rows,
        "arrays": f"three of {ELEMENTS * 8 >> 20} MiB",
        "compiler": " ".join(COMMAND),
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


def _check(arrays: StreamArrays) -> None:
    """The loops compute what the tensors do: after all turns the arrays are still alike."""
    if not torch.equal(arrays.a, arrays.b + 3.0 * arrays.c):
        raise RuntimeError("the loops and the tensors differ")


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
