"""Decode steps on a CPU, recorded by their number of requests and played again without Python between the kernels.

What CUDA graphs do on a GPU (vLLM's ``cudagraph``). A step that is all decodes has one token a request, so its shapes depend on
the number of requests alone; everything else about it is data, copied into the tensors that the recorded step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmlab.engine.batch import Batch

if TYPE_CHECKING:
    from llmlab.ops.cpu.graph import Graph

_DATA = ("input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping")


class StepGraphs:
    """Recorded steps of one model.

    Args:
        forward: the model's forward pass over a batch, ``[num_sched_tokens, hidden_size]``.
        max_blocks_per_req: widest block table that a batch can have.

    Attributes:
        recordable: False once a step was met that can't be recorded.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], max_blocks_per_req: int):
        from llmlab.ops.cpu.memory import Arena

        self._forward = forward
        self._max_blocks = max_blocks_per_req
        self._arena = Arena()  # steps run one at a time: they can share their memory
        self._seen: set[int] = set()
        self._graphs: dict[int, tuple[Batch, Graph]] = {}
        self.recordable = True

    def run(self, batch: Batch) -> Tensor | None:
        """The hidden states of the batch, valid until the next call; None if it is to be run op by op.

        A number of requests is recorded when it is met for the second time.
        """
        size = batch.num_reqs
        if not self.recordable or batch.num_sched_tokens != size or batch.rope_lengths is not None:
            return None
        if size not in self._graphs:
            if size not in self._seen:
                self._seen.add(size)
                return None
            if not self._record(batch):
                return None
            return self._graphs[size][1].result
        kept, graph = self._graphs[size]
        _copy(batch, kept)
        return graph.play()

    def _record(self, batch: Batch) -> bool:
        from llmlab.ops.cpu.graph import Graph, NotRecordable

        table = torch.zeros((batch.num_reqs, self._max_blocks), dtype=batch.block_table.dtype)
        kept = replace(batch, block_table=table, **{name: getattr(batch, name).clone() for name in _DATA})
        _copy(batch, kept)
        try:
            self._graphs[batch.num_reqs] = kept, Graph(lambda: self._forward(kept), self._arena)
        except NotRecordable:  # an op of this model has no kernel here, so none of its steps can be recorded
            self.recordable = False
        return self.recordable


def _copy(batch: Batch, kept: Batch) -> None:
    for name in _DATA:
        getattr(kept, name).copy_(getattr(batch, name))
    kept.block_table[:, : batch.block_table.shape[1]] = batch.block_table
