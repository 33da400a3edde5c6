"""The spec table: a plan as a small JSON file that is committed and reviewed.

In comes a `BoundPlan` (`from_plan`) or a file (`read_table`, of this schema or an older one); out
comes a `SpecTable`, and from it the file again (`write_table`), the forms of other libraries
(`export`) and a text of what two tables differ in (`diff`). With a program a table becomes a layout
again, also where the program or the mesh changed (`rebind`), or a list of what changed (`check`).
`schema` says what a file holds. Next are `report`, which shows tables, and `_apply`, which applies
them.

Imports: axes, compiler, evidence, layout, tracing.
"""
