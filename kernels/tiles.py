"""What several launchers need to choose a tile or to refuse an input; plain Python, no kernel here."""

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
H200_SMS = 132  # assumed for ``meta`` tensors, which belong to no machine


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of ``device``: 1 on a CPU, where programs run one after another."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return H200_SMS if device.type == "meta" else 1


def architecture(device: torch.device) -> str:
    """The class of machine that tiles are chosen for: "hopper" (and later), "ampere" (and Ada), or "cdna" (AMD).

    Without a GPU it is "hopper": what is interpreted and compiled by default is what ships for the first target.
    """
    if device.type != "cuda":
        return "hopper"
    if torch.version.hip is not None:
        return "cdna"
    return "hopper" if torch.cuda.get_device_capability(device) >= (9, 0) else "ampere"


def row_tile(row_length: int, target: int = 2048, max_row: int = 65536) -> tuple[int, int, int]:
    """(rows, padded row length, warps) of a tile that holds whole rows of about ``target`` elements altogether.

    Raises ValueError for a row that no program can hold.
    """
    block = next_power_of_2(row_length)
    if row_length < 1 or block > max_row:
        raise ValueError(f"a row of {row_length} elements: the kernel holds whole rows of 1 to {max_row}")
    rows = max(1, target // block)
    return rows, block, min(16, max(4, rows * block // 512))


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension of ``tensor`` is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}")


def require_near_heads(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a token's heads (the last but one dimension) lie within 2^31 elements: kernels that hold them
    all address them in int32."""
    heads, head_dim = tensor.shape[-2:]
    if heads and (heads - 1) * tensor.stride(-2) + head_dim > 2**31:
        raise ValueError(f"{name}: {heads} heads, {tensor.stride(-2)} elements apart, span more than 2^31 elements")


def require_product_dtype(op: str, tensor: Tensor) -> None:
    """Raise ValueError, in ``op``'s name, unless ``tensor`` is of a type that matrix products are written for."""
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{op}: the kernel takes float16, bfloat16 and float32, not {tensor.dtype}")
