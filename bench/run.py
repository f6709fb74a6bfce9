"""All benches, one after another, each in a process of its own: ``python -m bench.run``."""

import subprocess
import sys
from pathlib import Path

BENCHES = ("throughput", "ranks", "start", "memory")


def main() -> None:
    """Write ``bench/results/NAME.json`` and print each file's name."""
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    for name in BENCHES:
        file = results / f"{name}.json"
        with file.open("w") as out:
            subprocess.run([sys.executable, "-m", f"bench.{name}"], stdout=out, check=True)
        print(file)


if __name__ == "__main__":
    main()
