"""Write the picture of the README: the demo's typical step, packed in order and divided.

python recipes/demo/picture.py runs/demo docs/images/demo.svg
"""

import sys
from pathlib import Path

from equipoise.dash.before_after import draw_before_after, typical_pair
from equipoise.observe.reader import read_sides

before, after = read_sides(Path(sys.argv[1]))
Path(sys.argv[2]).write_text(draw_before_after(before, after, typical_pair(before, after)))
