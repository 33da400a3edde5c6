"""The one door to what jax does not promise: `jax._src`, `jax.extend`, `jaxlib`.

In come jaxprs, lowered programs, MLIR modules and processes as jax holds them; out go small
functions on them that mean the same in every jax release that is supported, so that everything else
is typed and survives an upgrade. One file a subject: `jaxprs`, `constraint_eqns` (equations built
from traced ones), `explicit_axes` (programs that say shardings in types), `other_meshes` (meshes
that a function makes), `mlir`, `executables` (programs compiled elsewhere), `coordination` (keys
and values that all processes see). `needed_names` lists what is taken from jax's inside; a jax
without one of these names is refused when this folder is imported. `tracing` is next.

Imports: errors.
"""

from autoshard.jax_internals.needed_names import require_names

require_names()
