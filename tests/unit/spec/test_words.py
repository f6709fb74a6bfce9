"""Models and layouts on a command line: presets written as words, and every refusal."""

import json

import pytest

from equipoise.base.errors import EquipoiseError, LayoutError, ModelError
from equipoise.base.nearest import nearest
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import PLANNED, preset
from equipoise.spec.words import read_layout, read_model


@pytest.mark.parametrize("name", [name for name in PLANNED if PLANNED[name].latent is None])
def test_a_preset_written_as_words_has_its_weights(name: str) -> None:
    model = PLANNED[name]
    sizes = ["layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab"]
    sizes += ["experts", "top_k", "expert_ffn", "shared_ffn"]
    words = [f"{size}={getattr(model, size)}" for size in sizes]
    words += [f"gated={int(model.gated)}", f"tied={int(model.tied)}"]
    found = read_model(",".join(words))
    assert found.attention_params == model.attention_params
    assert found.count_layer(sparse=False, active=True) == model.count_layer(
        sparse=False, active=True
    )
    assert found.expert_params == model.expert_params


def test_what_is_left_out_follows() -> None:
    model = read_model("layers=2,hidden=4096,heads=32,vocab=32_000")
    assert (model.kv_heads, model.head_width, model.ffn, model.gated) == (32, 128, 11_008, True)


def test_a_config_json_and_its_folder(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(preset("qwen3-8b"))))
    assert read_model(str(tmp_path)) == preset("qwen3-8b")
    assert read_model(str(tmp_path / "config.json")) == preset("qwen3-8b")


def test_a_file_without_a_table(tmp_path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EquipoiseError) as caught:
        read_model(str(tmp_path))
    assert str(caught.value) == (
        f"model: {tmp_path / 'config.json'} does not hold a table of sizes. Give the "
        "config.json that the model was published with."
    )


