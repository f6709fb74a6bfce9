"""Read an offline run of W&B: records of its own protocol in a log of LevelDB's format.

Source: LevelDB, doc/log_format.md; wandb 0.31 puts seven bytes before the first block.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES = 32_768, 7


def records(file: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, held, at = file.read_bytes(), b"", _HEADER_BYTES
    while at + _HEADER_BYTES <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        held += data[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
        at += _HEADER_BYTES + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            yield record
            held = b""


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Each offline folder in the order of its making: id, name, config and history."""
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run: dict[str, Any] = {"history": []}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
                run |= {
                    "id": record.run.run_id,
                    "project": record.run.project,
                    "name": record.run.display_name,
                    "config": config,
                }
            elif kind == "history":
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                run["history"].append({k: v for k, v in row.items() if "/" in k or k == "_step"})
        runs.append(run)
    return runs
