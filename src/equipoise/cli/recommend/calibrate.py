"""``equipoise calibrate`` of a recommender: rates of its parts on this machine."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from equipoise.base.disk import why_unwritable
from equipoise.base.errors import SpecError
from equipoise.cli.recommend.asked import read_asked
from equipoise.cli.written import require_folder_of


def calibrate_recommend(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Measure, write the rates, and say how far they are off."""
    from equipoise.cost.recommend import MOST_ERROR, TableRates
    from equipoise.recsys.foresight.calibrate import calibrate
    from equipoise.recsys.foresight.forecast import rates_file

    asked = read_asked(args, add_arguments, ("out",))
    file: Path = args.out or rates_file()
    folder = file.absolute().parent
    if why := why_unwritable(folder):
        raise SpecError(
            f"The rates cannot be written to {file} ({why}). Give another file with --out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    require_folder_of("out", file)
    rates = calibrate(asked.spec, asked.base, file)
    if args.json:
        sys.stdout.write(json.dumps(rates.as_row() | {"file": str(file)}, indent=1) + "\n")
    elif not args.quiet:
        sys.stdout.write(
            f"Wrote {file}: in runs that were not fitted, steps were {100 * rates.error:.0f}% off "
            f"on average. equipoise plan and simulate read it; new runs place tables by "
            f"{TableRates.fitted(rates).words} (measured ones that are up to {MOST_ERROR:.0%} "
            "off).\n"
        )
    return 0
