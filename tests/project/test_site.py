"""All pages and the timeline as a static site, without a server."""

import re
import runpy
import sys
from urllib.parse import unquote

import pytest
from project_helpers import ROOT

pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")


def test_links_lead_to_pages_and_headings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_site.py", str(tmp_path)])
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    runpy.run_path(str(ROOT / ".github/make_site.py"), run_name="__main__")
    pages = [path for path in tmp_path.glob("**/*.html") if path.name != "timeline.html"]
    assert len(pages) == len([ROOT / "README.md", *ROOT.glob("nanovllm/**/*.md")])
    assert (tmp_path / "timeline.html").exists()
    num_links = 0
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"]*)"', page.read_text()):
            name, _, heading = unquote(link).partition("#")
            if name.startswith("http"):
                continue
            num_links += 1
            found = page.parent / name if name else page
            assert found.is_file(), (page, link)
            if heading:
                assert f'id="{heading}"' in found.read_text(), (page, link)
    assert num_links > 200
