"""Is it right? Outputs of a layout against those of the unsharded function, from one trace.

In come a traced function and its arguments (`inputs`). `interpret` evaluates its jaxpr equation by
equation: inside one jit with every equation by itself and every sum in an order that a seed draws
(`sum_order`), or op by op without jit. `reference` runs the function as jax compiles it, and in
these other ways, which say how far rounding alone takes each element (`rounding`), and whether the
compiler got the unsharded function right. Out goes a `Reference`, which compares (`compare`). Next
is `device_runner`.

Imports: axes, compiler, evidence, jax_internals, layout, tracing.
"""
