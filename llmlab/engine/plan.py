"""The plan of one step, which is all that the scheduler tells the rest of the engine. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmlab.engine.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan. Dicts are keyed by request id, in the order of the batch.

    The copies come first: all of ``swap_out`` (device to host), then all of ``swap_in`` (host to device), then the
    forward pass; a block that one of these frees may be written by a later one. ``finished_req_ids`` come before
    ``scheduled_new_req_ids`` in time: an id may stand in both.

    ``block_ids`` are the requests' own tables, not copies. A table is append-only and replaced when it is freed, so its
    first ``cdiv(computed + scheduled, block_size)`` entries stay this step's, however long the plan is kept.
    A sample counts if ``num_computed + num_scheduled`` reaches the request's ``num_tokens``; else it is discarded.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    num_computed_tokens: dict[str, int]  # before this step, prefix-cache hits included
    block_ids: dict[str, list[int]]
    scheduled_new_req_ids: tuple[str, ...]
    scheduled_resumed_req_ids: tuple[str, ...]
    preempted_req_ids: tuple[str, ...]
    finished_req_ids: tuple[str, ...]  # ended since the step before
    num_cached_tokens: dict[str, int]  # prefix-cache hits of the requests admitted in this step
    num_recomputed_tokens: int
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class StepPlan:
    """A step in the making."""

    budget: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    num_recomputed_tokens: dict[str, int] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Give the request its tokens; ``num_computed_tokens`` advances at once, before they are computed."""
        request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
        self.num_scheduled_tokens[request_id] = num_new_tokens
        self.num_computed_tokens[request_id] = num_computed_tokens
        self.block_ids[request_id] = request.block_ids
        self.budget -= num_new_tokens
        request.num_computed_tokens = num_computed_tokens + num_new_tokens
        again = min(request.num_tokens_to_recompute, request.num_computed_tokens) - num_computed_tokens
        if again > 0:
            self.num_recomputed_tokens[request_id] = again

    def take_back(self, request: Request) -> None:
        """Undo :meth:`add`."""
        self.budget += self.num_scheduled_tokens.pop(request.request_id)
        request.num_computed_tokens = self.num_computed_tokens.pop(request.request_id)
        del self.block_ids[request.request_id]
        self.num_recomputed_tokens.pop(request.request_id, None)
