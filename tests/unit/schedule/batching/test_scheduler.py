"""The scheduler: each token once, pages conserved, whatever arrives, ends or is preempted."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule.batching.fair.policy import FairPolicy, MakePolicy
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from support.serving.loop import LinearPrice, Loop

policies = st.sampled_from(sorted(FAIR_POLICIES))


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[ServeRequest], dict[str, int]]:
    """Requests of a few tenants, some with common prompts, and what each generates."""
    requests, outputs = [], {}
    for at in range(draw(st.integers(1, 14))):
        prompt = draw(st.integers(1, 40))
        most = draw(st.integers(0, 24))
        group = draw(st.integers(0, 2))
        keys = tuple(bytes([group, page]) for page in range(prompt // 4)) if group else ()
        requests.append(
            ServeRequest(
                f"r{at:02d}",
                draw(st.sampled_from("abc")),
                draw(st.sampled_from([0.0, 0.0, 0.004, 0.01, 0.05])),
                prompt,
                most,
                keys,
                scores_prompt=draw(st.booleans()) and draw(st.booleans()),
            )
        )
        outputs[f"r{at:02d}"] = draw(st.integers(1, most)) if most else 0
    return requests, outputs


def noting(make: MakePolicy, charged: dict[str, float]) -> MakePolicy:
    """The same policy, which notes the work that each job is charged."""

    def made(weights: Mapping[str, float], grace_s: float) -> FairPolicy:
        policy = make(weights, grace_s)
        charge = policy.charge

        def note(job_id: str, work_s: float) -> None:
            charged[job_id] = charged.get(job_id, 0.0) + work_s
            charge(job_id, work_s)

        policy.charge = note  # type: ignore[method-assign]
        return policy

    return made


@settings(deadline=None, max_examples=50)
@given(
    load=loads(),
    policy=policies,
    pages=st.integers(16, 40),
    most_sequences=st.integers(1, 6),
    swap_pages=st.sampled_from([0, 8, 100]),
    swap=st.sampled_from([1e-7, 1.0]),
    budget_s=st.sampled_from([1e-4, 2e-3, 1.0]),
    is_chunked=st.booleans(),
)
def test_every_token_is_computed_once_and_every_page_comes_back(
    load: tuple[list[ServeRequest], dict[str, int]],
    policy: str,
    pages: int,
    most_sequences: int,
    swap_pages: int,
    swap: float,
    budget_s: float,
    is_chunked: bool,
) -> None:
    requests, outputs = load
    limits = BatchSettings(
        pages,
        page_tokens=4,
        most_sequences=most_sequences,
        iteration_s=budget_s,
        prefill_iteration_s=2 * budget_s,
        is_chunked=is_chunked,
        swap_pages=swap_pages,
    )
    price = LinearPrice(swap=swap)
    charged: dict[str, float] = {}
    scheduler = Scheduler(limits, price, noting(FAIR_POLICIES[policy], charged))
    loop = Loop(scheduler, outputs)
    loop.run(requests)
    for each in requests:
        mine = loop.served[each.id]
        assert mine.sampled == outputs[each.id]
        assert mine.computed == each.prompt_tokens + max(0, mine.sampled - 1)
        assert mine.end_s is not None
        # Whatever preemption took away and the cache gave, no token is charged twice.
        work_s = price.prompt_s(0, mine.computed)
        if each.page_keys:
            assert charged[each.id] <= work_s * (1 + 1e-9)
        else:
            assert charged[each.id] == pytest.approx(work_s)
    assert scheduler.used_pages == 0 and scheduler.available_pages == pages
    assert scheduler.backlog_s == pytest.approx(0.0, abs=1e-9)
