"""The engine: requests in, tokens out, one step at a time. vLLM's ``LLMEngine``.

A step is schedule → run → sample → update → detokenize; each part stands in a file of its own, and this one only joins them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from llmlab.engine.detokenizer import IncrementalDetokenizer
from llmlab.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from llmlab.engine.request import Request, RequestStatus
from llmlab.engine.scheduler import Scheduler
from llmlab.engine.sizing import check_fit
from llmlab.sampling.params import SamplingParams
from llmlab.tokenizer import NoTokenizer

if TYPE_CHECKING:
    from llmlab.engine.batch import Batch
    from llmlab.engine.plan import SchedulerOutput
    from llmlab.engine.runner import Runner
    from llmlab.sampling.sampler import Sampler
    from llmlab.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]


@dataclass
class _Parent:
    """What the user added: one prompt, ``n`` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any] | None
    sequences: list[_Sequence] = field(default_factory=list)


@dataclass
class _Sequence:
    """One of a prompt's ``n`` outputs in the making: what the scheduler does not need to know."""

    parent: _Parent
    index: int
    request: Request
    detokenizer: IncrementalDetokenizer
    logprobs: list[Any] | None
    cumulative_logprob: float | None


class LLMEngine:
    """Drives a scheduler, a runner and a sampler.

    Attributes:
        scheduler: holds every unfinished request; its ``stats`` count what happened.

    Raises:
        ValueError: the scheduler would hand out positions or blocks that the runner does not have.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, sampler: Sampler, tokenizer: Tokenizer):
        check_fit(runner, scheduler)
        self.runner = runner
        self.scheduler = scheduler
        self.sampler = sampler
        self.tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}
        self._parents: dict[str, _Parent] = {}
        self._pending: list[_Parent] = []  # changed between steps: the next step reports them
        self._returned: dict[str, RequestOutput] = {}  # reported to a caller whom they did not concern
        self._in_flight: SchedulerOutput | None = None  # planned, and neither computed nor given up

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Let a prompt (text, token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``) wait for its turn.

        Raises:
            ValueError: the prompt is empty, too long for the model or the KV cache, or holds ids outside the vocabulary; the
                parameters contradict each other or the model; the id is in use. The engine is unchanged then.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        if request_id in self._parents:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
        params.validate()
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("stop strings need a tokenizer, and this model has none (stop_token_ids do not)")
        text, token_ids, prompt_salt = self._tokenize(prompt)
        parent = _Parent(request_id, text, token_ids, None if params.prompt_logprobs is None else [None])
        try:
            for index in range(params.n):
                child_params = params if params.n == 1 else params.for_output(index)
                child = Request(
                    request_id if params.n == 1 else f"{request_id}/{index}",
                    token_ids,
                    child_params,
                    arrival_time=arrival_time,
                    priority=priority,
                    cache_salt=cache_salt if prompt_salt is None else prompt_salt,
                    cache_tags=self.runner.model.config.rope.cache_tags(len(token_ids)),
                )
                self.sampler.add_request(child)
                self.scheduler.add_request(child)
                detokenizer = IncrementalDetokenizer(self.tokenizer, child_params, token_ids)
                wants = child_params.logprobs is not None
                sequence = _Sequence(parent, index, child, detokenizer, [] if wants else None, 0.0 if wants else None)
                parent.sequences.append(sequence)
                self._sequences[child.request_id] = sequence
        except Exception:
            for sequence in parent.sequences:
                self.scheduler.abort_request(sequence.request.request_id)
                del self._sequences[sequence.request.request_id]
            raise
        self._parents[request_id] = parent

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End requests at any moment; unknown and ended ids are ignored. The next step reports them as "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            parent = self._parents.get(one)
            if parent is None:
                continue
            for sequence in parent.sequences:
                self.scheduler.abort_request(sequence.request.request_id)
            if parent not in self._pending:
                self._pending.append(parent)

    def discard_request(self, request_id: str | Sequence[str]) -> None:
        """Abort, and report nothing: for a caller that has stopped listening."""
        self.abort_request(request_id)
        gone = {request_id} if isinstance(request_id, str) else set(request_id)
        self._pending = [parent for parent in self._pending if parent.request_id not in gone]
        for one in gone & self._parents.keys():
            self._forget(one)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` still has something to compute or to report."""
        return bool(self._parents or self._returned)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._parents

    def get_num_unfinished_requests(self) -> int:
        return len(self._parents)

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step: the outputs of every request that got a token or ended.

        If something raises, the exception goes on to the caller, and the engine can be used further. A forward pass or a
        sampler that fails ends the requests of its step with "error"; bookkeeping that is cut short (Ctrl-C) ends all
        requests so, and forgets all cached prefixes. The next step reports them.
        """
        if self.scheduler.has_unfinished_requests():
            try:
                self._pending += self._run()
            except BaseException as error:
                self._fail(f"{type(error).__name__}: {error}")
                raise
        changed, self._pending = self._pending, []
        outputs = {**self._returned, **{parent.request_id: self._output(parent) for parent in changed}}
        self._returned = {}
        for output in outputs.values():
            if output.finished:
                self._forget(output.request_id)
        return list(outputs.values())

    def put_back(self, output: RequestOutput) -> None:
        """Hand an output back that was meant for somebody else: the next step reports it again."""
        self._returned[output.request_id] = output

    def _fail(self, error: str) -> None:
        scheduled, self._in_flight = self._in_flight, None
        failed = self.scheduler.reset(error) if scheduled is None else self.scheduler.fail_step(scheduled, error)
        for request in failed:
            if request.request_id in self._sequences:
                self._pending.append(self._sequences[request.request_id].parent)

    def _forget(self, request_id: str) -> None:
        parent = self._parents.pop(request_id, None)
        for sequence in parent.sequences if parent else ():
            self._sequences.pop(sequence.request.request_id, None)

    def _run(self) -> list[_Parent]:
        scheduled = self._in_flight = self.scheduler.schedule()
        batch, hidden = self.runner.execute(scheduled, self.scheduler.requests)
        kept = [
            self.scheduler.requests[r] for r, discard in zip(batch.req_ids, batch.discard, strict=True) if not discard
        ]
        self._prompt_logprobs(scheduled, batch, hidden)
        sampled = self.sampler(self.runner.logits(self.runner.last_tokens(batch, hidden)), kept) if kept else None
        self._in_flight = None
        token_ids: dict[str, int] = {}
        if sampled is not None:
            for row, request in enumerate(kept):
                if row in sampled.errors:
                    self.scheduler.finish_request(
                        request.request_id, RequestStatus.FINISHED_ERROR, error=sampled.errors[row]
                    )
                    continue
                token_ids[request.request_id] = sampled.token_ids[row]
                sequence = self._sequences[request.request_id]
                if sequence.logprobs is not None:
                    entry = sampled.logprobs[row]
                    sequence.logprobs.append(entry)
                    sequence.cumulative_logprob += entry[sampled.token_ids[row]].logprob
        self.scheduler.update_from_output(scheduled, token_ids)
        for request_id, token_id in token_ids.items():
            sequence = self._sequences[request_id]
            try:
                self._detokenize(sequence, token_id)
            except Exception as error:  # what a tokenizer can't decode is one request's trouble, not the others'
                self._fail_text(sequence, error)
        return [self._sequences[request.request_id].parent for request in kept]

    def _detokenize(self, sequence: _Sequence, token_id: int) -> None:
        request = sequence.request
        stop = sequence.detokenizer.append(token_id, request.is_finished and request.finish_reason == "stop")
        if stop is not None:
            self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_STOPPED, stop_reason=stop)
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, stop

    def _fail_text(self, sequence: _Sequence, error: Exception) -> None:
        """End one request whose text can't be decoded, even if this very token ended it; its token ids stay."""
        sequence.detokenizer.give_up()
        request, message = sequence.request, f"detokenizing: {type(error).__name__}: {error}"
        self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR, error=message)
        request.status, request.stop_reason, request.error = RequestStatus.FINISHED_ERROR, None, message

    def _text(self, sequence: _Sequence) -> str:
        if not sequence.request.is_finished:
            return sequence.detokenizer.text
        try:
            return sequence.detokenizer.finish()
        except Exception as error:
            self._fail_text(sequence, error)
            return sequence.detokenizer.text

    def _prompt_logprobs(self, scheduled: SchedulerOutput, batch: Batch, hidden: Tensor) -> None:
        """Logits at every prompt position of this step, for the requests that asked; each position once."""
        for row, request_id in enumerate(batch.req_ids):
            parent = self._sequences[request_id].parent
            request = self.scheduler.requests[request_id]
            wanted = request.sampling_params.prompt_logprobs
            if wanted is None or parent.sequences[0].request is not request or parent.prompt_logprobs is None:
                continue
            begin = scheduled.num_computed_tokens[request_id]
            end = min(begin + scheduled.num_scheduled_tokens[request_id], request.num_prompt_tokens - 1)
            begin_new = max(begin, len(parent.prompt_logprobs) - 1)  # a preempted request computes some again
            if begin_new >= end:
                continue
            first = int(batch.hidden_start_loc[row]) + begin_new - begin
            logits = self.runner.logits(hidden[first : first + end - begin_new])
            targets = request.prompt_token_ids[begin_new + 1 : end + 1]
            parent.prompt_logprobs.extend(self.sampler.prompt_logprobs(logits, targets, wanted))

    def _output(self, parent: _Parent) -> RequestOutput:
        first = parent.sequences[0].request
        outputs = []
        for sequence in parent.sequences:
            request = sequence.request
            text = self._text(sequence)
            outputs.append(
                CompletionOutput(
                    index=sequence.index,
                    text=text,
                    token_ids=list(request.output_token_ids),
                    cumulative_logprob=sequence.cumulative_logprob,
                    logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                )
            )
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=parent.prompt_token_ids,
            prompt_logprobs=None if parent.prompt_logprobs is None else list(parent.prompt_logprobs),
            outputs=outputs,
            finished=all(o.finish_reason is not None for o in outputs),
            num_cached_tokens=max(first.num_cached_tokens, 0),
            metrics=RequestMetrics(
                first.arrival_time,
                first.first_scheduled_time,
                first.first_token_time,
                first.last_token_time,
                first.finished_time,
                first.num_preemptions,
            ),
            error=next((s.request.error for s in parent.sequences if s.request.error), None),
        )

    # ---- prompts --------------------------------------------------------------------------------------------------

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """``(text, token ids, cache salt)`` of any form of prompt."""
        salt = None
        text = None
        if isinstance(prompt, dict):
            known = {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown := set(prompt) - known:
                raise ValueError(f"prompt has unknown keys {sorted(unknown)}; known are {sorted(known)}")
            salt = prompt.get("cache_salt")
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
            if prompt is None:
                raise ValueError('a prompt dict must have "prompt" or "prompt_token_ids"')
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        else:
            token_ids = _integers(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        vocab_size = self.runner.model.config.vocab_size
        bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the vocabulary [0, {vocab_size})")
        return text, token_ids, salt


def _integers(prompt: Any) -> list[int]:
    """Token ids as plain ints: of a list, a tuple, an array or a tensor of one dimension."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(prompt, (list, tuple)) or any(isinstance(t, bool) for t in prompt):
        raise ValueError(f"a prompt must be text, token ids or a dict of one, got {type(prompt).__name__}")
    try:
        return [operator.index(t) for t in prompt]
    except TypeError as error:
        raise ValueError(f"a prompt must be text, token ids or a dict of one: {error}") from error
