"""Errors: every kind has an exit code of the documented table."""

from equipoise.base import errors


def test_exit_codes() -> None:
    found = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EquipoiseError)
    }
    assert found == {
        "EquipoiseError": 1,
        "SpecError": 2,
        "DataError": 2,
        "LayoutError": 2,
        "ModelError": 2,
        "FitError": 3,
        "CheckpointError": 4,
        "PlanError": 4,
        "CheckError": 5,
        "FaultError": 6,
        "CorruptError": 6,
        "HungError": 6,
        "MismatchError": 6,
        "NonFiniteError": 6,
    }
