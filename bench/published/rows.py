"""Published training steps as settings that can be priced: one row, one measured number.

What a source ran is one of the shipped programs (``equipoise simulate --program``), and nothing is
said about it here but its name. If a source prints no micro-batch or no virtual stages, the row has
several settings, and the fastest that fits is taken, as its authors probably did.
"""

import csv
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from equipoise.cost.step.request import StepOptions
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec
from equipoise.spec.program.file import read_program
from equipoise.spec.run.spec import Recompute

FOLDER = Path(__file__).with_name("tables")


HARDWARE = "hardware FLOP of every pair, masked ones too"
"""What Megatron-LM of 2021 prints: recomputation counts, and causal masks save nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published step."""

    source: str
    name: str
    model: ModelSpec
    cluster: str
    layout: Layout
    options: tuple[StepOptions, ...]
    step_s: float
    program: str
    """A shipped program."""
    printed: str
    """What the source prints, from which the seconds follow."""

    @property
    def pairs(self) -> str:
        """Which pairs of a window its attention computes, whatever its FLOP count."""
        kept = self.options[0].stack.attention == "unfused"
        return "every pair, masked ones too" if kept else "causal pairs"


def make_row(
    source: str,
    name: str,
    program: str,
    model: ModelSpec,
    cluster: str,
    layout: Layout,
    options: Iterable[StepOptions],
    step_s: float,
    printed: str = "seconds",
) -> Row:
    """A step with what its program does, as ``equipoise simulate --program`` fills it in."""
    does = read_program(program)
    filled = tuple(
        dataclasses.replace(
            each,
            sharding=does.sharding,
            context_strategy=does.context_strategy,
            stack=does.stack,
        )
        for each in options
    )
    ordered = dataclasses.replace(layout, order=ORDERS[does.order])
    return Row(source, name, model, cluster, ordered, filled, step_s, program, printed)


