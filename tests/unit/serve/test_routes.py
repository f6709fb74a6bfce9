"""A run's experts clustered: the same model, measured on documents that it has not seen."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from equipoise.balance.expert.routes import ROUTES, read_table
from equipoise.balance.expert.table import find_table, require_same_tokens
from equipoise.base.errors import EquipoiseError
from equipoise.cli.convert.experts import describe, facts
from equipoise.cli.main import main
from equipoise.data.cache.store import TokenStore, open_store, prepare
from equipoise.data.progress import SilentProgress
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.files import ModelFiles
from equipoise.serve.convert import write_folder
from equipoise.serve.generate import build_decoder
from equipoise.serve.routes import cluster_model
from equipoise.serve.source import TrainedModel
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ResolvedFile, read_resolved, write_resolved
from equipoise.spec.run.spec import DataSpec, ExpertsSpec, LayoutSpec, PackSpec, RunSpec

TEXT = "the rank that owns an expert keeps all others waiting until its rows are done"
WORDS = TEXT.split(" ")


def _corpus(folder: Path, first: int, documents: int, tokenizer: Path | None) -> TokenStore:
    folder.mkdir()
    for at in range(first, first + documents):
        words = [WORDS[(at * 7 + 3 * n + n * n // 5) % len(WORDS)] for n in range(40 + at)]
        (folder / f"{at}.txt").write_text(" ".join(words))
    data = DataSpec(
        source="text",
        path=str(folder),
        vocab=300,
        cache=str(folder.parent / "cache"),
        tokenizer="train" if tokenizer is None else str(tokenizer),
    )
    return prepare(data, folder, progress=SilentProgress())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    folder = tmp_path_factory.mktemp("runs")
    store = _corpus(folder / "trained", 0, 8, None)
    held = _corpus(folder / "held", 6, 6, store.tokenizer_file)  # two are trained, too
    model = ModelSpec(
        layers=2, hidden=16, heads=2, kv_heads=2, ffn=8, vocab=300, head_width=8, experts=6,
        top_k=2, expert_ffn=8, norm_top_k=True,
    )  # fmt: skip
    spec = RunSpec(pack=PackSpec(context_tokens=64))
    corpora = {"corpus": str(store.folder), "eval_corpus": str(held.folder)}
    resolved = ResolvedFile(spec, model, {}, 1, init_folder="", **corpora)
    write_resolved(folder / "run", resolved)
    decoder = Decoder(model)
    initialize(decoder, 0)
    origin = folder / "run" / "checkpoint" / "step-000001"
    return TrainedModel(origin, model, decoder.state_dict(), ModelFiles({}, ""))


def test_the_model_is_the_same_and_a_run_finds_its_table(
    trained: TrainedModel, tmp_path: Path
) -> None:
    clustered = cluster_model(trained, 2, progress=SilentProgress())
    tokens = torch.randint(300, (50,), generator=torch.Generator().manual_seed(0))
    before = build_decoder(trained)(tokens, (50,))
    after = build_decoder(clustered.trained)(tokens, (50,))
    assert (before - after).abs().max() <= 1e-6 * before.abs().max()
    names = [f"layers.{at}.feed_forward.experts.up.weight" for at in range(2)]
    assert not all(
        torch.equal(trained.state[name], clustered.trained.state[name]) for name in names
    )
    assert clustered.left_out == 2 and clustered.held_tokens > 0
    rates = clustered.rates
    assert 0 < rates.predicted <= 1 and rates.predicted <= rates.known + 0.02
    assert facts(clustered)["predicted"] == rates.predicted
    text = describe(clustered)
    assert f"On {clustered.held_tokens:,} held-out tokens {rates.predicted:.1%} of the rows" in text
    assert "2 held-out documents left out: also trained." in text
    write_folder(clustered.trained, tmp_path / "hf")
    table = read_table(tmp_path / "hf" / ROUTES)
    assert (table.ranks, table.vocab, table.made_from) == (2, 300, (6, 2, 2))
    spec = RunSpec(experts=ExpertsSpec("speculative"), layout=LayoutSpec(tp=2, ep=2))
    model = trained.model
    found = find_table(spec, tmp_path, str(tmp_path / "hf"), model)
    assert found == str((tmp_path / "hf" / ROUTES).resolve())
    named = dataclasses.replace(spec, experts=ExpertsSpec("speculative", routes="hf/routes.npz"))
    assert find_table(named, tmp_path, "", model) == found
    assert find_table(RunSpec(), tmp_path, "", model) == ""
    with pytest.raises(EquipoiseError) as caught:
        find_table(spec, tmp_path, "", model)
    assert str(caught.value) == (
        'experts.policy = "speculative" needs a table of routes. Make one with equipoise convert '
        'RUN TO --cluster-experts RANKS, and begin from it: model.init = "hf:TO".'
    )
    with pytest.raises(EquipoiseError) as caught:
        find_table(named, tmp_path, "", dataclasses.replace(model, top_k=1))
    assert str(caught.value) == (
        "The table of experts.routes was made from another model, whose tokens choose 2 of 6 "
        "experts in 2 layers; those of the run's choose 1 of 6 experts in 2 layers. Make one with "
        "equipoise convert --cluster-experts 2."
    )
    tokenizer = load_tokenizer(
        open_store(Path(read_resolved(trained.origin.parent.parent).corpus)).tokenizer_file
    )
    require_same_tokens(found, tokenizer.tokens_digest)
    require_same_tokens("", "")
    with pytest.raises(EquipoiseError) as caught:
        require_same_tokens(found, "another's")
    assert str(caught.value) == (
        f"The table of experts.routes, {found}, was made with other tokens (digest "
        f"{tokenizer.tokens_digest[:8]}) than those of the run's corpus (another'). Set "
        f"data.tokenizer to the tokenizer of the model that the table was made from."
    )


def test_what_cannot_be_clustered_is_refused(
    trained: TrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(given: TrainedModel, ranks: int = 2, **limits: int) -> str:
        with pytest.raises(EquipoiseError) as caught:
            cluster_model(given, ranks, progress=SilentProgress(), **limits)
        return str(caught.value)

    dense = dataclasses.replace(trained, model=dataclasses.replace(trained.model, experts=0))
    assert said(dense) == (
        f"{trained.origin} has no experts; --cluster-experts renumbers the experts of a model of "
        f"equipoise's own decoder."
    )
    for ranks in (1, 0, -2):
        assert said(trained, ranks) == (
            f"--cluster-experts {ranks}: experts are clustered for 2 ranks or more."
        )
    assert "Set ep (layout.ep) to" in said(trained, 4)
    run = trained.origin.parent.parent
    whole = (run / "resolved.json").read_text()
    text = re.sub(r',\s*"digest": "\w+"', "", whole)
    held = text.split('"eval_corpus": "')[1].split('"')[0]
    (run / "resolved.json").write_text(text.replace(held, ""))
    assert said(trained) == (
        f"{trained.origin} belongs to a run without held-out documents, on which the share of "
        f"local rows is measured. Train with eval.path."
    )
    store = text.split('"corpus": "')[1].split('"')[0]
    (run / "resolved.json").write_text(text.replace(held, store))
    assert said(trained) == (
        "All 8 held-out documents that fit in 65,536 tokens are also trained. Give others as "
        "eval.path."
    )
    (run / "resolved.json").write_text(whole)
    target = tmp_path / "to"
    assert main(["convert", str(run), str(target), "--cluster-experts", "2", "--adapter"]) == 2
    assert (
        "--cluster-experts follows the routers of a run's model over the run's corpus. Give a run "
        "or a checkpoint, and leave --adapter out."
    ) in " ".join(capsys.readouterr().err.split())
    assert not target.exists()
