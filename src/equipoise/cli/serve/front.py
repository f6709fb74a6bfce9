"""Where a server listens, and what ``equipoise serve`` prints while it does."""

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Front:
    """A server's address, and its words on the console."""

    def __init__(self, args: argparse.Namespace, listener: socket.socket, began_s: float) -> None:
        """Speak for a server on ``listener`` that began to start at ``began_s`` [s, monotonic]."""
        host = f"[{args.host}]" if ":" in args.host else args.host
        self.listener, self.url = listener, f"http://{host}:{listener.getsockname()[1]}/v1"
        self._args, self.began_s = args, began_s

    def log(self, line: str) -> None:
        """A line for whoever watches."""
        if not (self._args.quiet or self._args.json):
            sys.stderr.write(f"{line}\n")

    def say_ready(self, facts: Mapping[str, Any], words: str, more: str = "") -> None:
        """Say that clients can connect: ``facts`` as JSON, or ``words``, the seconds and ``more``.

        ``words`` open a parenthesis, which is closed here.
        """
        seconds = time.monotonic() - self.began_s
        said = f"{words}; ready in {seconds:.1f} s{more}). Ctrl-C stops."
        if self._args.json:
            said = json.dumps({**facts, "seconds": seconds}, indent=1)
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


@contextmanager
def open_front(args: argparse.Namespace, began_s: float) -> Iterator[Front]:
    """Listen where the flags say, until the block ends.

    Raises:
        SpecError: the port is taken, or the host is not this machine's.
    """
    from equipoise.serve.http.server import listen

    listener = listen(args.host, args.port)
    try:
        yield Front(args, listener, began_s)
    finally:
        listener.close()
