"""Axes: which dimensions of a program belong together, and what its arguments are for.

In comes a traced `Program`, out go its axis classes (dimensions that are one and the same, joined
by the factors of `sharding_rules` and by how loops pass values to their bodies), its logical axes
(classes at isomorphic places of the program, under one name that a rule can send to a mesh axis)
and its argument groups (parameters, optimizer state, data). A primitive that `sharding_rules` does
not know gets a rule from what Shardy states for its lowering (`stated_rules`) or from a run on
small arrays (`discovered_rules`); `infer_rules` tries both. A kernel gets one from its grid
(`kernels`). What is applied to each shard by itself says `pieces`. `layout` is next.

Imports: jax_internals, shardy, tracing.
"""
