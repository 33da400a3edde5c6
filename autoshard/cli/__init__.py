"""The `autoshard` command: what users type becomes calls of the public functions.

In come arguments, job files (`autoshard.toml`) and factories (`pkg.module:factory`, the only code
of a user that is imported, and only from where the user says). Out go the texts and tables that the
folders below make, one line for each error, and an exit code. `app` lists the commands; each file
beside it has those of one subject, and `options` what several of them take. Nothing imports it.

Imports: _apply, _optimize, cost_model, devices, evaluate, evidence, jax_internals, layout, plan,
processes, report, search, table.
"""
