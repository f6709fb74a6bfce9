"""Requests that are refused cost their tenant, and floods of them nobody else."""

import json
import time
from collections.abc import Mapping
from typing import Any

from equipoise.serve.http.keys import hash_key, make_key
from equipoise.serve.http.tenants import Tenant, Tenants
from equipoise.serve.loop_share import LoopShare
from support.serving.http.raw import Reply, ask
from support.serving.http.served import Running, running

KEYS = {name: make_key() for name in ("ann", "few")}
BY_NAME = {"ann": Tenant("ann"), "few": Tenant("few", requests_per_minute=3)}
TENANTS = Tenants(BY_NAME, {hash_key(key): BY_NAME[name] for name, key in KEYS.items()})
BODY: Mapping[str, Any] = {"prompt": "a", "max_tokens": 1}


def post(server: Running, key: str, body: bytes | Mapping[str, Any] = BODY) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = ask(server.port, "POST", "/v1/completions", data, {"Authorization": f"Bearer {key}"})
    while server.state.under_way:  # who has an answer may still be counted as here
        time.sleep(0.001)
    return reply


def test_requests_at_fault_are_counted_and_then_not_even_parsed() -> None:
    with running(TENANTS) as server:
        for body in (b"{", {"prompt": "a", "temperature": "hot"}, {"prompt": [1] * 600}):
            assert post(server, KEYS["few"], body).status == 400
        reply = post(server, KEYS["few"], b"{")
        assert reply.status == 429
        said = json.loads(reply.body)["error"]["message"]
        assert said == "Tenant few has used its 3 requests a minute. Try again in 20 s."
        assert post(server, KEYS["ann"]).status == 200


def test_a_flood_beside_others_is_refused_before_it_is_read() -> None:
    now_s, spent_s = 0.0, 0.0
    share = LoopShare(lambda: now_s, lambda: spent_s, refusal_s=0.01)
    for name in ("few", "", "ann"):
        share.arrive(name)
        share.begin(name)
        share.leave(name)
    now_s, spent_s = 1.0, 0.9  # 0.3 s for each of their requests
    share.arrive("ann")  # a stream that goes on
    with running(TENANTS, state={"share": share}) as server:
        statuses = [post(server, KEYS["few"]).status for _ in range(2)]
        assert statuses == [200, 429]
        reply = post(server, KEYS["few"])
        assert json.loads(reply.body)["error"] == {
            "message": "few sends more requests than can be read beside those of others. Try "
            "again in 3 s.",
            "type": "rate_limit_exceeded",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert reply.headers["retry-after"] == "3"
        assert [post(server, "wrong").status for _ in range(2)] == [401, 429]
        assert json.loads(post(server, "wrong").body)["error"]["message"] == (
            "Who has no key sends more requests than can be read beside those of others. Try "
            "again in 3 s."
        )
