"""Shardy's passes, run from Python on lowered programs.

In comes a lowered program (StableHLO). `partition` propagates its shardings and inserts collectives
without compiling: out go those collectives, with their mesh axes and bytes, and the shardings of
arguments and results. `op_rules` reads the sharding rule that Shardy states for each operation;
`axes` composes rules of unknown primitives from them. MLIR itself is behind `jax_internals.mlir`.
Next are `compiler`, whose processes partition, and `evaluate`, which asks both.

Imports: evidence, jax_internals.
"""
