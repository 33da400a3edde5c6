"""A stable digest of a jaxpr: equal in every process for one jax version, whatever its variables
are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.jax_internals import jaxprs

_PLAIN = (int, float, bool, str, bytes, type(None))

_DIGEST_BYTES = 12
"""96 bits: two of a billion programs share a fingerprint with a probability below 1e-11 (birthday
bound). Tables hold it as text."""


def fingerprint(jaxpr: Any) -> str:
    """Digest of shapes, dtypes, primitives, plain parameters and data flow, not of names."""
    digest = _Digest()
    digest.add_jaxpr(jaxpr)
    return digest.hexdigest()


class _Digest:
    """A digest of jaxprs, in which variables are numbered by first appearance."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._numbers: dict[Any, int] = {}

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _add(self, text: str) -> None:
        self._digest.update(text.encode())

    def _atoms(self, atoms: Iterable[Any]) -> str:
        return " ".join(map(self._atom, atoms))

    def _atom(self, atom: Any) -> str:
        if jaxprs.is_literal(atom):
            return f"{atom.val!r}:{atom.aval.str_short()}"
        number = self._numbers.setdefault(atom, len(self._numbers))
        return f"{number}:{atom.aval.str_short()}"

    def add_jaxpr(self, jaxpr: Any) -> None:
        """Adds a jaxpr and all jaxprs in it."""
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        self._add(self._atoms((*jaxpr.invars, *jaxpr.constvars)))
        for eqn in jaxpr.eqns:
            self._add(f"\n{eqn.primitive.name} {self._atoms(eqn.invars)}>")
            self._add(self._atoms(var for var in eqn.outvars if not jaxprs.is_drop(var)))
            # Sorted: their own order is that in which the primitive was bound.
            for name, value in sorted(eqn.params.items()):
                self._add_param(name, value)
        self._add(f"\nout {self._atoms(jaxpr.outvars)}")

    def _add_param(self, name: str, value: Any) -> None:
        if jaxprs.is_jaxpr(value):
            self.add_jaxpr(value)
        elif type(value) is tuple and value and all(map(jaxprs.is_jaxpr, value)):
            for item in value:
                self.add_jaxpr(item)
        else:
            self._add(f"{name}={_plain(value)}")


def _plain(value: object) -> str:
    """A parameter as text that is the same in every process; its type's name if it has none."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_plain, value)) + ")"
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return "{" + ",".join(f"{key}:{_plain(item)}" for key, item in items) + "}"
    if hasattr(value, "name") and hasattr(type(value), "__members__"):  # an enum of C++ or Python
        return str(value.name)
    kind = type(value)
    is_numpy_scalar = kind.__module__.startswith("numpy") and getattr(value, "ndim", 1) == 0
    if is_numpy_scalar or kind.__name__.endswith(("DType", "dtype")):
        return str(value)
    return kind.__name__  # its repr may hold an address
