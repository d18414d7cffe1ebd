"""The sampler: logits [num_reqs, vocab_size] in, one token a request out, in vLLM v1's order (``vllm/v1/sample/sampler.py``).

1. Raw logprobs, if asked for. 2. Allowed ids, grammar bitmask, bad words, min_tokens, logit bias, custom processors that may
change the argmax, penalties. 3. Greedy rows: argmax, before temperature; an all-greedy batch ends here. 4. Temperature.
5. min-p, custom argmax-invariant processors. 6. top-k. 7. top-p. 8. The Gumbel race, with each request's own noise.
9. Greedy rows keep their argmax, the others take the winner of their race.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmlab import ops as all_ops
from llmlab.sampling.bad_words import BadWords, TokenIndex, with_leading_space
from llmlab.sampling.grammar import GrammarCompiler
from llmlab.sampling.logprobs import Logprob, to_dicts
from llmlab.sampling.metadata import RequestState, SamplingBatch
from llmlab.sampling.params import SamplingParams
from llmlab.sampling.token_counts import TokenCounts

if TYPE_CHECKING:
    from llmlab.engine.request import Request
    from llmlab.ops import OpSet
    from llmlab.sampling.processors import LogitsProcessor
    from llmlab.tokenizer import Tokenizer

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass
class SamplerOutput:
    """One entry a row. A row in ``errors`` got no token (its ``token_ids`` entry is −1): its request alone has failed.

    logprobs: for rows that asked, the sampled token and the most likely ones, by token id.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]


