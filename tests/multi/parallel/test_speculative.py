"""Tokens that lie where a table says: equal to one rank, and the bytes of what was mispredicted."""

import dataclasses

import numpy as np
import torch

from equipoise.balance.expert.routes import ChosenRoutes, RouteTable, fit_table
from equipoise.comm.local import run_ranks
from equipoise.nn.moe.layer import Router
from equipoise.nn.moe.route import chosen_experts
from equipoise.parallel.expert.speculative import tokens_before
from equipoise.schedule.expert.schedule import COUNT_BYTES
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.balanced import speculative_cases
from equipoise.train.check.prove import run_cases
from support.experts import speculative_ranks

MODEL = ModelSpec(
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=8,
    top_k=2,
    expert_ffn=8,
)


def _table(*, is_right: bool) -> RouteTable:
    """A table fitted to what one rank's routers choose, or to the opposite of it."""
    decoder = speculative_ranks._decoder(MODEL, torch.float64)
    seen: list[torch.Tensor] = []
    for module in decoder.modules():
        if isinstance(module, Router):
            module.register_forward_hook(
                lambda _module, _args, out: seen.append(chosen_experts(out[1]))
            )
    tokens = speculative_ranks.text(MODEL)
    decoder(tokens, speculative_ranks.DOCUMENTS)
    positions = np.concatenate([np.arange(each) for each in speculative_ranks.DOCUMENTS])
    chosen = torch.stack(seen, dim=1).numpy()
    before = tokens_before(tokens.numpy(), positions)
    routes = ChosenRoutes(tokens.numpy(), before, chosen)
    runs = np.tile(np.repeat([0, 1], 4), (2, 1))
    return fit_table(routes, runs if is_right else 1 - runs, 2, MODEL.vocab)


def test_right_and_wrong_tables_equal_one_rank_and_move_what_they_mispredict() -> None:
    tables = [None, _table(is_right=True), _table(is_right=False)]
    for dtype, bound, of in ((torch.float64, 1e-10, 3), (torch.float32, 1e-5, 2)):
        ranks = run_ranks(2, speculative_ranks.prove, MODEL, tables[:of], dtype)
        for outcome in (each for outcomes in ranks for each in outcomes):
            assert outcome.loss_error <= bound
            assert outcome.gradient_error <= bound
            assert outcome.weight_error <= bound
            assert outcome.logit_error <= bound
        away = []
        for at in range(of):
            each = [outcomes[at] for outcomes in ranks]
            rows = sum(sum(outcome.rows) for outcome in each)
            assert rows == 2 * 2 * sum(speculative_ranks.DOCUMENTS)
            away.append(sum(sum(outcome.away) for outcome in each))
            # There and back, forward and backward; and counts, before each.
            for layer in range(2):
                sent = sum(outcome.sent_bytes[layer] for outcome in each)
                travels = sum(outcome.away[layer] for outcome in each)
                counts = 2 * COUNT_BYTES * MODEL.experts // 2
                assert sent == 4 * travels * MODEL.hidden * dtype.itemsize + counts
        assert away[1] < away[0] < (away[2] if of == 3 else np.inf)


def test_cases_of_the_check_are_exact() -> None:
    model = dataclasses.replace(MODEL, balance="bias", balance_rate=1.0)
    cases = speculative_cases(2, model)
    assert {case.train.recompute for case in cases} == {"none", "full", "selective", "attention"}
    assert {case.layout.zero for case in cases} == {0, 1, 2, 3}
    assert any(case.model.shortcut for case in cases)
    assert all(f", speculative experts, {case.router}" in str(case) for case in cases)
    chosen = [case for case in cases if case.router == "W5"]
    for verdict in run_cases(chosen, over_gloo=False):
        assert verdict.is_exact, verdict


def test_tables_that_do_not_fit_are_refused() -> None:
    table = _table(is_right=True)
    both, far = Layout(tp=2, ep=2), Layout(dp=2, ep=2)
    other = dataclasses.replace(table, vocab=60)
    assert run_ranks(2, speculative_ranks.refuse, MODEL, both, other, False)[0] == (
        "The table of experts.routes is for 2 ranks and 60 tokens, but the run has tp = 2 and 61 "
        "tokens. Make one with equipoise convert --cluster-experts 2."
    )
    assert (
        run_ranks(2, speculative_ranks.refuse, MODEL, both, table, True)
        == [
            "Rank 1 read another table of experts.routes than rank 0. Give every machine the same "
            "file."
        ]
        * 2
    )
    assert (
        "but the run has tp = 1 and"
        in run_ranks(2, speculative_ranks.refuse, MODEL, far, table, False)[0]
    )
