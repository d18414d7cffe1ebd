"""Formulas leave markdown before it is rendered and come back as MathML; prices and code stay what they are."""

from __future__ import annotations

import pytest

from llmlab.report_math import Formulas, mathml


def through(markdown: str) -> tuple[str, str]:
    formulas = Formulas()
    taken = formulas.take_out(markdown)
    return taken, formulas.put_back(taken)


def test_formulas_become_mathml() -> None:
    taken, html = through("ridge $R = F/W$ and\n\n$$ f = 2\\,T\\,i\\,o, \\qquad a_1 b_2 $$\n")
    assert "$" not in taken and "_" not in taken
    assert html.count("<math") == 2
    assert html.count('display="block"') == 1
    assert "<mi>R</mi>" in html


@pytest.mark.parametrize(
    "text", ["costs $5 and $6", "`$HOME` and `$x$`", "```bash\necho $A $B\n```", "a lone $ sign", "no formula"]
)
def test_other_dollars_stay(text: str) -> None:
    assert through(text) == (text, text)


def test_inequalities_are_escaped() -> None:
    html = through("if $I < R$ and $a \\ll b$")[1]
    assert "&lt;" in html or "&#x0003C;" in html
    assert " < " not in html


def test_what_cannot_be_read_stays_readable() -> None:
    assert mathml("\\frac{") == "<code>\\frac{</code>"
    assert mathml("a < \\frac{") == "<code>a &lt; \\frac{</code>"
