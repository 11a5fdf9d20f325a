"""Photograph pages with Chromium, for the scripts beside this file.

Looks best where the fonts Inter and JetBrains Mono are installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import image as images

# Narrower than a window may be.
PHONE = 390


def photograph(
    address: str, image: Path, width: int, height: int, scale: float = 1.5, *, dark: bool = False
) -> None:
    """Let Chromium draw a page, `scale` times as fine as it is wide."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/images: Chromium is needed, found none: install it")
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    with tempfile.TemporaryDirectory() as scratch:
        if width == PHONE:
            frame = Path(scratch, "frame.html")
            style = f"border:0;position:absolute;inset:0;width:{width}px;height:{height}px"
            frame.write_text(f'<!doctype html><iframe src="{address}" style="{style}"></iframe>')
            address = frame.as_uri()
        command = [browser, "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
        command += [f"--disable-{feature}" for feature in quiet]
        command += [
            f"--user-data-dir={scratch}/profile",
            f"--window-size={max(width, 500)},{height}",
        ]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        command += [f"--force-device-scale-factor={scale}", f"--screenshot={image}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    if width == PHONE:
        images.imsave(image, images.imread(image)[:, : round(width * scale)])
