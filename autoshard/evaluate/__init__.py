"""From ranked proposals to a winner: candidates gain evidence, step by step.

In come `Proposals` (`search`) and a `Setting` (the traced request, the predictor, the devices). An
`Evaluation` holds an `Entry` for each candidate and does one thing with one of them: partition,
compile, verify, measure. `selection` (on a target `target_selection`) decides which get how far and
which one wins; an `Evaluator` decides where: here, or by any worker of a study
(`shared_evaluator`). What happens on the devices is a `DeviceRunner`'s, or by several processes a
`MultiProcessRunner`'s; which numbers are right, `verification` says. Out goes the winner with the
evidence of all; then `_stages` makes a `Plan`.

Imports: axes, compiler, cost_model, devices, evidence, jax_internals, layout, processes, search,
shardy, tracing.
"""
