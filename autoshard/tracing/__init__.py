"""Tracing: from a function to a `Program`, and back to a jaxpr.

In come the user's function and example arguments: `signature` flattens the call as `jax.jit` would,
`trace` makes a `Program` of it (values, equations and the bodies of scans, loops and branches, free
of jax types), `carry` finds which outputs are arguments of the next step. Traits of primitives are
in `primitives`, facts that flow through a program in `dataflow`. Out goes the program, and from
`rewrite` the same jaxpr with constraints written into it. `axes` is next.

Imports: jax_internals.
"""
