"""A spec table as Python: a readable module of PartitionSpecs, and ordered regular expressions over
leaf paths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from autoshard.table.leaf_patterns import Each, fold, ranges_of
from autoshard.table.spec_table import Leaf, SpecTable, spec_text

_HELPERS = '''

def specs_of(argument, tree, specs=INPUTS):
    """The PartitionSpecs of an argument, in the structure of its tree; None for leaves that are no arrays."""

    def spec(path, leaf):
        short = "/".join(filter(None, (argument, jax.tree_util.keystr(path, simple=True, separator="/"))))
        full = argument + jax.tree_util.keystr(path)
        if short in specs or full in specs:
            return specs[short if short in specs else full]
        if hasattr(leaf, "shape"):
            raise KeyError(f"{short} is not in this table")
        return None

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings_of(argument, tree, mesh, specs=INPUTS):
    """The NamedShardings of an argument; for `jax.device_put`, `in_shardings`, `eqx.filter_shard`, orbax."""
    found = specs_of(argument, tree, specs)
    is_spec = lambda x: isinstance(x, P)
    return jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), found, is_leaf=is_spec)
'''


def python_text(table: SpecTable) -> str:
    """A module that depends on jax only."""
    rules = (
        "".join(f"\n    {rule}" for rule in table.rules) or "\n    none: everything is replicated"
    )
    parts = [
        _docstring(
            f"Shardings of {table.function} on mesh {table.mesh.axes}, written by "
            f"autoshard.\n\nRules:{rules}\n"
        ),
        "import jax\nfrom jax.sharding import PartitionSpec as P\n",
        f"MESH_AXES = {table.mesh.axes!r}\n",
        _dict_text("INPUTS", table.inputs),
        _dict_text("OUTPUTS", table.outputs),
    ]
    return "\n".join(parts) + _HELPERS


def _docstring(text: str) -> str:
    safe = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
    return '"""' + safe.replace("\\", "\\\\").replace('"', "'") + '"""\n'


def _dict_text(name: str, leaves: Mapping[str, Leaf]) -> str:
    """Specs by leaf path; a pattern before its exceptions, because the later entry of a dict
    stays.
    """
    lines = fold({path: spec_text(leaf.spec) for path, leaf in leaves.items()})
    ordered = (
        sorted(lines.items(), key=lambda line: -len(line[1][0]))
        if _needs_order(lines)
        else list(lines.items())
    )
    rows = [f"    {_entry(path, each, spec)}," for path, (each, spec) in ordered]
    return "\n".join([f"{name} = {{", *rows, "}"]) + "\n"


def _needs_order(lines: Mapping[str, tuple[Each, str]]) -> bool:
    ranks = [len(each) for each, _ in lines.values()]
    return len(set(ranks) - {0}) > 1


def _entry(path: str, each: Each, spec: str) -> str:
    if not each:
        return f"{path!r}: {spec}"
    names = "ijklmnop"[: len(each)] if len(each) <= 8 else [f"i{n}" for n in range(len(each))]
    template = path.replace("{", "{{").replace("}", "}}").replace("*", "{}")
    loops = "".join(f" for {n} in {_range_text(text)}" for n, text in zip(names, each, strict=True))
    return f"**{{{template!r}.format({', '.join(names)}): {spec}{loops}}}"


def _range_text(text: str) -> str:
    runs = [
        f"range({run.stop})" if run.start == 0 else f"range({run.start}, {run.stop})"
        for run in ranges_of(text)
    ]
    return runs[0] if len(runs) == 1 else f"({', '.join(f'*{run}' for run in runs)})"


def regex_text(table: SpecTable, leaves: Mapping[str, Leaf]) -> str:
    """Ordered rules for `re.search` over leaf paths; the first match decides."""
    rules = regex_rules({path: spec_text(leaf.spec) for path, leaf in leaves.items()})
    rows = [f"    ({pattern!r}, {spec})," for pattern, spec in rules]
    head = _docstring(
        f"Sharding rules of {table.function} on mesh {table.mesh.axes}, written by autoshard.\n\n"
        f"Ordered: (pattern, PartitionSpec); re.search over the leaf path, the first match "
        f"decides.\n"
    )
    return (
        "\n".join([head, "from jax.sharding import PartitionSpec as P\n", "RULES = (", *rows, ")"])
        + "\n"
    )


def regex_rules(specs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Few rules that give every path its spec: the shortest ends of paths that agree, and single
    paths before them.

    >>> regex_rules({"p/0/wq": "P('a')", "p/1/wq": "P('a')", "p/0/b": "P()", "m/b": "P()", "q/b": "P('a')"})
    [('^q/b$', "P('a')"), ('(^|/)wq$', "P('a')"), ('(^|/)b$', 'P()')]
    """
    single: list[tuple[str, str]] = []
    ends: list[tuple[str, str]] = []

    def cover(paths: Sequence[str], length: int) -> None:
        by_end: dict[str, list[str]] = {}
        for path in paths:
            by_end.setdefault(_end(path, length), []).append(path)
        for end, members in by_end.items():
            counts = Counter(specs[path] for path in members)
            common, count = counts.most_common(1)[0]
            whole = all(len(path.split("/")) <= length for path in members)
            if len(counts) == 1 or whole or len(members) - count == 1:
                single.extend(
                    (f"^{re.escape(path)}$", specs[path])
                    for path in members
                    if specs[path] != common
                )
                ends.append((end, common))
            else:
                cover(members, length + 1)

    cover(list(specs), 1)
    ends.sort(key=lambda rule: -rule[0].count("/"))
    rules = single + ends
    for path, spec in specs.items():
        found = next((s for pattern, s in rules if re.search(pattern, path)), None)
        assert found == spec, (path, found, spec)
    return rules


def _numbered(part: str) -> str:
    """A pattern for `7`, `layers_7` and the like, in which the number may be any; `fc1` is
    itself.
    """
    return re.sub(r"(^|_)[0-9]+$", r"\1\\d+", re.escape(part))


def _end(path: str, length: int) -> str:
    """A pattern for the last parts of a path, numbers standing for any number."""
    parts = path.split("/")
    *inner, last = parts[-length:]
    text = "/".join([*map(_numbered, inner), r"\d+" if last.isdecimal() else re.escape(last)])
    return f"^{text}$" if len(parts) <= length else f"(^|/){text}$"
