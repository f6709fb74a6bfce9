"""Shared rows on two ranks: the same bits forward, and traffic that falls by what is shared."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.sessions.inverse import share_rows
from equipoise.schedule.tables.traffic import count_traffic
from equipoise.spec.recommend import read_recommend
from support.recsys import tables
from support.recsys.clicks import run_part

RUN = """\
name = "sessions"
[model]
kind = "recommend"
width = 4
bottom = [4]
top = [8]
[data]
path = "clicks.csv"
label = "click"
time = "t"
session = "user"
session_gap = 40.0
ids = ["user", "town", "ad"]
bags = ["words"]
numbers = ["age"]
[train]
epochs = 1
batch = 64
shuffle = "sessions"
"""
GROUPS = '[["user", "town", "age"], ["ad", "words"]]'


def compare(ranks: Ranks) -> dict[str, list]:
    """Every plan on repeated samples, with and without shared rows."""
    torch.set_num_threads(1)
    plain = tables.batch(3, ranks.rank)
    index = torch.arange(plain.samples).repeat_interleave(2 + ranks.rank)
    shared = share_rows(plain, [["user", "item"]])
    groups = [["user", "item"], ["hour"]]
    repeated = share_rows(
        tables.joined([plain.select(int(at), int(at) + 1) for at in index]), groups
    )
    assert repeated.group_rows[0] == shared.group_rows[0]
    seen: dict[str, list] = {}
    for name, plan in tables.plans(ranks.world).items():
        rows = []
        for batch in (repeated.flatten(), repeated):
            exchange = TableExchange()
            held = ShardedTables(plan, exchange, SparseStep("adagrad", lr=0.1), seed=3)
            out = held(batch)
            sent = {stage: each.tolist() for stage, each in exchange.sent.items()}
            (out.square().sum() / len(index)).backward()
            held.step()
            ids = sum(int(each.sum()) for each in held.ids_received.values())
            weights = [shard.weight.numpy().copy() for shard in held.held()]
            rows.append((out.detach().numpy(), sent, ids, weights))
        seen[name] = rows
    parts = [repeated.bags(table.name) for table in tables.TABLES]
    return {"plans": seen, "sizes": repeated.group_rows, "bags": parts, "samples": len(index)}


def test_every_plan_gives_the_same_bits_and_sends_what_the_formula_says() -> None:
    parts = run_ranks(2, compare)
    for name, plan in tables.plans(2).items():
        for part in parts:
            (plain, _, ids, weights), (shared, _, fewer, others) = part["plans"][name]
            assert plain.tobytes() == shared.tobytes(), name
            assert fewer < ids or not ids  # a rank may hold copies alone
            for own, other in zip(weights, others, strict=True):
                assert np.abs(own - other).max() < 1e-6, name
        sizes = {"user": 0, "item": 0, "hour": 1}
        ids_of = {}
        for place, each in enumerate(plan.placements):
            owner = np.zeros(each.table.rows, dtype=np.int64)
            for shard in range(each.row_map.shards):
                owner[each.row_map.rows_of(shard)] = shard
            ids_of[each.table.name] = np.array(
                [
                    np.bincount(owner[part["bags"][place][1]], minlength=each.row_map.shards)
                    for part in parts
                ]
            )
        formula = count_traffic(
            plan,
            {key: [part["sizes"][group] for part in parts] for key, group in sizes.items()},
            ids_of,
            groups=2,
        )
        for stage, expected in formula.items():
            sent = [part["plans"][name][1][1][stage] for part in parts]
            assert sent == expected.tolist(), (name, stage)


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who come back for sessions of some clicks."""
    folder = tmp_path_factory.mktemp("sessions")
    source = np.random.default_rng(0)
    rows = ["user,town,ad,words,age,t,click"]
    for visit in range(60):
        user = int(source.integers(20))
        for click in range(int(source.integers(5, 20))):
            ad, t = int(source.integers(12)), 1000 * visit + click
            rows.append(f"u{user},t{user % 3},a{ad},w{ad % 5} w1,{20 + user},{t},{(user + ad) % 2}")
    (folder / "clicks.csv").write_text("\n".join(rows) + "\n")
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def test_a_run_shares_rows_and_reports_them(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run by the verb, and beside it the same on ranks of this process, which share nothing."""
    keys = {"layout.dp": "2", "tables.kinds": '["row"]'}
    spec, _ = read_recommend(run_toml, list(keys.items()))
    plain = run_part(run_toml, tmp_path / "plain", spec)[0]
    flags = [f"--{key}={value}" for key, value in (keys | {"tables.deduplicate": GROUPS}).items()]
    out = tmp_path / "shared"
    assert main(["train", str(run_toml), "--out", str(out), "--quiet", *flags]) == 0
    shared = json.loads((out / "recommend.json").read_text())
    assert shared["losses"][0] == plain["losses"][0]  # to the bit, before the first update
    assert np.abs(np.subtract(shared["losses"], plain["losses"])).max() < 1e-5
    (users, ads) = shared["sharing"]
    assert users["columns"] == ["user", "town"]
    assert users["samples"] == shared["samples"]["train"]
    assert users["samples"] / users["rows"] > 4 > ads["samples"] / ads["rows"] > 1.2
    steps = len(shared["losses"])
    # One id a row in user, town and ad; two in words.
    ids = (2 * users["rows"] + 3 * ads["rows"]) / steps
    assert sum(row["ids"] for row in shared["traffic"]) == pytest.approx(ids)
    for row in shared["traffic"]:
        assert row["ids"] == pytest.approx(row["predicted_ids"], rel=0.15)
        assert row["sent_bytes"] == pytest.approx(row["predicted_sent_bytes"], rel=0.1)
    assert main(["report", str(tmp_path / "shared")]) == 0
    assert "user, town" in (tmp_path / "shared" / "report.html").read_text()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"tables.deduplicate": '[["user", "adv"]]'},
            'tables.deduplicate: "adv" is not among data.ids, data.bags and data.numbers. '
            'Nearest: "ad".',
        ),
        (
            {"tables.deduplicate": '[["user"], ["user", "ad"]]'},
            'tables.deduplicate names "user" twice. Name it once.',
        ),
        ({"tables.deduplicate": "[[]]"}, "tables.deduplicate has an empty group. Leave it out."),
        (
            {"data.numbers": '["age", "t"]', "tables.deduplicate": '[["user", "age"]]'},
            "tables.deduplicate: all numbers go through one MLP, so a group has all of them or "
            "none. Add t to that of age.",
        ),
        (
            {"data.session": ""},
            'train.shuffle = "sessions" needs data.session, the column that a session belongs to. '
            "Name it, or shuffle samples.",
        ),
    ],
)
def test_wrong_groups_are_refused(run_toml: Path, flags: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_recommend(run_toml, list(flags.items()))
    assert str(caught.value) == message
