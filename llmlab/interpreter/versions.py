"""Which Triton versions the interpreter knows: it follows their front end, so an unknown one is refused rather than trusted."""

import triton

SUPPORTED_TRITON = ("3.6", "3.7", "3.8", "3.9")


class UnsupportedTritonError(RuntimeError):
    """The installed Triton is none of ``SUPPORTED_TRITON``."""


def require_supported_triton(version: str | None = None) -> None:
    """Raise UnsupportedTritonError, naming the version and the supported ones, unless ``version`` (default: the
    installed one) is supported."""
    version = triton.__version__ if version is None else version
    if ".".join(version.split(".")[:2]) not in SUPPORTED_TRITON:
        raise UnsupportedTritonError(
            f"the interpreter was checked against triton {', '.join(SUPPORTED_TRITON)}; triton {version} is installed. "
            f"Install one of these, or run the tests of llmlab.interpreter against {version} and add it to the list"
        )
