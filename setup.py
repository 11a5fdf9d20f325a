"""What pyproject.toml cannot say: the README as a package index shows it, and addresses.

Links between files mean nothing on an index. Whoever publishes from a public repository names it,
and links and the picture lead there; otherwise they are plain text.

    VOCAGNOLM_SOURCE=https://github.com/OWNER/NAME python -m build
"""

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[([^]]+)\]\((?!http)([^)]+)\)")
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_SOURCE = re.compile(r'\bsrc(set)?="(?!http)')
_PAPER = "https://arxiv.org/abs/2503.19123"


def readme_of_index(text: str, source: str, version: str) -> str:
    """Lead links and pictures to the version's tag in a repository, or leave their text alone."""
    root = f"{source}/raw/v{version}/"
    text = _SOURCE.sub(rf"\g<0>{root}", text) if source else _PICTURE.sub("", text)

    def lead(found: re.Match[str]) -> str:
        picture, shown, path = found.groups()
        if not source:
            return f"({shown}: {path})" if picture else shown
        return f"{picture}[{shown}]({source}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return _LINK.sub(lead, text)


if __name__ == "__main__":
    source = os.environ.get("VOCAGNOLM_SOURCE", "").rstrip("/")
    root = Path(__file__).parent
    (version,) = re.findall(r'^version = "(.+)"', (root / "pyproject.toml").read_text(), re.M)
    setup(
        long_description=readme_of_index((root / "README.md").read_text(), source, version),
        long_description_content_type="text/markdown",
        project_urls={"Paper": _PAPER} | ({"Source": source} if source else {}),
    )
