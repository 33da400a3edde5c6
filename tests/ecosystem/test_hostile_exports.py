"""Tables with anybody's names go through every exporter, and each output is read by its consumer:
nothing is in it but the table's own content."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import autoshard
from autoshard.errors import TableError
from autoshard.evidence.candidate import Candidate, Measured, Origin, Predicted, Status
from autoshard.report.html import fragment_html, report_html
from autoshard.report.plan_text import table_text
from autoshard.table.export import export
from autoshard.table.leaf_patterns import unfold
from autoshard.table.schema import ConstraintEntry, Evidence, Leaf, MeshEntry
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable
from autoshard.text import printable

ODD = [
    "`", "``", "```", "|", "\\|", "\\", "<script>alert(1)</script>", "</code>", "</title>", "&lt;", "<!--", "]]>",
    "[a](javascript:x)", "![a](http://h/x)", "**b**", "_b_", "# x", "- x", "1. x", "> x", "~~~", "    x", "---",
    "=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "\n=1", " =1", "'=1", "\uff1d1", '"', "'", '"""', "'''", "{", "}", "{i}", "*", "%s",
    "\x1b[31m", "\u202e", "\u2028", "\x85", "\x00", "\x7f", "\ufeff", "import os", "__import__('os')", "\nimport os\n",
    "a/b", "/", "0", "7", "layers", "()", ",", ";", "->", "(optimizer)", "é", "名", "{{ 7*7 }}", "{% raw %}", "$(x)", "http://h.org",
]  # fmt: skip
NAMES = st.lists(st.sampled_from(ODD) | st.text(max_size=3), max_size=4).map("".join)
NAMES = NAMES.filter(lambda text: text.isascii() or text.encode("utf-8", "replace").decode() == text)  # fmt: skip
AXES = st.lists(NAMES, min_size=1, max_size=3, unique=True)


@st.composite
def tables(draw: st.DrawFn) -> SpecTable:
    axes, logical = draw(AXES), draw(st.lists(NAMES, min_size=1, max_size=3))

    def leaf() -> Leaf:
        rank = draw(st.integers(0, 3))
        left, spec = list(axes), []
        for _ in range(draw(st.integers(0, rank))):
            some = [left.pop() for _ in range(draw(st.integers(0, min(2, len(left)))))]
            spec.append(some if len(some) > 1 else some[0] if some else None)
        while spec and spec[-1] is None:
            spec.pop()
        names = [draw(st.sampled_from([*logical, None])) for _ in range(rank)]
        group = draw(st.sampled_from(["parameters", "optimizer", "data", ""]))
        return Leaf([8] * rank, draw(st.sampled_from(["float32", "key<fry>"])), spec, names, group)

    paths = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    inside = ConstraintEntry(
        draw(NAMES), draw(NAMES), draw(NAMES), [8, 8], spec_text([axes[0], None]), 2
    )
    candidate = Candidate(
        draw(NAMES), Origin.SEARCH, (draw(NAMES),), "anchors", draw(NAMES), Status.WINNER, draw(NAMES),
        Predicted(1.0, 10, 10), measured=Measured(draw(st.sampled_from([0.0, 1.0])), 3),
    )  # fmt: skip
    other = Candidate(draw(NAMES), Origin.PRESET, (), "anchors", "k", Status.MEASURED, "", Predicted(2.0, 20, 20), measured=Measured(2.0, 3), preset=draw(NAMES))  # fmt: skip
    table = SpecTable(
        function=draw(NAMES),
        mesh=MeshEntry(dict.fromkeys(axes, 2), ["auto"] * len(axes)),
        rules=draw(st.lists(NAMES, max_size=3)),
        constraints="anchors",
        inputs={path: leaf() for path in paths},
        outputs={path: leaf() for path in paths[:2]},
        inside=[inside],
        outputs_like={},
        evidence=Evidence(
            draw(NAMES), f"yes ({draw(NAMES)})", {draw(NAMES): draw(NAMES)}, arguments=draw(NAMES),
            hardware={draw(NAMES): draw(NAMES)}, when=draw(NAMES), search_s=1.0,
            candidates=[candidate.to_dict(), other.to_dict()],
        ),
    )  # fmt: skip
    return SpecTable.loads(table.dumps())  # what is exported was read from a file


