"""The largest sizes that a file or a flag may give.

Why
    A typing mistake must not loop for hours or fill memory: what exceeds any real model or
    machine is refused when it is read.
"""

MOST_SIZE = 2**31 - 1
"""Largest width, vocabulary, number of tokens or degree; products of a few still fit their
integers."""
MOST_LAYERS = 4096
"""The deepest published Transformer has 1,000 (DeepNet, arXiv:2203.00555)."""
MOST_EXPERTS = 1 << 16
"""The largest published router has 2,048 (Switch Transformer, arXiv:2101.03961)."""
MOST_WINDOWS = 1 << 20
"""Windows of one step: 64 Mi tokens even in windows of 64."""
