"""Scatter plots of the accuracy suite (needs matplotlib: the `report` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def scatter(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against compiled bytes and peaks, and partitioned against compiled bytes, as one
    PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def sent(row: dict[str, Any], source: str) -> float:
        return max(1.0, sum((row[source] or {}).values()))

    panels = (
        ("bytes sent", "predicted", lambda r: sent(r, "predicted"), lambda r: sent(r, "compiled")),
        (
            "bytes sent",
            "partitioned",
            lambda r: sent(r, "partitioned"),
            lambda r: sent(r, "compiled"),
        ),
        (
            "peak bytes",
            "predicted",
            lambda r: r["predicted_peak_bytes"],
            lambda r: r["memory"]["peak_bytes"],
        ),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 5), layout="constrained")
    models = list(dict.fromkeys(r["model"] for r in rows))
    for (what, source, y, x), axis in zip(panels, axes, strict=True):
        for model in models:
            mine = [r for r in rows if r["model"] == model]
            axis.scatter([x(r) for r in mine], [y(r) for r in mine], s=8, label=model)
        ends = [min(map(x, rows)), max(map(x, rows))]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel=f"{what}, compiled", ylabel=f"{what}, {source}")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=120)
