"""What nbval does not compare: pictures and HTML (figures are drawn from tables, whose text is compared), and stderr."""

from typing import Any

SKIP = ("stderr", "image/svg+xml", "text/html", "application/vnd.plotly.v1+json", "application/javascript")


def pytest_collectstart(collector: Any) -> None:
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += SKIP
