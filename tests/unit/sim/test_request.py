"""sim.request.simulate: what the verb prints, the same refusals, steps from plain values."""

import dataclasses
import json
import shlex

import pytest

from equipoise.base.errors import EquipoiseError, LayoutError, SpecError
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from support.verbs import run

EIGHT = StepRequest("llama3-8b", "h100-sxm:8", "dp=4,tp=2,zero=3", 4096, 32)
FLAGS = "--model llama3-8b --cluster h100-sxm:8 --layout dp=4,tp=2,zero=3"
FLAGS += " --context-tokens 4096 --step-sequences 32"


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        ({}, ""),
        ({"layout": "dp=8,zero=1"}, "--layout dp=8,zero=1"),  # does not fit
        (
            {"recompute": "full", "offload": "both", "micro_batch": 2, "precision": "fp8"},
            "--recompute full --offload both --micro-batch 2 --precision fp8",
        ),
        (
            {"layout": "dp=2,cp=2,pp=2", "order": "pp-dp", "context_strategy": "ring"},
            "--layout dp=2,cp=2,pp=2 --order pp-dp --context-strategy ring",
        ),
        (
            {"layout": "dp=2,pp=4,virtual=2", "schedule": "interleaved-zb"},
            "--layout dp=2,pp=4,virtual=2 --schedule interleaved-zb",
        ),
        (
            {"lengths": "wikipedia", "policy": "divided", "seed": 3},
            "--lengths wikipedia --policy divided --seed 3",
        ),
        (
            {"layout": "dp=8", "layers": "20:dp=8,zero=3:full 12:tp=2,dp=4,zero=1:none"},
            "--layout dp=8 --layers '20:dp=8,zero=3:full 12:tp=2,dp=4,zero=1:none'",
        ),
        (
            {"jitter": 0.05, "mtbf_hours": 5000.0, "restart_s": 60.0, "seed": 1},
            "--jitter 0.05 --mtbf-hours 5000 --restart-s 60 --seed 1",
        ),
    ],
)
def test_a_row_is_what_the_verb_prints(
    capsys: pytest.CaptureFixture[str], more: dict[str, object], flags: str
) -> None:

    answer = simulate(dataclasses.replace(EIGHT, **more))
    code, out, _ = run(capsys, "simulate", *shlex.split(f"{FLAGS} {flags}"), "--json")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(answer.as_row()))


def test_names_and_the_specs_that_they_stand_for_are_one_request() -> None:
    named = simulate(EIGHT)
    layout = Layout(dp=4, tp=2, zero=3)
    given = StepRequest(PLANNED["llama3-8b"], find_cluster("h100-sxm:8"), layout, 4096, 32)
    assert simulate(given).as_row() == named.as_row()
    virtual = StepRequest("llama3-8b", "h100-sxm:8", Layout(dp=2, pp=4), 4096, 32, virtual=2)
    words = StepRequest("llama3-8b", "h100-sxm:8", "dp=2,pp=4,virtual=2", 4096, 32)
    assert simulate(virtual).step_s == simulate(words).step_s


def test_an_answer_adds_up() -> None:
    answer = simulate(StepRequest("llama3-8b", "h100-sxm:8", "tp=2,pp=4", 4096, 32))
    row = answer.as_row()
    assert sum(answer.terms.values()) == pytest.approx(answer.step_s)
    assert answer.tokens == 4096 * 32 and answer.useful_flop > 6 * 8e9 * answer.tokens
    assert len(answer.memory_bytes) == 4 and answer.fits
    assert max(answer.memory_bytes) <= answer.capacity_bytes
    assert sum(answer.memory.values()) == pytest.approx(max(answer.memory_bytes))
    assert answer.energy_j == row["energy_j_per_step"] and answer.usd == row["usd_per_step"]
    assert answer.skew >= 1 and answer.sources == row["sources"]


