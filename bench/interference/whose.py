"""Whose fault do the verdicts on the recorded seconds say it is?

Every disturbed window is a slow rank with a neighbour; usual are the calm seconds of the same
workload. What ends a rank's own slowness is in ``tests/unit/fault/interference/test_verdict.py``.
"""

import json
import sys
from collections import Counter

import numpy as np

from bench.interference.windows import RESOURCE_OF, load
from equipoise.fault.interference.verdict import verdict

_SLOW = 0.7


def main() -> None:
    """Print how often the neighbour is found, and what it is said to use up, by kind."""
    windows = load()
    answer: dict[str, dict[str, object]] = {}
    for kind in RESOURCE_OF:
        whose, resources, shares = Counter[str](), Counter[str](), []
        for workload in dict.fromkeys(windows.workload.tolist()):
            own = windows.workload == workload
            calm = own & (windows.kind == "") & (windows.performance > 0.8)
            usual = windows.rows[calm][:, -1]
            usual_s = 1 / float(windows.performance[calm].mean())
            for at in np.flatnonzero(own & (windows.kind == kind) & (windows.performance < _SLOW)):
                made = verdict(
                    1 / float(windows.performance[at]), usual_s, windows.rows[at][-2:], usual
                )
                whose[made.whose] += 1
                resources[made.resource or "none"] += 1
                shares.append(made.neighbour_share)
        answer[kind] = {
            "windows": sum(whose.values()),
            "neighbour": whose["its neighbour on the host"] / max(1, sum(whose.values())),
            "resources": dict(resources),
            "share": float(np.median(shares)) if shares else None,
        }
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
