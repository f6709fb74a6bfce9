"""One link of three real ranks is paced by the kernel, and one rank is late: the link is named."""

from pathlib import Path

from equipoise.comm.local import run_ranks
from support.health import link_ranks
from support.read_run import events


def test_a_paced_link_is_named_and_the_late_rank_is_not(tmp_path: Path) -> None:
    shown, *others = run_ranks(3, link_ranks.narrow, tmp_path, 120.0, timeout_s=240.0)
    assert others == [[], []]  # rank 0 speaks for all
    (event,) = events(tmp_path, "slow-link")
    assert (event["source"], event["target"]) == (1, 0)
    assert 0.3 * link_ranks.NARROW < event["rate"] < 3 * link_ranks.NARROW
    assert event["expected"] > 3 * event["rate"]
    assert shown == [event["message"]]
    assert shown[0].startswith("The link from rank 1 to rank 0 is slow: it carries ")
