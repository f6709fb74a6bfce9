"""Let tests of specs import ``device_files``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
