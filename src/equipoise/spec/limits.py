"""The largest sizes that are read from a file or a flag.

Why
    A slip of the keyboard must not loop for hours or fill the memory: what is larger than any
    real model or machine is refused where it is read.
"""

MOST_SIZE = 2**31 - 1
"""The most of a width, a vocabulary, a number of tokens or a degree; products of a few still fit
what they are counted in."""
MOST_LAYERS = 4096
"""The deepest published Transformer has 1,000 (DeepNet, arXiv:2203.00555)."""
MOST_EXPERTS = 1 << 16
"""The largest published router has 2,048 (Switch Transformer, arXiv:2101.03961)."""
