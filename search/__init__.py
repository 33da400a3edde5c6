"""Search: which layouts are worth looking at, before anything is compiled.

In come a `layout.Problem` and a predictor of the cost model. `presets` writes down what experts
would do, `space` says which rule lists there are, `sampler` (Optuna) and `local_search` look for
better ones, and `proposer` leads through these. Out go `Proposals`: layouts with their predictions,
best first, one for each set of rule lists that come to the same specs. `evaluate` is next: it
compiles, verifies and measures the best; `search.study` shares that work between processes.

Imports: axes, cost_model, evidence, layout, processes, tracing.
"""
