"""Attention by a schedule as an autograd function, over a group or in one process.

Kept true (tests/unit/parallel/test_context.py, tests/multi/parallel/test_context.py)
    Output and gradients equal those of one rank for every schedule.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.comm.drive import drive, drive_together
from equipoise.comm.mail import Mail
from equipoise.parallel.context.backward import Backward
from equipoise.parallel.context.forward import Forward, Kept
from equipoise.parallel.context.program import RankProgram


class AttendOverRanks(torch.autograd.Function):
    """This rank's part; every rank of the group must call it, and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        softcap: float,
        program: RankProgram,
        mail: Mail,
    ) -> Tensor:
        """Output of this rank's queries."""
        executor = Forward(program, q, k, v, softcap, sinks)
        drive(executor.steps(), mail)
        kept = executor.kept
        ctx.save_for_backward(kept.q, kept.k, kept.v, kept.o, kept.lse, sinks)
        ctx.program, ctx.mail, ctx.softcap = program, mail, softcap
        return executor.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of this rank's queries, keys and values, and its part of the sinks'."""
        *kept, sinks = ctx.saved_tensors
        executor = Backward(ctx.program, Kept(*kept), grad_o.contiguous(), ctx.softcap, sinks)
        drive(executor.steps(), ctx.mail)
        return (*executor.gradients, executor.grad_sinks, None, None, None)


class AttendInOneProcess(torch.autograd.Function):
    """All ranks' parts; tensors are those of all ranks' home tokens, one after another."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        softcap: float,
        programs: tuple[RankProgram, ...],
        sent_bytes: npt.NDArray[np.int64],
    ) -> Tensor:
        """Outputs of all ranks' queries."""
        sizes = [program.home_tokens for program in programs]
        parts = zip(programs, *(x.split(sizes) for x in (q, k, v)), strict=True)
        executors = [
            Forward(program, own_q, own_k, own_v, softcap, sinks)
            for program, own_q, own_k, own_v in parts
        ]
        drive_together([executor.steps() for executor in executors], sent_bytes)
        kept = [executor.kept for executor in executors]
        ctx.save_for_backward(sinks, *(x for each in kept for x in (each.q, each.k, each.v)))
        ctx.outputs = [(each.o.detach(), each.lse) for each in kept]
        ctx.programs, ctx.sent_bytes, ctx.sizes = programs, sent_bytes, sizes
        ctx.softcap = softcap
        return torch.cat([executor.output for executor in executors])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all ranks' queries, keys and values, and of the sinks."""
        sinks, *saved = ctx.saved_tensors
        executors = [
            Backward(
                program,
                Kept(*saved[3 * at : 3 * at + 3], *ctx.outputs[at]),
                part,
                ctx.softcap,
                sinks,
            )
            for at, (program, part) in enumerate(
                zip(ctx.programs, grad_o.contiguous().split(ctx.sizes), strict=True)
            )
        ]
        drive_together([executor.steps() for executor in executors], ctx.sent_bytes)
        gradients = zip(*(executor.gradients for executor in executors), strict=True)
        of_sinks = [each.grad_sinks for each in executors if each.grad_sinks is not None]
        grad_sinks = torch.stack(of_sinks).sum(0) if of_sinks else None
        return (*(torch.cat(parts) for parts in gradients), grad_sinks, None, None, None)
