"""Pages for a browser, each one file that loads nothing: light and dark, on phones and paper."""

from pathlib import Path

import jinja2

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("vocagnolm", "assets"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def render_page(template: str, **values: object) -> str:
    """Fill a template of `assets`; every text is escaped."""
    return _TEMPLATES.get_template(template).render(**values)


def public_name(name: str) -> str:
    """Return the last part of a path of this machine; a name of the hub as it is.

    >>> public_name("/home/me/runs/cpt"), public_name("Qwen/Qwen2.5-Math-7B")
    ('cpt', 'Qwen/Qwen2.5-Math-7B')
    """
    path = Path(name)
    return path.name if path.is_absolute() or path.exists() else name
