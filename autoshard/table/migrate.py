"""Tables of older schema versions, brought to the current one; golden files of each version are
kept in the tests.
"""

from __future__ import annotations

from typing import Any

from autoshard.errors import TableError

SCHEMA = 2
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
    return _from_1(data) if schema == 1 else data


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had what is evidence beside the specs, no checksum, no patterns and no roles."""
    evidence: dict[str, Any] = {
        name: data[name] for name in ("fingerprint", "versions", "verified") if name in data
    }
    specs: dict[str, Any] = {name: value for name, value in data.items() if name not in evidence}
    evidence["candidates"] = data.get("evidence", [])
    return {"inside": [], **specs, "schema": SCHEMA, "outputs_like": {}, "evidence": evidence}
