"""Tables of routes: what they predict, how often, and what they refuse."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from equipoise.balance.expert.cluster import cluster_experts
from equipoise.balance.expert.routes import (
    NO_TOKEN,
    ChosenRoutes,
    RouteTable,
    fit_table,
    measure_rates,
    read_table,
)
from equipoise.base.errors import SpecError
from equipoise.spec.layout import rows_of

VOCAB, EXPERTS, LAYERS = 40, 8, 2


def _routes(seed: int, tokens: int = 600, *, shift: int = 0) -> ChosenRoutes:
    """Experts follow from the token and, for every third token, from the one before it."""
    drawn = np.random.default_rng(seed)
    text = drawn.zipf(1.3, tokens) % VOCAB
    previous = np.append(NO_TOKEN, text[:-1])
    previous[::50] = NO_TOKEN
    key = np.where((text % 3 == 0) & (previous != NO_TOKEN), 7 * previous + text, text) + shift
    first = np.stack([(5 * key + 3 * layer) % EXPERTS for layer in range(LAYERS)], axis=1)
    return ChosenRoutes(text, previous, np.stack((first, (first + 2) % EXPERTS), axis=2))


def test_tables_predict_text_that_they_have_not_seen(tmp_path: Path) -> None:
    seen, held = _routes(0), _routes(1)
    clusters = cluster_experts(seen.counts(EXPERTS), 2)
    table = fit_table(seen, clusters.ranks_LX, 2, VOCAB)
    rates = measure_rates(held, table, clusters.ranks_LX, 100)
    assert abs(rates.in_order - 0.5) < 0.1 and abs(rates.own - 0.5) < 0.1
    assert rates.in_order + 0.15 < rates.predicted <= rates.known
    assert rates.skew <= 1.3
    # Pairs of tokens say more than tokens.
    none = np.zeros((0,), dtype=np.int64)
    alone = dataclasses.replace(table, pairs=none, pair_values=np.zeros((0, 2), dtype=np.int64))
    of_tokens = measure_rates(held, alone, clusters.ranks_LX, 100).predicted
    assert 0.5 < of_tokens < rates.predicted
    (tmp_path / "routes.npz").write_bytes(table.to_bytes())
    again = read_table(tmp_path / "routes.npz")
    assert again.digest == table.digest
    assert (
        again.order(held.tokens, held.previous) == table.order(held.tokens, held.previous)
    ).all()


def test_rates_are_those_of_counting_rows_one_by_one() -> None:
    seen, held = _routes(0), _routes(1, tokens=250)
    clusters = cluster_experts(seen.counts(EXPERTS), 2)
    table = fit_table(seen, clusters.ranks_LX, 2, VOCAB)
    local = 0
    for begin in range(0, 250, 100):
        part = slice(begin, begin + 100)
        order = table.order(held.tokens[part], held.previous[part]).tolist()
        for place, token in enumerate(order):
            first = rows_of(len(order), ranks=2, rank=0)
            rank = 0 if place in first else 1
            chosen = held.chosen[part][token]
            local += sum(
                clusters.ranks_LX[layer, expert] == rank
                for layer in range(LAYERS)
                for expert in chosen[layer]
            )
    assert measure_rates(held, table, clusters.ranks_LX, 100).predicted == local / held.chosen.size


def test_routes_that_have_changed_are_predicted_no_worse_than_by_chance() -> None:
    seen, held = _routes(0), _routes(1, shift=3)
    clusters = cluster_experts(seen.counts(EXPERTS), 2)
    rates = measure_rates(
        held, fit_table(seen, clusters.ranks_LX, 2, VOCAB), clusters.ranks_LX, 100
    )
    assert 0.2 < rates.predicted < 0.8


def test_a_token_leans_on_all_and_a_pair_on_its_token() -> None:
    """One token seen 4 times on rank 1, another 12 times on rank 0: shares by hand."""
    tokens = np.array([0] * 12 + [1] * 4)
    previous = np.full(16, NO_TOKEN)
    previous[13:] = 0
    table = fit_table(
        ChosenRoutes(tokens, previous, (tokens == 1).astype(np.int64).reshape(16, 1, 1)),
        np.array([[0, 1]]),
        2,
        VOCAB,
    )
    part = 1 << 16
    unseen = [(12 * part + 2 * part) // 20, (4 * part + 2 * part) // 20]
    assert table.unseen.tolist() == unseen
    assert table.token_values[1].tolist() == [4 * unseen[0] // 8, (4 * part + 4 * unseen[1]) // 8]
    own = table.token_values[1].tolist()
    pair = [4 * own[0] // 7, (3 * part + 4 * own[1]) // 7]
    values = table.values(np.array([1, 1, 39]), np.array([0, 5, 1]))
    assert values.tolist() == [pair, own, unseen]


def test_a_route_to_an_expert_that_does_not_exist_is_refused() -> None:
    seen = _routes(0)
    seen.chosen[7, 1, 0] = EXPERTS
    with pytest.raises(SpecError) as caught:
        seen.counts(EXPERTS)
    assert str(caught.value) == (
        "Token 7 chose expert 8 in layer 1, and there are 8. Count the routes of this model."
    )


def test_the_fitted_text_and_what_is_not_a_table_are_refused(tmp_path: Path) -> None:
    seen = _routes(0)
    clusters = cluster_experts(seen.counts(EXPERTS), 2)
    table = fit_table(seen, clusters.ranks_LX, 2, VOCAB)
    with pytest.raises(SpecError) as caught:
        measure_rates(seen, table, clusters.ranks_LX, 100)
    assert str(caught.value) == (
        "The 600 held-out tokens are the text that the table was fitted to. Give other documents "
        "as eval.path."
    )
    fix = "Make one: equipoise convert RUN TO --cluster-experts RANKS"
    missing, text, short = (tmp_path / name for name in ("none.npz", "text.npz", "short.npz"))
    text.write_text("tokens")
    np.savez(short, vocab=3)
    with pytest.raises(SpecError) as caught:
        read_table(missing)
    assert str(caught.value) == f"experts.routes: no such file: {missing}. {fix}"
    for file in (text, short):
        with pytest.raises(SpecError) as caught:
            read_table(file)
        assert str(caught.value).startswith(f"experts.routes: {file} is not a table of routes (")
        assert str(caught.value).endswith(f"). {fix}")
    missing.write_bytes(table.to_bytes())
    stored = dict(np.load(missing))
    np.savez(missing, **stored | {"pairs": stored["pairs"][1:]})
    with pytest.raises(SpecError) as caught:
        read_table(missing)
    pairs, tokens = len(table.pairs), len(table.tokens)
    assert str(caught.value) == (
        f"experts.routes: {missing} is damaged: values of shapes ({tokens}, 2) and ({pairs}, 2) "
        f"for {tokens} tokens, {pairs - 1} pairs and 2 ranks. {fix}"
    )


def test_damaged_tables_are_refused_whatever_is_wrong(tmp_path: Path) -> None:
    numbers = {"unseen": np.array([3, 4]), "tokens": np.arange(5), "pairs": np.arange(7)}
    values = {"token_values": np.ones((5, 2), np.int64), "pair_values": np.ones((7, 2), np.int64)}
    table = RouteTable(16, "text", **numbers, **values)
    file, whole = tmp_path / "routes.npz", table.to_bytes()
    fix = "Make one: equipoise convert RUN TO --cluster-experts RANKS"
    for at in range(0, len(whole), 7):  # bits of names, sizes, sums and of what is compressed
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            found = read_table(file)
        except SpecError as error:
            assert str(error).endswith(fix)
        else:
            assert found.digest == table.digest
    stored = {"vocab": np.array(16), "text": np.array("text"), **numbers, **values}
    wrong = [
        {"vocab": np.array([1, 2])},
        {"vocab": np.array("a")},
        {"vocab": np.array(16.5)},
        {"unseen": np.array(3)},
        {"unseen": np.zeros((2, 2), np.int64)},
        {"tokens": np.array(3)},
        {"tokens": np.arange(5)[::-1]},
        {"token_values": np.full((5, 2), -1)},
        {"pair_values": np.full((7, 2), 1 << 62)},
    ]
    origin = {"made_from": np.array([8, 2, 2]), "tokenizer": np.array("digest")}
    np.savez(file, **stored)
    assert (read_table(file).made_from, read_table(file).tokenizer) == ((), "")  # an older table
    np.savez(file, **stored, **origin)
    assert (read_table(file).made_from, read_table(file).tokenizer) == ((8, 2, 2), "digest")
    wrong += [origin | {"made_from": np.array(each)} for each in ([8, 2], [8, 2, -2], [8, 2, 2.0])]
    for each in wrong:
        np.savez(file, **(stored | each))
        with pytest.raises(SpecError, match=r"^experts\.routes: .* is damaged: "):
            read_table(file)
    np.savez(file, **stored, tokenizer=origin["tokenizer"])
    with pytest.raises(SpecError, match=r"is not a table of routes \(KeyError: "):
        read_table(file)
    np.savez(file, **(stored | {"pairs": np.arange(7)[::-1]}))
    with pytest.raises(SpecError) as caught:
        read_table(file)
    assert str(caught.value) == (
        f"experts.routes: {file} is damaged: its tokens or pairs are not ascending. {fix}"
    )
