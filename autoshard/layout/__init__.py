"""Layouts: from mesh, pins and axis rules to the spec of every value, and to constraints.

In come a function with example arguments, a mesh and pins (specs that the user fixes) (`prepare`),
then axis rules. `problem` is what stays fixed while candidates vary; `layout` sends logical axes to
mesh axes by first-fit (the first rule whose mesh axis is free and divides), one layout at a time,
and `placements` does the same for thousands at once. Out go specs of arguments and results, and the
constraints to state inside the function, as data (`constraints`). `cost_model`, which predicts
layouts, and `compiler`, which builds them, are next.

Imports: axes, devices, jax_internals, tracing.
"""
