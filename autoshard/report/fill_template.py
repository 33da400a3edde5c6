"""The templates of the HTML report, in `templates/`; Jinja2 is imported when the first is filled.

Names in a table may be anybody's. Here, and nowhere else, they are made harmless: every value that
a template shows is escaped for markup, and what a terminal would act on is escaped too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from autoshard.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def fill(template: str, **values: Any) -> Markup:
    """A template filled with values; `Markup` among them is taken as it is."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values).strip())


def markup(text: str, *values: object) -> Markup:
    """Markup with values in place of its `{}`, which are escaped.

    >>> markup("Of <b>{}</b>.", "<script>")
    Markup('Of <b>&lt;script&gt;</b>.')
    """
    from markupsafe import Markup

    return Markup(text).format(*(printable(str(value)) for value in values))


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    # Runs before escaping; markup is made of harmless parts already.
    def finalize(value: object) -> str:
        return value if isinstance(value, Markup) else printable(str(value))

    return Environment(
        loader=PackageLoader("autoshard.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a name that a template misspells is an error, not ""
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
