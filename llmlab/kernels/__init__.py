"""Triton kernels. In a checkout they stand in the top-level ``kernels/`` folder; an installed wheel has them right here."""

from pathlib import Path

_root = Path(__file__).resolve().parents[2]
if (_root / "pyproject.toml").is_file():
    __path__ = [str(_root / "kernels")]
