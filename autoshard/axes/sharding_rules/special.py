"""Bit casts; and the primitives that deliberately link nothing: because body mappings say how their
dimensions relate, or because they are opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, leading_dims
from autoshard.tracing.primitives import KERNELS

RULES: Mapping[str, Rule] = MappingProxyType({"bitcast_convert_type": leading_dims})

_WITH_BODIES = """
    call checkpoint closed_call composite cond core_call core_closed_call core_map custom_jvp_call
    custom_jvp_call_jaxpr custom_lin custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr
    custom_vmap_call eval_jaxpr jit linear_call mpmd_map pjit remat remat2 remat_opt run_scoped
    run_state scan shard_map stage while xla_metadata_call
"""

STRUCTURAL: frozenset[str] = frozenset(_WITH_BODIES.split())
"""Primitives with bodies: how their dimensions relate is stated by `Eqn.mappings`."""

_COLLECTIVE = """
    all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
    all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast
    pbroadcast_done pbroadcast_dynamic pbroadcast_start pgather pmax pmin ppermute ppermute_done
    ppermute_start preduced precv psend psum psum2 psum_done psum_invariant psum_invariant_start
    psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start
    unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter
    unreduced_reduce_scatter_start
"""

_CALLBACK = "check debug_callback debug_print inspect_sharding io_callback pure_callback"

_REFERENCE = "addupdate broadcast_to create_linear get pin swap unpin"

_NO_DATA = """
    after_all create_token dce_sink dim_as_value dimension_size platform_index shape_assertion tie
    unreachable
"""

_OPAQUE_BY_REASON = (
    (
        _COLLECTIVE.split(),
        "a collective over a manual mesh axis: its operands are already local shards",
    ),
    (_CALLBACK.split(), "runs on the host, with the whole array"),
    (["custom_partitioning"], "its own partitioning rule decides"),
    (KERNELS, "a kernel or executable that cannot be looked into"),
    (_REFERENCE.split(), "reads or writes a mutable reference"),
    (_NO_DATA.split(), "orders effects or yields scalars; no array passes through it"),
)


OPAQUE: Mapping[str, str] = MappingProxyType(
    {name: reason for names, reason in _OPAQUE_BY_REASON for name in names}
)
"""Primitives that link nothing on purpose, each with the reason."""
