"""Strided blocks: one canonical form, the same elements in the same order, packed and back."""

import doctest
import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.parallel.boxing import blocks
from equipoise.parallel.boxing.blocks import block_of, pack, unpack, view_of
from equipoise.schedule.block import Block, join_blocks


@st.composite
def walks(draw) -> Block:
    """Any loops, strides of 0 and loops of no turn among them."""
    loops = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
    return Block(draw(st.integers(0, 9)), tuple(c for c, _ in loops), tuple(s for _, s in loops))


@st.composite
def tensors(draw) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """A tensor with dims in any order of memory, some of them cut out of more, and a box in it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    memory = torch.arange(math.prod(shape)).reshape(shape).permute(order)
    if draw(st.booleans()):
        memory = memory[1:]
    ends = [sorted(draw(st.tuples(*(st.integers(0, size),) * 2))) for size in memory.shape]
    return memory, [(first, stop) for first, stop in ends]


@given(walks())
def test_the_canonical_form_is_the_same_walk_and_rewritten_to_itself(block: Block) -> None:
    found = block.canonical()
    assert found.addresses().tolist() == block.addresses().tolist()
    assert found.canonical() == found
    assert found.elements == block.elements
    assert len(found.counts) <= max(1, len(block.counts))
    assert 1 not in found.counts


@given(walks(), st.lists(st.integers(0, 4), max_size=4), st.data())
def test_equal_walks_have_equal_forms(block: Block, at: list[int], data) -> None:
    counts, strides = list(block.counts), list(block.strides)
    for place in at:  # loops of one turn change nothing, nor does a loop cut in two
        counts.insert(place, 1)
        strides.insert(min(place, len(strides)), data.draw(st.integers(0, 99)))
    cut = [i for i, count in enumerate(counts) if count == 4]
    if cut:
        counts[cut[0] : cut[0] + 1] = [2, 2]
        strides[cut[0] : cut[0] + 1] = [2 * strides[cut[0]], strides[cut[0]]]
    assert Block(block.offset, tuple(counts), tuple(strides)).canonical() == block.canonical()


@given(tensors(), st.data())
def test_in_memory_order_is_one_form_of_all_orders_of_the_dims(found, data) -> None:
    tensor, box = found
    order = data.draw(st.permutations(range(tensor.ndim)))
    block, other = block_of(tensor, box), block_of(tensor.permute(order), [box[i] for i in order])
    assert block.in_memory_order() == other.in_memory_order()
    assert block.in_memory_order().addresses().tolist() == sorted(block.addresses().tolist())


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 2])), max_size=8))
def test_joined_blocks_are_the_same_walk(offsets: list[tuple[int, int]]) -> None:
    each = [Block(offset, (3, count), (4, 1)).canonical() for offset, count in offsets]
    found = join_blocks(each)
    assert len(found) <= len(each)
    walked = [block.addresses() for block in found]
    assert [*map(int, np.concatenate([np.zeros(0), *walked]))] == [
        address for block in each for address in block.addresses().tolist()
    ]


@given(tensors())
def test_what_is_packed_is_the_part_of_the_tensor(found) -> None:
    tensor, box = found
    part = tensor[tuple(slice(*dim) for dim in box)]
    packed = pack(tensor, [block_of(tensor, box)])
    assert packed.tolist() == part.reshape(-1).tolist()
    is_run = block_of(tensor, box).is_run
    same_memory = packed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert same_memory == is_run


@given(tensors())
def test_unpacking_what_was_packed_is_the_identity(found) -> None:
    tensor, box = found
    index = tuple(slice(*dim) for dim in box)
    blank = torch.zeros_like(tensor)
    unpack(pack(tensor, [block_of(tensor, box)]), blank, [block_of(blank, box)])
    assert torch.equal(blank[index], tensor[index])
    assert int(blank.sum()) == int(tensor[index].sum())
    unpack(pack(tensor, [block_of(tensor, box)]), blank, [block_of(blank, box)], "sum")
    assert torch.equal(blank[index], 2 * tensor[index])
    unpack(3 * pack(tensor, [block_of(tensor, box)]), blank, [block_of(blank, box)], "max")
    assert torch.equal(blank[index], 3 * tensor[index])
    unpack(-pack(tensor, [block_of(tensor, box)]), blank, [block_of(blank, box)], "max")
    assert torch.equal(blank[index], 3 * tensor[index])


def test_parts_for_ranks_are_one_block() -> None:
    tensor = torch.zeros(6, 8)
    columns = [block_of(tensor, [(0, 6), (2 * rank, 2 * rank + 2)]) for rank in range(4)]
    assert join_blocks(columns) == [Block(0, (4, 6, 2), (2, 8, 1))]
    rows = [block_of(tensor, [(2 * rank, 2 * rank + 2), (0, 8)]) for rank in range(3)]
    assert join_blocks(rows) == [Block(0, (48,), (1,))]


def test_blocks_of_a_cache_are_one_copy_where_they_lie_regularly() -> None:
    cache = torch.arange(8 * 2 * 4 * 3).view(8, 2, 4, 3)  # blocks, key and value, tokens, width
    numbers = [1, 2, 3, 4, 6, 7]
    each = [block_of(cache, [(n, n + 1), (0, 2), (0, 4), (0, 3)]) for n in numbers]
    joined = join_blocks(each)
    assert joined == [Block(24, (96,), (1,)), Block(144, (48,), (1,))]
    assert torch.equal(pack(cache, each), cache[numbers].reshape(-1))
    keys = [block_of(cache, [(n, n + 1), (0, 1), (0, 4), (0, 3)]) for n in numbers]
    assert join_blocks(keys) == [Block(24, (4, 12), (24, 1)), Block(144, (2, 12), (24, 1))]


def test_a_slice_of_a_file_is_read_as_a_shard_is(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(5, 3, 4)
    file = tmp_path / "weights"
    file.write_bytes(b"12345678" + whole.numpy().tobytes())
    stored = torch.from_file(str(file), size=62, dtype=torch.float32)[2:].view(5, 3, 4)
    box = [(1, 4), (0, 3), (1, 3)]
    assert block_of(stored, box) == Block(2 + 13, (9, 2), (4, 1))
    assert torch.equal(pack(stored, [block_of(stored, box)]), whole[1:4, :, 1:3].reshape(-1))
    assert torch.equal(view_of(stored, block_of(stored, [(1, 2), (2, 3), (0, 4)])), whole[1, 2])


def test_examples() -> None:
    assert doctest.testmod(blocks).failed == 0  # those of ``spec`` run in tests/unit/base