class Sampler:
    """Samples for any mix of requests; what depends on the mix is built once and kept until the mix changes.

    A request's tokens depend on its own logits, parameters and seed alone: not on the batch, nor on how it was chunked or
    preempted, since its noise is a function of (seed, position).

    Args:
        vocab_size: columns of the logits. eos_token_ids: every id that ends an output.
        tokenizer: for bad words, structured output and the text of logprobs.
        ops: the bound ops (:func:`llmlab.ops.bind`); None for those of the CPU.
        logprobs_mode: "raw_logprobs" (of the untouched logits) or "processed_logprobs" (after masks, penalties, temperature,
            top-k and top-p). Prompt logprobs are always raw.
        logits_processors: custom ones, in order.
        seed: where the seeds of requests without one come from: the same seed and order of requests, the same tokens. None
            for fresh entropy.

    Raises:
        ValueError: unknown logprobs_mode, or an EOS id outside the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        tokenizer: Tokenizer | None = None,
        *,
        ops: OpSet | None = None,
        logprobs_mode: str = "raw_logprobs",
        logits_processors: Sequence[LogitsProcessor] = (),
        seed: int | None = None,
    ):
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs_mode!r}")
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._check_ids("eos_token_ids", self.eos_token_ids)
        self.tokenizer = tokenizer
        self.ops = all_ops.bind("torch", "cpu") if ops is None else ops
        self.logprobs_mode = logprobs_mode
        self.logits_processors = list(logits_processors)
        self._seed = secrets.randbits(64) if seed is None else seed % 2**64
        self._unseeded = count()
        self._batch: SamplingBatch | None = None
        self._grammar_compiler: GrammarCompiler | None = None
        self._token_index: TokenIndex | None = None

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Check the request's parameters against the model and prepare ``request.sampling_state``.

        Raises:
            ValueError: a token id outside the vocabulary; more logprobs than tokens; a schema, regex or grammar that can't be
                compiled or enforced, or xgrammar is missing; bad words without a tokenizer; a custom processor's refusal.
        """
        params: SamplingParams = deepcopy(request.sampling_params)
        params.validate()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise ValueError(f"{name} is {getattr(params, name)}, above the vocabulary's {self.vocab_size} tokens")
        for processor in self.logits_processors:
            processor.validate_params(params)
        stops = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *self.eos_token_ids}
        state = RequestState(params, 0, sorted(stops))
        if params.bad_words:
            state.bad_words = self._bad_words(params.bad_words)
        if params.structured_outputs is not None:
            if self._grammar_compiler is None:
                self._grammar_compiler = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)
            state.grammar = self._grammar_compiler.compile(params.structured_outputs)
        if params.repetition_penalty != 1.0:
            state.counts = TokenCounts(request.prompt_token_ids)
        elif params.frequency_penalty or params.presence_penalty:
            state.counts = TokenCounts(())
        seed = self._fresh_seed() if params.seed is None else params.seed % 2**64
        state.seed = seed - 2**64 if seed >= 2**63 else seed
        request.sampling_state = state

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            worst = max(token_ids) if max(token_ids) >= self.vocab_size else min(token_ids)
            raise ValueError(f"{name}: token id {worst} is outside the vocabulary [0, {self.vocab_size})")

    def _bad_words(self, words: Sequence[str]) -> BadWords:
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this sampler has none")
        if self._token_index is None:
            self._token_index = TokenIndex(self.tokenizer, self.vocab_size)
        forms = with_leading_space(words)
        sequences = [self.tokenizer.encode(form, add_special_tokens=False) for form in forms]
        return BadWords([form.encode() for form in forms], self._token_index, sequences)

    def _fresh_seed(self) -> int:
        """The next of a stream of seeds that the sampler's own seed determines."""
        material = self._seed.to_bytes(8, "little") + next(self._unseeded).to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")

    # ---- sampling -------------------------------------------------------------------------------------------------

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> SamplerOutput:
        """One token for each row of ``logits`` [num_reqs, vocab_size], which are left as they are.

        Every call is one kept token for each of these requests: grammars advance by it.
        """
        if logits.shape != (len(requests), self.vocab_size):
            raise ValueError(f"logits must be [{len(requests)}, {self.vocab_size}], got {list(logits.shape)}")
        if not requests:
            return SamplerOutput([], [], {})
        with torch.inference_mode():
            return self._sample(logits, self._batch_of(requests, logits.device))

    def _batch_of(self, requests: Sequence[Request], device: torch.device) -> SamplingBatch:
        batch = self._batch
        if batch is None or batch.ids != list(map(id, requests)) or batch.temperatures.device != device:
            batch = self._batch = SamplingBatch(requests, self.vocab_size, device)
        return batch

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        needs_positions = batch.edits or not batch.all_greedy
        positions = np.array([request.num_tokens for request in batch.requests]) if needs_positions else None
        processed, sound = self._edit(logits, batch, positions)
        if batch.all_greedy:
            tokens = self.ops.greedy_argmax(processed)
        else:
            processed, temperatures = self._narrow(processed.float(), batch)
            at = torch.from_numpy(positions).to(logits.device)
            tokens = self.ops.gumbel_argmax(processed, temperatures, batch.seeds, at)
        if sound is not None:
            tokens = torch.where(sound, tokens, -1)
        token_ids: list[int] = tokens.tolist()
        errors = self._errors(logits, token_ids) if min(token_ids) < 0 else {}
        for row, grammar in batch.grammars:
            if row not in errors and not grammar.accept(token_ids[row]):
                errors[row] = f"token {token_ids[row]} breaks the grammar: a custom processor undid its mask"
        logprobs = self._logprobs(logits, processed, tokens, batch, errors)
        return SamplerOutput(token_ids, logprobs, errors)

    def _edit(self, logits: Tensor, batch: SamplingBatch, positions: np.ndarray | None) -> tuple[Tensor, Tensor | None]:
        """Step 2: whatever may change which token is most likely. The given logits stay as they are.

        Also which rows were sound before, if anything could have covered a NaN up.
        """
        edits, sound = [], None
        if batch.edits:
            num_outputs = positions - batch.num_prompt_tokens
            edits = [edit for edit in batch.edits if edit.update(batch.requests, num_outputs)]
        custom = [p for p in self.logits_processors if not p.is_argmax_invariant()]
        if edits or custom:
            sound = self.ops.greedy_argmax(logits) >= 0
            logits = logits.to(torch.float32, copy=True)
            for edit in edits:
                edit.apply(logits)
            for processor in custom:
                logits = self._apply(processor, logits, batch)
        if batch.counts is not None:
            cells = batch.counts.update([batch.requests[row].output_token_ids for row in batch.penalised])
            penalties = (batch.repetition_penalties, batch.frequency_penalties, batch.presence_penalties)
            logits = self.ops.apply_penalties(logits.float(), *cells, *penalties)
        return logits, sound

    def _narrow(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Steps 4 to 7, and the temperatures that are left for the race (which divides by them itself if nothing else needs
        the divided logits)."""
        custom = [p for p in self.logits_processors if p.is_argmax_invariant()]
        reported = self.logprobs_mode == "processed_logprobs" and batch.logprob_rows
        if not (custom or reported or batch.min_p is not None or batch.top_k is not None):
            return logits, batch.temperatures
        logits = self.ops.apply_temperature(logits, batch.temperatures)
        if batch.min_p is not None:
            logits = self.ops.apply_min_p(logits, batch.min_p)
        for processor in custom:
            logits = self._apply(processor, logits, batch)
        if batch.top_k is not None:
            logits = self.ops.apply_top_k_top_p(logits, batch.top_k, batch.top_p)
        return logits, batch.random

    @staticmethod
    def _apply(processor: LogitsProcessor, logits: Tensor, batch: SamplingBatch) -> Tensor:
        found = processor.apply(logits, batch.requests)
        if not isinstance(found, Tensor) or found.shape != logits.shape or found.dtype != torch.float32:
            shape = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{type(processor).__name__}.apply must return float32 {list(logits.shape)}, got {shape}")
        return found

    def _errors(self, logits: Tensor, token_ids: Sequence[int]) -> dict[int, str]:
        errors = {}
        for row, token_id in enumerate(token_ids):
            if token_id < 0:
                broken = logits[row].isnan().any() or logits[row].max().isinf()
                errors[row] = (
                    "the model's logits hold NaN, infinity or nothing else than -inf"
                    if broken
                    else "no token is left to sample: the request's constraints exclude the whole vocabulary"
                )
        return errors

    # ---- logprobs -------------------------------------------------------------------------------------------------

    def _logprobs(
        self, raw: Tensor, processed: Tensor, tokens: Tensor, batch: SamplingBatch, errors: dict[int, str]
    ) -> list[dict[int, Logprob] | None]:
        result: list[dict[int, Logprob] | None] = [None] * len(batch.requests)
        if not batch.logprob_rows:
            return result
        logits = raw if self.logprobs_mode == "raw_logprobs" else processed
        if len(batch.logprob_rows) < len(batch.requests):
            logits, tokens = logits[batch.logprob_rows], tokens[batch.logprob_rows]
        found = self._top_n(logits, tokens.clamp(min=0), batch.num_logprobs)
        for row, entries in zip(batch.logprob_rows, found, strict=True):
            if row not in errors:
                result[row] = entries
        return result

    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Sequence[int] | Tensor, n: int
    ) -> list[dict[int, Logprob]]:
        """Raw logprobs of given tokens: row ``t`` of ``logits`` [num_tokens, vocab_size] is what predicts the ``t``-th.

        Args:
            n: how many of the most likely ones to list besides the token itself; −1 for all.
        """
        token_ids = torch.as_tensor(next_token_ids, dtype=torch.int64, device=logits.device)
        n = self.vocab_size if n == -1 else n
        with torch.inference_mode():
            return self._top_n(logits, token_ids, [n] * len(token_ids))

    def _top_n(self, logits: Tensor, token_ids: Tensor, num_logprobs: Sequence[int]) -> list[dict[int, Logprob]]:
        found = self.ops.top_n_logprobs(logits.float(), token_ids, max(num_logprobs, default=0))
        return to_dicts(*(values.tolist() for values in found), num_logprobs, self.tokenizer)
