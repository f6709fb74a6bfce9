"""Checks of a machine: versions, cores, pinning, memory, shared memory, limits, accelerators.

Sources
    Shared and locked memory: NCCL user guide 2.27, "Troubleshooting". What waits cost when ranks
    share a core: Linux's default scheduler gives a slice of some 4 ms.
"""

import re
import shlex

from equipoise.base.units import GIB, MIB, format_bytes
from equipoise.launch.doctor.facts import MachineFacts, Needs, Row

TORCH = ((2, 13), (2, 14))
"""From the first to before the second: the ``train`` extra's range."""

_BASE_FILES = 24
"""Open files of a rank besides its groups'. Two ranks, whose groups hold 10, trained with 30 in
all; with 27 they waited for each other silently."""

_BASE_PROCESSES = 64
"""Threads that a rank and its agent may start: a bare CPU rank has 7, CUDA and NCCL add theirs."""

_BUSY_SHARE = 0.25


def machine_rows(facts: MachineFacts, needs: Needs) -> list[Row]:
    """The checks of one machine."""
    rows = [
        _torch(facts),
        _packages(facts),
        _accelerators(facts, needs),
        _cores(facts, needs),
        _load(facts),
        _pinning(facts, needs),
        memory_row(facts, needs),
        _shared(facts, needs),
        _files(facts, needs),
        _processes(facts, needs),
        _file_size(facts, needs),
    ]
    return rows if needs.accelerator == "none" else [*rows, _locked(facts, needs)]


