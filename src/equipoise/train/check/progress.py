"""How far cases on other processes have come: a file grows by a byte with each of them.

Kept true (tests/multi/check/test_check.py)
    Progress advances once for each case.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.comm.group import Ranks


def tell(ranks: Ranks, done: Path | None) -> None:
    """Report that a case is done, if a file was given."""
    if done is not None and ranks.rank == 0:
        with done.open("ab") as file:
            file.write(b".")


@contextmanager
def growing_file(advance: Callable[[int], None]) -> Iterator[Path]:
    """A file whose growth is passed on, byte by byte, while it grows."""
    with tempfile.TemporaryDirectory(prefix="equipoise-check-") as folder:
        file, over, seen = Path(folder) / "done", threading.Event(), 0
        file.touch()

        def tell() -> None:
            nonlocal seen
            is_over = False
            while not is_over:
                is_over = over.wait(0.1)
                size = file.stat().st_size
                advance(size - seen)
                seen = size

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield file
        finally:
            over.set()
            teller.join()
