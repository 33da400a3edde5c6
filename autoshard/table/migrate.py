"""Tables of older schema versions, brought to the current one.

Golden files of each version are kept in tests/golden/tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoshard.errors import TableError
from autoshard.table.schema import SCHEMA, TableData, checksum_of, plan_parts

_BARE_UNCONSTRAINED = re.compile(r"(?<![\w.'\"])UNCONSTRAINED\b")


def to_current(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The data of a table of any known schema, as one of the current schema.

    Raises:
        TableError: If the schema is missing, no number, or newer than this autoshard.
    """
    schema = data.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise TableError(
            f"{where}: is no spec table: it has no field `schema` that is a positive number. Check "
            f"the path."
        )
    if schema > SCHEMA:
        raise TableError(
            f"{where}: has schema {schema}, this autoshard reads schema 1 to {SCHEMA}. Upgrade "
            f"autoshard."
        )
    for migration in (_from_1, _from_2)[schema - 1 :]:
        data = migration(data)
    return data


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had what is evidence beside the specs.

    It had no checksum, no patterns and no logical axes.
    """
    evidence: dict[str, Any] = {
        name: data[name] for name in ("fingerprint", "versions", "verified") if name in data
    }
    plan: dict[str, Any] = {name: value for name, value in data.items() if name not in evidence}
    evidence["candidates"] = data.get("evidence", [])
    migrated = {"inside": [], **plan, "schema": 2, "outputs_like": {}, "evidence": evidence}
    if isinstance(migrated["inside"], list):
        migrated["inside"] = [_constraint_from_1(entry) for entry in migrated["inside"]]
    return migrated


def _constraint_from_1(entry: Any) -> Any:
    """Schema 1 wrote `UNCONSTRAINED` in a spec, which Python does not know without its `P.`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("spec"), str):
        return entry
    return {**entry, "spec": _BARE_UNCONSTRAINED.sub("P.UNCONSTRAINED", entry["spec"])}


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 called the logical axes of a leaf its roles, and wrote a preset's name into the
    origin of a candidate (`preset:fsdp`).
    """
    migrated = {**data, "schema": 3}
    for side in ("inputs", "outputs"):
        if isinstance(data.get(side), dict):
            migrated[side] = {path: _leaf_from_2(leaf) for path, leaf in data[side].items()}
    evidence = data.get("evidence")
    if isinstance(evidence, dict) and isinstance(evidence.get("candidates"), list):
        candidates = [_candidate_from_2(record) for record in evidence["candidates"]]
        migrated["evidence"] = {**evidence, "candidates": candidates}
    return migrated


def _leaf_from_2(leaf: Any) -> Any:
    return _renamed(leaf, "roles", "logical_axes") if isinstance(leaf, dict) else leaf


def _candidate_from_2(record: Any) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get("origin"), str):
        return record
    origin, _, preset = record["origin"].partition(":")
    migrated = {**record, "origin": origin}
    if preset:
        migrated["preset"] = preset
    return migrated


def schema_2_checksum(table: TableData) -> str:
    """The checksum that schema 2 gave to a table, with the roles of its leaves."""
    *rest, inputs, outputs = plan_parts(table)
    sides = [
        {path: _renamed(leaf, "logical_axes", "roles") for path, leaf in side.items()}
        for side in (inputs, outputs)
    ]
    return checksum_of([*rest, *sides])


def _renamed(fields: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Fields of which one has another name; the order stays."""
    return {(new if name == old else name): value for name, value in fields.items()}
