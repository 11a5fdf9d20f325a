"""Pages for a browser, each one file that loads nothing: light and dark, on phones and paper."""

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
