"""Ids → text, one token at a time, and the search for stop strings in it. vLLM's `IncrementalDetokenizer`.

What may be shown at any moment never ends inside a character, nor inside what may become a stop string; the pieces
shown join to the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmlab.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8
MAX_PENDING_TOKENS = 4  # a character has at most four bytes: no more tokens can wait for its end


class StopParams(Protocol):
    """The part of SamplingParams that is read here."""

    stop: str | list[str] | None
    include_stop_str_in_output: bool
    min_tokens: int
    skip_special_tokens: bool


class ByteStream:
    """Text of a bytewise tokenizer: each token's bytes through an incremental UTF-8 decoder.

    An unfinished character waits for its end; a byte that can't be part of any becomes U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_first_space and at_start

    def push(self, token_id: int) -> str:
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if text and self._strip_space:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class WindowStream:
    """Text of any other tokenizer: decode a window of the last tokens, and again with the new one; the difference is new.

    The window begins one safe place before the last, so that what a decoder does at the start of a text (dropping a
    space) happens to both alike. Nothing is released while the window ends in U+FFFD, which may be an unfinished
    character, unless too many tokens wait for it to be one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-MAX_PENDING_TOKENS:])
        self._num_released = len(self._window)  # how many tokens of the window have had their text released

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        pending = len(self._window) - self._num_released
        return self._release(wait=pending < MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._release(wait=False)

    def _release(self, wait: bool) -> str:
        released = self._tokenizer.decode(self._window[: self._num_released], skip_special_tokens=False)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        if len(text) <= len(released) or (wait and text.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._num_released :]
        self._num_released = len(self._window)
        return text[len(released) :]


class IncrementalDetokenizer:
    """The growing text of one request.

    `append` takes the tokens as they come and says whether a stop string is complete; `text` is what may be shown now,
    `delta()` what of it is new, and `finish()` the whole, at the end. `stop_reason` is the stop string that was found.

    While stop strings are wanted, the last max(len) − 1 characters are held back, since they may begin one; only they
    and what is new are searched. Of several stop strings the one that is complete first counts (of these, the one that
    begins first), so how the text is cut into tokens does not matter. A stop string that is complete within the first
    min_tokens tokens is text like any other.

    `prompt_token_ids`: pass them if the output shall read as the prompt's continuation where a tokenizer drops a space
    at the start of a text (Llama 2); without them `finish()` equals `tokenizer.decode` of the output alone.
    """

    def __init__(self, tokenizer: Tokenizer, params: StopParams, prompt_token_ids: Sequence[int] = ()) -> None:
        stop = params.stop or []
        self.stop_reason: str | None = None
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        prompt = [i for i in prompt_token_ids if i not in self._skipped]
        self._stream = ByteStream(tokenizer, not prompt) if tokenizer.is_bytewise else WindowStream(tokenizer, prompt)
        self._hold_back = max(map(len, self._stop), default=1) - 1
        self._held = ""
        self._shown: list[str] = []  # joins to `text`
        self._new: list[str] = []  # joins to the next `delta()`
        self._num_tokens = 0
        self._finished = False

    @property
    def text(self) -> str:
        """All that may be shown now: whole characters, cut before (or after) the stop string if one was found."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def append(self, token_id: int, is_stop_token: bool = False) -> str | None:
        """Take one more token of the output. The stop string that it completes, if any: the request ends then.

        `is_stop_token`: this token ended the request (EOS, stop_token_ids); it has no text, as in vLLM, unless
        include_stop_str_in_output.
        """
        if self._finished:
            raise RuntimeError("the text is finished: no token can follow")
        self._num_tokens += 1
        if token_id in self._skipped or (is_stop_token and not self._include_stop):
            return None
        new = self._stream.push(token_id)
        if new:
            self._held += new
            if self._stop and self._num_tokens > self._min_tokens:
                self._check_stop(len(self._held) - len(new))
            self._show(0 if self._finished else self._hold_back)
        return self.stop_reason

    def delta(self) -> str:
        """What has become visible since the last call."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def finish(self) -> str:
        """End the text: what was held back comes out, an unfinished character as U+FFFD. Returns the whole text."""
        if not self._finished:
            self._finished = True
            self._held += self._stream.flush()
            self._show(0)
        return self.text

    def give_up(self) -> None:
        """End the text where it stands: what is held back is not shown, nothing more is decoded."""
        self._finished, self._held = True, ""

    def _show(self, hold_back: int) -> None:
        """Release what is held but for the last `hold_back` characters."""
        end = len(self._held) - hold_back
        if end > 0:
            self._shown.append(self._held[:end])
            self._new.append(self._held[:end])
            self._held = self._held[end:]

    def _check_stop(self, old_length: int) -> None:
        """Look for stop strings that end in the held text from `old_length` on; cut at the first to be complete."""
        found: list[tuple[int, int, str]] = []  # (end, begin, stop string)
        for stop in self._stop:
            begin = self._held.find(stop, max(old_length - len(stop) + 1, 0))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if found:
            end, begin, self.stop_reason = min(found)
            self._held = self._held[: end if self._include_stop else begin]
            self._finished = True
