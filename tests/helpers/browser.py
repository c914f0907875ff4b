"""Runs pages in a headless browser, where one is installed."""

import html
import json
import re
import shutil
import subprocess
from tempfile import TemporaryDirectory

import pytest

# JavaScript that lists what does not fit a phone. A headless window has at least 500 pixels.
FIND_WIDE = """
function findWide() {
  document.documentElement.style.width = "390px";
  const all = [...document.querySelectorAll("body *")];
  const wide = all.filter((element) => element.getBoundingClientRect().right > 391);
  return wide.map(({ tagName, id }) => `${tagName} ${id}`);
}
"""
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PROFILE = TemporaryDirectory()  # without it, each start makes a new one, which stays in ~/.cache
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
        f"--user-data-dir={PROFILE.name}",
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


def run_script(page, script, *options):
    """Run the body of an async JavaScript function in `page`, and return its result.

    It may await what is resolved without a timer.
    """
    probe = page.with_suffix(".probe.html")
    show = "(result) => { document.body.textContent = JSON.stringify(result); }"
    probe.write_text(
        f"{page.read_text()}<script>(async () => {{{script}}})().then({show})</script>"
    )
    done = browse(probe, "--dump-dom", *options)
    body = re.search("<body.*?>(.*?)</body>", done.stdout, flags=re.DOTALL)
    assert body, done.stdout[-2000:]
    return json.loads(html.unescape(body[1]).replace("\xa0", " "))