def read(name: str) -> list[dict[str, str]]:
    lines = [line for line in (FOLDER / name).read_text().splitlines() if line[:1] != "#"]
    return list(csv.DictReader(lines))


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    return dataclasses.replace(
        PLANNED["gpt3-175b"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        head_width=hidden // heads,
        vocab=vocab,
    )


def megatron_flop(model: ModelSpec, batch: int, seq: int) -> float:
    """FLOP by arXiv:2104.04473, appendix: full recomputation, every pair."""
    layers, hidden = model.layers, model.hidden
    ratio = 1 + seq / (6 * hidden) + model.vocab / (16 * layers * hidden)
    return 96.0 * batch * seq * layers * hidden**2 * ratio


NEMOTRON = {
    # arXiv:2402.16819, table 1, and arXiv:2406.11704, section 2.
    "nemotron4-15b": dataclasses.replace(gpt(32, 6144, 48, 256_000), kv_heads=8, tied=False),
    "nemotron4-340b": dataclasses.replace(gpt(96, 18_432, 96, 256_000), kv_heads=8, tied=False),
}
# The published config.json of grok-1.
GROK = dataclasses.replace(
    PLANNED["mixtral-8x7b"],
    layers=64,
    hidden=6144,
    heads=48,
    kv_heads=8,
    vocab=131_072,
    expert_ffn=32_768,
    ffn=32_768,
)


def dgxc() -> Iterator[Row]:
    for row in read("dgxc.csv"):
        if "maxtext" in row["model"] or row["hw"] != "H100":
            continue  # no recipe says what maxtext recomputes; other hardware has no table here
        name = row["model"].partition("-proxy")[0]
        model = {**PLANNED, **NEMOTRON, "grok1-314b": GROK}[name]
        tp, pp, cp, ep, vp, dp = (int(row[key]) for key in ("tp", "pp", "cp", "ep", "vp", "dp"))
        sparse = model.experts > 0
        layout = Layout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=tp if sparse else 1)
        if layout.world != int(row["gpus"]):
            layout = dataclasses.replace(layout, dp=int(row["gpus"]) // (tp * cp * pp))
        options = StepOptions(
            int(row["seq"]),
            int(row["gbs"]),
            micro_batch=int(row["mbs"]),
            virtual=vp,
            schedule="interleaved" if vp > 1 else "1f1b",
            precision="fp8" if row["precision"] == "FP8" else "bf16",
        )
        yield make_row(
            "dgxc",
            f"{row['tag']} {row['model']} {row['precision']} x{row['gpus']}",
            "nemo",
            dataclasses.replace(model, layers=int(row["layers"])),
            f"h100-sxm:{row['gpus']}",
            layout,
            (options,),
            float(row["step_s"]),
        )


MPT = {  # layers, hidden, heads: llm-foundry, scripts/train/yamls/pretrain
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
DEVICES = {"h100_80gb": "h100-sxm", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}


def llmfoundry() -> Iterator[Row]:
    for row in read("llmfoundry.csv"):
        gpus, seq = int(row["gpus"]), int(row["seqlen_t"])
        options = StepOptions(
            seq,
            int(row["globalbatchsize"]),
            micro_batch=int(row["microbatchsize"]),
            recompute="full" if row["activation_checkpointing"] == "True" else "none",
            precision="fp8" if row["precision"] == "amp_fp8" else "bf16",
        )
        yield make_row(
            f"llm-foundry {row['gpu']}",
            f"{row['model']} seq {seq} x{gpus} {row['precision']} mb {row['microbatchsize']}",
            "llm-foundry-pure" if row["mp_mode"] == "PURE" else "llm-foundry",
            gpt(*MPT[row["model"]], 50_368),
            f"{DEVICES[row['gpu']]}:{gpus}",
            Layout(dp=gpus, zero=3 if row["sharding_strategy"] == "FULL_SHARD" else 2),
            (options,),
            # The table's own figure; its rounded rates are of short steps.
            int(row["globalbatchsize_t"]) / (float(row["throughput_t_s_gpu"]) * gpus),
            "tokens a second",
        )


def torchtitan() -> Iterator[Row]:
    for row in read("torchtitan.csv"):
        gpus, technique = int(row["gpus"]), row["technique"]
        if "rowwise" in technique:
            continue  # scales of rows are made by kernels that no table here has
        degree = {key: int(row[key]) for key in ("fsdp", "tp", "pp", "cp")}
        layout = Layout(
            dp=degree["fsdp"],
            tp=degree["tp"],
            pp=degree["pp"],
            cp=degree["cp"],
            # Pipelines keep parameters gathered, and sums of gradients whole until the last.
            zero=1 if degree["pp"] > 1 else 3,
        )
        is_async = "async" in technique.lower() and "vanilla" not in technique
        is_compiled = "compile" in technique or row["table"][0] == "a"
        program = "torchtitan-async" if is_async else "torchtitan"
        # Selective: every other matrix product is computed again.
        recompute: Recompute = "full" if row["activation_ckpt"] == "full" else "every-2"
        interleaved = row["schedule"].startswith("Inter")
        # As many micro-batches as stages, the default of its pipelines.
        pp_batch = int(row["local_batch"]) // layout.pp
        options = StepOptions(
            int(row["seq"]),
            int(row["global_batch"]),
            micro_batch=pp_batch,
            virtual=2 if interleaved else 1,
            schedule="interleaved" if interleaved else "1f1b",
            recompute=recompute,
            precision="fp8" if "float8" in technique.lower() else "bf16",
        )
        tokens = int(row["seq"]) * int(row["global_batch"])
        cluster = "h200" if "H200" in row["table"] else "h100-sxm-500w"
        yield make_row(
            "torchtitan",
            f"{row['table']} {row['model']} x{gpus} {row['seq']} {technique} {row['schedule']}",
            program if is_compiled else "torchtitan-eager",
            PLANNED["llama3-" + row["model"].rpartition("-")[2]],
            f"{cluster}:{gpus}",
            layout,
            (options,),
            tokens / (float(row["tps_per_gpu"]) * gpus),
            "tokens a second",
        )


def _virtual(layers: int, pp: int) -> list[int]:
    return [v for v in (1, 2, 3, 4, 5, 6) if layers % (pp * v) == 0] if pp > 1 else [1]


def _choices(
    layout: Layout, seq: int, batch: int, layers: int, *, interleaves: bool
) -> tuple[StepOptions, ...]:
    steps = []
    for micro_batch in (1, 2, 4, 8, 16):
        if batch % (layout.dp * micro_batch):
            continue
        for virtual in _virtual(layers, layout.pp) if interleaves else [1]:
            if virtual > 1 and batch // (layout.dp * micro_batch) % layout.pp:
                continue
            steps.append(
                StepOptions(
                    seq,
                    batch,
                    micro_batch=micro_batch,
                    virtual=virtual,
                    schedule="interleaved" if virtual > 1 else "1f1b",
                    recompute="full",
                )
            )
    return tuple(steps)


def sc21_table1() -> Iterator[Row]:
    for row in read("sc21_table1.csv"):
        yield _megatron(row, int(row["tp"]), int(row["pp"]), "SC21 table 1", interleaves=True)


def megatron_jan2021() -> Iterator[Row]:
    for row in read("megatron_jan2021.csv"):
        size = int(row["model_parallel_size"])
        tp = min(8, size)
        row = row | {"model": row["case"]}
        yield _megatron(row, tp, size // tp, "Megatron January 2021", interleaves=False)


def _megatron(row: dict[str, str], tp: int, pp: int, source: str, *, interleaves: bool) -> Row:
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    model = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 51_200)
    layout = Layout(dp=gpus // (tp * pp), tp=tp, pp=pp, zero=0)
    flop = megatron_flop(model, batch, 2048)
    return make_row(
        source,
        row["model"],
        "megatron-2021",
        model,
        f"a100-80:{gpus}",
        layout,
        _choices(layout, 2048, batch, model.layers, interleaves=interleaves),
        flop / (float(row["tflops_per_gpu_hw"]) * 1e12 * gpus),
        HARDWARE,
    )


def megatron_2020() -> Iterator[Row]:
    for row in read("megatron_2020.csv"):
        gpus, tp, batch = int(row["gpus"]), int(row["tp"]), int(row["global_batch"])
        is_volta = "V100" in row["system"]
        model = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 51_200)
        layout = Layout(dp=gpus // tp, tp=tp, zero=0)
        yield make_row(
            "Megatron 2020",
            f"{row['case']} {row['system']} x{gpus}",
            "megatron-2020",
            model,
            f"{'v100-32' if is_volta else 'a100-40'}:{gpus}",
            layout,
            _choices(layout, 1024, batch, model.layers, interleaves=False),
            1e-3 * float(row["iter_ms"]),
        )


def sc21_table2() -> Iterator[Row]:
    shapes = {"174.6": (96, 12_288, 96), "529.6": (105, 20_480, 128)}
    for row in read("sc21_table2.csv"):
        gpus, batch = int(row["gpus"]), int(row["global_batch"])
        model = gpt(*shapes[row["params_B"]], 51_200)
        micro_batch = int(row["microbatch"])
        if row["scheme"] == "ZeRO-3":
            layout = Layout(dp=gpus, zero=3)
            options = (
                StepOptions(
                    2048,
                    batch,
                    micro_batch=micro_batch,
                    recompute="full",
                ),
            )
        else:
            size = int(row["model_parallel"])
            layout = Layout(dp=gpus // size, tp=8, pp=size // 8, zero=0)
            options = tuple(
                each
                for each in _choices(layout, 2048, batch, model.layers, interleaves=True)
                if each.micro_batch == micro_batch
            )
        yield make_row(
            "SC21 table 2",
            f"{row['scheme']} {row['params_B']}B x{gpus} mb {micro_batch}",
            "deepspeed-2021" if row["scheme"] == "ZeRO-3" else "megatron-2021",
            model,
            f"a100-80:{gpus}",
            layout,
            options,
            megatron_flop(model, batch, 2048) / (float(row["tflops_per_gpu_hw"]) * 1e12 * gpus),
            HARDWARE,
        )


FORMS: tuple[tuple[Recompute, str, str], ...] = (
    ("full", "iter_s_full_recompute", "megatron-2022-tensor"),
    ("attention", "iter_s_seqpar_selective", "megatron-2022"),
)


def seqpar_table5() -> Iterator[Row]:
    for row in read("seqpar_table5.csv"):
        gpus, virtual = int(row["gpus"]), int(row["vp"])
        model = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 51_200)
        layout = Layout(tp=int(row["tp"]), pp=int(row["pp"]), zero=0)
        for recompute, column, program in FORMS:
            options = StepOptions(
                2048,
                int(row["global_batch"]),
                micro_batch=int(row["microbatch"]),
                virtual=virtual,
                schedule="interleaved" if virtual > 1 else "1f1b",
                recompute=recompute,
            )
            yield make_row(
                "Korthikanti table 5",
                f"{row['model']} {recompute}",
                program,
                model,
                f"a100-80:{gpus}",
                layout,
                (options,),
                float(row[column]),
            )


SCHEDULES = {"ZB-2p": "zb-h2", "ZB-1p": "zb-h1", "1F1B": "1f1b", "1F1B-I": "interleaved"}


def zero_bubble() -> Iterator[Row]:
    for row in read("zero_bubble_table4.csv"):
        gpus, layers = int(row["gpus"]), int(row["layers"])
        model = gpt(layers, int(row["hidden"]), int(row["heads"]), 51_200)
        micro_batch = int(row["microbatch"])
        sequences = micro_batch * int(row["num_microbatches"])
        virtual = (layers + 2) // gpus if row["schedule"] == "1F1B-I" else 1
        options = StepOptions(
            int(row["seq"]),
            sequences,
            micro_batch=micro_batch,
            virtual=virtual,
            schedule=SCHEDULES[row["schedule"]],
        )
        yield make_row(
            "zero bubble table 4",
            f"{row['model']} {row['schedule']} m {row['num_microbatches']}",
            "zero-bubble",
            model,
            f"a100-80:{gpus}",
            Layout(pp=gpus, zero=0),
            (options,),
            sequences / (float(row["samples_per_gpu_s"]) * gpus),
            "sequences a second",
        )


def rows() -> list[Row]:
    """Every published step that can be priced."""
    return [
        row
        for source in (
            dgxc,
            llmfoundry,
            torchtitan,
            sc21_table1,
            sc21_table2,
            megatron_jan2021,
            megatron_2020,
            seqpar_table5,
            zero_bubble,
        )
        for row in source()
    ]