def literal(node: ast.expr) -> Any:
    """The value of a literal, of `P(...)` as its text, and of the generators of patterns."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "P":
        assert not node.keywords
        return spec_text([list(e) if isinstance(e, tuple) else e for e in map(literal, node.args)])
    if isinstance(node, ast.Tuple):
        return tuple(map(literal, node.elts))
    return ast.literal_eval(node)


PATTERN = re.compile(r"\*\*\{(?P<template>.*)\.format\((?P<names>[\w, ]+)\): .*\}", re.DOTALL)


def specs_in(tree: ast.Dict) -> dict[str, str]:
    """By path, the specs of a dict of the Python export; patterns are run, once they are seen to be
    a literal that is formatted with numbers."""
    specs: dict[str, str] = {}
    for key, value in zip(tree.keys, tree.values, strict=True):
        if key is not None:
            specs[literal(key)] = literal(value)
            continue
        assert isinstance(value, ast.DictComp)
        template = value.key
        assert isinstance(template, ast.Call)
        assert isinstance(template.func, ast.Attribute)
        assert isinstance(template.func.value, ast.Constant)
        assert template.func.attr == "format"
        for loop in value.generators:
            assert re.fullmatch(
                r"range\([\d, ]+\)|\((\*range\([\d, ]+\),? ?)+\)", ast.unparse(loop.iter)
            )
        value.value = ast.Constant(literal(value.value))
        code = compile(ast.Expression(ast.fix_missing_locations(value)), "pattern", "eval")
        specs |= eval(code, {"range": range})
    return specs


def check_python(table: SpecTable) -> None:
    body = ast.parse(export(table, "python")).body
    assert [type(node).__name__ for node in body] == [
        "Expr", "Import", "ImportFrom", "Assign", "Assign", "Assign", "FunctionDef", "FunctionDef",
    ]  # fmt: skip
    assert isinstance(ast.literal_eval(body[0].value), str)
    assert [ast.unparse(node) for node in body[1:3]] == [
        "import jax", "from jax.sharding import PartitionSpec as P",
    ]  # fmt: skip
    assert literal(body[3].value) == table.mesh.axes
    for node, leaves in ((body[4], table.inputs), (body[5], table.outputs)):
        assert specs_in(node.value) == {p: spec_text(leaf.spec) for p, leaf in leaves.items()}
    helpers = ast.parse(export(PLAIN, "python")).body[6:]
    assert [ast.dump(node) for node in body[6:]] == [ast.dump(node) for node in helpers]


def check_regex(table: SpecTable) -> None:
    head, imports, rules = ast.parse(export(table, "regex")).body
    assert isinstance(ast.literal_eval(head.value), str)
    assert ast.unparse(imports) == "from jax.sharding import PartitionSpec as P"
    pairs = literal(rules.value)
    for path, leaf in table.inputs.items():
        first = next(spec for pattern, spec in pairs if re.search(pattern, path))
        assert first == spec_text(leaf.spec)


def check_constraints(table: SpecTable) -> None:
    text = export(table, "constraints")
    (statement,) = ast.parse(text).body
    spec = table.inside[0].spec
    expected = f"x = jax.lax.with_sharding_constraint(x, {spec})"
    assert ast.dump(statement) == ast.dump(ast.parse(expected).body[0])
    others = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert len(others) == 1


def check_logical(table: SpecTable) -> None:
    try:
        exported = json.loads(export(table, "logical-axis-rules"))
    except TableError as error:
        if "rename that logical axis" not in str(error):
            raise
        return
    assert set(exported["logical_axes"]) == set(table.inputs)
    rules = dict(exported["logical_axis_rules"])
    for path, leaf in table.inputs.items():
        by_rules = [rules[name] for name in exported["logical_axes"][path]]
        while by_rules and not by_rules[-1]:
            by_rules.pop()
        spec = [axes if len(axes) > 1 else axes[0] if axes else None for axes in by_rules]
        assert spec == leaf.spec


def check_csv(table: SpecTable) -> None:
    text = export(table, "csv")
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    assert head[0] == "side"
    leaves = [*table.inputs.items(), *table.outputs.items()]
    assert len(rows) == len(leaves) == text.count("\n") - 1
    for row, (path, leaf) in zip(rows, leaves, strict=True):
        assert len(row) == len(head)
        assert not any(
            cell.lstrip()[:1] in "=+-@\uff1d\uff0b\uff0d\uff20\t\r" for cell in row if cell.strip()
        )
        assert all(cell.isprintable() for cell in row)
        shown = row[1][1:] if row[1].startswith("'") else row[1]
        assert shown == printable(path)
        assert row[4] == printable(spec_text(leaf.spec))


MARKDOWN = MarkdownIt("commonmark").enable("table")


def check_markdown(table: SpecTable) -> None:
    tokens = MARKDOWN.parse(export(table, "markdown"))
    kinds = {token.type for token in tokens}
    assert not kinds & {"html_block", "fence", "code_block", "blockquote_open", "hr"}
    texts, codes = [], []
    for token in tokens:
        for child in token.children or ():
            assert child.type in ("text", "code_inline"), child
            (codes if child.type == "code_inline" else texts).append(child.content)
    words = " ".join(texts)
    assert re.fullmatch(r"[\w\s:,;.()-]*", words.replace("*", "")), words  # and no name
    named = [table.function, *table.rules]
    assert {printable(name) for name in named if name} <= set(codes)
    cells = [after for token, after in itertools.pairwise(tokens) if token.type == "td_open"]
    assert len(cells) % 4 == 0
    for path, _, spec, each in zip(*[iter(cells)] * 4, strict=True):
        assert [child.type for child in path.children or ()] in (["code_inline"], ["text"])
        if not each.content and "(no name)" not in path.content:
            shown = {printable(p): leaf for p, leaf in (table.inputs | table.outputs).items()}
            assert path.children[0].content in shown
            assert spec.children[0].content.startswith("P(")


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[tuple[str, str]] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        assert decl == "doctype html"

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def check_html(table: SpecTable) -> None:
    plain = page_of(report_html(PLAIN))
    for text in (report_html(table), fragment_html(table)):
        page = page_of(text)
        assert set(page.tags) <= set(plain.tags)
        assert page.attributes <= plain.attributes
        assert page.tags.count("script") <= 1
        shown = "".join(page.text)
        if "<title>" in text:
            assert all(printable(path) in shown for path in table.inputs if "*" not in path and not re.search(r"\d", path))  # fmt: skip
        assert all(line.isprintable() for line in text.split("\n"))


PLAIN = SpecTable.loads(
    SpecTable(
        "step", MeshEntry({"data": 2, "model": 2}, ["auto"] * 2), ["w.1->model"], "anchors",
        {f"l/{i}/w": Leaf([8, 8], "float32", ["data"], ["a", "b"], g) for i, g in enumerate(["parameters", "optimizer", "data", "", ""])},
        {"out": Leaf([8], "float32", [])}, [ConstraintEntry("a.py:1", "dot", "result", [8, 8], "P('data')")], {},
        Evidence("f", "yes (x)", {"jax": "1"}, search_s=1.0, candidates=[
            Candidate("a", Origin.SEARCH, (), "anchors", "k", Status.WINNER, "", Predicted(1.0, 1, 1), measured=Measured(1.0, 3)).to_dict(),
            Candidate("b", Origin.PRESET, (), "anchors", "l", Status.MEASURED, "r", Predicted(2.0, 2, 2), measured=Measured(2.0, 3), preset="b").to_dict(),
        ]),
    ).dumps()
)  # fmt: skip

CHECKS = {
    "python": check_python, "regex": check_regex, "constraints": check_constraints, "logical": check_logical,
    "csv": check_csv, "markdown": check_markdown, "html": check_html,
}  # fmt: skip


@pytest.mark.parametrize("form", CHECKS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(table=tables())
def test_nothing_but_the_tables_content_is_exported(form: str, table: SpecTable) -> None:
    CHECKS[form](table)


@pytest.mark.slow
@pytest.mark.parametrize("form", CHECKS)
@settings(max_examples=3000, deadline=None, derandomize=True)
@given(table=tables())
def test_nothing_but_the_content_of_many_tables_is_exported(form: str, table: SpecTable) -> None:
    CHECKS[form](table)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(table=tables())
def test_tables_for_people_act_on_no_terminal(table: SpecTable) -> None:
    assert SpecTable.loads(table.dumps()) == table
    assert all(line.isprintable() for line in table_text(table).split("\n"))


@pytest.mark.parametrize(
    "spec",
    ["P(print('x'))", "P('data'); import os", "P('data'))\nimport os\n(", "Q('data')", "P(*x)", "P('a' + 'b')",
     "P(f'{x}')", "P('data', unreduced={'x'})", "P(P('x'))", "x", "", "P('\\x1')", "P('a', 'b', 'c')"],
)  # fmt: skip
def test_what_is_no_spec_is_refused_at_load_and_at_export(spec: str) -> None:
    entry = msgspec.structs.replace(PLAIN.inside[0], spec=spec)
    edited = msgspec.structs.replace(PLAIN, inside=[entry])
    with pytest.raises(TableError, match=r"(?s)(no PartitionSpec|has 3 dimensions).*inside\[0\]"):
        SpecTable.loads(edited.dumps())
    with pytest.raises(TableError, match=r"no PartitionSpec|has 3 dimensions"):
        export(edited, "constraints")


def test_every_spec_that_a_plan_states_is_read_back() -> None:
    for name in ("data", "it's", 'a"b', "a'\"b", "tab\t", "back\\slash", "é", "x\x1b"):
        spec = f"P({name!r}, None, ({name!r}, 'b'), P.UNCONSTRAINED)"
        entry = msgspec.structs.replace(PLAIN.inside[0], spec=spec, shape=[8] * 4)
        table = msgspec.structs.replace(PLAIN, inside=[entry])
        assert SpecTable.loads(table.dumps()).inside == [entry]


def test_logical_axes_that_would_be_called_alike_are_not_exported() -> None:
    leaves = {
        "a": Leaf([8], "float32", ["data"], ["w"]),
        "b": Leaf([8], "float32", [], ["w"]),
        "c": Leaf([8], "float32", ["model"], ["w:whole"]),
    }
    with pytest.raises(autoshard.TableError, match="'w:whole' would be the name"):
        export(msgspec.structs.replace(PLAIN, inputs=leaves), "logical-axis-rules")


def test_the_markdown_of_patterns_is_unfolded_again() -> None:
    text = export(PLAIN, "markdown")
    lines = {}
    for token, row in [(t, t.content) for t in MARKDOWN.parse(text) if t.type == "inline"]:
        if row.startswith("`l/"):
            lines[token.children[0].content] = (("0-4",), "P('data')")
    assert set(unfold(lines)) == set(PLAIN.inputs)
