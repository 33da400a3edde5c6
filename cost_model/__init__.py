"""The predictor: seconds, collectives and peak memory of layouts, without compiling anything.

In: a `Problem` (`layout`), a `Hardware` with its `Backend`, and which arguments are donated. Out:
a `Prediction` of each layout (`predict`), thousands of layouts at once where a search asks for
them, and what the memory of a layout is for (`memory_breakdown`). Inside, `program` counts what
there is to do under any layout, `hardware` knows what that costs once, `step_time` prices many
layouts as table look-ups, and `memory` finds where they peak. `search`, which asks for predictions,
and `evaluate`, which compares them with compiled programs, are next.

Imports: axes, evidence, layout, tracing.
"""
