"""Documents of a step are packed once a layout, and ranks come by their work."""

import numpy as np

from equipoise.cost.curve import counted_curve
from equipoise.cost.step.request import ExpertForecast, StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.packs import Packs, sort_batches
from equipoise.sim.drawn import step_packer
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


def test_packs_depend_on_the_skew_of_experts_where_ranks_share_them() -> None:
    model = read_model("layers=2,hidden=64,heads=4,vocab=100,experts=8,top_k=2,expert_ffn=512")
    loads = ExpertForecast(*(((1, 1.0), (4, value)) for value in (4.0, 4.0, 0.0, 0.0)))
    even, skewed = (StepOptions(4096, 16, experts=each) for each in (None, loads))
    lengths = [4096] * 4 + [256] * 64 + [64] * 256
    pack = step_packer(model, lengths, even)
    packs = Packs(model, lambda choice: pack(choice.layout, choice.options))
    apart, shared = Layout(dp=4), Layout(dp=4, ep=4)
    found = {}
    for layout in (apart, shared):
        for name, options in (("even", even), ("skewed", skewed)):
            found[layout.ep, name] = packs.documents(Choice(layout, options))
    assert found[1, "even"] == found[1, "skewed"] and found[4, "even"] != found[4, "skewed"]

    def heaviest(documents: Documents) -> int:
        curve = counted_curve(model, expert_skew=4.0)
        rows = (np.array([length for batch in rank for length in batch]) for rank in documents)
        return max(int(curve.document_ns(row).sum()) for row in rows)

    assert heaviest(found[4, "skewed"]) < heaviest(found[4, "even"])


def test_without_a_packer_windows_are_full() -> None:
    choice = Choice(Layout(dp=2), StepOptions(8, 8, micro_batch=2))
    assert Packs(MODEL, None).documents(choice) == [[[8, 8], [8, 8]]]


def test_equal_tokens_are_not_equal_documents() -> None:
    """First and last of them are alike; that in the middle is not."""
    bins = sort_batches([[8], [4, 4], [8]])
    assert not bins.is_alike
    assert sum(bins.counts) == 3
    assert sorted(bins.documents.tolist()) == [4, 4, 8, 8]
