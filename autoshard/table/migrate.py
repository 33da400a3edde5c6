"""Tables of older schema versions, brought to the current one; golden files of each version are
kept in the tests.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from autoshard.errors import TableError

SCHEMA = 3
"""Version of the format that is written."""


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
    for step in (_from_1, _from_2)[schema - 1 :]:
        data = step(data)
    return data


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had what is evidence beside the specs, no checksum, no patterns and no roles."""
    evidence: dict[str, Any] = {
        name: data[name] for name in ("fingerprint", "versions", "verified") if name in data
    }
    specs: dict[str, Any] = {name: value for name, value in data.items() if name not in evidence}
    evidence["candidates"] = data.get("evidence", [])
    return {"inside": [], **specs, "schema": 2, "outputs_like": {}, "evidence": evidence}


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 called the logical axes of a leaf its roles, and wrote a preset's name into the
    origin of a candidate (`preset:fsdp`).
    """
    leaves = {
        part: {path: _leaf_from_2(leaf) for path, leaf in data[part].items()}
        for part in ("inputs", "outputs")
        if isinstance(data.get(part), dict)
    }
    result = {**data, **leaves, "schema": 3}
    evidence = data.get("evidence")
    if isinstance(evidence, dict) and isinstance(evidence.get("candidates"), list):
        candidates = [_candidate_from_2(record) for record in evidence["candidates"]]
        result["evidence"] = {**evidence, "candidates": candidates}
    return result


def _leaf_from_2(leaf: Any) -> Any:
    if not isinstance(leaf, dict) or "roles" not in leaf:
        return leaf
    return {("logical_axes" if name == "roles" else name): value for name, value in leaf.items()}


def _candidate_from_2(record: Any) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get("origin"), str):
        return record
    origin, _, preset = record["origin"].partition(":")
    return {**record, "origin": origin, **({"preset": preset} if preset else {})}


def checksum_of(parts: list[Any]) -> str:
    """Digest of a table's mesh, rules, constraints and leaves as plain builtins."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def checksum_of_2(parts: list[Any]) -> str:
    """`checksum_of` as schema 2 computed it, where the logical axes of a leaf were its roles."""
    *rest, inputs, outputs = parts
    leaves = [{path: _leaf_to_2(leaf) for path, leaf in part.items()} for part in (inputs, outputs)]
    return checksum_of([*rest, *leaves])


def _leaf_to_2(leaf: dict[str, Any]) -> dict[str, Any]:
    return {("roles" if name == "logical_axes" else name): value for name, value in leaf.items()}
