"""A spec table as Python: a module of PartitionSpecs, or ordered regular expressions over paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from autoshard.table.leaf_patterns import Each, fold, ranges_of
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable

_HELPERS = '''

def specs_of(argument, tree, specs=INPUTS):
    """The PartitionSpecs of an argument, in the structure of its tree; None for other leaves."""

    def spec(path, leaf):
        parts = (argument, jax.tree_util.keystr(path, simple=True, separator="/"))
        short = "/".join(filter(None, parts))
        full = argument + jax.tree_util.keystr(path)
        if short in specs or full in specs:
            return specs[short if short in specs else full]
        if hasattr(leaf, "shape"):
            raise KeyError(f"{short} is not in this table")
        return None

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings_of(argument, tree, mesh, specs=INPUTS):
    """The NamedShardings of an argument: for `jax.device_put`, `in_shardings`, equinox, orbax."""
    is_spec = lambda x: isinstance(x, P)
    return jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        specs_of(argument, tree, specs),
        is_leaf=is_spec,
    )
'''


def python_text(table: SpecTable) -> str:
    """A module that depends on jax only."""
    rules = table.rules or ["none: everything is replicated"]
    rule_lines = "".join(f"\n    {rule}" for rule in rules)
    head = f"Shardings of {table.function} on mesh {table.mesh.axes}, written by autoshard."
    parts = [
        _docstring(f"{head}\n\nRules:{rule_lines}\n"),
        "import jax\nfrom jax.sharding import PartitionSpec as P\n",
        f"MESH_AXES = {table.mesh.axes!r}\n",
        _dict_text("INPUTS", table.inputs),
        _dict_text("OUTPUTS", table.outputs),
    ]
    return "\n".join(parts) + _HELPERS


def _docstring(text: str) -> str:
    # A name may hold quotes and line breaks: nothing in it ends the docstring.
    safe = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
    return '"""' + safe.replace("\\", "\\\\").replace('"', "'") + '"""\n'


def _dict_text(name: str, leaves: Mapping[str, Leaf]) -> str:
    """Specs by leaf path, as a dict; of two entries for one path the later one holds."""
    lines = fold({path: spec_text(leaf.spec) for path, leaf in leaves.items()})
    ordered = list(lines.items())
    if _patterns_overlap(lines):
        ordered.sort(key=lambda line: -len(line[1][0]))  # a pattern before its exceptions
    rows = [f"    {_entry(path, each, spec)}," for path, (each, spec) in ordered]
    return "\n".join([f"{name} = {{", *rows, "}"]) + "\n"


def _patterns_overlap(lines: Mapping[str, tuple[Each, str]]) -> bool:
    """True if one pattern may be an exception of another: they have more and fewer `*`."""
    stars = {len(each) for each, _ in lines.values()}
    return len(stars - {0}) > 1


def _entry(path: str, each: Each, spec: str) -> str:
    if not each:
        return f"{path!r}: {spec}"
    names = _loop_names(len(each))
    template = path.replace("{", "{{").replace("}", "}}").replace("*", "{}")
    loops = [f"for {name} in {_range_text(text)}" for name, text in zip(names, each, strict=True)]
    return f"**{{{template!r}.format({', '.join(names)}): {spec} {' '.join(loops)}}}"


def _loop_names(count: int) -> Sequence[str]:
    """`i`, `j`, `k`, ..."""
    letters = "ijklmnop"
    return letters[:count] if count <= len(letters) else [f"i{n}" for n in range(count)]


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
    imports = "from jax.sharding import PartitionSpec as P\n"
    return "\n".join([head, imports, "RULES = (", *rows, ")"]) + "\n"


def regex_rules(specs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Few rules that give every path its spec.

    The shortest ends of paths that agree, and before them single paths that do not.

    >>> regex_rules({"p/0/wq": "P('a')", "p/1/wq": "P('a')", "p/0/b": "P()", "m/b": "P()"})
    [('(^|/)wq$', "P('a')"), ('(^|/)b$', 'P()')]
    >>> regex_rules({"p/b": "P()", "m/b": "P()", "q/b": "P('a')"})
    [('^q/b$', "P('a')"), ('(^|/)b$', 'P()')]
    """
    cover = _Cover(specs)
    cover.add(list(specs))
    cover.ends.sort(key=lambda rule: -rule[0].count("/"))  # longer ends are exceptions of shorter
    rules = cover.single + cover.ends
    if not _exact(rules, specs):  # odd paths, such as an empty one: each for itself
        rules = [(rf"\A{re.escape(path)}\Z", spec) for path, spec in specs.items()]
    return rules


def _exact(rules: Sequence[tuple[str, str]], specs: Mapping[str, str]) -> bool:
    """True if the first rule that matches a path gives its spec, for all paths."""
    return all(
        next((its for pattern, its in rules if re.search(pattern, path)), None) == spec
        for path, spec in specs.items()
    )


class _Cover:
    """Rules for paths: `single` ones, and `ends` of several paths."""

    def __init__(self, specs: Mapping[str, str]) -> None:
        self._specs = specs
        self.single: list[tuple[str, str]] = []
        self.ends: list[tuple[str, str]] = []

    def add(self, paths: Sequence[str]) -> None:
        """Adds rules for paths, by their last part, or by more where paths do not agree."""
        pending: list[tuple[Sequence[str], int]] = [(paths, 1)]
        while pending:
            group, length = pending.pop()
            by_end: dict[str, list[str]] = {}
            for path in group:
                by_end.setdefault(_end(path, length), []).append(path)
            for end, members in by_end.items():
                if self._agree(members, length):
                    self._add_end(end, members)
                else:
                    pending.append((members, length + 1))

    def _agree(self, members: Sequence[str], length: int) -> bool:
        """True if the members have one spec but for one of them, or have no longer ends.

        A single exception is a shorter rule than a longer end for each of the others.
        """
        _, count = self._most_common(members)
        return len(members) - count <= 1 or all(len(p.split("/")) <= length for p in members)

    def _add_end(self, end: str, members: Sequence[str]) -> None:
        common, _ = self._most_common(members)
        self.ends.append((end, common))
        for path in members:
            if self._specs[path] != common:
                self.single.append((f"^{re.escape(path)}$", self._specs[path]))

    def _most_common(self, members: Sequence[str]) -> tuple[str, int]:
        return Counter(self._specs[path] for path in members).most_common(1)[0]


def _numbered(part: str) -> str:
    """A pattern for `7`, `layers_7` and the like, with any number; `fc1` is itself."""
    return re.sub(r"(^|_)[0-9]+$", r"\1\\d+", re.escape(part))


def _end(path: str, length: int) -> str:
    """A pattern for the last parts of a path, numbers standing for any number."""
    parts = path.split("/")
    *inner, last = parts[-length:]
    text = "/".join([*map(_numbered, inner), r"\d+" if last.isdecimal() else re.escape(last)])
    return f"^{text}$" if len(parts) <= length else f"(^|/){text}$"
