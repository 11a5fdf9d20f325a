"""Chromium without a window, which reads pages for the tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# Pages see a system that is dark, or light.
DARK = "--blink-settings=preferredColorScheme=0"
# A phone is narrower than a window may be, so the page is looked at through a frame.
_FRAME = """<!doctype html><iframe id="frame" src="{name}" width="{width}" height="900"></iframe>
<script>onload = () => {{
  const page = document.getElementById("frame").contentDocument;
  document.body.dataset.found = JSON.stringify((({script}))(page));
}}</script>"""


def find_browser() -> str:
    """The path of Chromium; the test is skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium")
    return found


def read_dom(address: str, profile: Path, *flags: str) -> str:
    """The page as it is after its scripts have run."""
    options = [*FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", address]
    command = [find_browser(), *options]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()


def look(page: Path, script: str, width: int, *flags: str) -> Any:
    """What a function of the document returns, where the page is so many pixels wide."""
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(_FRAME.format(name=page.name, width=width, script=script))
    access = "--allow-file-access-from-files"
    dom = read_dom(frame.as_uri(), page.with_name("profile"), access, *flags)
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found, dom[:2000]
    return json.loads(unescape(found[1]))
