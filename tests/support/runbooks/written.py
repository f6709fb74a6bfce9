"""Journals of runs, healthy or with a fault, by the journal's own writer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.observe.journal import Journal

BEGAN_S = 1_790_000_000.0


class WrittenRun:
    """A run on some ranks; a step takes half a second and 0.4 s of it are computing."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks, self.now, self.step = folder, ranks, BEGAN_S, 0
        self.journals = [Journal(folder / "journal", rank) for rank in range(ranks)]

    def write(self, rank: int, kind: Any, name: str, **fields: Any) -> None:
        """One event, a tenth of a second later."""
        self.now += 0.1
        self.journals[rank].write(kind, name, t=self.now, **fields)
        self.journals[rank].flush()

    def start(self, spec: Mapping[str, Any] | None = None, **more: Any) -> None:
        """A session begins."""
        spec = spec or {
            "name": "demo",
            "train": {"lr": 3e-3, "precision": "fp32", "steps": 100},
            "checkpoint": {"every_steps": 20},
            "pack": {"policy": "by-work"},
        }
        origins = {"name": "run.toml:1", "train.steps": "--train.steps"}
        machine = {"memory_bytes": 8 << 30, "cores": 2}
        fields = {"spec": spec, "origins": origins, "environment": machine, "world": self.ranks}
        self.write(0, "instant", "start", **{**fields, "resumed_step": self.step, **more})

    def steps(
        self, count: int, by_rank: Callable[[int, int], Mapping[str, float]] | None = None
    ) -> None:
        """Steps on every rank; ``by_rank`` gives fields that differ, by rank and step."""
        for step in range(self.step + 1, self.step + count + 1):
            fields = {"policy": "by-work", "plan_s": 0.001, "predicted_s": [0.4] * self.ranks}
            self.write(0, "decision", "pack", step=step, **fields)
            for rank in range(self.ranks):
                own = {
                    "loss": 4.0, "grad_norm": 1.0, "lr": 3e-3, "step_s": 0.5, "busy_s": 0.4,
                    "wait_s": 0.06, "run_delay_s": 0.0, "predicted_s": 0.4,
                    "memory_bytes": 1 << 29, "peak_memory_bytes": 1 << 30,
                }  # fmt: skip
                own |= by_rank(rank, step) if by_rank is not None else {}
                outside_s = own.pop("outside_s", 0.005)
                spans = {"forward": own["busy_s"] / 3, "backward": own["busy_s"] * 2 / 3}
                spans |= {"wait": own["wait_s"]}
                spans |= {"optimizer": own["step_s"] - sum(spans.values()) - outside_s}
                for name, duration_s in spans.items():
                    self.write(rank, "span", name, duration_s=duration_s, step=step)
                self.write(rank, "scalar", "step", step=step, **own)
        self.step += count

    def saved(self, step: int, blocked_s: float = 0.004, **more: float) -> None:
        """A checkpoint is published."""
        times = {"staged_s": 0.1, "written_s": 0.3, "core_s": 0.1, "size_bytes": 10 << 20} | more
        for rank in range(self.ranks):
            self.write(rank, "scalar", "saved", step=step, blocked_s=blocked_s, **times)

    def recovered(self, fault: str, rank: int | None, step: int | None, action: str) -> None:
        """What the launcher decided."""
        more = {} if step is None else {"step": step}
        self.write(
            0, "decision", "recovery", fault=fault, fault_rank=rank, action=action,
            message=f"Rank {rank} ended.", **more,
        )  # fmt: skip

    def wait(self, kind: Any, name: str, rank: int, culprits: Sequence[int], **more: Any) -> None:
        """A rank waits for others, as the watchdog writes it."""
        self.write(
            rank, kind, name, message="Rank has waited.", waiting_rank=rank, what="all_gather",
            phase="wait of step 9", waited_s=31.0, missing=list(culprits), culprits=list(culprits),
            stacks={str(each): ["nn/norm.py:29 (forward)"] for each in culprits}, **more,
        )  # fmt: skip
