"""A run, from a run.toml or a ``RunSpec`` to its record: what ``equipoise train`` does.

What it decides
    A run is refused before its corpus is read where the layout, the machine or the folder cannot
    carry it. Ranks are processes on this machine; asked again, a run goes on from its last
    checkpoint. ``prepare`` stops before ranks start, for a launcher of your own. From what ranks
    will read until they have ended, a second command may not write to the folder.

    Ranks import torch, and this does not, unless weights must be named or read: the command is
    there sooner, and waits for its ranks in a quarter of the memory.

Kept true (tests/multi/train/test_request.py, tests/unit/train/test_light.py)
    A run from Python has the losses of the same run from the command line, to the bit. Preparing
    one imports no torch.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from equipoise.balance.expert.table import find_table, require_same_tokens
from equipoise.base.disk import run_unwritten, why_unwritable, writing_run
from equipoise.base.errors import FitError, ModelError, SpecError
from equipoise.base.read import real_path, user_path
from equipoise.base.shown import shown
from equipoise.base.units import format_bytes
from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.checkpoint.second import take_second
from equipoise.data.cache.store import TokenStore, check_vocabulary
from equipoise.data.cache.store import prepare as open_store
from equipoise.data.held_out import prepare_held_out
from equipoise.data.modality.rules import ItemRules
from equipoise.data.model_files import files_to_keep
from equipoise.data.progress import Progress, SilentProgress
from equipoise.data.reading import cut_sentence, describe_reading, read_sources
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.fault.recover import run_recovering, with_fewer
from equipoise.launch.doctor.folder import room_row
from equipoise.launch.doctor.gather import read_folder, read_machine
from equipoise.launch.doctor.machine import memory_row
from equipoise.launch.doctor.needs import LIBRARIES_BYTES, needs_of, require_slots
from equipoise.launch.forms import Nodes
from equipoise.launch.gang import Launch
from equipoise.launch.local import claim_folder, require_free_folder, require_free_port
from equipoise.launch.room import require_room
from equipoise.nn.hf.files import KEPT, keep_files
from equipoise.observe import reader
from equipoise.observe.machine import own_ranks
from equipoise.observe.run_record import RunRecord
from equipoise.plan.run import read_obeyed
from equipoise.plan.space.accepted import require_accepted, require_step
from equipoise.sim.settle.parts import settle_parts
from equipoise.sim.settle.sharding import settle_machine
from equipoise.sim.stages import settle_edges
from equipoise.spec.device.driver import cuda_devices
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import CHECKPOINTS, HF
from equipoise.spec.plan import LOCK
from equipoise.spec.run.compared import compared_specs, require_same_sides
from equipoise.spec.run.load import read_run, texts_of
from equipoise.spec.run.obey import share_experts
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import RunSpec
from equipoise.spec.run.step import describe_step
from equipoise.train.sinks.catalog import wanted_sinks


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose ranks may start."""

    folder: Path
    """Where ``python -m equipoise.train.worker`` finds it."""
    ranks: int


def run(
    run: Path | str | RunSpec | ResolvedRun,
    *,
    out: Path | str | None = None,
    plan: Path | str | None = None,
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
    proves: bool = True,
) -> RunRecord:
    """Train on this machine's ranks, or go on from the run's last checkpoint.

    Args:
        run: A run.toml, a ``RunSpec`` whose relative paths start at the working directory, or
            what ``spec.run.load.read_run`` made of a file and flags.
        out: The run's folder; ``runs/NAME`` unless given.
        plan: A plan.lock of ``equipoise plan run.toml`` to obey.
        port: Where the ranks meet; any that is free unless given.
        is_quiet: Whether rank 0 shows no line for each step.
        progress: Hears of the corpus while it is read.
        proves: Whether ranks on devices that are not CPUs first prove that this layout equals one
            rank on them; proofs are kept.

    Returns:
        The run's folder read back: loss, tokens and seconds of every step, of all its sessions.

    Raises:
        SpecError: every fault of the run's keys.
        PlanError: the plan is stale, or of something else.
        LayoutError: the layout does not go with the model, the policy or this machine.
        DataError: the corpus is missing or wrong.
        EquipoiseError: a rank failed; with its words.
    """
    resolved = resolve_run(run)
    with ExitStack() as held:
        prepared = _prepare(resolved, out, plan, (), port, is_quiet, progress, held, starts=True)

        def again(fewer: ResolvedRun) -> int:
            folder = prepared.folder
            return _prepare(fewer, folder, None, (), port, True, None, None, starts=True).ranks

        smaller = None if plan is not None else with_fewer(resolved, again)
        run_recovering(Launch(prepared.folder, prepared.ranks, is_quiet, port, proves), smaller)
    return reader.read_run(prepared.folder)


