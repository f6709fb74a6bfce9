"""Documents of a step are packed once a layout, and ranks come by their work."""

from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.packs import Packs, sort_batches
from equipoise.sim.step import Documents
from equipoise.spec.layout import Layout
from equipoise.spec.words import read_model

MODEL = read_model("layers=2,hidden=64,heads=4,vocab=100")


def test_ranks_come_by_their_work() -> None:
    asked = []

    def pack(choice: Choice) -> Documents:
        asked.append(choice.layout.dp)
        return [[[4], [4]], [[8], [1]], [[1]]]

    packs = Packs(MODEL, pack)
    choice = Choice(Layout(dp=3), StepOptions(8, 6))
    assert packs.documents(choice) == [[[8], [1]], [[4], [4]], [[1]]]
    assert packs.bins(choice).tokens == (1, 8)
    assert packs.documents(choice) is packs.documents(choice)
    assert asked == [3]


def test_policies_are_packed_apart() -> None:
    packs = Packs(MODEL, lambda choice: [[[8 if choice.options.policy == "by-work" else 4]]])
    by_work = Choice(Layout(), StepOptions(8, 6))
    by_tokens = Choice(Layout(), StepOptions(8, 6, policy="by-tokens"))
    assert packs.documents(by_work) == [[[8]]] and packs.documents(by_tokens) == [[[4]]]
    assert packs.bins(by_work).tokens == (8,) and packs.bins(by_tokens).tokens == (4,)


def test_without_a_packer_windows_are_full() -> None:
    choice = Choice(Layout(dp=2), StepOptions(8, 8, micro_batch=2))
    assert Packs(MODEL, None).documents(choice) == [[[8, 8], [8, 8]]]


def test_equal_tokens_are_not_equal_documents() -> None:
    """First and last of them are alike; that in the middle is not."""
    bins = sort_batches([[8], [4, 4], [8]])
    assert not bins.is_alike
    assert sum(bins.counts) == 3
    assert sorted(bins.documents.tolist()) == [4, 4, 8, 8]
