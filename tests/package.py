"""Builds the wheel and the source distribution, installs each into an environment of its own, and
runs the README's example from it, away from the checkout: what a user gets.

python -m tests.package
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that must succeed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def readme_example() -> str:
    """The first Python block of the README."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[
        :1
    ]
    return block


def check(distribution: Path, folder: Path) -> None:
    """Installs a distribution and uses it."""
    environment = folder / f"environment-{distribution.suffix.strip('.')}"
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, distribution, cwd=folder)

    where = Path(
        run(python, "-c", "import autoshard; print(autoshard.__file__)", cwd=folder).strip()
    )
    assert environment in where.parents, where
    assert not [p for p in where.parent.rglob("*") if p.is_symlink()], "links went along"
    version = run(environment / "bin" / "autoshard", "--version", cwd=folder).strip()
    (folder / "example.py").write_text(readme_example(), encoding="utf-8")
    plan = run(python, "example.py", cwd=folder)
    assert "verified: yes" in plan, plan
    assert (folder / "specs" / "train_step.json").is_file()
    html = folder / "train_step.html"
    report = ("report", "specs/train_step.json", "--html", html)
    run(environment / "bin" / "autoshard", *report, cwd=folder)
    print(
        f"{distribution.name}: installs, {version}, the README's example runs, "
        f"{html.stat().st_size} bytes of HTML"
    )


def main() -> None:
    """Checks both distributions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        for distribution in sorted((folder / "dist").iterdir()):
            check(distribution, folder)


if __name__ == "__main__":
    main()
