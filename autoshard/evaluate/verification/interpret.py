"""A jaxpr evaluated equation by equation, in two ways that the compiler's optimisations for the
whole program do not reach.

`each_alone` is meant for one jit: there is a barrier behind every equation, so nothing is fused or
updated in place across equations, and every sum is made in the order that a seed draws. `op_by_op`
runs without jit: every primitive is compiled and run for itself, loops are Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.evaluate.verification.sum_order import SumOrder, in_drawn_order, summed_sizes
from autoshard.jax_internals import jaxprs
from autoshard.tracing.primitives import Trait, with_trait

OPERATIONS = 20_000
"""Operations that are run one by one at most: about 100 microseconds each on a CPU, besides the
tens of milliseconds that each different one takes to compile.
`tests/evaluate/test_interpret.py` has a loop that is longer."""

_CALLS = with_trait(Trait.ONE_TO_ONE)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_FREE = frozenset(("broadcast_in_dim", "iota"))
"""Behind these is no barrier: they round nothing, and what they make would fill the memory."""


class TooLongError(Exception):
    """A program of more operations than are run one by one."""


def each_alone(closed: Any) -> Callable[..., list[Any]]:
    """A function of a seed (0: sums as they are written) and flat leaves, to be jitted."""
    sizes = summed_sizes(jaxprs.open_jaxpr(closed))

    def call(seed: Any, *leaves: Any) -> list[Any]:
        return _EachAlone(SumOrder(seed, sizes)).evaluate(closed, leaves)

    return call


def op_by_op(closed: Any) -> Callable[..., list[Any]]:
    """A function of flat leaves that runs one primitive after the other.

    It raises `TooLongError` after `OPERATIONS` of them.
    """

    def call(*leaves: Any) -> list[Any]:
        return _OpByOp().evaluate(closed, leaves)

    return call


class _Interpreter:
    """Evaluates jaxprs; subclasses say how loops, branches and other equations are evaluated."""

    def evaluate(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of an open or closed jaxpr."""
        plain, consts = jaxprs.open_jaxpr(jaxpr), jaxprs.consts_of(jaxpr)
        known = dict(zip(jaxprs.all_inputs(plain), (*consts, *operands), strict=True))
        last_use = _last_uses(plain)

        def read(atom: Any) -> Any:
            return atom.val if jaxprs.is_literal(atom) else known[atom]

        for number, eqn in enumerate(plain.eqns):
            with jaxprs.context_of(eqn):
                results = self._equation(eqn, list(map(read, eqn.invars)))
            known.update(zip(eqn.outvars, results, strict=True))
            for var in last_use.get(number, ()):
                known.pop(var, None)
        return list(map(read, plain.outvars))

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            body = next(params[key] for key in _BODIES if key in params)
            if params.get("prevent_cse") and params.get("differentiated"):
                operands = lax.optimization_barrier(operands)  # as jax lowers it
            return self.evaluate(body, operands)
        if name == "scan":
            consts, carries = jaxprs.scan_counts(params)
            return self._scan(params, operands[:consts], operands[consts:], carries)
        if name == "while":
            first = params["cond_nconsts"]
            second = first + params["body_nconsts"]
            of_cond, of_body = operands[:first], operands[first:second]
            return self._while(params, of_cond, of_body, operands[second:])
        if name == "cond":
            return self._cond(params["branches"], operands[0], operands[1:])
        return self._primitive(eqn, operands)

    def _scan(
        self, params: Any, consts: list[Any], operands: list[Any], carries: int
    ) -> Sequence[Any]:
        raise NotImplementedError

    def _while(
        self, params: Any, of_cond: list[Any], of_body: list[Any], state: list[Any]
    ) -> Sequence[Any]:
        raise NotImplementedError

    def _cond(self, branches: Sequence[Any], index: Any, operands: list[Any]) -> Sequence[Any]:
        raise NotImplementedError

    def _primitive(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        raise NotImplementedError


class _EachAlone(_Interpreter):
    def __init__(self, order: SumOrder) -> None:
        self._order = order

    def _scan(
        self, params: Any, consts: list[Any], operands: list[Any], carries: int
    ) -> Sequence[Any]:
        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.evaluate(params["jaxpr"], [*consts, *carry, *slices])
            return results[:carries], results[carries:]

        carry, stacked = lax.scan(
            step,
            operands[:carries],
            operands[carries:],
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*carry, *stacked]

    def _while(
        self, params: Any, of_cond: list[Any], of_body: list[Any], state: list[Any]
    ) -> Sequence[Any]:
        def goes_on(state: list[Any]) -> Any:
            return self.evaluate(params["cond_jaxpr"], [*of_cond, *state])[0]

        def step(state: list[Any]) -> list[Any]:
            return self.evaluate(params["body_jaxpr"], [*of_body, *state])

        results: list[Any] = lax.while_loop(goes_on, step, state)
        return results

    def _cond(self, branches: Sequence[Any], index: Any, operands: list[Any]) -> Sequence[Any]:
        def of(branch: Any) -> Callable[..., list[Any]]:
            return lambda *operands: self.evaluate(branch, operands)

        results: list[Any] = lax.switch(index, list(map(of, branches)), *operands)
        return results

    def _primitive(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        results = in_drawn_order(eqn, operands, self._order)
        if eqn.primitive.name in _FREE or not all(map(_is_plain, eqn.outvars)):
            return results
        behind: Sequence[Any] = lax.optimization_barrier(list(results))
        return behind


class _OpByOp(_Interpreter):
    def __init__(self) -> None:
        self._left = OPERATIONS

    def _scan(
        self, params: Any, consts: list[Any], operands: list[Any], carries: int
    ) -> Sequence[Any]:
        carry, scanned, length = operands[:carries], operands[carries:], params["length"]
        if not length:
            raise TooLongError("a loop that runs zero times has no results to stack")
        rows: list[list[Any]] = []
        for trip in range(length)[:: -1 if params["reverse"] else 1]:
            results = self.evaluate(
                params["jaxpr"], [*consts, *carry, *(one[trip] for one in scanned)]
            )
            carry = results[:carries]
            rows.append(results[carries:])
        if params["reverse"]:
            rows.reverse()
        return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]

    def _while(
        self, params: Any, of_cond: list[Any], of_body: list[Any], state: list[Any]
    ) -> Sequence[Any]:
        while bool(self.evaluate(params["cond_jaxpr"], [*of_cond, *state])[0]):
            state = self.evaluate(params["body_jaxpr"], [*of_body, *state])
        return state

    def _cond(self, branches: Sequence[Any], index: Any, operands: list[Any]) -> Sequence[Any]:
        chosen = min(max(int(index), 0), len(branches) - 1)
        return self.evaluate(branches[chosen], operands)

    def _primitive(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if not self._left:
            raise TooLongError(f"it runs more than {OPERATIONS:,} operations")
        self._left -= 1
        return jaxprs.as_call(eqn)(*operands)


def _is_plain(var: Any) -> bool:
    """True for an array of numbers: no keys, no tokens."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """By number of an equation, the variables that nothing after it reads."""
    last: dict[Any, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for var in (*eqn.invars, *eqn.outvars):
            if not jaxprs.is_literal(var):
                last[var] = number
    for var in jaxpr.outvars:
        if not jaxprs.is_literal(var):
            last.pop(var, None)
    uses: dict[int, list[Any]] = {}
    for var, number in last.items():
        uses.setdefault(number, []).append(var)
    return uses
