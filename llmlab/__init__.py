"""llmlab: the lab in which people find out how large language models are run fast.

``from llmlab import LLM, SamplingParams`` is vLLM's offline API; ``record_ops`` watches a step, op by op. Names are imported
when they are first used, so that ``import llmlab`` is quick and a part can be used without what the others need.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlab.engine.llm import LLM
    from llmlab.engine.outputs import CompletionOutput, RequestOutput
    from llmlab.ops.registry import record_ops
    from llmlab.sampling.params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

# torch's idle OpenMP threads spin for milliseconds before they sleep. On cores that others use too, they spin away the very
# time that the thread needs which they wait for, and a decode step of 10 ms takes 200. So many turns last about 200 µs, longer
# than passes between two kernels: as fast on idle cores, several times faster on busy ones. Read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

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