def compare(
    run: Path | str | RunSpec | ResolvedRun,
    policies: Sequence[str],
    *,
    out: Path | str | None = None,
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
    proves: bool = True,
) -> tuple[RunRecord, ...]:
    """Train with every step computed under each packing policy in turn, and updated once.

    All policies see the same pieces and weights within seconds, so their times compare step by
    step (``dash.compare.compare``).

    Args:
        run: As for ``run``; with ``pack.cut = "windows"``.
        policies: Two or more packing policies that train the same pieces.
        out: As for ``run``; each policy's journal is in a folder of its name within.
        port: As for ``run``.
        is_quiet: As for ``run``.
        progress: As for ``run``.
        proves: As for ``run``.

    Returns:
        The run under each policy, read back, in the order of ``policies``.

    Raises:
        SpecError: the policies cannot be compared, or the folder holds a run that compares others;
            and as ``run``.
        EquipoiseError: as ``run``.
    """
    with ExitStack() as held:
        made = _prepare(run, out, None, policies, port, is_quiet, progress, held, starts=True)
        run_recovering(Launch(made.folder, made.ranks, is_quiet, port, proves))
    return tuple(reader.read_run(made.folder / policy) for policy in policies)


def prepare(
    run: Path | str | RunSpec | ResolvedRun,
    *,
    out: Path | str | None = None,
    plan: Path | str | None = None,
    policies: Sequence[str] = (),
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
) -> Prepared:
    """Make all that ranks will read, and start none: for a launcher of your own.

    As ``run``; with ``policies``, as ``compare``.
    """
    with ExitStack() as held:
        return _prepare(run, out, plan, policies, port, is_quiet, progress, held, starts=False)


def resolve_run(run: Path | str | RunSpec | ResolvedRun) -> ResolvedRun:
    """A run with its model and every key judged.

    Raises:
        SpecError: every fault of the run's keys.
    """
    if isinstance(run, ResolvedRun):
        return run
    if isinstance(run, Path | str):
        return read_run(Path(run))
    if not isinstance(run, RunSpec):
        raise SpecError(f"run is {shown(run)}. Give a run.toml, or a RunSpec.")
    return read_run(None, texts_of(run))


def require_no_plan(plan: Path | str | None) -> None:
    """Refuse a plan for a run that compares policies.

    Raises:
        SpecError: there is one.
    """
    if plan is not None:
        raise SpecError(
            "A plan.lock decides the packing policy, and a comparison runs several. Give --plan or "
            "--compare."
        )


