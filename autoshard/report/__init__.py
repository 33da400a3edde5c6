"""What people read: texts, tables and pages about a plan, and questions that it answers.

In come a `BoundPlan` (`compiler`) or a `SpecTable` (`table`), with candidates that have been
predicted, compiled and measured. Out come values that print themselves: the summary and the page of
a plan (`plan_text`, `html`), its explanation (`explain`), what other specs would cost (`what_if`),
the few constraints to paste into the source (`minimise`, which asks Shardy), and what a change of
the program would gain (`advice`, which asks the search). No layout is chosen here; every number is
shown with its provenance. `plan`, which gives a user these answers as methods, is next.

Imports: axes, compiler, cost_model, evidence, layout, search, shardy, table, tracing.
"""
