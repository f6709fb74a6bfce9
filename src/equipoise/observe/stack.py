"""The stack of another thread of this process, read at one moment.

Why
    A thread that runs must not have its frames walked from another one: between two steps of the
    walk it may leave a caller, and CPython 3.11 then reads a frame that is gone
    (``PyFrame_GetBack``), which ends the process. A rank died of that after hours.

What it decides
    ``faulthandler`` writes all stacks in one call, which lets no other thread run in between.

Kept true (tests/unit/observe/test_stack.py)
    Lines are those that run, innermost first, also while the thread calls and returns.
"""

import faulthandler
import os
import re
from dataclasses import dataclass

_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) ")


@dataclass(frozen=True, slots=True)
class StackLine:
    """A line that runs."""

    file: str
    line: int
    name: str
    """The function's."""


class StackReader:
    """Reads the stack of one thread again and again.

    Args:
        thread: As ``threading.get_ident`` counts it.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._file = os.memfd_create("stacks")

    def read(self) -> list[StackLine]:
        """Its lines, innermost first, at most a hundred; none if it has ended."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        lines, is_ours = list[StackLine](), False
        for row in text.splitlines():
            if header := _THREAD.match(row):
                is_ours = int(header[1], 16) == self._thread
            elif is_ours and (line := _LINE.match(row)):
                lines.append(StackLine(_plain(line[1]), int(line[2]), _plain(line[3])))
        return lines

    def close(self) -> None:
        """Free its file."""
        os.close(self._file)


def _plain(text: str) -> str:
    r"""What ``faulthandler`` writes in ASCII.

    >>> _plain(r"/home/m\xfcller/a.py")
    '/home/müller/a.py'
    """
    return text if "\\" not in text else text.encode().decode("unicode_escape", "replace")
