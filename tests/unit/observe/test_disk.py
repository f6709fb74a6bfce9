"""Disk rates: as many as asked for, and nothing left behind."""

from pathlib import Path

from equipoise.observe.disk import disk_rates


def test_rates_are_positive_and_the_file_is_removed(tmp_path: Path) -> None:
    reads, writes = disk_rates(tmp_path, size_bytes=1 << 20, samples=2)
    assert len(reads) == len(writes) == 2
    assert min(*reads, *writes) > 0
    assert list(tmp_path.iterdir()) == []
