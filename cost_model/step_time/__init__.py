"""Seconds of many layouts at once: compute and collectives, as sums of NumPy table look-ups.

In: the classes of a program (`program`), a `Hardware` and its `Backend`, and layouts as rows of
`Placements`. `CostTables` (`cost_tables`) gives each layout one row per group of classes
(`row_index`) and sums the rows; rows that are new are priced together, by `equation_costs`
(roofline, partial sums, results) and `value_costs` (operands brought to the spec in which they are
read), which add up collectives in `collective_tables`. Out: seconds, collectives, and the
`temporaries` that a device holds besides the values. Next is `memory`, which finds the peak.
"""