def test_a_model_type_that_nobody_knows(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(ModelError) as refusal:
        read_model(str(file))
    assert str(refusal.value) == (
        'config.json: model_type "deepseek_v4" is not one of llama, mistral, mixtral, qwen2, '
        "qwen2_moe, qwen3, qwen3_moe, phi3, ernie4_5, deepseek_v3, kimi_k2, glm4_moe, gpt_oss, "
        "llama4_text, llama4. Nearest: deepseek_v3."
    )


def test_faults_of_a_config_name_its_file(tmp_path) -> None:
    file = tmp_path / "ours.json"
    for config, said in (
        (
            {"model_type": "llama", "hidden_size": 0},
            ": hidden_size 0 is not a whole number above 0.",
        ),
        (
            {"model_type": "gpt_oss", "hidden_size": 0},
            " has no num_local_experts, and packs cannot be priced without it. Save the "
            "configuration again with transformers, which writes every size.",
        ),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(ModelError) as refusal:
            read_model(str(file))
        assert str(refusal.value) == f"ours.json{said}"


def test_a_layout_of_words() -> None:
    found = read_layout("tp=8, cp=2, pp=4, dp=16, ep=8, etp=1, zero=3, replicas=2, virtual=5")
    layout = found.layout
    assert (layout.world, layout.ep, layout.zero, layout.replicas) == (1024, 8, 3, 2)
    assert (found.virtual, read_layout("dp=2").virtual) == (5, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "llama3-80b",
            'model: "llama3-80b" is neither a known model nor a config.json. Nearest: '
            f"llama3-8b. All: {', '.join(PLANNED)}. Any other is "
            "layers=..,hidden=..,heads=..,vocab=.., or the path of its config.json.",
        ),
        (
            "layer=2",
            'model: "layer=2" begins with no known name. Nearest: layers. Give layers, hidden, '
            "heads, kv_heads, head_width, ffn, vocab, gated, tied, experts, top_k, expert_ffn, "
            "identity_experts, expert_groups, kept_groups, shared_ffn, shortcut, dense_layers, "
            "expert_every as name=number, with commas between.",
        ),
        (
            "layers=2,layers=3",
            "model: layers is given twice. Give it once.",
        ),
        (
            "layers=two",
            'model: layers is "two". Give a whole number of 1 to 2,147,483,647, as in layers=8.',
        ),
        (
            "layers=2,tied=-1",
            'model: tied is "-1". Give a whole number of 0 to 2,147,483,647, as in tied=1.',
        ),
        (
            "layers=2,hidden=99999999999",
            'model: hidden is "99999999999". Give a whole number of 1 to 2,147,483,647, as in '
            "hidden=8.",
        ),
        (
            "layers=\u0663",
            'model: layers is "\u0663". Give a whole number of 1 to 2,147,483,647, as in layers=8.',
        ),
        (
            f"layers={'9' * 5000}",
            f'model: layers is "{"9" * 5000}". Give a whole number of 1 to 2,147,483,647, as in '
            "layers=8.",
        ),
        (
            "layers=99999999,hidden=8,heads=2,vocab=9",
            "model: 99,999,999 layers are too many. Give 1,024 or fewer.",
        ),
        (
            "layers=2,hidden=8,heads=2,vocab=9,experts=4,top_k=2,dense_layers=2",
            "model: none of 2 layers has experts, with dense_layers = 2 and expert_every = 1. "
            "Lower them, or leave experts out.",
        ),
        (
            "",
            'model: "" is neither a known model nor a config.json. Nearest: '
            f"{nearest('', PLANNED)}. All: {', '.join(PLANNED)}. Any other is "
            "layers=..,hidden=..,heads=..,vocab=.., or the path of its config.json.",
        ),
        (
            "layers=2,hidden=8",
            "model: heads, vocab are missing. Give at least layers, hidden, heads, vocab.",
        ),
        (
            "layers=2,hidden=8,heads=2",
            "model: vocab is missing. Give at least layers, hidden, heads, vocab.",
        ),
        (
            "layers=2,hidden=8,heads=2,vocab=9,gated=2",
            "model: gated is 2. Give 0 for no or 1 for yes.",
        ),
        (
            "layers=2,hidden=8,heads=4,kv_heads=3,vocab=9",
            "model: 4 heads cannot share 3 key/value heads. Give a kv_heads that divides heads.",
        ),
        (
            "layers=2,hidden=8,heads=3,vocab=9",
            "model: a width of 8 does not divide over 3 heads. Give head_width.",
        ),
        (
            "layers=2,hidden=8,heads=2,vocab=9,experts=4,top_k=5",
            "model: 4 experts with top_k = 5. Give both, top_k between 1 and experts.",
        ),
        (
            "layers=2,hidden=8,heads=2,vocab=9,experts=4,top_k=2,expert_groups=3,kept_groups=1",
            "model: 4 experts in expert_groups = 3 with kept_groups = 1. Give both, "
            "kept_groups between 1 and expert_groups, which divides experts.",
        ),
        (
            "nowhere/config.json",
            "model: nowhere/config.json cannot be read as a config.json (no such file or "
            "directory). Give the file that the model was published with.",
        ),
    ],
)
def test_a_faulty_model_is_refused(text: str, message: str) -> None:
    with pytest.raises(EquipoiseError) as caught:
        read_model(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pq=2",
            'layout: "pq=2" begins with no known name. Nearest: dp. Give dp, cp, tp, pp, ep, '
            "etp, zero, replicas, virtual as name=number, with commas between.",
        ),
        ("tp=0", 'layout: tp is "0". Give a whole number of 1 to 2,147,483,647, as in tp=8.'),
        (
            "dp=2147483647,cp=2147483647,ep=3",
            "layout: 4,611,686,014,132,420,609 ranks are too many. Give degrees whose product "
            "is 1,048,576 or less.",
        ),
        (
            "dp=8,virtual=2",
            "layout: virtual = 2 needs a pipeline; pp = 1. Give pp of 2 or more, or omit virtual.",
        ),
        ("zero=4", "layout: zero is 4. Give 0, 1, 2 or 3."),
    ],
)
def test_a_faulty_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(EquipoiseError) as caught:
        read_layout(text)
    assert str(caught.value) == message


def test_degrees_that_do_not_go_together() -> None:
    with pytest.raises(LayoutError):
        read_layout("dp=2,ep=3")