def test_packed_documents_are_priced_as_they_are_given() -> None:

    whole = simulate(EIGHT)
    packed = [[[4096]] * 8] * 4
    same = simulate(dataclasses.replace(EIGHT, documents=packed))
    assert same.step_s == whole.step_s and same.tokens == whole.tokens
    halves = simulate(dataclasses.replace(EIGHT, documents=[[[2048, 2048]] * 8] * 4))
    assert halves.tokens == whole.tokens and halves.useful_flop < whole.useful_flop
    listed = simulate(dataclasses.replace(EIGHT, lengths=[4096] * 32))
    as_text = ",".join(["4096"] * 32)
    assert simulate(dataclasses.replace(EIGHT, lengths=as_text)).step_s == listed.step_s
    assert listed.step_s == whole.step_s


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"model": "llama3-8"}, SpecError, '"llama3-8" is neither a known model nor a config.json'),
        ({"layout": Layout(dp=4)}, LayoutError, "there are 8. Set dp = 8."),
        ({"model": 3}, SpecError, "model is 3. Give text, or a ModelSpec."),
        ({"cluster": {}}, SpecError, "cluster is (a table). Give text, or a ClusterSpec."),
        ({"layout": None}, SpecError, "layout is null. Give text, or a Layout."),
        ({"program": []}, SpecError, "program is []. Give text, or a ProgramSpec."),
        (
            {"context_tokens": 0},
            SpecError,
            "context_tokens is 0. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            {"step_sequences": "32"},
            SpecError,
            'step_sequences is "32". Give a whole number.',
        ),
        (
            {"recompute": "ful"},
            SpecError,
            'recompute: "ful" is not one of none, attention, selective, every-2, every-3, every-4, '
            "full, core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts. Nearest: "
            '"full". Modules are joined with +, as layernorm+moe_act.',
        ),
        (
            {"offload": "all"},
            SpecError,
            'offload: "all" is not one of none, optimizer, activations, both. Nearest: '
            '"activations".',
        ),
        (
            {"precision": "bf15"},
            SpecError,
            'precision: "bf15" is not one of bf16, fp8, fp32. Nearest: "bf16".',
        ),
        (
            {"layout": "dp=2,cp=2,tp=2", "context_strategy": "rings"},
            SpecError,
            'context_strategy: "rings" is not one of needed-kv, all-gather, ring, ulysses. '
            'Nearest: "ring".',
        ),
        (
            {"order": "tp-dp"},
            SpecError,
            'order: "tp-dp" is not one of dp-pp, pp-dp. Nearest: "pp-dp".',
        ),
        (
            {"virtual": 2},
            SpecError,
            "virtual = 2 goes beside a Layout. Write it into the words: "
            "dp=4,tp=2,zero=3,virtual=2.",
        ),
        (
            {"documents": [[[4096]]] * 3},
            LayoutError,
            "documents has micro-batches of 3 ranks for dp = 4. Give a row for each data-parallel "
            "rank, or one that stands for all.",
        ),
        (
            {"documents": [[[]]] * 4},
            SpecError,
            "documents has a rank or a micro-batch with nothing in it. Fill it.",
        ),
        (
            {"documents": [[4096]] * 4},
            SpecError,
            "documents is not a list of ranks, of micro-batches, of lengths. Give all three, as "
            "in [[[4096, 100]]].",
        ),
        (
            {"documents": [[[4096, -1]]] * 4},
            SpecError,
            "documents has a length of -1. Give whole numbers of 1 to 2,147,483,647.",
        ),
        (
            {"documents": [[[4096, 1.5]]] * 4},
            SpecError,
            "documents has a length of 1.5. Give whole numbers of 1 to 2,147,483,647.",
        ),
        (
            {"documents": [[[4096]]] * 4, "lengths": "wikipedia"},
            SpecError,
            "documents are packed already, and lengths are still to be packed. Give one of them.",
        ),
        (
            {"checkpoint_s": 3.0},
            SpecError,
            "checkpoint_s = 3 needs mtbf_hours, for without it nothing fails. Give both or "
            "neither.",
        ),
    ],
)
def test_what_is_refused(more: dict[str, object], kind: type[EquipoiseError], message: str) -> None:

    with pytest.raises(kind) as refused:
        simulate(dataclasses.replace(EIGHT, **more))
    assert message in str(refused.value) and str(refused.value).count("\n") == 0
