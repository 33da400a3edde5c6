"""This process and the others: interrupts, progress, supervision, and groups of processes.

In come signals, texts for a terminal, commands to keep alive, and small values to agree on. Out go
interruptions at a place where they can be served, lines on standard error, exit codes, and the same
values on every process of a search (`process_group`, over keys and values that all see: the
coordination service of `jax_internals`).

It stands on `errors` alone. Who uses it: `evaluate.multiprocess` (a search by several processes),
`search.study` (workers), `compiler.isolated` (a process that compiles) and `cli`.
"""
