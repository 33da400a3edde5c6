"""Distinct jaxprs: every place of the program has variables of its own.

jax hands the same Jaxpr object to two calls of one helper. Here plain `jit` calls are inlined and
every body gets variables of its own, so that a variable is one place. `custom_jvp` and `custom_vjp`
are never inlined: the plan would silently lose its gradient rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.jax_internals import jaxprs
from autoshard.tracing.primitives import INLINED


def distinct_copy(jaxpr: Any, keep_user_constraints: bool) -> Any:
    """An open jaxpr that computes the same.

    Args:
        jaxpr: Open or closed.
        keep_user_constraints: False to leave out sharding constraints.
    """
    return _Distinct(keep_user_constraints).copy(jaxpr)


class _Distinct:
    """Copies jaxprs so that plain jit calls are inlined and each variable is in one place only."""

    def __init__(self, keep_user_constraints: bool) -> None:
        self._keep_user_constraints = keep_user_constraints

    def copy(self, jaxpr: Any) -> Any:
        """An open jaxpr that computes the same, with variables of its own in all bodies."""
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        scope = _Scope()
        invars = [scope.define(var) for var in jaxpr.invars]
        constvars = [scope.define(var) for var in jaxpr.constvars]
        eqns: list[Any] = []
        self._copy_eqns(jaxpr, scope, eqns, None)
        outvars = [scope.read(var) for var in jaxpr.outvars]
        eqns = _live(eqns, outvars)
        return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)

    def _copy_eqns(self, jaxpr: Any, scope: _Scope, eqns: list[Any], call: Any) -> None:
        """Appends copies of the equations of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            scope: What its variables are called in the copy.
            eqns: What to append to.
            call: The call that it is inlined from, None if it is not.
        """
        for eqn in jaxpr.eqns:
            named = eqn if call is None else jaxprs.nest_name_stack(eqn, call)
            # The user's constraint is left out by reading its operand in the place of its result.
            if eqn.primitive.name == "sharding_constraint" and not self._keep_user_constraints:
                scope.rename(eqn.outvars[0], scope.read(eqn.invars[0]))
            elif _is_plain_jit(eqn):
                self._inline(eqn, named, scope, eqns)
            else:
                eqns.append(self._copied(named, scope))

    def _inline(self, eqn: Any, call: Any, scope: _Scope, eqns: list[Any]) -> None:
        body = jaxprs.open_jaxpr(_called_jaxpr(eqn))
        body_scope = _Scope()
        for var, atom in zip(body.invars, eqn.invars, strict=True):
            body_scope.rename(var, scope.read(atom))
        self._copy_eqns(body, body_scope, eqns, call)
        for result, var in zip(eqn.outvars, body.outvars, strict=True):
            scope.rename(result, body_scope.read(var))

    def _copied(self, eqn: Any, scope: _Scope) -> Any:
        params = jaxprs.map_jaxprs(
            eqn.params, lambda _, jaxpr: jaxprs.replace_jaxpr(jaxpr, self.copy(jaxpr))
        )
        invars = [scope.read(atom) for atom in eqn.invars]
        outvars = [v if jaxprs.is_drop(v) else scope.define(v) for v in eqn.outvars]
        return eqn.replace(invars=invars, outvars=outvars, params=params)


class _Scope:
    """What the variables of a jaxpr are called in its copy."""

    def __init__(self) -> None:
        self._names: dict[Any, Any] = {}

    def define(self, var: Any) -> Any:
        """A new variable for this one."""
        self._names[var] = new = jaxprs.new_var(var.aval)
        return new

    def rename(self, var: Any, atom: Any) -> None:
        """Puts a variable or literal of the copy in the place of this one."""
        self._names[var] = atom

    def read(self, atom: Any) -> Any:
        """A literal itself; what a variable is called in the copy."""
        return atom if jaxprs.is_literal(atom) else self._names[atom]


def _is_plain_jit(eqn: Any) -> bool:
    """True for a call without shardings of its own: only then does inlining change nothing."""
    if eqn.primitive.name not in INLINED or jaxprs.consts_of(_called_jaxpr(eqn)):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(sharding is None or jaxprs.is_unspecified(sharding) for sharding in shardings)


def _called_jaxpr(eqn: Any) -> Any:
    return eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")


def _live(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations that an output needs or that have an effect.

    XLA drops the others, so they must not count.
    """
    needed = {var for var in outvars if not jaxprs.is_literal(var)}
    live = []
    for eqn in reversed(eqns):
        # Effects count without readers: prints, callbacks, checks.
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(atom for atom in eqn.invars if not jaxprs.is_literal(atom))
    return live[::-1]
