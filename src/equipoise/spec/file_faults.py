"""Faults of a file that is read whole, such as cluster.toml, as sentences.

What it decides
    Words for pydantic's kinds of faults: an unknown key comes with its nearest, a value of the
    wrong kind with the right one, written as TOML does. A file words the kinds that only it can
    explain.

Kept true (tests/unit/spec/cluster, tests/unit/spec/program)
    Every refusal of these files is read whole by a test.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from equipoise.base.nearest import nearest
from equipoise.base.shown import shorten
from equipoise.spec.run.faults import describe, explain_fault
from equipoise.spec.run.keys import toml
from equipoise.spec.run.toml_lines import TomlPath

_KINDS = {"string_type": str, "int_type": int, "float_type": float, "bool_type": bool}


def explain_file_fault(
    path: TomlPath,
    fault: Mapping[str, Any],
    *,
    file: type[BaseModel],
    tables: Mapping[str, type[BaseModel]],
    own: Mapping[str, str],
) -> str:
    """A sentence for one fault.

    Args:
        path: Of the value that is at fault.
        fault: Pydantic's.
        file: The file's model.
        tables: Models of its tables, by their first key.
        own: Sentences for kinds of faults that the file words itself.
    """
    kind, value = str(fault["type"]), fault["input"]
    if kind in own:
        return own[kind]
    if kind == "extra_forbidden":
        words = tables[str(path[0])].model_fields if len(path) > 1 else file.model_fields
        return f"no such key. Nearest: {nearest(str(path[-1]), words)}"
    if kind == "literal_error":
        expected = str(fault["ctx"]["expected"]).replace("'", '"')
        is_shown = isinstance(value, str | int | float)
        return f"{shorten(toml(value)) if is_shown else describe(value)} is not one of {expected}."
    wanted = _KINDS.get(kind)
    if wanted is None and kind in ("list_type", "dict_type", "model_type"):
        shape = "a list" if kind == "list_type" else "a table"
        return f"needs {shape}, got {describe(value)}."
    return explain_fault([wanted], value, kind, fault.get("ctx", {}))
