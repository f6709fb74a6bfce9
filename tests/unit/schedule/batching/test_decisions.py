"""Decisions stay the same, to the last page, however fast they are made.

Each digest is of every iteration of one random load, as the scheduler decided it when it was
written for clearness alone. A change that is to decide otherwise replaces them; one that is to be
faster must not.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.iteration import BatchSchedule, ServeOutcome
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.spec.device.serving import ServingCurve

PRICE = CurvePrice(
    ServingCurve(
        tokens=((1, 4e-3), (64, 5e-3), (4096, 0.2)),
        logits=((1, 1e-4), (64, 4e-4)),
        pair_s=1e-8,
        kv_token_s=1e-7,
        sequence_s=1e-5,
        swap_token_s=1e-7,
    )
)
LIMITS: dict[str, dict[str, Any]] = {
    "room for all": {"pages": 400},
    "few pages": {"pages": 80, "page_tokens": 4, "most_sequences": 8},
    "few pages and a swap": {"pages": 80, "page_tokens": 4, "swap_pages": 90, "iteration_s": 0.01},
    "chunks of ranks": {
        "pages": 40,
        "page_tokens": 8,
        "shares_chunks": True,
        "iteration_s": 0.006,
    },
    "whole prompts": {"pages": 60, "is_chunked": False, "weights": {"a": 3.0}},
}
DIGESTS = {
    "fifo, room for all": "748e1bb4531b3389",
    "fifo, few pages": "7dbabbc72565fb70",
    "fifo, few pages and a swap": "4263d7209d0f7d33",
    "fifo, chunks of ranks": "485394fc81504048",
    "fifo, whole prompts": "46b3b95d343e8ad1",
    "job-fair, room for all": "748e1bb4531b3389",
    "job-fair, few pages": "ba40265700843606",
    "job-fair, few pages and a swap": "224281ec997b0573",
    "job-fair, chunks of ranks": "4035a8b407568699",
    "job-fair, whole prompts": "46b3b95d343e8ad1",
    "user-fair, room for all": "b870b18b4ecac918",
    "user-fair, few pages": "0ce3681731533ec5",
    "user-fair, few pages and a swap": "034168d62bb332a7",
    "user-fair, chunks of ranks": "742655c1e2e00a5b",
    "user-fair, whole prompts": "56d8f98c7dc87bab",
    "uwfq, room for all": "b3cf8a085ef8e89c",
    "uwfq, few pages": "2ef8592544507c59",
    "uwfq, few pages and a swap": "b76ac9cf64df137a",
    "uwfq, chunks of ranks": "084ca5e0e481cb11",
    "uwfq, whole prompts": "b712cc68a8f5cdd0",
    "vtc, room for all": "243ec8f0509f01de",
    "vtc, few pages": "d192dda66a321560",
    "vtc, few pages and a swap": "58281034ec1d7b80",
    "vtc, chunks of ranks": "7a265787ecac0eb2",
    "vtc, whole prompts": "3f07e577a0c102fd",
}


def load(seed: int) -> list[tuple[ServeRequest, int]]:
    """Requests of some tenants, and what each generates; some share pages, some are stages."""
    draw = random.Random(seed)
    rows, now = [], 0
    for number in range(70):
        now += draw.choice((0, 0, 1, 4, 9))
        prompt, output = draw.randint(1, 200), draw.choice((0, 1, 5, 20, 60))
        shared = draw.choice((0, 0, 2, 5))
        rows.append(
            (
                ServeRequest(
                    f"{number:03d}",
                    draw.choice("aabc"),
                    now / 512,
                    prompt,
                    output + draw.choice((0, 0, 10)) if output else 0,
                    tuple(b"%d" % page for page in range(min(shared, prompt // 16))),
                    scores_prompt=not output or draw.random() < 0.1,
                    job=draw.choice(("", "", "j", "k")),
                ),
                output,
            )
        )
    return rows


def decisions(settings: BatchSettings, policy: str, seed: int) -> Iterator[BatchSchedule]:
    """Every iteration of a load, some of whose requests are given up."""
    scheduler = Scheduler(settings, PRICE, FAIR_POLICIES[policy])
    waiting, left, done, now_s = load(seed), {}, {}, 0.0
    waiting.reverse()
    while waiting or not scheduler.is_idle:
        if scheduler.is_idle:
            now_s = max(now_s, waiting[-1][0].arrival_s)
        while waiting and waiting[-1][0].arrival_s <= now_s:
            request, output = waiting.pop()
            scheduler.submit(request)
            left[request.id], done[request.id] = output, request.prompt_tokens
        schedule = scheduler.plan(now_s)
        if schedule is None:
            continue
        yield schedule
        now_s += schedule.predicted_s
        if schedule.number % 61 == 0 and left:
            scheduler.abort(min(left), now_s)
        outcomes = []
        for chunk in schedule.chunks:
            name = chunk.request
            left[name] -= chunk.samples
            ended = not left[name] and chunk.start + chunk.tokens >= done[name]
            keys = ()
            if chunk.samples and schedule.number % 5 == 0:
                keys = (b"%s/%d" % (name.encode(), schedule.number),)
            outcomes.append(ServeOutcome(name, ended=ended, page_keys=keys))
        for each in outcomes:
            if each.ended:
                del left[each.request], done[each.request]
        scheduler.done(outcomes, now_s)
        left = {name: each for name, each in left.items() if name in scheduler._sequences}


def digest_of(settings: BatchSettings, policy: str) -> str:
    """One digest of all decisions under some limits."""
    sum_ = hashlib.sha256()
    for seed in range(3):
        for each in decisions(settings, policy, seed):
            facts = each.number, each.chunks, each.work, each.predicted_s
            sum_.update(repr((facts, each.swaps_out, each.swaps_in, each.preempted)).encode())
    return sum_.hexdigest()[:16]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", sorted(FAIR_POLICIES))
def test_a_load_is_decided_as_ever(policy: str, limit: str) -> None:
    assert digest_of(BatchSettings(**LIMITS[limit]), policy) == DIGESTS[f"{policy}, {limit}"]
