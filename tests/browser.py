"""Runs pages in a headless browser, where one is installed."""

import html
import json
import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium or google-chrome is installed"
)


def browse(page, *options, fragment=""):
    """Open `page` headless, and check that its console stays empty."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        *options,
    ]
    done = subprocess.run(
        [*command, page.as_uri() + fragment],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


def run_script(page, script):
    """Run the body of a JavaScript function in `page`, and return its result."""
    probe = page.with_suffix(".probe.html")
    call = f"document.body.textContent = JSON.stringify((() => {{{script}}})())"
    probe.write_text(f"{page.read_text()}<script>{call}</script>")
    done = browse(probe, "--dump-dom")
    body = re.search("<body.*?>(.*?)</body>", done.stdout, flags=re.DOTALL)
    assert body, done.stdout[-2000:]
    return json.loads(html.unescape(body[1]).replace("\xa0", " "))
