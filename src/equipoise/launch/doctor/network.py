"""Checks of a machine's name, its interfaces, a port, its clock and the shell's environment.

Sources
    Rendezvous: torch 2.13, ``dynamic_rendezvous.py``: a node whose last heartbeat, stamped by its
    own clock, is older than 3 times 5 s is taken for dead (``_sanitize``). Gloo: an address that a
    node announces is what its host name resolves to (``ProcessGroupGloo.cpp``). ``PET_`` variables
    are torchrun's flags (``torch/distributed/argparse_util.py``).
"""

import datetime
import ipaddress
import re
from collections.abc import Iterable

from equipoise.launch.doctor.facts import Needs, NetworkFacts, Row

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel"),
    "NCCL_IB_DISABLE": ("1", "takes InfiniBand away"),
    "NCCL_P2P_DISABLE": ("1", "takes NVLink away"),
    "NCCL_SHM_DISABLE": ("1", "takes shared memory away"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "compares every collective over the network"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "waits for every collective"),
}


def network_rows(facts: NetworkFacts, needs: Needs) -> list[Row]:
    """The checks of one machine's network, clock and environment."""
    rows = [_host(facts, needs), _interfaces(facts)]
    if facts.port is not None:
        rows.append(_port(facts))
    return [*rows, _clock(facts), _kept(facts, needs), _threads(facts, needs), _environment(facts)]


def _host(facts: NetworkFacts, needs: Needs) -> Row:
    what, several = "host name", needs.nodes > 1
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    why = "ranks announce the address that it resolves to"
    up = ", ".join(facts.interfaces) or "none"
    fix = f"Name an interface, GLOO_SOCKET_IFNAME or --interface (up: {up}), or correct /etc/hosts."
    if not facts.addresses:
        fact = f"{facts.host} resolves to nothing"
        if named:
            return Row(what, f"{fact}; {named} is used", "ok", f"{why}.")
        if several:
            return Row(what, fact, "breaks", f"{why}, or loopback, which no other node is.", fix)
        return Row(what, fact, "warn", f"{why}, or loopback after a wait for the resolver.", fix)
    fact = f"{facts.host} is {', '.join(facts.addresses)}"
    if several and not named and all(_is_loopback(each) for each in facts.addresses):
        return Row(what, fact, "breaks", f"{why}, and no other node reaches loopback.", fix)
    return Row(what, fact, "ok", f"{why}.")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces(facts: NetworkFacts) -> Row:
    known = (*facts.interfaces, "lo")
    up = ", ".join(facts.interfaces) or "loopback alone"
    wrong = [
        f"{key}={facts.environment[key]}"
        for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if not _names_some(key, facts.environment.get(key, ""), known)
    ]
    why = "ranks of several nodes talk through one of them."
    if not wrong:
        return Row("interfaces", f"up: {up}", "ok", why)
    fact = f"{' and '.join(wrong)}; up: {up}"
    return Row("interfaces", fact, "breaks", why, "Unset it, or name one that is up.")


def _names_some(key: str, value: str, known: Iterable[str]) -> bool:
    """Whether the variable leaves some interface: gloo's names are whole, NCCL's are prefixes."""
    if not value:
        return True
    if key.startswith("GLOO"):
        return set(value.split(",")) <= set(known)
    names = tuple(value.lstrip("^=").split(","))
    exact = value.lstrip("^").startswith("=")
    named = [each for each in known if each in names or (not exact and each.startswith(names))]
    return bool(set(known) - set(named)) if value.startswith("^") else bool(named)


def _port(facts: NetworkFacts) -> Row:
    why = "the first node's agent listens there, and all others dial it."
    if not facts.port_fault:
        return Row("port", f"{facts.port} is free", "ok", why)
    fact = f"{facts.port}: {facts.port_fault}"
    fix = "Stop the program that listens there, or choose another --port."
    return Row("port", fact, "breaks", why, fix)


def _clock(facts: NetworkFacts) -> Row:
    now = datetime.datetime.fromtimestamp(facts.now_s, datetime.UTC)
    fact = f"{now:%Y-%m-%d %H:%M} UTC"
    why = "torchrun takes a node for dead whose clock is 15 s behind the others"
    if facts.now_s >= facts.built_s:
        return Row("clock", fact, "ok", f"{why}.")
    built = datetime.datetime.fromtimestamp(facts.built_s, datetime.UTC)
    why = f"it is before {built:%Y-%m-%d %H:%M}, when this package was written here, and {why}."
    return Row("clock", fact, "breaks", why, "Set it: chronyc makestep, or timedatectl set-ntp 1.")


def _kept(facts: NetworkFacts, needs: Needs) -> Row:
    what = "time service"
    fact = {True: "synchronised", False: "not synchronised", None: "unknown"}
    why = "unsynchronised clocks drift by a second a day or more, and torchrun ends at 15 s."
    if needs.nodes == 1 or facts.is_synchronised:
        return Row(what, fact[facts.is_synchronised], "ok", why)
    fix = "Start chronyd, ntpd or systemd-timesyncd on every node."
    return Row(what, fact[facts.is_synchronised], "warn", why, fix)


def _threads(facts: NetworkFacts, needs: Needs) -> Row:
    what, value = "OMP_NUM_THREADS", facts.environment.get("OMP_NUM_THREADS", "")
    why = "a rank computes on one thread; launchers of equipoise set it to 1."
    if value in ("", "1"):
        return Row(what, value or "not set", "ok", why)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
        why = f"no number of threads: libraries then start one a core, for each of {needs.ranks}."
        return Row(what, value, "warn", why, "unset OMP_NUM_THREADS, or set it to 1.")
    if needs.ranks == 1:
        return Row(what, value, "ok", why)
    why = f"under a launcher of your own, {needs.ranks} ranks have {value} threads each for NumPy."
    return Row(what, value, "warn", why, "Set OMP_NUM_THREADS=1.")


def _environment(facts: NetworkFacts) -> Row:
    given = facts.environment
    flags = sorted(key for key in given if key.startswith("PET_"))
    left = [key for key in _OF_A_RANK if key in given]
    slow = [f"{key}={value}" for key, (value, _) in _SLOW.items() if given.get(key) == value]
    fact = ", ".join([*(f"{key}={given[key]}" for key in (*left, *flags)), *slow])
    if not fact:
        why = "variables of torch, gloo and NCCL outlive what they were set for."
        return Row("environment", "nothing left over", "ok", why)
    reasons = [_SLOW[each.partition("=")[0]][1] for each in slow]
    if flags:
        reasons.insert(0, "changes torchrun's flags")
    if left:
        reasons.insert(0, "makes what is started here a rank of another run")
    names = " ".join([*left, *flags, *(each.partition("=")[0] for each in slow)])
    why = f"it {', '.join(reasons)}."
    return Row("environment", fact, "warn", why, f"unset {names}")
