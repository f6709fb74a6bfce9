"""Let tests of executors import ``dense`` and the ``placements`` of schedules' tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "schedule")]
