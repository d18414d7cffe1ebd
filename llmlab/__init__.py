"""llmlab: the lab in which people find out how large language models are run fast.

``from llmlab import LLM, SamplingParams`` is vLLM's offline API; ``record_ops`` watches a step, op by op. Names are imported
when they are first used, so that ``import llmlab`` is quick and a part can be used without what the others need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlab.engine.llm import LLM
    from llmlab.engine.outputs import CompletionOutput, RequestOutput
    from llmlab.ops.registry import record_ops
    from llmlab.sampling.params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llmlab.engine.llm",
    "CompletionOutput": "llmlab.engine.outputs",
    "RequestOutput": "llmlab.engine.outputs",
    "SamplingParams": "llmlab.sampling.params",
    "StructuredOutputsParams": "llmlab.sampling.params",
    "record_ops": "llmlab.ops.registry",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "record_ops",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmlab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
