"""Before the first step on other devices than CPUs, ranks prove their layout on them.

The proof is that of ``equipoise check``; here its ranks are gloo's, on which it must hold too.
"""

import json
from pathlib import Path

import pytest

from equipoise.base.errors import CheckError, LayoutError
from equipoise.comm.local import run_ranks
from equipoise.spec.layout_space import legal_layouts
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec, TrainSpec
from equipoise.train.proof import proof_case
from support.ranks import links_ranks


def resolved(ranks: int, policy: str = "by-work", **layout: object) -> ResolvedFile:
    spec = RunSpec(
        layout=LayoutSpec(**layout),
        pack=PackSpec(policy=policy),
        train=TrainSpec(recompute="selective"),
    )
    return ResolvedFile(spec, preset("2m"), {}, ranks, "", "")


def events(folder: Path) -> list[dict[str, object]]:
    text = (folder / "journal" / "rank-00000.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_layout_is_proven_once(tmp_path: Path) -> None:
    run = resolved(2, dp=1, cp=2, strategy="ring")
    run_ranks(2, links_ranks.prove, tmp_path, run)
    (proof,) = (each for each in events(tmp_path) if each["name"] == "proof")
    assert proof["is_exact"] and proof["devices"] == ["cpu"]
    assert proof["case"] == "2 ranks (cp = 2, ring, mixed, zero = 1)"
    assert proof["gradient_error"] <= proof["tolerance"] == 1e-5
    assert proof["sent_bytes"] == proof["scheduled_bytes"] > 0
    (kept,) = (tmp_path / "proofs").iterdir()
    assert json.loads(kept.read_text())["is_exact"]
    run_ranks(2, links_ranks.prove, tmp_path, run)
    assert len([each for each in events(tmp_path) if each["name"] == "proof"]) == 1


def test_a_wrong_layout_is_refused_with_its_table_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckError) as caught:
        run_ranks(2, links_ranks.prove, tmp_path, resolved(2), "layers.1.feed_forward.up.weight")
    first, *table = str(caught.value).splitlines()
    assert first == (
        '2 ranks (zero = 1, policy = "by-work") does not equal one rank on cpu, so nothing was '
        "trained. Report this table, choose another layout, or train all the same with --no-proof."
    )
    names = [line.split()[0] for line in table]
    assert names == ["loss", "logits", "gradient", "messages"]
    assert table[2].endswith("of its scale, layers.1.feed_forward.up.weight")
    assert table[3] == "  messages  0 B sent, 0 B in the schedule"
    assert not (tmp_path / "proofs").exists()


def test_an_unproven_run_says_so_in_its_journal(tmp_path: Path) -> None:
    run_ranks(1, links_ranks.train_unproven, tmp_path, resolved(1))
    (event,) = (each for each in events(tmp_path) if each["name"] == "unproven")
    assert event["message"] == (
        "--no-proof: nobody has checked that this layout equals one rank on these devices."
    )
    assert event["devices"] == ["cpu"]


def test_every_legal_layout_of_a_run_has_a_case() -> None:
    """The sample's documents are repeated until ranks and schedules have enough of them."""
    for ranks in (8, 64):
        degrees = {
            (layout.dp, layout.cp, layout.tp, layout.pp): layout
            for layout in legal_layouts(ranks, preset("2m"))
        }
        for layout in degrees.values():
            case = proof_case(resolved(ranks, cp=layout.cp, tp=layout.tp, pp=layout.pp))
            assert case.layout.dp == layout.dp
            assert case.ranks == ranks


def test_policies_and_schedules_that_no_single_rank_has() -> None:
    """What waits or skips trains other documents, or another model."""
    waits = proof_case(resolved(2, policy="delayed"))
    assert waits.pack.policy == "by-work"
    skips = proof_case(resolved(2, pp=2, schedule="skip-partial", skip=0.5, virtual=4))
    assert (skips.layout.schedule, skips.layout.skip) == ("1f1b", 0.0)
    assert proof_case(resolved(2)).train.recompute == "selective"


def test_a_layout_without_enough_documents_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        proof_case(resolved(2**14, pp=2))
    assert str(caught.value) == (
        "The layout cannot be proven on a sample of 768 documents: A step of 52,928 tokens holds "
        "768 documents for 8192 ranks, and by-work packs whole documents. Smallest changes that "
        "fit: layout.dp = 768, or a larger pack.step_tokens. Train it as it is with --no-proof."
    )
