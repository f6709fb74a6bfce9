"""Files that are not what was written: checkpoints (F3, F9) and documents (F11)."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from equipoise.data.cache.verified import CHUNK_BYTES
from equipoise.fault.drill.facts import resumed_s
from equipoise.fault.drill.injection import Fired
from equipoise.fault.drill.judge import BY_ITSELF, SAME_COMMAND, UNDISTURBED, Expected, judge
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import EVERY, Stage

_PAGE = 4096
_ROTTEN_TOKENS = f"a bit of every {CHUNK_BYTES >> 10} KiB"


def _cut(share: float) -> Callable[[Path, Path], None]:
    def cut(file: Path, older: Path) -> None:
        del older
        with file.open("r+b") as opened:
            opened.truncate(int(file.stat().st_size * share))

    return cut


def _zero(file: Path, older: Path) -> None:
    del older
    data = bytearray(file.read_bytes())
    begins = [*range(len(data) // 2, len(data), _PAGE), *range(0, len(data) // 2, _PAGE)]
    begin = next((each for each in begins if any(data[each : each + _PAGE])), 0)
    data[begin : begin + _PAGE] = bytes(len(data[begin : begin + _PAGE]))
    file.write_bytes(data)


def _age(file: Path, older: Path) -> None:
    shutil.copyfile(older, file)


def _swap(file: Path, older: Path) -> None:
    """Two shards of one checkpoint in each other's place; of a single one, the older step's."""
    others = sorted(each for each in file.parent.glob("shard-*") if each != file)
    if not others:
        return _age(file, older)
    mine, theirs = file.read_bytes(), others[0].read_bytes()
    file.write_bytes(theirs)
    others[0].write_bytes(mine)
    return None


def _double(file: Path, older: Path) -> None:
    """One shard twice; of a single one, a second file beside it."""
    others = sorted(each for each in file.parent.glob("shard-*") if each != file)
    shutil.copyfile(file, others[0] if others else file.with_name("shard-99999.bin"))
    del older


def _lose(file: Path, older: Path) -> None:
    del older
    file.unlink()


def rot(file: Path, older: Path | None = None, every: int | None = None) -> None:
    """Flip one bit in the middle of a file, or of every run of ``every`` bytes of it."""
    del older
    data = bytearray(file.read_bytes())
    every = every or len(data)
    for begin in range(0, len(data), every):
        data[(begin + min(begin + every, len(data))) // 2] ^= 0x10
    file.write_bytes(data)


TEARS: dict[str, Callable[[Path, Path], None]] = {
    "zero-filled page": _zero,
    "cut at 50%": _cut(0.5),
    "swapped shards": _swap,
    "shard of an older step": _age,
    "cut at 99.9%": _cut(0.999),
    "doubled shard": _double,
    "empty": _cut(0.0),
    "missing": _lose,
}
"""What can be done to a shard of a checkpoint: ``(file, the older step's file)``."""


def torn(stage: Stage, repeat: int) -> Rehearsal:
    """A file of the newest checkpoint is damaged; the one before is used."""
    return _damage(stage, *[*TEARS.items()][repeat % len(TEARS)], name="torn")


def rotten(stage: Stage, repeat: int) -> Rehearsal:
    """One bit of the newest checkpoint flips on the disk."""
    del repeat
    return _damage(stage, "one bit", rot, name="rotten")


def _damage(stage: Stage, what: str, tear: Callable[[Path, Path], None], *, name: str) -> Rehearsal:
    folder = stage.copied(name, until=2 * EVERY)
    newest = folder / "checkpoint" / f"step-{2 * EVERY:06}"
    older = folder / "checkpoint" / f"step-{EVERY:06}"
    shard = sorted(newest.glob("shard-*"))[-1]
    before = {each: each.read_bytes() for each in newest.glob("shard-*")}
    tear(shard, older / shard.name)
    after = {each: each.read_bytes() for each in newest.glob("shard-*")}
    changed = sorted(each.name for each in before | after if before.get(each) != after.get(each))
    began, t = time.monotonic(), time.time()
    with stage.start(folder) as attempt:
        code = attempt.end()
    files = "|".join(map(re.escape, changed)) or "nothing was changed"
    line = attempt.first(rf"{newest.name}.*({files}).*Passed over")
    resumed = attempt.first(rf"Resuming after step {EVERY} from ")
    return Rehearsal(
        injected=f"{what}, {newest.name}/{changed[0]}" if changed else "",
        detected_by="checksum" if line else "",
        is_named=line is not None and resumed is not None,
        detected_s=None if line is None else line.at_s - began,
        resumed_s=resumed_s(folder, t),
        lost_tokens=EVERY * stage.step_tokens,
        is_equal=stage.is_equal(folder) if code == 0 else None,
        goes_on=SAME_COMMAND if code == 0 else "",
        said=line.text if line else attempt.last_words,
    )


def documents(stage: Stage, repeat: int) -> Rehearsal:
    """One bit of every chunk of tokens on the disk flips, so that whatever documents come meet it.

    With the file as it was, the same command goes on.
    """
    del repeat
    folder = stage.copied("documents", until=EVERY)
    corpus = Path(json.loads((folder / "resolved.json").read_text())["corpus"])
    cache = folder / "cache"
    cache.mkdir()
    for each in (corpus, *corpus.parent.glob("tokenizer-*")):
        shutil.copytree(each, cache / each.name)
    tokens = cache / corpus.name / "tokens.bin"
    whole = tokens.read_bytes()
    rot(tokens, every=CHUNK_BYTES)
    fired = Fired(0, 0, 0, "", 0, time.monotonic(), time.time(), "tokens.bin")
    with stage.start(folder, f"--data.cache={cache}") as attempt:
        attempt.end()
    tokens.write_bytes(whole)
    expected = Expected(
        _ROTTEN_TOKENS, "checksum", lambda _: r"tokens\.bin", (SAME_COMMAND, BY_ITSELF, UNDISTURBED)
    )
    return judge(stage, folder, attempt, fired, expected, f"--data.cache={cache}")


def no_single_corpus(stage: Stage) -> str:
    """Why documents cannot be damaged here."""
    is_mixed = bool(stage.asked.spec.data.mix)
    return "needs a run with one corpus, and this one mixes several" if is_mixed else ""