def _torch(facts: MachineFacts) -> Row:
    what, why = "torch", "ranks compute and meet with it"
    first, last = (".".join(map(str, each)) for each in TORCH)
    fix = f'pip install "equipoise[train]", or torch>={first},<{last}.'
    if not facts.torch:
        return Row(what, "not installed", "breaks", f"{why}.", fix)
    version = _numbers(facts.torch)
    if version < TORCH[0]:
        return Row(what, facts.torch, "breaks", f"{why}, and use what came with {first}.", fix)
    if version >= TORCH[1]:
        return Row(what, facts.torch, "warn", f"{why}, and {facts.torch} is untested.", fix)
    return Row(what, facts.torch, "ok", f"{why}.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _packages(facts: MachineFacts) -> Row:
    listed = ", ".join(
        f"{name} {version or 'is missing'}" for name, (version, _) in facts.packages.items()
    )
    wrong = [
        f"{name}{wanted}"
        for name, (version, wanted) in facts.packages.items()
        if not version
        or any(_numbers(version) < _numbers(least) for least in re.findall(r">=[\d.]+", wanted))
    ]
    why = "the corpus, run.toml and the console are read and written with them."
    if not wrong:
        return Row("packages", listed, "ok", why)
    names = " ".join(shlex.quote(each) for each in wrong)
    return Row("packages", listed, "breaks", why, f"pip install {names}")


def _accelerators(facts: MachineFacts, needs: Needs) -> Row:
    what = "accelerators"
    nvidia = facts.accelerators.get("nvidia", 0)
    here = facts.accelerators.get(needs.accelerator, 0)
    fact = ", ".join(f"{n} {maker}" for maker, n in facts.accelerators.items() if n) or "none"
    if needs.accelerator == "none":
        why = "ranks compute on CUDA devices wherever there are some"
        if nvidia and needs.ranks > nvidia:
            fix = f"Set layout.dp for {nvidia} ranks, or CUDA_VISIBLE_DEVICES= for CPU ranks."
            return Row(what, fact, "breaks", f"{why}, one each, and {needs.ranks} want one.", fix)
        return Row(what, fact, "ok", f"{why}.")
    if here < needs.ranks:
        fix = f"Give a cluster of nodes of {here}, or make more visible." if here else ""
        fix = fix or "Load the driver, give the container its devices, or unset what hides them."
        why = f"each of the {needs.ranks} ranks of a node computes on its own."
        return Row(what, fact, "breaks", why, fix)
    return Row(what, fact, "ok", f"each of the {needs.ranks} ranks of a node has its own.")


def _cores(facts: MachineFacts, needs: Needs) -> Row:
    what, usable = "cores", float(facts.cores)
    fact = f"{facts.cores} usable"
    if facts.quota_cores is not None and facts.quota_cores < facts.cores:
        usable = facts.quota_cores
        fact += f", and a quota of {usable:g} cores' time"
    if needs.ranks <= usable:
        return Row(what, fact, "ok", f"each of {needs.ranks} ranks has a core.")
    held = usable < facts.cores
    why = f"{needs.ranks} ranks on fewer cores wait for each other's slices, some 4 ms each time."
    if held:
        why = f"a quota stops all {needs.ranks} ranks for the rest of each period once it is spent."
    fix = f"Start {max(1, int(usable))} ranks here, or " + (
        f"raise the container's CPU limit to {needs.ranks}." if held else "allow more cores."
    )
    return Row(what, fact, "warn", why, fix)


def _load(facts: MachineFacts) -> Row:
    fact = f"{facts.busy_cores:.1f} at work on {facts.cores} cores, mean of the last minute"
    why = "who shares a core with a rank delays every rank that waits for it"
    if facts.busy_cores <= _BUSY_SHARE * facts.cores:
        return Row("other load", fact, "ok", f"{why}.")
    fix = "End what else runs, or read no timings of this run as its own."
    return Row("other load", fact, "warn", f"{why}.", fix)


def _pinning(facts: MachineFacts, needs: Needs) -> Row:
    what = "pinning"
    if not needs.is_pinned:
        return Row(what, "off", "ok", "a rank may move away from a core that a stranger takes.")
    if needs.ranks > facts.cores:
        fact = f"{needs.ranks} ranks on {facts.cores} cores"
        why = "pinned ranks that share a core cannot move to one that is free."
        return Row(what, fact, "warn", why, "Set layout.pin = false, or start fewer ranks.")
    if facts.busy_cores > _BUSY_SHARE * facts.cores:
        fact = f"{needs.ranks} ranks on {facts.cores} cores that others use"
        why = "a pinned rank cannot move away from a stranger, and all ranks wait for it."
        return Row(what, fact, "warn", why, "Set layout.pin = false while others run here.")
    return Row(what, f"{needs.ranks} ranks on {facts.cores} cores", "ok", "each has its own.")


def memory_row(facts: MachineFacts, needs: Needs) -> Row:
    """Whether the ranks of a node have the memory that they are forecast to need."""
    what = "memory"
    largest = max(needs.terms, key=lambda name: needs.terms[name], default="")
    most = f", most of it {largest}" if largest else ""
    if needs.device_bytes:
        need, have, unit = needs.rank_bytes, needs.device_bytes, "a device"
    else:
        need, have, unit = needs.rank_bytes * needs.ranks, facts.memory_bytes, "free"
    fact = f"{format_bytes(have)} {unit}, {format_bytes(need)} needed"
    why = f"{needs.ranks} ranks are forecast to need {format_bytes(needs.rank_bytes)} each{most}."
    fix = 'Set train.recompute = "full", a smaller pack.context_tokens, or layout.zero = 3.'
    if need > have:
        return Row(what, fact, "breaks", why, fix)
    if need > 0.8 * have:
        return Row(what, fact, "warn", f"{why} That leaves less than a fifth.", fix)
    return Row(what, fact, "ok", why)


def _shared(facts: MachineFacts, needs: Needs) -> Row:
    what, size = "shared memory", facts.shared_bytes
    fact = "no /dev/shm" if size is None else f"{format_bytes(size)} at /dev/shm"
    if needs.accelerator == "none":
        return Row(what, fact, "ok", "gloo passes messages through sockets and needs none.")
    why = "ranks of one node pass messages through it, and a container has 64 MiB by default."
    fix = "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory at /dev/shm."
    if size is None or (size <= 64 * MIB and needs.ranks > 1):
        return Row(what, fact, "breaks", why, fix)
    if size < GIB:
        return Row(what, fact, "warn", why, fix)
    return Row(what, fact, "ok", why)


def _files(facts: MachineFacts, needs: Needs) -> Row:
    limits = facts.limits
    # The first node's agent holds the store, which every rank and every agent dials.
    need = _BASE_FILES + max(needs.group_files, 2 * needs.world)
    fact = "no limit" if limits.open_files is None else f"{limits.open_files:,}"
    why = f"connections are open files; with {needs.world:,} ranks a process needs up to {need:,}."
    if limits.open_files is None or limits.open_files >= need:
        return Row("open files", fact, "ok", why)
    hard = limits.most_open_files
    fix = f"ulimit -n {need}"
    if hard is not None and hard < need:
        fix += f", once an administrator has raised the hard limit of {hard:,}"
    return Row("open files", fact, "breaks", why, f"{fix}.")


def _processes(facts: MachineFacts, needs: Needs) -> Row:
    limit = facts.limits.processes
    need = _BASE_PROCESSES * (needs.ranks + 1)
    fact = "no limit" if limit is None else f"{limit:,}"
    why = f"threads count as processes, and {needs.ranks} ranks start up to {need:,}."
    if limit is None or limit >= need:
        return Row("processes", fact, "ok", why)
    return Row("processes", fact, "warn", why, f"ulimit -u {need}.")


def _file_size(facts: MachineFacts, needs: Needs) -> Row:
    limit = facts.limits.file_bytes
    share = -(-needs.checkpoint_bytes // needs.world)
    fact = "no limit" if limit is None else format_bytes(limit)
    why = f"a rank's share of a checkpoint is a file of {format_bytes(share)}."
    if limit is None or limit >= share:
        return Row("file size", fact, "ok", why)
    return Row("file size", fact, "breaks", why, "ulimit -f unlimited.")


def _locked(facts: MachineFacts, needs: Needs) -> Row:
    limit = facts.limits.locked_bytes
    fact = "no limit" if limit is None else format_bytes(limit)
    why = "network cards of InfiniBand and RoCE read from memory that is locked."
    if limit is None or needs.nodes == 1:
        return Row("locked memory", fact, "ok", why)
    fix = "ulimit -l unlimited; docker run --ulimit memlock=-1."
    return Row("locked memory", fact, "warn", why, fix)
