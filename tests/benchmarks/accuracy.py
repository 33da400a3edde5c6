"""How far predictions are from the compiled program: `make bench-accuracy`, or

    python -m tests.benchmarks.accuracy --models gpt2,llama --meshes 4x2 --layouts 6 --cache
    evidence.jsonl --out a.json

For each model, mesh and layout (random distinct ones beside the presets): predicted, partitioned
and compiled bytes of the collectives by kind, predicted and compiled peak memory. Prints a table,
and writes every row as JSON. `--plots` draws the scatter plots (needs the `report` extra). Seconds
are measured by `tests.benchmarks.times`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from scipy.stats import spearmanr

from autoshard.cost_model.hardware.hardware import cpu
from tests.benchmarks.evidence_store import EvidenceStore, by_kind
from tests.benchmarks.suite import MESHES, MODELS, setting

Row = dict[str, Any]
FLOOR_BYTES = 1024
"""Errors are relative to the compiled bytes, or to this: a scalar's all_reduce is no error of 100
%."""
COUNTS = 0.02
"""Kinds with at least this share of the bytes must be predicted."""


def rows_of(
    model: str,
    mesh: str,
    layouts: int,
    store: EvidenceStore,
    *,
    only_known: bool = False,
    seed: int = 0,
) -> Iterable[Row]:
    """A row for each layout of a model on a mesh that compiles."""
    made = setting(model, mesh)
    predictor = made.predictor(cpu)
    for case in made.cases(cpu, layouts, seed):
        if only_known and not store.known(made.made, case.layout):
            continue
        evidence = store.of(made.made, case.layout)
        if "failed" in evidence:
            print(f"{model} {mesh} {case.name}: {evidence['failed']}", flush=True)
            continue
        predicted = predictor.predict(case.layout)
        yield {
            "model": model,
            "mesh": mesh,
            "name": case.name,
            "preset": case.preset,
            "rules": [str(rule) for rule in case.layout.rules],
            "predicted": by_kind(predicted.collectives),
            "predicted_peak_bytes": predicted.peak_bytes,
            "predicted_s": predicted.time_s,
            **evidence,
        }


def total(row: Row, source: str) -> int:
    """Bytes one device sends, over all kinds."""
    return sum((row[source] or {}).values())


def bytes_error(row: Row, source: str = "predicted", truth: str = "compiled") -> float:
    """Relative error of the bytes sent."""
    real = total(row, truth)
    return abs(total(row, source) - real) / max(real, FLOOR_BYTES)


def memory_error(row: Row) -> float:
    """Relative error of the peak."""
    real: int = row["memory"]["peak_bytes"]
    return abs(row["predicted_peak_bytes"] - real) / real


def kinds(row: Row, source: str) -> frozenset[str]:
    """Kinds with a share of the bytes that counts."""
    least = max(COUNTS * total(row, source), FLOOR_BYTES)
    return frozenset(kind for kind, sent in row[source].items() if sent >= least)


def rank(rows: Sequence[Row], one: str = "predicted", other: str = "compiled") -> float:
    """Spearman correlation of bytes; 1 where both are constant."""
    x, y = ([total(r, source) for r in rows] for source in (one, other))
    return _spearman(x, y)


def _spearman(x: Sequence[float], y: Sequence[float]) -> float:
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 1.0 if len(set(x)) == len(set(y)) else 0.0
    return float(spearmanr(x, y)[0])


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """What the table shows of some rows."""
    random_rows = [r for r in rows if not r["preset"]] or list(rows)
    preset_rows = [r for r in rows if r["preset"]] or list(rows)

    def quantiles(name: str, errors: Sequence[float]) -> dict[str, float]:
        return {
            f"{name}_median": float(np.median(errors)),
            f"{name}_p95": float(np.quantile(errors, 0.95)),
        }

    parted = [r for r in random_rows if r["partitioned"] is not None] or random_rows
    return {
        "layouts": len(rows),
        **quantiles("bytes", [bytes_error(r) for r in random_rows]),
        **quantiles("preset_bytes", [bytes_error(r) for r in preset_rows]),
        **quantiles("partitioned_bytes", [bytes_error(r, "partitioned") for r in parted]),
        "kinds_right": float(
            np.mean([kinds(r, "predicted") == kinds(r, "compiled") for r in rows])
        ),
        **quantiles("memory", [memory_error(r) for r in rows]),
        "memory_bias": float(
            np.median([r["predicted_peak_bytes"] / r["memory"]["peak_bytes"] - 1 for r in rows])
        ),
        "spearman": rank(random_rows),
        "memory_spearman": _spearman(
            [r["predicted_peak_bytes"] for r in rows], [r["memory"]["peak_bytes"] for r in rows]
        ),
    }


def table(rows: Sequence[Row]) -> str:
    """The printed table: a line for each model and mesh, and one for all."""
    head = (
        "model             mesh   layouts |  bytes: med   p95  rank  presets  kinds | part. med   "
        "p95 | "
        "memory: med   p95   bias  rank"
    )
    lines = [head, "-" * len(head)]

    def line(model: str, mesh: str, f: dict[str, float]) -> str:
        return (
            f"{model:17} {mesh:6} {f['layouts']:7.0f} | {f['bytes_median']:11.1%} "
            f"{f['bytes_p95']:5.0%} "
            f"{f['spearman']:5.2f} {f['preset_bytes_median']:8.1%} {f['kinds_right']:6.0%} | "
            f"{f['partitioned_bytes_median']:9.1%} {f['partitioned_bytes_p95']:5.0%} | "
            f"{f['memory_median']:11.1%} {f['memory_p95']:5.0%} {f['memory_bias']:+6.0%} "
            f"{f['memory_spearman']:5.2f}"
        )

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["mesh"]), []).append(row)
    by_group = {key: figures(found) for key, found in groups.items()}
    lines += [line(*key, f) for key, f in by_group.items()]
    whole = figures(rows)
    for name in ("spearman", "memory_spearman"):  # ranks are of the layouts of one model
        whole[name] = float(np.median([f[name] for f in by_group.values()]))
    lines += ["-" * len(head), line("all (median rank)", "", whole)]
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument(
        "--layouts", type=int, default=20, help="random layouts for each model and mesh"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    parser.add_argument("--cache", type=Path, help="file of evidence: read, and added to")
    parser.add_argument(
        "--only-known", action="store_true", help="compile nothing: only what is in the cache"
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--plots", type=Path, help="write the scatter plots to this PNG")
    parser.add_argument(
        "--worst", type=int, default=0, help="print so many rows with the largest errors"
    )
    return parser


def main() -> None:
    """Runs the suite; see the module."""
    chosen = arguments().parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    store = EvidenceStore(chosen.cache)
    rows: list[Row] = []
    for model in chosen.models.split(","):
        for mesh in chosen.meshes.split(","):
            rows += rows_of(
                model, mesh, chosen.layouts, store, only_known=chosen.only_known, seed=chosen.seed
            )
            print(f"{model} {mesh}: {len(rows)} rows", flush=True)
    print(table(rows))
    for error, label in ((memory_error, "memory"), (bytes_error, "bytes")):
        for row in sorted(rows, key=error, reverse=True)[: chosen.worst]:
            print(
                f"{label} {error(row):5.0%} {row['model']} {row['mesh']} {row['name']} "
                f"{' '.join(row['rules'])}\n"
                f"   bytes {row['predicted']} compiled {row['compiled']} peak "
                f"{row['predicted_peak_bytes']:,} "
                f"compiled {row['memory']['peak_bytes']:,}"
            )
    if chosen.out is not None:
        chosen.out.write_text(
            json.dumps({"jax": jax.__version__, "all": figures(rows), "rows": rows}, indent=1)
            + "\n"
        )
    if chosen.plots is not None:
        from tests.benchmarks.plots import scatter

        scatter(rows, chosen.plots)


if __name__ == "__main__":
    main()
