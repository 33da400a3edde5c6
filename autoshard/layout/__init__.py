"""Layouts: from mesh, pins and axis rules to the spec of every value, and to constraints.

In come a function with example arguments and a mesh (`prepare`), then axis rules. `problem` is what
stays fixed while candidates vary; `layout` sends logical axes to mesh axes by first-fit, one layout
at a time, and `placements` does the same for thousands at once. Out go specs of arguments and
results, and the constraints to state inside the function, as data (`constraints`). The cost model
predicts layouts from here, the compiler builds them; both come next, and `search` proposes them.
"""
