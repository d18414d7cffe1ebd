"""What a user can ask of one request: vLLM's ``SamplingParams``, its names and defaults, with every value checked.

Nothing here knows a model: limits that depend on one (vocabulary, context length) are checked where the request meets
the engine. No torch is imported, so that the scheduler and the simulator can use the class too.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""

MIN_TEMPERATURE = 1e-2
"""Random sampling at a lower temperature would overflow the divided logits: it is raised to this, with a warning."""

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127

LARGEST_LOGIT_BIAS = 1e30
"""With the next one: a logit that is biased, divided by the smallest repetition penalty and by MIN_TEMPERATURE is at most
1e38 and stays finite in float32. Downwards all of float32 is allowed, as an overflow there is a ban."""

LARGEST_REPETITION_PENALTY = 1e6
"""And the reciprocal of the smallest one."""


@dataclass
class StructuredOutputsParams:
    """What shape the output must have: exactly one of the five kinds.

    json: a JSON schema, as a dict or as text; json_object: any JSON object; regex: the whole output matches it;
    choice: the output is one of these strings; grammar: an EBNF grammar whose start rule is ``root``.
    JSON is written without optional whitespace, since a weak model can otherwise emit whitespace for ever.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def validate(self) -> None:
        """ValueError unless exactly one kind is asked for, with a value of its type."""
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must ask for exactly one of {[f.name for f in fields(self)]}, got {given}"
            )
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise ValueError(f"structured_outputs.json must be a schema as a dict or a string, got {self.json!r}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a non-empty string, got {value!r}")
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"structured_outputs.json_object must be True or left out, got {self.json_object!r}")
        if self.choice is not None:
            choice = None if isinstance(self.choice, str) else _listed(self.choice)
            if choice is None:
                raise ValueError(f"structured_outputs.choice must be a list of strings, got {self.choice!r}")
            self.choice = choice
            if not self.choice or not all(isinstance(c, str) and c for c in self.choice):
                raise ValueError(
                    f"structured_outputs.choice must be a non-empty list of non-empty strings, got {self.choice!r}"
                )


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen, when it stops and what is reported. vLLM's names and defaults.

    n: outputs per prompt. temperature: 0 (below 1e-5) is greedy, and then top_p, top_k and min_p are switched off.
    top_p: in (0, 1], the smallest set of tokens whose mass reaches it. top_k: 0 or -1 for all tokens.
    min_p: in [0, 1], least probability relative to the most likely token. seed: 64 bits; None (or -1) for a fresh one.
    stop: strings that end the output (cut away unless include_stop_str_in_output). stop_token_ids: ids that end it.
    ignore_eos: go on after EOS (other stops still count). max_tokens: None for as many as max_model_len allows.
    min_tokens: no stop before that many. logprobs, prompt_logprobs: how many of the most likely tokens to report
    at each position besides the token itself (0: that one alone; -1: the whole vocabulary).
    repetition_penalty: over prompt and output, in [1e-6, 1e6]. presence_penalty, frequency_penalty: over the output, in
    [-2, 2]. logit_bias: added to a token's logit, at most 1e30 (-inf bans it). allowed_token_ids: nothing else can be sampled.
    bad_words: strings never to be written. structured_outputs: see StructuredOutputsParams.
    extra_args: free arguments for custom logits processors.

    ValueError for a value outside its limits and for settings that contradict each other. The checks run when the
    object is made and once more when a request meets the engine, so a field assigned later is checked too.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self) -> None:
        """Check every field and bring it to its normal form (lists for stop, stop_token_ids, bad_words). ValueError."""
        self._validate_numbers()
        self._validate_tokens()
        self._validate_contradictions()
        if self.is_greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is below {MIN_TEMPERATURE}, where divided logits may overflow: "
                f"{MIN_TEMPERATURE} is used (0 means greedy)",
                stacklevel=4,
            )
            self.temperature = MIN_TEMPERATURE

    def for_output(self, index: int) -> SamplingParams:
        """The parameters of output ``index`` among the n of one prompt: n = 1, and a seed of its own (seed + index)."""
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return replace(self, n=1, seed=seed)

    def _validate_numbers(self) -> None:
        self.n = _integer("n", self.n, 1)
        self.temperature = _real("temperature", self.temperature, 0.0, FLOAT32_MAX)
        self.top_p = _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be in (0, 1], got 0.0 (temperature=0 gives the most likely token)")
        self.top_k = _integer("top_k", self.top_k, -1)
        self.min_p = _real("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _real(
            "repetition_penalty", self.repetition_penalty, 1 / LARGEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY
        )
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            if self.seed == -1:
                self.seed = None
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is True:  # vLLM takes True for 1
                setattr(self, name, 1)
            elif value is not None:
                setattr(self, name, _integer(name, value, -1))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _validate_tokens(self) -> None:
        self.stop = _strings("stop", self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        self.stop_token_ids = _token_ids("stop_token_ids", [] if self.stop_token_ids is None else self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name at least one token id, got an empty list")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias must be a dict from token id to bias, got {self.logit_bias!r}")
            bias: dict[int, float] = {}
            for key, value in self.logit_bias.items():
                # OpenAI's JSON can only have text keys
                token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
                token_id = _integer("logit_bias token id", token_id, 0)
                if value != -math.inf:
                    value = _real(f"logit_bias[{token_id}]", value, -FLOAT32_MAX, LARGEST_LOGIT_BIAS)
                bias[token_id] = float(value)
            self.logit_bias = bias
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise ValueError(
                    f"structured_outputs must be a StructuredOutputsParams, got {self.structured_outputs!r}"
                )
            self.structured_outputs.validate()
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise ValueError(f"extra_args must be a dict, got {self.extra_args!r}")

    def _validate_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.is_greedy and self.n > 1:
            raise ValueError(
                f"n must be 1 with greedy sampling (temperature 0), got {self.n}: all outputs would be equal"
            )
        if self.allowed_token_ids is not None and self.logit_bias is not None:
            banned = {t for t, b in self.logit_bias.items() if b == -math.inf}
            if banned.issuperset(self.allowed_token_ids):
                raise ValueError(f"logit_bias bans every one of allowed_token_ids {self.allowed_token_ids}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer {limit}, got {value!r}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {limit}, got {value!r}")
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    limit = f"finite and in [{low}, {high}]"
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # the last one: an integer beyond any float
        raise ValueError(f"{name} must be a number {limit}, got {value!r}") from None
    if not math.isfinite(number) or not low <= number <= high:
        raise ValueError(f"{name} must be {limit}, got {value!r}")
    return number


def _strings(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    values = [value] if isinstance(value, str) else _listed(value)
    if values is None or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"{name} must hold non-empty strings, got {value!r}")
    return values


def _token_ids(name: str, value: Any) -> list[int]:
    values = None if isinstance(value, (str, bytes)) else _listed(value)
    if values is None:
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return [_integer(f"{name}: a token id", v, 0) for v in values]


def _listed(value: Any) -> list[Any] | None:
    """The items of anything that has some, arrays and tensors included, as Python objects; None for a single thing."""
    if hasattr(value, "tolist"):  # numpy and torch; without a dimension it gives a number or a string
        value = value.tolist()
        return value if isinstance(value, list) else None
    return list(value) if isinstance(value, Iterable) else None
