"""The trainers that docs/your-code/transformers.md shows."""

import re
from pathlib import Path


def page_trainers() -> tuple[str, str]:
    """The page's class over ranks, and as one rank packs."""
    page = (Path(__file__).parents[3] / "docs" / "your-code" / "transformers.md").read_text()
    code, *_ = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    last = 'ContextCollator("needed-kv")'
    assert last in code
    apart = code.replace(last, 'ContextCollator("ring", sharding="head-tail-document")')
    packed = code.replace(last, "collate_for_transformers").replace(
        "import PackedLoader", "import PackedLoader, collate_for_transformers"
    )
    return apart, packed