def _prepare(
    run: Path | str | RunSpec | ResolvedRun,
    out: Path | str | None,
    plan: Path | str | None,
    policies: Sequence[str],
    port: int,
    is_quiet: bool,
    progress: Progress | None,
    held: ExitStack | None,
    *,
    starts: bool,
) -> Prepared:
    """Prepare a run; its folder stays claimed as long as ``held``, or is by who calls, if None."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    resolved, lock = resolve_run(run), None
    progress = progress or SilentProgress()
    if plan is not None:
        lock, resolved = read_obeyed(Path(plan), resolved, progress)
    ranks = resolved.spec.layout.count_ranks(own_ranks())
    resolved = share_experts(resolved, ranks)
    specs, model = [resolved.spec], resolved.model
    if policies:
        require_no_plan(plan)
        specs = compared_specs(resolved.spec, policies)
    spec = specs[0]
    folder = real_path(Path(out or Path("runs") / spec.name))
    require_same_sides(folder, policies)
    require_free_folder(folder)
    _require_own_folder(folder)
    if starts:
        _require_few(ranks)
        require_room(ranks)
    if port:
        require_free_port(port)
    for each in specs:
        require_accepted(each, model, ranks)
    if starts and not cuda_devices():
        _require_fit(spec, model, ranks, folder)
    wanted_sinks(spec.journal)
    folder_of_init = init_folder(resolved)
    routes = find_table(spec, resolved.base, folder_of_init, model)
    if spec.train.freeze or spec.lora.rank:
        from equipoise.train.trained import require_trained  # which imports torch

        require_trained(spec, model, Path(folder_of_init))
    if spec.model.engine == "transformers":
        from equipoise.parallel.theirs.tried import require_exact_folder

        require_exact_folder(Path(folder_of_init), spec.pack.context_tokens)
    rules = ItemRules.of(spec)
    store = open_store(spec.data, resolved.base, progress=progress, rules=rules)
    check_vocabulary(store, model.vocab)
    if routes:
        require_same_tokens(routes, load_tokenizer(store.tokenizer_file).tokens_digest)
    if store.left_out and not is_quiet:
        sys.stdout.write(f"{store.source_name}: {store.left_out}.\n")
    if (cut := cut_sentence(spec, store)) and not is_quiet:
        sys.stdout.write(f"{store.source_name}: {cut}\n")
    for each in specs:
        require_step(each, model, ranks, store.doc_tokens, store.mixture)
    eval_corpus = ""
    if spec.eval.path:
        held_out = prepare_held_out(spec, resolved.base, store, progress=progress)
        eval_corpus = str(held_out.folder.resolve())
    if not is_quiet:
        sources = read_sources(spec, store.source_name, store.doc_tokens, store.mixture)
        for line in (*describe_reading(spec, sources), describe_step(spec, ranks)):
            sys.stdout.write(f"{line}\n")
    stages = None if lock is None else lock.best.stages
    settled = ResolvedFile(
        spec=spec,
        model=model,
        origins=resolved.origins,
        ranks=ranks,
        corpus=str(store.folder.resolve()),
        init_folder=folder_of_init,
        context_machine=settle_machine(spec, model, ranks, folder),
        part_machine=settle_parts(spec, model, ranks, folder),
        stage_edges=settle_edges(spec, model, folder, stages),
        compare=tuple(policies),
        eval_corpus=eval_corpus,
        routes=routes,
        second_checkpoints=take_second(spec.checkpoint.second_path, resolved.base, folder),
    )
    if held is not None:
        with writing_run(folder):
            folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(claim_folder(folder))
    _keep_files(folder, settled, store)
    write_resolved(folder, settled)
    if lock is not None:
        lock.write(folder / LOCK)
    return Prepared(folder, ranks)


def init_folder(resolved: ResolvedRun) -> str:
    """The folder of a run's first weights; "" where they are random.

    Raises:
        ModelError: the run's engine is not installed.
    """
    model = resolved.spec.model
    if model.engine == "transformers" and importlib.util.find_spec("transformers") is None:
        raise ModelError(
            'model.engine = "transformers" needs the package transformers, which is not installed. '
            "Run: pip install 'equipoise[transformers]'"
        )
    if model.init == "random":
        return ""
    return str(real_path(resolved.base / user_path(model.init.removeprefix("hf:"))))


def _require_few(ranks: int) -> None:
    """Refuse more ranks than this machine could even import torch in.

    Raises:
        FitError: says how many fit.
    """
    have = read_machine().memory_bytes
    if ranks * LIBRARIES_BYTES > have:
        raise FitError(
            f"{ranks:,} ranks need {format_bytes(ranks * LIBRARIES_BYTES)} of memory for their "
            f"libraries alone, and {format_bytes(have)} are free here. Set layout.dp and the other "
            f"degrees for at most {max(1, have // LIBRARIES_BYTES):,} ranks."
        )


def _require_fit(spec: RunSpec, model: ModelSpec, ranks: int, folder: Path) -> None:
    """Refuse what ``equipoise doctor`` finds impossible here: memory, and room for checkpoints.

    Raises:
        FitError: with doctor's words.
    """
    needs = needs_of(spec, model, ranks, Nodes(1, ranks, "none"))
    if spec.checkpoint.every_steps != "auto":
        saves = -(-spec.train.steps // spec.checkpoint.every_steps)
        needs = dataclasses.replace(needs, kept_checkpoints=min(needs.kept_checkpoints, saves - 1))
    require_slots(read_machine(), needs, spec, model)
    facts = read_folder(folder)
    held = sum(path.stat().st_size for path in (folder / CHECKPOINTS).rglob("*") if path.is_file())
    facts = dataclasses.replace(facts, free_bytes=facts.free_bytes + held)
    rows = [memory_row(read_machine(), needs)]
    if not facts.fault:
        rows.append(room_row(facts, needs))
    for row in rows:
        if row.verdict == "breaks":
            raise FitError(f"{row.what.capitalize()}: {row.found}, because {row.why} {row.fix}")


def _require_own_folder(folder: Path) -> None:
    """Refuse what cannot be a run's folder, before a corpus is read for it.

    Raises:
        SpecError: it cannot be written, or a run's files would replace somebody's model.
    """
    if why := why_unwritable(folder):
        raise run_unwritten(folder, why)
    kept = folder / HF
    if kept.exists() and not (kept / KEPT).exists():
        raise SpecError(
            f"{kept} is not of a run, which would replace it by its own files. Choose another "
            f"folder with --out."
        )


def _keep_files(folder: Path, settled: ResolvedFile, store: TokenStore) -> None:
    """Keep what must come back with the weights; once the run has a checkpoint, it stays.

    Raises:
        ModelError: the folder that the run begins from cannot be read.
        SpecError: the run's folder cannot be written.
    """
    kept = folder / HF
    if (kept / KEPT).exists() and any(find_checkpoints(folder / CHECKPOINTS)):
        return
    source = Path(settled.init_folder) if settled.init_folder else None
    is_theirs = settled.spec.model.engine == "transformers"
    files = files_to_keep(source, store.tokenizer_file, may_draw=is_theirs)
    with writing_run(folder):
        keep_files(files, kept)
