"""Compile the kernels that an engine will call, in other processes, while its model is read.

Why
    A first start compiles for seconds. Other cores can do that meanwhile, and numba's cache hands
    the code over.

Kept true (tests/unit/serve/engine/test_ahead.py)
    What was compiled ahead is what an engine calls: nothing is compiled again. It ends with the
    process that asked for it.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from equipoise.launch.agent import end_with_parent
from equipoise.serve.early import start_compiling
from equipoise.serve.engine.chunks.kernel import attend_chunk, pack_keys
from equipoise.serve.engine.jit import KeptKernel
from equipoise.serve.engine.kernel import attend_rows
from equipoise.serve.engine.products.dot import multiplies_pairs
from equipoise.serve.engine.products.pairs import gate_pairs, multiplies_by_pairs, multiply_pairs
from equipoise.serve.engine.products.words import multiplies_words, multiply_words
from equipoise.serve.engine.rows import gate_rows, head_rows, norm_rows


def compile_ahead(dtype: str) -> "subprocess.Popen[bytes] | None":
    """Start compiling what the cache lacks; None if it lacks nothing.

    Args:
        dtype: What the engine will compute in: fp32 or bf16.
    """
    if not _lacking(dtype):
        return None
    return start_compiling(dtype)


def compile_lacking(dtype: str) -> None:
    """Compile what the cache lacks: every second kernel in a process of its own."""
    lacking = _lacking(dtype)
    context = multiprocessing.get_context("fork")
    helper = context.Process(target=_compile_beside, args=(os.getpid(), lacking[1::2]))
    helper.start()
    _compile(lacking[::2])
    helper.join()


def _compile_beside(parent: int, lacking: Sequence[tuple[KeptKernel, tuple[Any, ...]]]) -> None:
    """Compile kernels in a process that ends with its parent."""
    end_with_parent()
    if os.getppid() == parent:
        _compile(lacking)


def _compile(lacking: Sequence[tuple[KeptKernel, tuple[Any, ...]]]) -> None:
    for kernel, kinds in lacking:
        kernel.compile(kinds)


def _lacking(dtype: str) -> list[tuple[KeptKernel, tuple[Any, ...]]]:
    calls = [(kernel, kernel.kinds(*given)) for kernel, given in _calls(dtype)]
    return [(kernel, kinds) for kernel, kinds in calls if not kernel.is_kept(kinds)]


def _calls(dtype: str) -> list[tuple[KeptKernel, tuple[Any, ...]]]:
    """Each kernel with the smallest arrays of the types that an engine gives it."""
    wide, kind = np.float32, np.uint16 if dtype == "bf16" else np.float32
    x, scales, eps = np.zeros((1, 4), kind), np.ones((2, 4), wide), np.float32(1)
    heads, table = np.zeros((1, 1, 4), kind), np.zeros((2, 1, 1, 2), kind)
    q, parts = np.zeros((1, 1, 4), wide), np.zeros((1, 1, 1, 6), wide)
    whole, rows = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    work, sums = np.zeros((1, 4), np.int32), np.zeros((1, 1), wide)
    kernels: list[tuple[Any, tuple[Any, ...]]] = [
        (attend_rows, (q, heads, heads, whole, 1, rows, work, 1, parts, q, sums)),
        (head_rows, (x, table, False, scales, eps, heads, heads, heads)),
        (norm_rows, (x, scales[0], eps, x)),
        (gate_rows, (x, x)),
    ]
    weight, words = torch.zeros(1, 2, dtype=torch.bfloat16), np.zeros((1, 1, 1), np.uint32)
    if dtype == "bf16" and multiplies_words(weight):
        kernels.append((multiply_words, (scales, words, x, 1, x)))
    if dtype == "bf16" and multiplies_by_pairs(weight):
        kernels += [
            (multiply_pairs, (words[0], words, x, 1, 1, x)),
            (gate_pairs, (words[0], words, 1, x)),
        ]
    if dtype == "bf16" and multiplies_pairs():
        pairs = np.zeros((1, 1, 2), np.uint32)
        packed = np.zeros((1, 1, 1, 2), np.uint32)
        kernels += [
            (pack_keys, (pairs, pairs, rows, 1, 1, packed)),
            (attend_chunk, (pairs, packed, 1, 1, 1, eps, 1, parts[0], sums)),
        ]
    return [(kernel, given) for kernel, given in kernels if isinstance(kernel, KeptKernel)]
