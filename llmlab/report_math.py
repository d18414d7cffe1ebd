"""Formulas of notebooks as MathML, which browsers draw without a network and without a script."""

from __future__ import annotations

import re
from html import escape

_MATH = re.compile(
    r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?=[^\s$])(?P<inline>[^$\n]*?[^\s$\\])\$(?!\d)",
    re.DOTALL,
)


class Formulas:
    """Takes formulas out of markdown before it is rendered, and puts them into the page afterwards.

    Markdown would read the underscores and stars of LaTeX as its own.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def take_out(self, markdown: str) -> str:
        """The text with a word in place of each ``$…$`` and ``$$…$$``; code is left alone."""
        return _MATH.sub(self._keep, markdown)

    def put_back(self, html: str) -> str:
        """The page with MathML in place of those words."""
        return re.sub(r"FORMULA(\d+)ALUMROF", lambda m: self._found[int(m[1])], html)

    def _keep(self, match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match["code"]
        block = match["block"] is not None
        self._found.append(mathml(match["block"] if block else match["inline"], block))
        return f"FORMULA{len(self._found) - 1}ALUMROF"


def mathml(latex: str, block: bool = False) -> str:
    """A formula as MathML; one that can't be read stays as it was written."""
    from latex2mathml.converter import convert

    try:
        return convert(latex.strip(), display="block" if block else "inline")
    except Exception:  # the converter raises what comes; a formula in LaTeX is still one
        return f"<code>{escape(latex)}</code>"
