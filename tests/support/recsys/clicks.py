"""Clicks that follow from users and ads, and a run that learns from them."""

from pathlib import Path

import numpy as np

from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.observe.journal import Journal
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.worker import train_rank
from equipoise.spec.recommend import RecommendSpec

RUN = """\
name = "clicks"
[model]
kind = "recommend"
width = 4
top = [8]
bottom = [4]
[data]
path = "clicks.csv"
label = "click"
time = "t"
ids = ["user", "ad"]
bags = ["words"]
numbers = ["price"]
[tables]
lr = 0.05
[train]
epochs = 2
batch = 64
lr = 0.01
[checkpoint]
every_steps = 5
"""


def write_clicks(folder: Path) -> Path:
    """900 clicks over time as CSV, and the run.toml beside them."""
    source = np.random.default_rng(0)
    rows = ["user,ad,words,price,t,click"]
    taste, appeal = source.standard_normal(30), source.standard_normal(12)
    for t in range(900):
        user, ad = int(30 * source.random() ** 2), int(source.integers(12))
        words = " ".join(f"w{w}" for w in source.integers(0, 9, int(source.integers(0, 4))))
        price = source.standard_normal()
        chance = 1 / (1 + np.exp(-2 * (taste[user] + appeal[ad] + 0.3 * price)))
        rows.append(f"u{user},a{ad},{words},{price:.4f},{t},{int(source.random() < chance)}")
    (folder / "clicks.csv").write_text("\n".join(rows) + "\n")
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def write_parity_clicks(folder: Path, run: str, rows: int, users: int, ads: int) -> Path:
    """Clicks of users and ads, the first of them frequent, where the sum of both is odd; and
    ``run`` as their run.toml. The column ``hour`` says nothing."""
    source = np.random.default_rng(0)
    lines = ["user,ad,hour,click"]
    for row in range(rows):
        user, ad = int(users * source.random() ** 2), int(source.integers(ads))
        lines.append(f"u{user},a{ad},{row % 24},{(user + ad) % 2}")
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(run)
    return folder / "run.toml"


def train_part(
    ranks: Ranks, folder: Path, spec: RecommendSpec, base: Path, stop_at: int | None = None
) -> dict:
    """A rank of a run, or of its first steps, without a launcher."""
    samples = read_samples(spec.data, base)
    plan = plan_samples(spec, samples).plan
    with Journal(folder / "journal", ranks.rank) as journal:
        return train_rank(ranks, folder, spec, samples, plan, journal, True, stop_at)


def run_part(run_toml: Path, folder: Path, spec: RecommendSpec, stop_at: int | None = None) -> list:
    """That run over its own ranks, or its first ``stop_at`` steps: what each rank returned."""
    folder.mkdir(exist_ok=True)
    return run_ranks(spec.layout.dp, train_part, folder, spec, run_toml.parent, stop_at)
