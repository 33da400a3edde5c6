"""A layout as a real program: jitted, lowered, compiled, its text read; here or in another process.

In come a traced function, a layout and a mesh. Out go a jitted function (`compile.build`), an
executable with its evidence (`compile.compile_built`), and a `BoundPlan`: what a user calls, places
arrays with and initialises by. The evidence is read from the program's text alone
(`hlo_collectives`, `hlo_cycles`: the TPU compiler's own estimate), so it is the same for a program
that another process compiled or partitioned: `isolated` keeps one that may crash, `pool` several
for a target, with a `cache` on disk. `evaluate`, which compiles candidates, is next.

Imports: devices, evidence, jax_internals, layout, processes, shardy, tracing.
"""
