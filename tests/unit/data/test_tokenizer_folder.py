"""What a model's folder says of its tokenizer, and what becomes of a folder that says less."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.base.errors import DataError
from equipoise.data.text.folder import read_tokenizer_folder
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.spec.run.load import read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>", "<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(["user user user"], trainer)
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_the_end_token_is_the_folders(folder: Path) -> None:
    assert load_tokenizer(folder / "tokenizer.json").end == 0
    assert load_tokenizer(folder).end == 0  # it says nothing, so by the known names
    write(folder, "config.json", eos_token_id=5)
    assert load_tokenizer(folder).end == 5
    write(folder, "generation_config.json", eos_token_id=[1, 5])
    assert load_tokenizer(folder).end == 1
    write(folder, "special_tokens_map.json", eos_token={"content": "<end>"})
    write(folder, "generation_config.json", eos_token_id=[3])
    assert load_tokenizer(folder).end == 1
    write(folder, "tokenizer_config.json", eos_token="<|endoftext|>", added_tokens_decoder={})
    assert load_tokenizer(folder).end == 0
    assert load_tokenizer(folder / "tokenizer.json", asks_folder=True).end == 0


def test_added_tokens_are_those_of_transformers(folder: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    write(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<end>",
        bos_token="u",
        added_tokens_decoder={
            "1": {"content": "<end>", "special": True, **flags},
            str(size): {"content": "<new>", "special": True, **flags},
        },
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    ours.core.encode_special_tokens = False
    assert ours.vocab == size + 1
    for text in ("user<end><new> us", "<new><new>u", "<|endoftext|>"):
        assert ours.core.encode(text).ids == theirs(text).input_ids
    named = read_tokenizer_folder(folder).special_tokens
    assert named == theirs.special_tokens_map == {"eos_token": "<end>", "bos_token": "u"}
    write(folder, "tokenizer_config.json", added_tokens_decoder={"7": {"content": "<end>"}})
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        f"{folder / 'tokenizer_config.json'} gives '<end>' the id 7, but in tokenizer.json it has "
        "1. Save the tokenizer again with save_pretrained."
    )
    for fields, said in (
        ({"content": ""}, "gives '' the id 7, but in tokenizer.json it has none."),
        ({"content": 5}, 'has an "added_tokens_decoder" that cannot be read.'),
    ):
        write(folder, "tokenizer_config.json", added_tokens_decoder={"7": fields})
        with pytest.raises(DataError) as caught:
            load_tokenizer(folder)
        assert str(caught.value) == (
            f"{folder / 'tokenizer_config.json'} {said} Save the tokenizer again with "
            "save_pretrained."
        )


def test_templates_are_files_or_in_the_config(folder: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(folder, "tokenizer_config.json", chat_template=named)
    read = read_tokenizer_folder(folder)
    assert (read.template(with_tools=False), read.template(with_tools=True)) == ("a", "b")
    write(folder, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "a"}])
    with pytest.raises(DataError) as caught:
        read_tokenizer_folder(folder).template(with_tools=False)
    assert str(caught.value) == (
        f"{folder} has the chat templates rag, but none is the default. Write the one to use to "
        "chat_template.jinja."
    )
    (folder / "chat_template.jinja").write_text("c")
    assert read_tokenizer_folder(folder).templates == {"default": "c"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    read = read_tokenizer_folder(folder)
    assert (read.template(with_tools=False), read.template(with_tools=True)) == ("c", "d")


def test_files_that_cannot_be_read_are_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read: .*Correct it, or"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        f"{folder / 'tokenizer_config.json'} does not hold a JSON object. Correct it, or remove it."
    )
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        f'data.tokenizer {folder} has no tokenizer.json. Set data.tokenizer to "train" or to the '
        "path of a tokenizer.json."
    )


def test_a_run_takes_the_tokenizer_of_its_models_folder(folder: Path) -> None:
    from equipoise.spec.model.hf_config import hf_config
    from equipoise.spec.model.presets import preset

    write(folder, "config.json", **hf_config(preset("smollm2-135m")))
    given = [("model.init", f"hf:{folder}")]
    run = read_run(None, given)
    assert run.spec.data.tokenizer == str(folder)
    assert run.origins["data.tokenizer"] == f'model.init = "hf:{folder}"'
    other = read_run(None, [*given, ("data.tokenizer", "train")])
    assert other.spec.data.tokenizer == "train"
    (folder / "tokenizer.json").unlink()
    assert read_run(None, given).spec.data.tokenizer == "train"
    (folder / "tokenizer.model").write_text("")
    with pytest.raises(Exception) as caught:
        read_run(None, given)
    assert str(caught.value) == (
        f"--model.init: {folder} has tokenizer.model but no tokenizer.json, the only tokenizer "
        f"file that is read. Write it with transformers: AutoTokenizer.from_pretrained("
        f"'{folder}').save_pretrained('{folder}')."
    )
    (folder / "tokenizer.model").unlink()
    rows = [("data.source", "jsonl"), ("data.path", "a.jsonl"), ("data.format", "messages")]
    with pytest.raises(Exception) as caught:
        read_run(None, [*given, *rows])
    assert str(caught.value) == (
        f'--model.init: {folder} has no tokenizer.json, and data.format = "messages" '
        "(--data.format) needs the model's own. Copy it there, or set data.tokenizer to the folder "
        "that has it."
    )


def test_keys_of_conversations_go_together() -> None:
    def faults(*given: tuple[str, str]) -> str:
        with pytest.raises(Exception) as caught:
            read_run(None, given)
        return str(caught.value)

    assert faults(("data.loss", "last-answer")) == (
        '--data.loss: "last-answer" needs conversations, but data.format = "text" (default). Set '
        'data.format = "messages" or "prompt-completion", or remove data.loss.'
    )
    assert faults(("data.format", "prompt-completion")) == (
        '--data.format: "prompt-completion" needs rows with columns, but data.source = '
        '"python-stdlib" (default). Set data.source = "jsonl", "parquet" or "datasets".'
    )
    rows = [("data.source", "jsonl"), ("data.path", "a.jsonl"), ("data.format", "messages")]
    assert faults(*rows) == (
        '--data.format: "messages" needs the chat template of a model\'s folder. Set '
        'data.tokenizer to that folder, or model.init = "hf:DIR".'
    )
