"""Steps on a CPU, recorded by their shape and played again without Python between the kernels.

What CUDA graphs do on a GPU (vLLM's ``cudagraph``). A step that is all decodes has one token a request, so its shapes depend on
the number of requests alone. Any other step is filled up to a shape that comes again: its tokens to a multiple of 16, its
requests to a power of two, the last of which owns the tokens that fill up. Block tables are as wide as a power of two. Everything
else about a step is data, copied into the tensors that the recorded one reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from llmlab.engine.batch import Batch, WantedRows

if TYPE_CHECKING:
    from llmlab.ops.cpu.graph import Graph

TOKENS_TOGETHER = 16
"""Steps are filled up to a multiple of it, the rows of a tile of the matrix products."""
MOST_GRAPHS = 256
"""Recorded steps that are kept, some 100 KB each and their block table; the one played the longest ago goes first."""


class Shape(NamedTuple):
    """What a recorded step is for: numbers of tokens, of requests, of wanted rows (None: a step of decodes, all are), and of
    blocks that a request can have."""

    tokens: int
    requests: int
    wanted: int | None
    blocks: int

    @property
    def kind(self) -> tuple[bool, ...]:
        """What a forward pass asks of a shape; the rest is how large its tensors are (of one row, each is contiguous)."""
        return self.tokens > 1, self.wanted is None, self.wanted == 0

    @staticmethod
    def of(batch: Batch) -> Shape | None:
        """The least shape that the batch fits in; None if it can't be played: every row of a prompt is wanted, or what the
        rotary table holds depends on the lengths."""
        if batch.rope_lengths is not None:
            return None
        blocks = 1 << (batch.block_table.shape[1] - 1).bit_length()
        if batch.num_sched_tokens == batch.num_reqs:
            return Shape(batch.num_reqs, batch.num_reqs, None, blocks)
        requests = 1 << batch.num_reqs.bit_length()  # at least one more than the batch has
        if batch.wanted is None or len(batch.wanted.rows) > batch.num_reqs:
            return None
        tokens = -(-batch.num_sched_tokens // TOKENS_TOGETHER) * TOKENS_TOGETHER
        return Shape(tokens, requests, requests if len(batch.wanted.rows) else 0, blocks)


class StepGraphs:
    """Recorded steps of one model.

    Args:
        forward: the model's forward pass over a batch, ``[num_wanted, hidden_size]``.
        block_size: tokens of a block.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], block_size: int):
        from llmlab.ops.cpu.memory import Arena

        self._forward = forward
        self._block_size = block_size
        self._arena = Arena()  # steps run one at a time: they can share their memory
        self._recordable: dict[tuple[bool, ...], bool] = {}  # of each kind of shape that was tried
        self._graphs: OrderedDict[Shape, tuple[Batch, Graph]] = OrderedDict()

    @property
    def recordable(self) -> bool:
        """Whether any kind of step can be recorded, as far as is known."""
        return not self._recordable or any(self._recordable.values())

    def run(self, batch: Batch) -> Tensor | None:
        """The hidden states of the batch, valid until the next call; None if it is to be run op by op.

        A shape is recorded when it is first met.
        """
        shape = Shape.of(batch)
        if shape is None or not self._recordable.get(shape.kind, True):
            return None
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            kept, graph = self._graphs[shape]
            self._fill(kept, batch)
            graph.play()
        elif not self._record(shape, batch):
            return None
        hidden = self._graphs[shape][1].result
        return hidden if shape.wanted is None else hidden[: len(batch.wanted.rows)]

    def _record(self, shape: Shape, batch: Batch) -> bool:
        from llmlab.ops.cpu.graph import Graph, NotRecordable

        kept = self._empty(shape)
        self._fill(kept, batch)
        check = shape.kind not in self._recordable
        try:
            self._graphs[shape] = kept, Graph(lambda: self._forward(kept), self._arena, check)
        except NotRecordable:  # an op of this model has no kernel here, or none for such shapes
            self._recordable[shape.kind] = False
            return False
        self._recordable[shape.kind] = True
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return True

    def _empty(self, shape: Shape) -> Batch:
        long = lambda size: torch.zeros(size, dtype=torch.int64)
        short = lambda *size: torch.zeros(size, dtype=torch.int32)
        tokens, requests, wanted, blocks = shape
        return Batch(
            req_ids=("",) * requests,
            input_ids=long(tokens),
            positions=long(tokens),
            query_start_loc=short(requests + 1),
            seq_lens=short(requests),
            slot_mapping=long(tokens),
            block_table=short(requests, blocks),
            logits_indices=long(requests),
            discard=(False,) * requests,
            wanted=None
            if wanted is None
            else WantedRows(long(wanted), short(wanted + 1), short(requests + 1), long(wanted)),
        )

    def _fill(self, kept: Batch, batch: Batch) -> None:
        """Copy the batch; what is left over is harmless tokens of the last request, whose K and V go nowhere."""
        _copy(batch.input_ids, kept.input_ids, 0)
        _copy(batch.positions, kept.positions, 0)
        _copy(batch.slot_mapping, kept.slot_mapping, -1)
        _copy(batch.query_start_loc, kept.query_start_loc, batch.num_sched_tokens)
        kept.query_start_loc[-1] = kept.num_sched_tokens
        _copy(batch.seq_lens, kept.seq_lens, 0)
        kept.block_table[: batch.num_reqs, : batch.block_table.shape[1]] = batch.block_table
        if kept.wanted is None:
            return
        kept.block_table[-1] = 0
        kept.seq_lens[-1] = self._block_size  # its tokens see what stands in block 0, and nobody sees them
        _copy(batch.wanted.segments, kept.wanted.segments, kept.num_sched_tokens)
        _copy(batch.wanted.query_start_loc, kept.wanted.query_start_loc, len(batch.wanted.rows))
        kept.wanted.query_start_loc[-1] = len(kept.wanted.rows)
        _copy(batch.wanted.positions, kept.wanted.positions, 0)


def _copy(source: Tensor, target: Tensor, rest: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = rest
