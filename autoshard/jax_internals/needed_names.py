"""Which names of jax's inside this package needs, and whether this jax has them.

A newer jax may have renamed one. Then the first use of autoshard says which, instead of an
`AttributeError` somewhere in a search.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import jax

from autoshard.errors import JaxVersionError

TESTED = ("0.10.2", "0.12.0.1")
"""The releases of jax that the tests run on; `constraints.txt` installs them."""

NEEDED = {
    "jax._src.core": ("current_jaxpr_eqn_context",),
    "jax._src.distributed": ("global_state",),
    "jax._src.effects": ("ordered_effects", "shardable_ordered_effects"),
    "jax._src.interpreters.mlir": ("make_ir_context", "module_to_bytecode"),
    "jax._src.interpreters.partial_eval": ("lower_jaxpr2",),
    "jax._src.interpreters.pxla": ("create_compile_options", "get_prop_to_input_output"),
    "jax._src.source_info_util": ("user_frame", "user_frames"),
    "jax._src.stages": ("Executable",),
    "jax._src.state.discharge": ("discharge_state",),
    "jax.extend.core": (
        "ClosedJaxpr",
        "DropVar",
        "Jaxpr",
        "Literal",
        "Var",
        "check_jaxpr",
        "jaxpr_as_fun",
    ),
    "jax.extend.mlir.ir": (
        "ArrayAttr",
        "Block",
        "BlockArgument",
        "DenseIntElementsAttr",
        "FlatSymbolRefAttr",
        "FunctionType",
        "MLIRError",
        "Module",
        "OpResult",
        "RankedTensorType",
        "TypeAttr",
        "WalkResult",
    ),
    "jax.extend.mlir.passmanager": ("PassManager",),
    "jaxlib._jax": ("CompileOnlyPyClient", "get_topology_for_devices"),
    "jaxlib.xla_client": ("CompileOptions", "DeviceAssignment", "DeviceList"),
}
"""By module, what the files of this folder take from it; a test compares it with them."""


def missing_names() -> Iterator[str]:
    """Full names of what this jax does not have."""
    for module_name, names in NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            yield module_name
            continue
        yield from (f"{module_name}.{name}" for name in names if not hasattr(module, name))


def require_names() -> None:
    """Raises unless this jax has all names.

    Raises:
        JaxVersionError: With each name that is missing.
    """
    missing = list(missing_names())
    if missing:
        raise JaxVersionError(
            f"jax {jax.__version__} does not have {', '.join(missing)}, which autoshard needs. It "
            f"is tested with jax {' and '.join(TESTED)}: install one of them, or an autoshard that "
            f"knows this jax."
        )
