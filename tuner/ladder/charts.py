"""What the pages of a ladder draw: a chart of series, each a curve of places, or dots, as plain values."""

from typing import Any

Series = dict[str, Any]
"""``name``, the number of its ``color``, and a ``curve`` or ``dots``: lists of [x, y] or [x, y, low, high]."""
Chart = dict[str, Any]


def chart(label: str, x: str, y: str, series: list[Series], **options: Any) -> Chart:
    """A chart; `x` and `y` name its axes."""
    return {"label": label, "x": x, "y": y, "series": series, "xLog": True, "unit": ""} | options
