"""The two ends of the model: the embedding look-up, and the gather of the rows whose logits are wanted."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmlab.ops.registry import Cost, op


def _embedding_cost(token_ids: Tensor, weight: Tensor) -> Cost:
    rows = token_ids.numel() * weight.shape[1] * weight.itemsize
    return Cost(0, 2 * rows + token_ids.numel() * token_ids.element_size())


@op(cost=_embedding_cost)
def embedding(
    token_ids: Int[Tensor, "num_sched_tokens"], weight: Float[Tensor, "vocab_size hidden_size"]
) -> Float[Tensor, "num_sched_tokens hidden_size"]:
    """Row ``token_ids[t]`` of the table for each token. IndexError for an id outside it, negative ones included.

    On a GPU nobody looks: ids must be right before they get there.
    """
    return torch.nn.functional.embedding(token_ids, weight)


def _gather_last_tokens_cost(x: Tensor, query_start_loc: Tensor) -> Cost:
    rows = query_start_loc.shape[0] - 1
    return Cost(0, 2 * rows * x.shape[1] * x.element_size() + query_start_loc.numel() * query_start_loc.element_size())


@op(cost=_gather_last_tokens_cost)
def gather_last_tokens(
    x: Float[Tensor, "num_sched_tokens hidden_size"], query_start_loc: Int[Tensor, "num_reqs+1"]
) -> Float[Tensor, "num_reqs hidden_size"]:
    """The last scheduled token's row of each request: ``x[query_start_loc[1:] − 1]``; the LM head needs no other.

    IndexError for a row outside ``x``: no row has −1, so the first request must not be empty.
    """
    return x.index_select(0, query_start_loc[1:].long() - 1)
