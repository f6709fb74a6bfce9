"""The stages of a decoder that one rank holds, under the names of the whole model.

Why
    Checkpoints, optimizers, initial weights and reports know a decoder by the names of its
    weights. A rank's part keeps those names and has fewer of them, so all of these work on it
    unchanged.

What it decides
    A *part* is a decoder without the modules of other ranks. The first stage has the embedding,
    the last one norm and head; a stage in between has layers, any number of them. One rank may
    hold several stages, which are parts of one module, so that data parallelism gathers and sums
    them together.

    If the head is tied to the embedding, first and last stage each have a copy of the table, equal
    from the start; the pipeline sums their gradients.

Kept true (tests/unit/parallel/test_pipeline_part.py)
    The parts of all ranks have every weight once, a tied table twice, with the same values from
    the same seed; running the stages in order equals the whole decoder.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import PackAttention
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.modality.insert import Inserted
from equipoise.parallel.pipeline.slices import LayerAttention
from equipoise.spec.layout import rows_of
from equipoise.spec.model.presets import ModelSpec


class DecoderPart(Decoder):
    """Some stages of a decoder; it shares the modules of the decoder that it is cut from."""

    def __init__(self, decoder: Decoder, edges: Sequence[int], held: Sequence[int]) -> None:
        """Take what the held stages need.

        Args:
            decoder: The whole model; may be on the meta device.
            edges: Stage s has layers ``edges[s]`` to ``edges[s + 1]``, from ``balance.stage``.
            held: Stages of this rank, from ``PipelineSchedule.rank_of``.

        Raises:
            LayoutError: the edges do not fit this decoder's layers, or there is no such stage.
        """
        nn.Module.__init__(self)
        # All other attributes of a decoder, except its modules.
        plain = {name: value for name, value in vars(decoder).items() if name[0] != "_"}
        vars(self).update(plain)
        self.edges = tuple(int(edge) for edge in edges)
        self.held = tuple(sorted(int(stage) for stage in held))
        self._require()
        mine = {at for stage in self.held for at in self.layers_of(stage)}
        self.layers = nn.ModuleList(
            layer if at in mine else nn.Identity() for at, layer in enumerate(decoder.layers)
        )
        self.head = None
        if self.holds_first or (self.holds_last and decoder.head is None):
            self.embed = decoder.embed
        if self.holds_last:
            self.norm = decoder.norm
            self.head = decoder.head

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.edges) - 1

    @property
    def holds_first(self) -> bool:
        """Whether the embedding is here."""
        return 0 in self.held

    @property
    def holds_last(self) -> bool:
        """Whether norm, head and loss are here."""
        return self.stages - 1 in self.held

    def layers_of(self, stage: int) -> range:
        """The whole model's layers that a stage has."""
        return range(self.edges[stage], self.edges[stage + 1])

    def count_rows(self, tokens: int) -> int:
        """Hidden states of this rank between stages: its share, if ranks share weights."""
        return len(rows_of(tokens, ranks=self.tensor.ranks, rank=self.tensor.rank))

    def forward(
        self,
        tokens_T: Tensor,
        pack: Sequence[int] | PackAttention | LayerAttention,
        *,
        labels_T: Tensor | None = None,
        inserted: Inserted | None = None,
        stage: int | None = None,
    ) -> Tensor:
        """Run one stage; or, without tokens, every stage of this rank.

        Args:
            tokens_T: Packed token ids, int64 [T], for the first stage; for any other, the hidden
                states [T, D] of the previous stage.
            pack: Length of each document in the pack [tokens], or how these tokens attend, in
                all layers alike or in each separately.
            labels_T: Next token of each token, for the last stage; without it, logits.
            inserted: Rows of images and sound in place of some tokens, for the first stage.
            stage: A stage of this rank. Without it ``tokens_T`` and ``labels_T`` must be empty,
                and the backward of the result gives every weight a gradient of 0.

        Returns:
            Hidden states [t, D]; from the last stage, the summed loss or logits.
        """
        if stage is None:
            return self._touch(tokens_T)
        x_TD = self.begin(tokens_T, inserted) if stage == 0 else tokens_T
        if torch.is_grad_enabled() and not x_TD.requires_grad:
            x_TD.requires_grad_()  # a stage whose weights are all frozen has a backward, too
        if isinstance(pack, LayerAttention):
            for at in self.layers_of(stage):
                x_TD = self.run_layers(x_TD, pack.in_layer(at), [self.layers[at]])
        else:
            x_TD = self.run_layers(x_TD, pack, (self.layers[at] for at in self.layers_of(stage)))
        if stage == self.stages - 1:
            return self.finish(x_TD, labels_T)
        return x_TD.clone() if x_TD is tokens_T else x_TD  # a stage without layers

    def _touch(self, none_T: Tensor) -> Tensor:
        like = next(self.parameters(), torch.empty(0))
        none_TD = torch.zeros(0, self.model.hidden, dtype=like.dtype, device=none_T.device)
        total = torch.zeros((), dtype=like.dtype, device=none_T.device, requires_grad=True)
        for stage in self.held:
            x = none_T if stage == 0 else none_TD
            total = total + self.forward(x, (), labels_T=none_T, stage=stage).sum()
        return total

    def _require(self) -> None:
        edges = self.edges
        layers = self.model.layers
        ascends = all(one <= other for one, other in pairwise(edges))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != layers or not ascends:
            raise LayoutError(
                f"Stage edges {', '.join(map(str, edges)) or '(none)'} do not fit {layers} "
                f"layers. Give them ascending, from 0 to {layers}."
            )
        wrong = [stage for stage in self.held if not 0 <= stage < self.stages]
        if wrong or not self.held:
            named = f"stage {wrong[0]}" if wrong else "no stage"
            raise LayoutError(
                f"A rank cannot hold {named} of {self.stages} stages. Give it its stages of the "
                f"schedule's rank_of."
            )


def make_part(
    model: ModelSpec,
    edges: Sequence[int],
    held: Sequence[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> DecoderPart:
    """A part with initial weights; the other stages take no memory.

    Args:
        model: The whole decoder's sizes.
        edges: As for ``DecoderPart``.
        held: As for ``DecoderPart``.
        seed: Seed of the weights, the same on every rank.
        dtype: Dtype of the weights.
        device: Where they are; by default the CPU.

    Raises:
        LayoutError: as ``DecoderPart``.

    >>> tiny = ModelSpec(layers=3, hidden=8, heads=2, kv_heads=1, ffn=8, vocab=9, head_width=4)
    >>> part = make_part(tiny, [0, 1, 3], [1])
    >>> sorted({name.split(".")[0] for name, _ in part.named_parameters()})
    ['head', 'layers', 'norm']
    """
    with torch.device("meta"):
        whole = Decoder(model)
    part = DecoderPart(whole, edges, held).to(dtype)
    part.to_empty(device=device or torch.device("cpu"))
    for buffer in part.buffers():  # counts of experts' loads, which start at 0
        buffer.zero_()
    initialize(part, seed)
    return part
