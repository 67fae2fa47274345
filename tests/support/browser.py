"""A real browser for the tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]


def browse(folder: Path, page: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    """Headless Chromium on a file or an address; a browser that hangs fails the test."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: install chromium to see the report rendered")
    address = page.as_uri() if isinstance(page, Path) else page
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
