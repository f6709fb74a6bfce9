"""A bench's ranks on a link of limited rate: a namespace's loopback behind a token bucket."""

import json
import subprocess
import sys
from typing import Any


def run_on_link(module: str, rate_mbit: int, *, limit_s: float = 300) -> Any:
    """What ``python -m module inside`` prints as JSON, on a link of this rate.

    Args:
        module: Whose program starts the ranks; arguments of it may follow.
        rate_mbit: Of loopback [Mbit/s]; 0 leaves it as it is.
        limit_s: Longest time that it may take [s].

    Returns:
        The document; or ``{"refused": why}`` where the machine has no such namespaces.
    """
    run = [sys.executable, "-m", *module.split(), "inside"]
    if rate_mbit:
        # A link saves up its burst while it is idle, so the burst is much less than a message.
        limit = f"tc qdisc add dev lo root tbf rate {rate_mbit}mbit burst 20kb latency 100ms"
        shell = f'ip link set lo up mtu 9000 && {limit} && exec "$@"'
        run = ["unshare", "-rn", "sh", "-c", shell, "sh", *run]
    try:
        done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=limit_s)
    except (OSError, subprocess.SubprocessError) as error:
        return {"refused": str(getattr(error, "stderr", "") or error)[-200:]}
    return json.loads(done.stdout)
