"""Measure how fast a folder's disk writes and reads, past the system's cache."""

import os
import time
from pathlib import Path


def disk_rates(
    folder: Path, *, size_bytes: int = 64 << 20, samples: int = 6
) -> tuple[list[float], list[float]]:
    """Read and write one file several times, and return the rates [bytes/s].

    A write counts until the disk has it (``fsync``); before a read the system is asked to drop
    the file from its cache. If it keeps the file, as memory file systems do, the rate is the
    system's.

    Args:
        folder: A folder on the disk to measure; a file is made there and removed.
        size_bytes: Size of the file.
        samples: Number of samples of each rate.

    Returns:
        Rates of reads, and of writes.
    """
    data = os.urandom(1 << 20) * (size_bytes >> 20)
    file = folder / f".disk-rate-{os.getpid()}"
    reads, writes = [], []
    try:
        for _ in range(samples):
            begin = time.perf_counter()
            with file.open("wb", buffering=0) as out:
                out.write(data)
                os.fsync(out.fileno())
            writes.append(len(data) / (time.perf_counter() - begin))
            with file.open("rb", buffering=0) as source:
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                while source.read(1 << 20):
                    pass
                reads.append(len(data) / (time.perf_counter() - begin))
    finally:
        file.unlink(missing_ok=True)
    return reads, writes
