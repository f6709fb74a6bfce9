"""Manifests for folders whose files a test has written."""

from pathlib import Path

from equipoise.base.digest import digest_file
from equipoise.checkpoint.manifest import MANIFEST, Manifest, render_manifest


def describe_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a folder except the manifest, as before format 3."""
    return {
        path.name: (path.stat().st_size, digest_file(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a folder's manifest, sealed."""
    (folder / MANIFEST).write_text(render_manifest(manifest))
