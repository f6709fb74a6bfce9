"""Sphinx settings. The build reads this checkout and nothing else: no network."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import equipoise

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "equipoise"
version = release = equipoise.__version__
author = "the equipoise authors"
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "foresight",
    "house",
    "tables",
]
exclude_patterns = ["_build"]
nitpicky = False
smartquotes_action = "qe"  # two dashes open a flag

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"equipoise {version}"
html_static_path = ["_static"]
html_css_files = ["equipoise.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "tango"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

_ARRAY = re.compile(r"~?numpy\.ndarray\[.*?dtype\[[^]]*\]\]")


def _shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returns: str
) -> tuple[str, str]:
    """Arrays as ``ndarray``: their dtype and shape are told by the docstring."""
    del app, what, name, obj, options
    return tuple(
        _ARRAY.sub("~numpy.ndarray", text) if text else text for text in (arguments, returns)
    )


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _shorten)
