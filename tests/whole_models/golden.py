"""What was found for each whole model, kept in tests/golden/whole_models.json and reviewed by eye.

    python -m tests.whole_models.golden --write [model ...]

searches again with the jax that is installed and replaces the rows of its generation; the sentences
and the rows of other generations stay. The table to read, tests/golden/whole_models.md, is written
from it. Without --write it says what would change."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autoshard
from tests.whole_models.registry import MODELS
from tests.whole_models.search import SCALE_MODEL, replicated_peak_bytes, search, winner_of

JSON = Path(__file__).parent.parent / "golden" / "whole_models.json"
MARKDOWN = JSON.with_suffix(".md")

Row = dict[str, Any]


def generation() -> str:
    """`0.10`, `0.12`."""
    return ".".join(jax.__version__.split(".")[:2])


def read() -> dict[str, dict[str, Any]]:
    """The golden file: by model, its sentence and a row for each jax generation."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def row_of(name: str) -> Row:
    """The golden row of a model: of this generation, else of the newest older one, else of the
    oldest."""
    rows: Mapping[str, Row] = read()[name]["found"]
    order = sorted(rows, key=_version)
    older = [g for g in order if _version(g) <= _version(generation())]
    return rows[older[-1] if older else order[0]]


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def make_row(plan: autoshard.Plan, replicated_bytes: int) -> Row:
    """What is written down of a plan."""
    won = winner_of(plan)
    assert won.compiled is not None
    return {
        "rules": list(won.rules),
        "constraints": won.constraints,
        "origin": f"preset:{won.preset}" if won.is_preset else "search",
        "verified": plan.verified.ok,
        "predicted_bytes": won.predicted and won.predicted.collective_bytes,
        "compiled_bytes": won.compiled.collective_bytes,
        "collectives": {
            kind: sum(c.bytes for c in won.compiled.collectives if c.kind == kind)
            for kind in sorted({c.kind for c in won.compiled.collectives})
        },
        "peak_bytes": won.compiled.peak_bytes,
        "replicated_peak_bytes": replicated_bytes,
    }


def search_again(name: str) -> Row:
    """Searches and makes the row; prints how the presets compare, by prediction, for the
    sentence."""
    model = MODELS[name]()
    replicated_bytes = replicated_peak_bytes(model)
    plan = search(model, replicated_bytes // 2)
    found = winner_of(plan).predicted
    for candidate in plan.candidates:
        if (
            found is not None
            and candidate.is_preset
            and candidate.constraints == "anchors"
            and candidate.predicted is not None
        ):
            time, sent = (
                candidate.predicted.time_s / found.time_s,
                candidate.predicted.collective_bytes,
            )
            print(
                f"  {candidate.name}: {time:.3f} of the found plan's time, sends {sent:,} "
                f"({found.collective_bytes:,})"
            )
    return make_row(plan, replicated_bytes)


def sent(count: int | None) -> str:
    """Bytes in the table; layouts at arguments only are not predicted."""
    return "" if count is None else f"{count:,}"


def markdown(models: Mapping[str, Mapping[str, Any]]) -> str:
    """The table that people review."""
    lines = [
        "# What is found for whole models",
        "",
        f"One train or decode step each, 8 CPU devices as data=4, model=2, predicted for a "
        f"{SCALE_MODEL.name}, the",
        "memory budget half of what replication needs. Bytes are what one device sends per step, "
        "peaks are per device",
        "and compiled. Written by `python -m tests.whole_models.golden --write`; the sentences are "
        "written by hand.",
        "",
    ]
    for name in MODELS:
        if name not in models:
            continue
        entry = models[name]
        lines += [f"## {name}", "", entry["sentence"] or "(not reviewed)", ""]
        lines += [
            "| jax | axis rules | sent, predicted | sent, compiled | peak | replicated peak |",
            "|---|---|---|---|---|---|",
        ]
        for which in sorted(entry["found"], key=_version):
            row = entry["found"][which]
            rules = "<br>".join(f"`{rule}`" for rule in row["rules"])
            parts = ", ".join(f"{kind} {count:,}" for kind, count in row["collectives"].items())
            lines.append(
                f"| {which} | {row['origin']}, {row['constraints']}<br>{rules} | "
                f"{sent(row['predicted_bytes'])} | "
                f"{row['compiled_bytes']:,} ({parts}) | {row['peak_bytes']:,} | "
                f"{row['replicated_peak_bytes']:,} |"
            )
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Searches the named models again (all where none is named); see the module."""
    jax.config.update("jax_num_cpu_devices", 8)
    names = [name for name in MODELS if name in arguments or not set(arguments) & set(MODELS)]
    for name in names:
        row = search_again(name)
        before = (
            read().get(name, {"found": {}})["found"].get(generation(), {}).get("compiled_bytes")
        )
        print(
            f"{name}: {before} -> {row['compiled_bytes']} bytes, {', '.join(row['rules'])}",
            flush=True,
        )
        if "--write" in arguments:
            models = read()
            models.setdefault(name, {"sentence": "", "found": {}})["found"][generation()] = row
            save(models)


def save(models: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the file and the table."""
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(
        json.dumps({name: models[name] for name in MODELS if name in models}, indent=1) + "\n"
    )
    MARKDOWN.write_text(markdown(models))


if __name__ == "__main__":
    main(sys.argv[1:])
