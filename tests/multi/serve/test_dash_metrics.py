"""What the dashboard reads is what a server over ranks with tenants says."""

import json
from pathlib import Path

import pytest

from equipoise.dash.web.serving import CONTEXT, COUNTERS, GAUGES, LATENCIES, SERVICE, look
from equipoise.fault.runbook.metric_names import METRICS
from equipoise.observe.prometheus import histogram, parse_metrics
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.http.app import make_app
from equipoise.serve.http.keys import hash_key, make_key
from equipoise.serve.http.served import serve_model
from equipoise.serve.http.server import ServerThread
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.tenants import Tenant, Tenants
from equipoise.serve.source import TrainedModel
from support.serving.http.raw import ask
from support.serving.http.served import prompt_reader
from support.serving.trained import CURVE, trained

KEYS = {name: make_key() for name in ("ann", "bob")}
BY_NAME = {name: Tenant(name) for name in KEYS}
TENANTS = Tenants(BY_NAME, {hash_key(key): BY_NAME[name] for name, key in KEYS.items()})
ANSWERS, TOKENS = 3, 9


@pytest.fixture(scope="module")
def page() -> str:
    model: TrainedModel = trained()
    settings = EngineSettings(cache_tokens=640, context_ranks=2)
    with open_engine(model, settings, curve=CURVE) as engine:
        engine.prompts = prompt_reader()
        state = ServerState(serve_model(Path("small"), model, engine), TENANTS)
        with ServerThread(make_app(state), state) as server:
            headers = [{"Authorization": f"Bearer {key}"} for key in KEYS.values()]
            body = {"prompt": "a world of words", "max_tokens": TOKENS, "ignore_eos": True}
            data = json.dumps({**body, "n": ANSWERS}).encode()
            for each in headers:
                assert ask(server.port, "POST", "/v1/completions", data, each).status == 200
            return ask(server.port, "GET", "/metrics", headers=headers[0]).body.decode()


def test_every_name_is_there_under_our_own(page: str) -> None:
    samples = parse_metrics(page)
    single = [*GAUGES.values(), *COUNTERS.values()]
    names = {*(each[0] for each in single), *SERVICE, *CONTEXT}
    assert names <= set(samples)
    assert all(histogram(samples, each[0]) for each in LATENCIES.values())


def test_what_runbooks_ask_for_is_there_as_its_kind(page: str) -> None:
    for name, kind in METRICS.items():
        assert f"# TYPE {name} {kind}\n" in page or f"# TYPE {name}_total {kind}\n" in page, name


def test_no_name_is_missing_where_vllm_has_one(page: str) -> None:
    samples = parse_metrics(page)
    for ours, *theirs in (GAUGES | COUNTERS).values():
        if theirs and ours in samples:
            assert theirs[0] in samples
            assert sum(samples[ours].values()) == sum(samples[theirs[0]].values())
    assert all(histogram(samples, each[1]) for each in LATENCIES.values())


def test_preemptions_have_a_mode_and_are_added_up_under_vllms_name(page: str) -> None:
    samples = parse_metrics(page)
    ours = samples["equipoise_preemptions_total"]
    assert sorted(dict(labels)["mode"] for labels in ours) == ["recompute", "swap"]
    (theirs,) = samples["vllm:num_preemptions_total"]
    assert {name for name, _ in theirs} == {"engine", "model_name"}


def test_what_the_dashboard_makes_of_it(page: str) -> None:
    seen, samples = look(parse_metrics(page), 0.0), parse_metrics(page)
    assert set(seen.tenants) == set(KEYS)
    assert seen.gauges["fairness_gap"] == 0.0  # nobody waits
    assert seen.context and all(sent > 0 for sent in seen.context.values())
    for name in ("queue", "prefill"):
        times = histogram(samples, f"equipoise_request_{name}_time_seconds")
        theirs = histogram(samples, f"vllm:request_{name}_time_seconds")
        assert times is not None and times == theirs
        assert times.count == len(KEYS) * ANSWERS
    first = seen.histograms["first_token"]
    queue, prefill = (
        histogram(samples, f"equipoise_request_{name}_time_seconds")
        for name in ("queue", "prefill")
    )
    assert queue is not None and prefill is not None
    assert queue.sum + prefill.sum == pytest.approx(first.sum)
    work = histogram(samples, "vllm:iteration_tokens_total")
    assert work is not None
    assert work.count == sum(samples["equipoise_iterations_total"].values())
    service = samples["equipoise_tenant_service_seconds_total"]
    assert len(service) == len(KEYS) and all(value > 0 for value in service.values())
