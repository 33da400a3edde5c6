"""A stable digest of a jaxpr: equal in every process for one jax version, whatever its variables
are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from autoshard.jax_internals import jaxprs

_PLAIN = (int, float, bool, str, bytes, type(None))


def _plain(value: object) -> str:
    """A parameter as text that is the same in every process; what has no such text is named by its
    type.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_plain, value)) + ")"
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(
                f"{k}:{_plain(v)}" for k, v in sorted(value.items(), key=lambda i: str(i[0]))
            )
            + "}"
        )
    if hasattr(value, "name") and hasattr(type(value), "__members__"):
        return str(value.name)
    if type(value).__module__.startswith("numpy") and getattr(value, "ndim", 1) == 0:
        return str(value)
    return str(value) if type(value).__name__.endswith(("DType", "dtype")) else type(value).__name__


def fingerprint(jaxpr: Any) -> str:
    """Digest of shapes, dtypes, primitives, plain parameters and data flow; variable names do not
    enter.
    """
    digest = hashlib.blake2b(digest_size=12)
    numbers: dict[Any, int] = {}

    def atom(var: Any) -> str:
        if jaxprs.is_literal(var):
            return f"{var.val!r}:{var.aval.str_short()}"
        return f"{numbers.setdefault(var, len(numbers))}:{var.aval.str_short()}"

    def feed(jaxpr: Any) -> None:
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        digest.update(" ".join(map(atom, (*jaxpr.invars, *jaxpr.constvars))).encode())
        for eqn in jaxpr.eqns:
            digest.update(f"\n{eqn.primitive.name} {' '.join(map(atom, eqn.invars))}>".encode())
            digest.update(" ".join(atom(v) for v in eqn.outvars if not jaxprs.is_drop(v)).encode())
            for key, value in sorted(eqn.params.items()):
                if jaxprs.is_jaxpr(value):
                    feed(value)
                elif type(value) is tuple and value and all(map(jaxprs.is_jaxpr, value)):
                    for item in value:
                        feed(item)
                else:
                    digest.update(f"{key}={_plain(value)}".encode())
        digest.update(f"\nout {' '.join(map(atom, jaxpr.outvars))}".encode())

    feed(jaxpr)
    return digest.hexdigest()
