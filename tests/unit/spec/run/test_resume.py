"""Every key has a meaning for a run that goes on, and those that change a step are told."""

import dataclasses

from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run import resume
from equipoise.spec.run.keys import keys
from equipoise.spec.run.resume import OnResume, describe_changes, on_resume, resume_facts
from equipoise.spec.run.spec import PackSpec, RunSpec, TrainSpec


def of_kind(kind: OnResume) -> list[str]:
    return [name for name, each in on_resume().items() if each is kind]


def test_every_key_has_a_kind_and_only_keys_have() -> None:
    assert list(on_resume()) == list(keys())
    assert set(resume._KINDS) <= set(keys())


def test_keys_that_change_what_a_step_holds_or_how_it_trains_are_told() -> None:
    assert of_kind(OnResume.REPORTED) == [
        "eval.path",
        "eval.source",
        "eval.field",
        "eval.tokens",
        "model.init",
        "pack.policy",
        "pack.context_tokens",
        "pack.step_tokens",
        "pack.cut",
        "pack.max_tokens",
        "pack.queues",
        "pack.max_delay_steps",
        "train.steps",
        "train.lr",
        "train.schedule",
        "train.warmup_steps",
        "train.decay_steps",
        "train.final_lr_ratio",
        "train.weight_decay",
        "train.beta1",
        "train.beta2",
        "train.eps",
        "train.clip_norm",
        "train.freeze",
        "train.precision",
        "layout.schedule",
        "layout.skip",
    ]
    assert of_kind(OnResume.REFUSED) == ["train.seed"]


def test_compared_keys_of_the_model_are_sizes_that_a_manifest_holds() -> None:
    sizes = {field.name for field in dataclasses.fields(ModelSpec)}
    compared = {name.removeprefix("model.") for name in of_kind(OnResume.COMPARED)}
    compared -= set(resume.TRAINED)
    # Tokens of images and sound are part of the corpus' digest.
    of_model = {name for name in compared if not name.startswith(("data.", "vision."))}
    of_model -= {"preset", "engine"}
    assert of_model <= sizes


def test_both_values_of_each_key_are_told() -> None:
    before = resume_facts(RunSpec())
    now = resume_facts(
        RunSpec(
            pack=PackSpec(context_tokens=4096, max_tokens=5000),
            train=TrainSpec(seed=3, schedule="constant"),
        )
    )
    assert describe_changes(before, now) == (
        "pack.context_tokens = 8192 before and 4096 now; pack.max_tokens = unset before and 5000 "
        'now; train.schedule = "cosine" before and "constant" now'
    )
    assert describe_changes(before, before) == ""
    assert describe_changes({}, now) == ""  # of a version that did not write them
