"""Axes: which dimensions of a program belong together, and what its arguments are for.

In comes a traced `Program`, out go its axis classes (dimensions that are one and the same, joined
by `sharding_rules` and body mappings), its logical axes (classes at isomorphic places of the
program, under one name that a rule can send to a mesh axis) and its argument groups (parameters,
optimizer state, data). Rules of primitives that nobody wrote one for are inferred here; kernels get
theirs from their grid. The next folder is `layout`, which assigns mesh axes to logical axes.
"""
