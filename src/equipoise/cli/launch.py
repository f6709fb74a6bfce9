"""``equipoise launch``: a run as torchrun, Slurm or Kubernetes starts it; printed, or submitted."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.asked_run import AskedRun, add_asked_arguments, asked_from, cluster_from

if TYPE_CHECKING:
    from equipoise.launch.forms import Job

HELP = "print a run as torchrun, Slurm or Kubernetes starts it; --submit hands it over"

EXAMPLES = """\
examples:
  equipoise launch runs/demo                        a prepared run, by torchrun on one node
  equipoise launch runs/demo --cluster h100-sxm:16 --host node-0
                                                    a script to start on each of two nodes
  equipoise launch run.toml --form slurm --cluster h100-sxm:64 --python /opt/venv/bin/python \\
      --sbatch="--partition=gpu --time=04:00:00" > demo.sh
  equipoise launch runs/demo --form slurm --cluster h100-sxm:64 --submit
  equipoise launch run.toml --plan plan.lock --form slurm
                                                    as equipoise plan run.toml decided
  equipoise launch /data/runs/demo --form kubernetes --cluster h100-sxm:64 \\
      --image registry/equipoise:1 --claim data --mount /data | kubectl apply -f -

--json prints {"form", "nodes", "ranks_per_node", "text", "submitted", "answer"}: the command that
  the form was handed to and what it said, null where it was only printed.
"""

FORMS = ("torchrun", "slurm", "kubernetes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_asked_arguments(parser)
    parser.add_argument(
        "--form", choices=FORMS, default="torchrun", help="who starts the ranks (default: torchrun)"
    )
    parser.add_argument(
        "--submit", action="store_true", help="hand it to bash, sbatch or kubectl, and say so"
    )
    parser.add_argument(
        "--python",
        default="python3",
        metavar="PATH",
        help="the nodes' interpreter with equipoise (default: python3)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29_400,
        metavar="N",
        help="where the nodes' agents meet (default: 29400)",
    )
    parser.add_argument(
        "--interface",
        default="",
        metavar="NAME",
        help="network interface of the ranks' messages (default: left to gloo and NCCL)",
    )
    parser.add_argument(
        "--host", default="", metavar="NAME", help="torchrun: the node where several meet"
    )
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="slurm: more options of sbatch"
    )
    parser.add_argument("--image", default="", metavar="IMAGE", help="kubernetes: the container's")
    parser.add_argument(
        "--claim", default="", metavar="NAME", help="kubernetes: volume claim that holds the run"
    )
    parser.add_argument(
        "--mount", type=Path, metavar="DIR", help="kubernetes: folder where the claim is mounted"
    )


def run(args: argparse.Namespace) -> int:
    """Print the form, or submit it and say so."""
    from equipoise.launch.forms import Job, place_on

    _judge(args)
    cluster = cluster_from(args)
    asked = asked_from(args, cluster)
    job = Job(
        name=asked.spec.name,
        folder=asked.folder,
        nodes=place_on(cluster, asked.ranks, sharing=asked.spec.layout.sharing),
        python=args.python,
        port=args.port,
        interface=args.interface,
        prepare=asked.prepare,
        restarts=asked.spec.fault.restarts if "killed" in asked.spec.fault.on else 0,
        wait_s=asked.spec.fault.wait_s,
    )
    text = _write(args, job, asked)
    submitted, answer = _submit(args, job, text) if args.submit else (None, None)
    if args.json:
        row = {
            "form": args.form,
            "nodes": job.nodes.count,
            "ranks_per_node": job.nodes.ranks,
            "text": text,
            "submitted": submitted,
            "answer": answer,
        }
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
    elif submitted is None:
        sys.stdout.write(text)
    elif answer and not args.quiet:
        sys.stdout.write(f"Ran {submitted}: {answer}\n")
    elif not args.quiet:
        sys.stdout.write(f"Ran {submitted}.\n")
    return 0


_OF_FORM = {
    "host": "torchrun",
    "sbatch": "slurm",
    "image": "kubernetes",
    "claim": "kubernetes",
    "mount": "kubernetes",
}


def _judge(args: argparse.Namespace) -> None:
    for flag, form in _OF_FORM.items():
        if getattr(args, flag) and args.form != form:
            raise SpecError(
                f"--{flag} needs --form {form}; the form is {args.form}. Give --form {form}, or "
                f"leave --{flag} out."
            )


def _write(args: argparse.Namespace, job: "Job", asked: AskedRun) -> str:
    if args.form == "slurm":
        from equipoise.launch.slurm import write_slurm

        return write_slurm(job, more=args.sbatch)
    if args.form == "kubernetes":
        from equipoise.launch.kube import PodSpec, write_kube

        used = [Path(each) for each in (asked.corpus, asked.init_folder) if each]
        return write_kube(job, PodSpec(args.image, args.claim, args.mount), used=used)
    from equipoise.launch.torchrun import write_torchrun

    return write_torchrun(job, host=args.host)


def _submit(args: argparse.Namespace, job: "Job", text: str) -> tuple[str, str]:
    """What was run, and what it answered."""
    from equipoise.launch.forms import submit
    from equipoise.launch.torchrun import run_torchrun

    if args.form == "torchrun":
        run_torchrun(job, text)
        return "the script with bash", ""
    words = ["sbatch"] if args.form == "slurm" else ["kubectl", "apply", "-f", "-"]
    return " ".join(words), submit(words, text)
