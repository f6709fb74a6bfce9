"""The errors a user may meet: one sentence with the numbers, then the fix.

Why
    Whoever reads the message of a rank that died at night did not write the code. Each class has
    the exit code of its kind, so that a script can tell a typing mistake from a model that does
    not fit.

Kept true (tests/unit/base/test_errors.py)
    Every subclass has the exit code of its meaning; messages are whole sentences.
"""


class EquipoiseError(Exception):
    """Something the user can fix. ``exit_code`` is what the command line returns."""

    exit_code = 1


class SpecError(EquipoiseError):
    """run.toml, a flag, or a name on the command line is wrong."""

    exit_code = 2


class DataError(EquipoiseError):
    """A corpus, a document, a tokenizer or a token cache is wrong or missing."""

    exit_code = 2


class LayoutError(EquipoiseError):
    """Ranks, documents, micro-batches or degrees do not match."""

    exit_code = 2


class ModelError(EquipoiseError):
    """Weights, model files and ModelSpec do not match."""

    exit_code = 2


class FitError(EquipoiseError):
    """The work does not fit in memory."""

    exit_code = 3


class CheckpointError(EquipoiseError):
    """A checkpoint cannot be written, or must not be loaded."""

    exit_code = 4


class PlanError(EquipoiseError):
    """A plan.lock cannot be read, or its inputs have changed."""

    exit_code = 4


class CheckError(EquipoiseError):
    """A layout does not equal one rank."""

    exit_code = 5


class FaultError(EquipoiseError):
    """A rank died or a number went bad, and the run could not go on."""

    exit_code = 6


class HungError(FaultError):
    """A rank waited for another beyond the deadline.

    Args:
        message: Who waited for whom.
        missing: Ranks that never came while all started.
        rank: The only rank that was waited for, if that is certain.
    """

    def __init__(
        self, message: str, missing: tuple[int, ...] = (), rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.missing, self.rank = missing, rank


class MismatchError(FaultError):
    """Ranks called collectives that do not match."""


class NonFiniteError(FaultError):
    """A loss or a gradient is not a number; nothing was changed by it."""


class CorruptError(FaultError):
    """Bytes of weights or moments have changed though nothing wrote to them.

    Args:
        message: Who holds them.
        verified: The last step after which all bytes were known to be right.
        rank: The only rank that holds them, if that is certain.
    """

    def __init__(self, message: str, verified: int = 0, rank: int | None = None) -> None:
        super().__init__(message)
        self.verified, self.rank = verified, rank
