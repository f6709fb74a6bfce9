"""``equipoise dash``: a local web page that shows runs, and a server, while they run."""

import argparse
import json
import sys
import webbrowser
from pathlib import Path

from equipoise.base.whole import whole_number

HELP = "show runs and a server live in a browser, predicted beside measured"

EXAMPLES = """\
examples:
  equipoise dash                            the runs below runs/, also those that come later
  equipoise dash runs/by-work runs/plain    two runs; choose both on the page to compare them
  equipoise dash --open                     and open a browser
  equipoise dash --metrics http://127.0.0.1:8000/metrics
                                            a server too: equipoise serve's, or vLLM's
  equipoise dash --host 0.0.0.0             for other machines; whoever reaches it can read it

It reads journals and metrics, writes nothing, and loads nothing from elsewhere. Ctrl-C ends it. A
server that guards its metrics gets the key in the environment variable EQUIPOISE_API_KEY.

--json prints {"url", "folders", "metrics"} when it listens, and goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="folder of a run, or one in which runs are or will be (default: runs)",
    )
    parser.add_argument("--metrics", metavar="URL", help="metrics of a running server")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=_port, default=8600, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from equipoise.dash.web.find import require_place_of_runs
    from equipoise.dash.web.server import Dashboard
    from equipoise.dash.web.serving import Serving
    from equipoise.dash.web.watch import Watch

    folders: list[Path] = args.folders
    if not folders and (not args.metrics or Path("runs").is_dir()):
        folders = [Path("runs")]
    for folder in folders:
        require_place_of_runs(folder)
    serving = Serving(args.metrics) if args.metrics else None
    with Dashboard(args.host, args.port, Watch(folders), serving) as server:
        if serving:
            serving.start()
        if args.json:
            row = {
                "url": server.url,
                "folders": [str(each) for each in folders],
                "metrics": serving.url if serving else None,
            }
            sys.stdout.write(json.dumps(row) + "\n")
        else:
            sys.stdout.write(f"{server.url}{'' if args.quiet else '  (Ctrl-C ends it)'}\n")
        sys.stdout.flush()
        if args.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            sys.stderr.write("\n" if sys.stderr.isatty() else "")
        finally:
            if serving:
                serving.stop()
    return 0


def _port(text: str) -> int:
    port = whole_number(text)
    if port is None or port > 65_535:
        raise argparse.ArgumentTypeError(f'"{text}" is not a port: 0 to 65,535')
    return port
