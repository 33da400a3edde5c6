"""What a program does under any layout: arithmetic, fusion, halos, propagated shardings.

In: a `Problem`: the traced program with its sharding rules, axis classes and pins. Out, each
computed once for all layouts: the order in which a backend runs the equations and what of them
reaches memory (`fusion_schedule`); classes of equations and of values with the same cost
(`equation_classes`, with `flops` and `halo`); constraints that the partitioner applies to the
producer of a value (`applied_constraints`), factors that it gathers (`gathered_factors`), and
shardings that it carries on to values of which nothing is stated (`propagation`). Next are
`step_time` and `memory`, which price many layouts.
"""
