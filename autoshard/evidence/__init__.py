"""Plain records of what is known of a candidate, by provenance; they know neither jax nor a device.

In come numbers from whoever found them: the cost model (predicted), Shardy's passes (partitioned),
the compiler (compiled), a comparison of outputs (verified), the clock (measured). Out go frozen
records that are written into a spec table or a study as they are: a `Candidate` gains evidence by
`dataclasses.replace`. Collectives are counted by one rule, whoever counts them (`collectives`), and
named by the mesh axes that they span (`replica_groups`). Next is whoever has numbers: `shardy`,
`cost_model`, `compiler`, `evaluate`.

Imports: errors.
"""
