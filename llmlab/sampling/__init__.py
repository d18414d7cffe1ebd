"""Sampling: from logits to tokens, in vLLM's order, and everything that a user can ask for on the way."""

from llmlab.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
