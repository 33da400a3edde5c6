"""Equations to put into a jaxpr: sharding constraints, and kernels in a `shard_map`.

jax has no constructor for them. Each is traced once from a small function, and its variables are
exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.jax_internals.jaxprs import (
    HOST_KIND,
    JaxprEqn,
    Var,
    as_call,
    is_on_host,
    map_jaxprs,
    open_jaxpr,
    replace_jaxpr,
)


def user_spec(eqn: JaxprEqn, mesh: jax.sharding.Mesh) -> PartitionSpec | None:
    """The PartitionSpec of a `sharding_constraint`; None for another sharding or mesh."""
    sharding = eqn.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    own = sharding.mesh
    same = own.axis_names == mesh.axis_names and own.axis_sizes == mesh.axis_sizes
    if isinstance(own, jax.sharding.Mesh):
        same = same and bool((own.devices == mesh.devices).all())
    return sharding.spec if same else None


class ConstraintMaker:
    """Makes `sharding_constraint` equations from traced ones: one for each spec and rank."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._templates: dict[tuple[int, PartitionSpec, bool], JaxprEqn] = {}

    def __call__(self, source: Var, result: Var, spec: PartitionSpec, anchor: JaxprEqn) -> JaxprEqn:
        """The equation `result = sharding_constraint(source)`, with the source line of `anchor`."""
        key = (len(source.aval.shape), spec, is_on_host(source.aval))
        if key not in self._templates:
            self._templates[key] = self._traced(*key)
        return self._templates[key].replace(
            invars=[source], outvars=[result], source_info=anchor.source_info, ctx=anchor.ctx
        )

    def _traced(self, rank: int, spec: PartitionSpec, on_host: bool) -> JaxprEqn:
        kind = HOST_KIND if on_host else None
        sharding = NamedSharding(self._mesh, spec, memory_kind=kind)
        # Sizes that any spec divides; the equation itself does not hold them.
        aval = jax.ShapeDtypeStruct((self._mesh.size,) * rank, np.float32)
        with _auto(self._mesh):
            traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(aval)
        (eqn,) = traced.jaxpr.eqns
        return eqn


def _auto(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """Traces under a mesh, not under the caller's, which may be Explicit."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


class ShardMapMaker:
    """Makes `shard_map` equations: a call on shards of its operands, manual over all mesh axes."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._context: Any = None

    def __call__(
        self,
        eqn: JaxprEqn,
        shard: JaxprEqn,
        operands: Sequence[PartitionSpec],
        results: Sequence[PartitionSpec],
        summed: Sequence[str] = (),
    ) -> JaxprEqn:
        """The equation that does what `eqn` does.

        Args:
            eqn: The equation it takes the place of.
            shard: The equation as one device runs it; only its parameters count.
            operands: Specs of the operands.
            results: Specs of the results.
            summed: Mesh axes over which the results of the shards are added.
        """
        call = as_call(shard.replace(params=_in_context(shard.params, self._manual_context())))

        def body(*operands: Any) -> tuple[Any, ...]:
            partial = call(*operands)
            return tuple(jax.lax.psum(p, tuple(summed)) for p in partial) if summed else partial

        avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        traced = self._traced(body, avals, tuple(operands), tuple(results))
        return traced.replace(
            invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx
        )

    def _manual_context(self) -> Any:
        """The context of equations inside a `shard_map` over this mesh, found on a probe."""
        if self._context is None:
            scalar, whole = jax.ShapeDtypeStruct((), np.float32), PartitionSpec()
            probe = self._traced(jax.lax.neg, [scalar], (whole,), whole)
            self._context = open_jaxpr(probe.params["jaxpr"]).eqns[0].ctx
        return self._context

    def _traced(
        self, body: Callable[..., Any], avals: Sequence[Any], in_specs: Any, out_specs: Any
    ) -> JaxprEqn:
        with _auto(self._mesh):
            mapped = jax.shard_map(
                body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
            (eqn,) = jax.make_jaxpr(mapped)(*avals).jaxpr.eqns
        return eqn


def _in_context(params: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Parameters whose jaxprs (a kernel's and its index maps') are of another context.

    They were traced outside of a `shard_map`. Unless their equations get its context, jax finds
    that they are not manual over the mesh axes.
    """

    def moved(jaxpr: Any) -> Any:
        eqns = [
            eqn.replace(ctx=context, params=_in_context(eqn.params, context))
            for eqn in open_jaxpr(jaxpr).eqns
        ]
        return replace_jaxpr(jaxpr, open_jaxpr(jaxpr).replace(eqns=eqns))

    changed = map_jaxprs(params, lambda _, jaxpr: moved(jaxpr))
    for name, value in changed.items():
        # Some equations repeat what the context is (`broadcast_in_dim` inside a branch).
        if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
            changed[name] = NamedSharding(context.cur_abstract_mesh, value.spec)
    if "grid_mapping" in changed:
        mapping = changed["grid_mapping"]
        blocks = [
            block.replace(index_map_jaxpr=moved(block.index_map_jaxpr))
            for block in mapping.block_mappings
        ]
        changed["grid_mapping"] = mapping.replace(block_mappings=tuple(blocks))
    return changed
