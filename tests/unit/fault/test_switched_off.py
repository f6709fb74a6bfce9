"""Each guard against a fault has a test that fails once the guard is switched off.

The page on faults has the same table. A guard is switched off in place, and its test is called.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from equipoise.checkpoint import blocks, manifest, publish, same
from equipoise.checkpoint.blocks import SummedFile, sum_block
from equipoise.comm import patience, signature, standstill
from equipoise.data.cache import verified
from equipoise.fault import blame, fingerprint, policy, recover
from equipoise.fault.detect import copies, links, slow
from equipoise.fault.drill import inside
from equipoise.fault.interference.verdict import HostVerdict
from equipoise.launch import ends, local
from equipoise.launch.gang import KeptReady
from equipoise.observe.fence import Fence
from equipoise.sim import faults
from equipoise.spec.run.spec import FaultSpec
from equipoise.train.health import host

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs/train/faults.md"


@dataclass(frozen=True)
class Guard:
    """What guards, what it is when it is off, and the test that then fails."""

    owner: Any
    name: str
    off: Any
    test: str
    arguments: Callable[[Path], tuple[Any, ...]] = lambda folder: ()


def in_folder(folder: Path) -> tuple[Any, ...]:
    return (folder,)


def three_blocks(folder: Path) -> tuple[Any, ...]:
    """What the fixture of those tests makes."""
    data = bytes(2 * blocks.BLOCK_BYTES + 1000)
    path = folder / "shard-00000.bin"
    path.write_bytes(data)
    sums = tuple(sum_block(data[start:stop]) for start, stop in blocks.blocks(len(data)))
    return ((path, SummedFile(len(data), sums)),)


def blind(*ignored: Any, **also: Any) -> None:
    """Does nothing, finds nothing."""


def without_flush(folder: int, name: str, text: str) -> None:
    """Writes, and does not wait for the disk."""
    flags = os.O_WRONLY | os.O_CREAT
    with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "w") as file:
        file.write(text)


GUARDS = {
    "wait for spares": Guard(
        policy,
        "SPARE_WAIT_S",
        0.0,
        "fault/test_policy.py::test_who_does_not_want_to_wait_starts_others",
    ),
    "switch of spares": Guard(
        recover,
        "_kept",
        lambda rules, launch: KeptReady(0.0, needs_room=False),
        "launch/test_spares.py::test_who_is_kept_ready",
        lambda folder: (FaultSpec(), 0, None, folder),
    ),
    "checkpoint of a newer version": Guard(
        manifest,
        "FORMAT",
        manifest.FORMAT + 1,
        "fault/drill/test_skewed.py::test_a_newer_format_is_refused_by_its_number",
        in_folder,
    ),
    "flush before a checkpoint's name": Guard(
        publish,
        "_write",
        without_flush,
        "checkpoint/test_publish.py"
        "::test_bytes_and_names_are_flushed_before_a_checkpoint_has_its_name",
        in_folder,
    ),
    "places in a fingerprint": Guard(
        fingerprint,
        "_odd",
        lambda count, stream, device: torch.ones(count, dtype=torch.int64, device=device),
        "fault/test_fingerprint.py::test_a_swap_and_two_equal_flips_are_seen",
        lambda folder: (lambda tensor: int(fingerprint.weighted_sum(tensor)),),
    ),
    "copies of one tensor": Guard(
        copies,
        "judge_copies",
        blind,
        "fault/detect/test_copies.py::test_two_that_differ_are_both_under_suspicion",
    ),
    "lock of a run's folder": Guard(
        local,
        "require_free_folder",
        blind,
        "launch/test_local.py::test_a_folder_whose_run_goes_on",
        in_folder,
    ),
    "checksum of every block": Guard(
        blocks.BlockReader,
        "read",
        lambda self, number: memoryview(bytes(blocks.BLOCK_BYTES)),
        "checkpoint/test_blocks.py::test_a_changed_byte_is_noticed_by_reads_of_its_block_alone",
        three_blocks,
    ),
    "digest of every chunk of documents": Guard(
        verified,
        "_digest",
        lambda data: bytes(16),
        "data/cache/test_verified.py::test_a_file_that_is_cut_under_a_run_ends_in_a_sentence",
        in_folder,
    ),
    "tensor in a torn shard": Guard(
        manifest,
        "_lost",
        lambda folder, name, held: "",
        "checkpoint/test_manifest.py::test_a_torn_newest_is_passed_over_with_a_sentence",
        in_folder,
    ),
    "name of a checkpoint's folder": Guard(
        manifest,
        "_require_name",
        blind,
        "checkpoint/test_manifest.py::test_a_renamed_folder_alone_is_refused_and_not_a_fresh_start",
        in_folder,
    ),
    "checkpoint of another run": Guard(
        same,
        "require_same",
        blind,
        "checkpoint/test_manifest.py::test_another_order_of_documents",
        in_folder,
    ),
    "epoch of the run's folder": Guard(
        Fence,
        "is_passed",
        False,
        "observe/test_fence.py::test_a_journal_that_newer_ranks_write_is_left_alone",
        in_folder,
    ),
    "who has not come": Guard(
        standstill,
        "_not_come",
        lambda *_: (),
        "comm/test_standstill.py::test_a_rank_that_entered_fewer_has_not_come",
    ),
    "known reasons for being late": Guard(
        patience,
        "takes_long",
        lambda phase: False,
        "comm/test_patience.py::test_what_takes_long_for_a_known_reason_is_not_named",
        lambda folder: ("save of step 9",),
    ),
    "collectives that match": Guard(
        signature.Call,
        "matches",
        lambda *_: True,
        "comm/test_signature.py::test_the_first_difference_counts_and_numbers_line_up",
    ),
    "links that carry little": Guard(
        links.SlowLinks,
        "_judge",
        lambda *_: None,
        "fault/detect/test_links.py::test_a_cell_is_the_link_and_no_rank",
    ),
    "load that comes and goes": Guard(
        slow,
        "_HOST_PROOF",
        12.0,
        "fault/detect/test_slow.py::test_load_that_comes_and_goes_accuses_nobody",
    ),
    "whose a slow second is": Guard(
        host,
        "verdict",
        lambda *_: HostVerdict("nobody", None, 0.0, 0.0, ""),
        "train/test_host_watch.py::test_whose_the_slow_seconds_are",
    ),
    "layer of a number that went bad": Guard(
        blame,
        "_is_bad",
        lambda tensor: False,
        "fault/test_blame.py::test_a_spoiled_weight_is_named_by_its_layer",
        lambda folder: ("1.0", float("nan")),
    ),
    "end of a fault that repeats": Guard(
        policy.Policy,
        "_times",
        lambda self: 1,
        "fault/test_policy.py::test_a_step_that_others_finish_without_the_dead_rank_is_one_place",
    ),
    "pause before a fault that repeats": Guard(
        policy,
        "_LONGEST_PAUSE_S",
        0.0,
        "fault/test_policy.py::test_a_fault_that_repeats_is_given_time_to_pass",
    ),
    "signal of a dead rank": Guard(
        ends,
        "signal_of",
        blind,
        "launch/test_ends.py::test_a_process_that_a_signal_ended_has_it_until_it_is_read",
    ),
    "proof of an injection": Guard(
        inside,
        "prove",
        blind,
        "fault/drill/test_injection.py::test_what_fires_is_proven",
        in_folder,
    ),
    "interval between checkpoints": Guard(
        faults,
        "best_interval",
        lambda *_: 1,
        "sim/test_faults.py::test_young_is_near_the_best",
    ),
}


def load(test: str) -> Callable[..., None]:
    file, _, name = test.partition("::")
    path = TESTS / file
    spec = importlib.util.spec_from_file_location(f"switched_off_{path.stem}", path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("feature", GUARDS)
def test_a_guard_that_is_off_fails_its_test(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = GUARDS[feature]
    whole = tmp_path / "on"
    whole.mkdir()
    load(guard.test)(*guard.arguments(whole))
    off = tmp_path / "off"
    off.mkdir()
    arguments = guard.arguments(off)
    monkeypatch.setattr(guard.owner, guard.name, guard.off)
    test = load(guard.test)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(*arguments)


def test_the_page_has_the_same_table() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(tests/unit/[^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: f"tests/unit/{guard.test}" for name, guard in GUARDS.items()}
