"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.jax_internals.jaxprs import (
    JaxprEqn,
    Var,
    as_call,
    map_jaxprs,
    open_jaxpr,
    replace_jaxpr,
)


def user_spec(eqn: JaxprEqn, mesh: jax.sharding.Mesh) -> PartitionSpec | None:
    """The PartitionSpec of a `sharding_constraint` equation; None where it is none, or on another
    mesh.
    """
    sharding = eqn.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    own = sharding.mesh
    same = own.axis_names == mesh.axis_names and own.axis_sizes == mesh.axis_sizes
    if isinstance(own, jax.sharding.Mesh):
        same = same and bool((own.devices == mesh.devices).all())
    return sharding.spec if same else None


class ConstraintMaker:
    """Makes `sharding_constraint` equations, with the primitive and parameters taken from a traced
    one.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._templates: dict[tuple[int, PartitionSpec], JaxprEqn] = {}

    def __call__(self, source: Var, result: Var, spec: PartitionSpec, anchor: JaxprEqn) -> JaxprEqn:
        """The equation `result = sharding_constraint(source)`, with the source line of `anchor`."""
        rank = len(source.aval.shape)
        key = (rank, spec)
        if key not in self._templates:
            sharding = NamedSharding(self._mesh, spec)
            aval = jax.ShapeDtypeStruct((self._mesh.size,) * rank, np.float32)
            with jax.sharding.use_abstract_mesh(
                self._mesh.abstract_mesh
            ):  # not the caller's, which may be Explicit
                traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
                    aval
                )
            (self._templates[key],) = traced.jaxpr.eqns
        return self._templates[key].replace(
            invars=[source], outvars=[result], source_info=anchor.source_info, ctx=anchor.ctx
        )


class ShardMapMaker:
    """Makes `shard_map` equations: a call on the pieces of its operands, manual over all mesh
    axes.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._context: Any = None

    def __call__(
        self,
        eqn: JaxprEqn,
        piece: JaxprEqn,
        operands: Sequence[PartitionSpec],
        results: Sequence[PartitionSpec],
        summed: Sequence[str] = (),
    ) -> JaxprEqn:
        """The equation that does what `eqn` does.

        Args:
            eqn: The equation it takes the place of.
            piece: The equation as one device runs it; only its parameters count.
            operands: Specs of the operands.
            results: Specs of the results.
            summed: Mesh axes over which the results of the pieces are added.
        """
        if self._context is None:
            probe = self._traced(
                jax.lax.neg,
                [jax.ShapeDtypeStruct((), np.float32)],
                (PartitionSpec(),),
                PartitionSpec(),
            )
            self._context = open_jaxpr(probe.params["jaxpr"]).eqns[0].ctx
        call = as_call(piece.replace(params=_in_context(piece.params, self._context)))

        def body(*operands: Any) -> tuple[Any, ...]:
            found = call(*operands)
            return tuple(jax.lax.psum(f, tuple(summed)) for f in found) if summed else found

        avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        made = self._traced(body, avals, tuple(operands), tuple(results))
        return made.replace(
            invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx
        )

    def _traced(
        self, body: Callable[..., Any], avals: Sequence[Any], in_specs: Any, out_specs: Any
    ) -> JaxprEqn:
        with jax.sharding.use_abstract_mesh(
            self._mesh.abstract_mesh
        ):  # not the caller's, which may be Explicit
            mapped = jax.shard_map(
                body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
            (made,) = jax.make_jaxpr(mapped)(*avals).jaxpr.eqns
        return made


def _in_context(params: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Parameters whose jaxprs (a kernel's and its index maps') were traced in another context: that
    of a `shard_map`.

    Without it jax finds that a kernel's equations are not manual over the mesh axes.
    """

    def moved(jaxpr: Any) -> Any:
        eqns = [
            eqn.replace(ctx=context, params=_in_context(eqn.params, context))
            for eqn in open_jaxpr(jaxpr).eqns
        ]
        return replace_jaxpr(jaxpr, open_jaxpr(jaxpr).replace(eqns=eqns))

    changed = map_jaxprs(params, lambda _, jaxpr: moved(jaxpr))
    if "grid_mapping" in changed:
        mapping = changed["grid_mapping"]
        blocks = (
            block.replace(index_map_jaxpr=moved(block.index_map_jaxpr))
            for block in mapping.block_mappings
        )
        changed["grid_mapping"] = mapping.replace(block_mappings=tuple(blocks))
    return changed
