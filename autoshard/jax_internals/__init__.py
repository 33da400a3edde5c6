"""The one door to what jax does not promise: `jax._src`, `jax.extend`, `jaxlib`.

In come jaxprs, lowered programs, MLIR modules and processes as jax holds them; out go small
functions on them that mean the same in every jax release that is supported, so that everything else
is typed and survives an upgrade. One file a subject: `jaxprs`, `constraint_eqns` (equations built
from traced ones), `mlir`, `executables` (programs compiled elsewhere), `coordination` (keys and
values that all processes see). `tracing` is next.

Imports: nothing of autoshard.
"""
