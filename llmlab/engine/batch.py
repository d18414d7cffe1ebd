"""From the scheduler's decision to the flat tensors of one forward pass. No padding: tokens of all requests in one row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llmlab.engine.request import Request
    from llmlab.engine.scheduler import SchedulerOutput


@dataclass(frozen=True)
class WantedRows:
    """The tokens of a step whose final hidden states somebody reads. In the last layer all others need only K and V.

    Attributes:
        rows: ``[num_wanted]`` int64, their rows among the step's tokens, ascending.
        segments: ``[num_wanted+1]`` int32, the step's tokens cut so that each wanted one ends a piece: what
            :func:`llmlab.ops.gather_last_tokens` takes.
        query_start_loc: ``[num_reqs+1]`` int32; request r's wanted tokens, which are its last ones, are rows
            ``query_start_loc[r] … query_start_loc[r+1]−1`` of what is left.
        positions, rope_lengths: those of the wanted tokens, as :class:`Batch` has them of all.
    """

    rows: Tensor
    segments: Tensor
    query_start_loc: Tensor
    positions: Tensor
    rope_lengths: Tensor | None = None

    @staticmethod
    def find(
        query_start_loc: np.ndarray,
        discard: Sequence[bool],
        whole: Sequence[bool],
        positions: np.ndarray,
        rope_lengths: np.ndarray | None = None,
        move: Callable[[np.ndarray], Tensor] = torch.from_numpy,
    ) -> WantedRows | None:
        """The last token of each request that is sampled, and all tokens of those that are wanted whole (for logprobs).

        None where there is nothing to gain: every token is wanted, or the step is all decodes.
        """
        query_lens = np.diff(query_start_loc)
        if len(query_lens) == query_start_loc[-1]:
            return None
        wanted = np.where(whole, query_lens, ~np.array(discard, dtype=bool))
        if (wanted == query_lens).all():
            return None
        starts = np.zeros(len(query_start_loc), np.int64)
        np.cumsum(wanted, out=starts[1:])
        rows = np.repeat(query_start_loc[1:] - starts[1:], wanted) + np.arange(starts[-1])
        segments = np.concatenate(([0], rows + 1))
        return WantedRows(
            move(rows),
            move(segments.astype(np.int32)),
            move(starts.astype(np.int32)),
            move(positions[rows]),
            None if rope_lengths is None else move(rope_lengths[rows]),
        )


@dataclass(frozen=True)
class Batch:
    """One step's input: requests in batch order, their scheduled tokens one after another.

    Attributes:
        req_ids: request of each row.
        input_ids: ``[num_sched_tokens]`` int64.
        positions: ``[num_sched_tokens]`` int64, index of each token in its request.
        query_start_loc: ``[num_reqs+1]`` int32; request r's tokens are rows ``query_start_loc[r] … query_start_loc[r+1]−1``.
        seq_lens: ``[num_reqs]`` int32, tokens that are in the cache after this step (computed + scheduled).
        slot_mapping: ``[num_sched_tokens]`` int64, where each token's K and V go: ``block · block_size + offset``.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32, block ids of each request; unused entries are 0.
        logits_indices: ``[num_reqs]`` int64, row of each request's last scheduled token.
        discard: whether a request's sample is thrown away, because its tokens are not all computed yet.
        rope_lengths: ``[num_sched_tokens]`` int64, length that each token is rotated for (see :mod:`llmlab.model.rope`);
            None where the model's rope type does not depend on it.
        wanted: the tokens whose hidden states are computed to the end; None for all of them.
    """

    req_ids: tuple[str, ...]
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    logits_indices: Tensor
    discard: tuple[bool, ...]
    rope_lengths: Tensor | None = None
    wanted: WantedRows | None = None

    @property
    def hidden_start_loc(self) -> Tensor:
        """``[num_reqs+1]`` int32: where each request's rows begin in the hidden states that the forward pass returns."""
        return self.query_start_loc if self.wanted is None else self.wanted.query_start_loc

    @property
    def num_sched_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @staticmethod
    def single(
        token_ids: list[int], block_size: int, device: torch.device, length_dependent_rope: bool = False
    ) -> Batch:
        """One request's whole sequence as one prefill, in blocks 0, 1, …: for looking at a model without an engine."""
        count = len(token_ids)
        positions = torch.arange(count, device=device)
        blocks = torch.arange(-(-count // block_size), dtype=torch.int32, device=device)
        return Batch(
            req_ids=("0",),
            input_ids=torch.tensor(token_ids, device=device),
            positions=positions,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            slot_mapping=positions,
            block_table=blocks[None],
            logits_indices=torch.tensor([count - 1], device=device),
            discard=(False,),
            rope_lengths=torch.full_like(positions, count) if length_dependent_rope else None,
        )

    @staticmethod
    def build(
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        block_size: int,
        device: torch.device | str = "cpu",
        length_dependent_rope: bool = False,
        whole: Collection[str] | None = None,
    ) -> Batch:
        """A pure function of the scheduler's output and the requests' tokens.

        Args:
            whole: the requests all of whose hidden states are wanted, of the others the sampled ones only; None: no
                hidden state is left out.
        """
        req_ids = tuple(output.num_scheduled_tokens)
        num_reqs = len(req_ids)
        scheduled = np.fromiter(output.num_scheduled_tokens.values(), np.int64, num_reqs)
        computed = np.fromiter((output.num_computed_tokens[r] for r in req_ids), np.int64, num_reqs)
        seq_lens = computed + scheduled
        query_start_loc = np.zeros(num_reqs + 1, np.int64)
        np.cumsum(scheduled, out=query_start_loc[1:])

        tokens: list[int] = []
        discard = []
        for req_id, begin, end in zip(req_ids, computed.tolist(), seq_lens.tolist(), strict=True):
            request = requests[req_id]
            if end - begin == 1:
                tokens.append(request.all_token_ids[begin])
            else:
                tokens.extend(request.all_token_ids[begin:end])
            discard.append(end < request.num_tokens)

        row = np.repeat(np.arange(num_reqs), scheduled)
        positions = np.arange(len(row)) - np.repeat(query_start_loc[:-1] - computed, scheduled)
        tables = [output.block_ids[r] for r in req_ids]
        block_table = np.zeros((num_reqs, max(map(len, tables), default=0)), np.int32)
        for r, table in enumerate(tables):
            block_table[r, : len(table)] = table
        slots = block_table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        rope_lengths = None
        if length_dependent_rope:
            prompts = np.fromiter((requests[r].num_prompt_tokens for r in req_ids), np.int64, num_reqs)
            rope_lengths = np.maximum(prompts[row], positions + 1)

        move = lambda array: torch.from_numpy(array).to(device, non_blocking=True)
        return Batch(
            req_ids=req_ids,
            input_ids=move(np.array(tokens, np.int64)),
            positions=move(positions),
            query_start_loc=move(query_start_loc.astype(np.int32)),
            seq_lens=move(seq_lens.astype(np.int32)),
            slot_mapping=move(slots),
            block_table=move(block_table),
            logits_indices=move(query_start_loc[1:] - 1),
            discard=tuple(discard),
            rope_lengths=None if rope_lengths is None else move(rope_lengths),
            wanted=None
            if whole is None
            else WantedRows.find(
                query_start_loc, discard, [r in whole for r in req_ids], positions, rope_lengths, move
            ),
        )
