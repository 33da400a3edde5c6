"""The HTML report: one file, safe, and opened in a real browser. Debian: apt-get install -y
chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import autoshard
from autoshard.cli.tables import report
from autoshard.report.html import leaf_bytes, report_html, shard_bytes, summary
from autoshard.report.svg import mesh_svg
from autoshard.table.schema import Leaf
from autoshard.table.spec_table import SpecTable
from tests.models import decoder_args, decoder_step

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(
        decoder_step,
        decoder_args(),
        "data=4,model=2",
        donate_argnums=(0, 1),
        progress=False,
        effort=autoshard.Effort(compiled=3, measured=2),
    )


@pytest.fixture(scope="module")
def page(plan: autoshard.Plan) -> str:
    return report_html(SpecTable.loads(plan.table.dumps()))


class Balanced(HTMLParser):
    """Fails where tags do not match."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(page: str) -> str:
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    return parser.text


def test_it_has_all_that_people_look_for(page: str, plan: autoshard.Plan) -> None:
    text = text_of(page)
    for words in (
        "decoder_step on data=4, model=2",
        "8 devices",
        "Its results were compared and agree",
        "device 7",
        "data 3, model 1",
        "on each device",
        "predicted peak",
        "compiled peak",
        "measured time",
        "calls / s",
        "Time against memory",
        "Predicted against compiled",
        "params/wq",
        "logical axes of its dimensions",
        "models.py:",
        *map(str, plan.rules),
    ):
        assert words in text, words
    for candidate in plan.candidates:
        if candidate.status != "predicted":
            assert candidate.name in text


def test_it_needs_no_network(page: str) -> None:
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|<script [^>]*src|<link [^>]*href=\"(?!data:)", page
    )


def test_names_are_text_and_never_markup(plan: autoshard.Plan) -> None:
    nasty = "<img src=x onerror=alert(1)>\x1b[31m\"'"
    table = plan.table
    leaf = msgspec.structs.replace(table.inputs["tokens"], logical_axes=[nasty, nasty])
    table = msgspec.structs.replace(
        table,
        function=nasty,
        rules=[nasty],
        inputs={**table.inputs, nasty: leaf},
        mesh=msgspec.structs.replace(table.mesh, axes={nasty: 4, "model": 2}),
    )
    page = report_html(table)
    text_of(page)
    assert "<img" not in page
    assert "\x1b" not in page


def test_an_edited_table_says_that_its_numbers_are_stale(plan: autoshard.Plan, page: str) -> None:
    assert "Stale." not in text_of(page)
    edited = msgspec.structs.replace(plan.table, rules=[])
    assert "Stale." in text_of(report_html(edited))
    assert not any("Measured" in sentence for sentence in summary(edited, plan.candidates))


def test_bytes_of_a_leaf() -> None:
    leaf = Leaf([8, 6], "bfloat16", ["data", ["x", "y"]])
    assert (leaf_bytes(leaf), shard_bytes(leaf, {"data": 4, "x": 3, "y": 2})) == (96, 4)
    assert leaf_bytes(Leaf([2], "key<fry>", [])) == 16


def test_large_meshes_are_drawn_in_part() -> None:
    drawing = mesh_svg({"a": 16, "b": 16}, {"parameters": 1024}, str)
    assert drawing.count('class="cell"') == 64
    assert "and 192 more" in drawing


def test_a_layout_that_was_not_searched_has_a_page_too() -> None:
    plan = autoshard.apply(decoder_step, decoder_args(), "data=4,model=2", "fsdp")
    assert "None: this layout was applied, not searched." in text_of(report_html(plan.table))


def test_a_notebook_shows_the_plan(plan: autoshard.Plan) -> None:
    shown = plan._repr_html_()
    assert "params/wq" in text_of(shown)
    assert "<script" not in shown
    assert "<style" not in shown


def test_the_command_writes_the_page(plan: autoshard.Plan, tmp_path: Path) -> None:
    plan.table.save(tmp_path / "x.json")
    report(tmp_path / "x.json", tmp_path / "out" / "x.html")
    assert (tmp_path / "out" / "x.html").read_text() == report_html(
        SpecTable.load(tmp_path / "x.json")
    )


# In a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(page: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if BROWSER is None:
        pytest.skip("no browser: the page was NOT opened. Install one: apt-get install -y chromium")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(page, encoding="utf-8")

    def run(*flags: str) -> tuple[str, str]:
        command = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            *flags,
            (folder / "page.html").as_uri(),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, cwd=folder
        )
        return done.stdout, "\n".join(
            x for x in done.stderr.splitlines() if "CONSOLE" in x or "Uncaught" in x
        )

    return run


def test_a_browser_has_nothing_to_complain_about(opened: Any) -> None:
    dom, console = opened("--dump-dom")
    assert console == ""
    assert re.search(r'id="found">\d+ of \d+<', dom), "the page's script did not run"


@pytest.mark.parametrize(
    "flags", [["--window-size=1200,2400"], ["--window-size=500,2400"]], ids=["wide", "phone"]
)
def test_screenshots(opened: Any, flags: list[str], tmp_path: Path) -> None:
    for scheme, name in ((1, "light"), (0, "dark")):
        picture = tmp_path / f"{name}.png"
        _, console = opened(
            *flags, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}"
        )
        assert console == ""
        assert picture.stat().st_size > 20_000
