"""How fast a folder's disk takes and gives bytes, past the system's cache."""

import os
import time
from pathlib import Path


def disk_rates(
    folder: Path, *, size_bytes: int = 64 << 20, samples: int = 6
) -> tuple[list[float], list[float]]:
    """Bytes a second of reading and of writing one file, several times each.

    A write counts until the disk has it (``fsync``); before a read the system is asked to
    forget the file. Where the system keeps it nevertheless, as in memory file systems, the rate
    is the system's.

    Args:
        folder: On the disk to measure; a file is made there and removed.
        size_bytes: Of the file.
        samples: Of each rate.

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
