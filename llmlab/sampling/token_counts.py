"""Which tokens a request has seen, and how often it wrote each: what the penalties need, kept up to date token by token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class TokenCounts:
    """The distinct tokens of one request's prompt (if they count) and output, with their counts in the output.

    Columns are in the order of first appearance and never move, so a batch can hold on to them.
    """

    def __init__(self, prompt_token_ids: Sequence[int]):
        distinct = dict.fromkeys(prompt_token_ids)
        self._column = {token_id: column for column, token_id in enumerate(distinct)}
        self.token_ids = array("q", distinct)
        self.counts = array("q", bytes(8 * len(distinct)))
        self._num_counted = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> list[int]:
        """Count the output tokens that are new since the last call; the columns that changed, each once."""
        new = output_token_ids[self._num_counted :]
        self._num_counted += len(new)
        touched = []
        for token_id in new:
            column = self._column.setdefault(token_id, len(self.token_ids))
            if column == len(self.token_ids):
                self.token_ids.append(token_id)
                self.counts.append(0)
            self.counts[column] += 1
            touched.append(column)
        return touched if len(touched) < 2 else list(dict.fromkeys(touched))


class BatchCounts:
    """The (row, token) cells of all penalised requests of a batch, as the tensors that ``apply_penalties`` takes.

    Cells only change where a token was appended; a token new to its request gets the next free cell.
    """

    def __init__(self, rows: Sequence[int], counts: Sequence[TokenCounts], device: torch.device):
        self._rows = list(rows)
        self._counts = list(counts)
        sizes = [len(c.token_ids) for c in counts]
        self._bases = np.cumsum([0, *sizes]).tolist()
        self._late: dict[tuple[int, int], int] = {}
        self.num_cells = self._bases[-1]
        room = self.num_cells + 64 * len(rows)
        self._cells = torch.zeros((3, room), dtype=torch.int64, device=device)  # row, token id, count in the output
        if self.num_cells:
            cells = np.empty((3, self.num_cells), np.int64)
            cells[0] = np.repeat(np.asarray(rows, np.int64), sizes)
            cells[1] = np.concatenate([np.frombuffer(c.token_ids, np.int64) for c in counts])
            cells[2] = np.concatenate([np.frombuffer(c.counts, np.int64) for c in counts])
            self._cells[:, : self.num_cells] = torch.from_numpy(cells)

    def update(self, outputs: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Count what was appended to each request's output: (rows, token ids, output counts), [num_cells] int64 each."""
        at, cells = [], []
        for i, (counts, output) in enumerate(zip(self._counts, outputs, strict=True)):
            for column in counts.catch_up(output):
                at.append(self._cell(i, column))
                cells.append((self._rows[i], counts.token_ids[column], counts.counts[column]))
        if at:
            if self.num_cells > self._cells.shape[1]:
                self._cells = torch.nn.functional.pad(self._cells, (0, self.num_cells))
            self._cells[:, at] = torch.tensor(cells, dtype=torch.int64).T.to(self._cells.device)
        rows, token_ids, output_counts = self._cells[:, : self.num_cells]
        return rows, token_ids, output_counts

    def _cell(self, i: int, column: int) -> int:
        if self._bases[i] + column < self._bases[i + 1]:
            return self._bases[i] + column
        cell = self._late.setdefault((i, column), self.num_cells)
        self.num_cells = max(self.num_cells, cell + 1)
        return cell
