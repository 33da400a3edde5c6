"""A study shared by workers: which tasks it has, who is at which, and what came of them.

In comes the name of a storage (`storage`: a database, a proxy, or a `journal` file, whose lines
(`journal_lines`) survive damage and whose writers take turns (`journal_lock`)) and tasks, each a
name (`task_id`) with a function that does it. `task_queue` gives each task to one worker: claims
and results are Optuna trials (`claims`), a process beside the worker shows that it lives
(`heartbeat`, `lease_watch`), and one worker at a time measures on a machine (`machine_lock`).
`shared_study` puts a search on it. Out go the records of all tasks, the same for every worker, and
what `autoshard status` shows (`status`).

Optuna is imported here and in `search.sampler` only. Next: `evaluate.shared_evaluator`, which makes
tasks of evaluations.
"""
