"""This process and the others: interrupts, progress, supervision, and groups of processes.

In come signals, texts for a terminal, commands to keep alive, and small values to agree on. Out go
interruptions at a place where they can be served, lines on standard error, exit codes, and the same
values on every process of a search (`process_group`; the store that all see is handed in). Next
are `evaluate.multiprocess` (a search by several processes), `search.study` (workers),
`compiler.isolated` (a process that compiles) and `cli`.

Imports: text.
"""
