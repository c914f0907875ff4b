"""Writes all Markdown pages and the timeline as a static site: python .github/make_site.py site

README.md becomes index.html, and other pages keep their paths. A link to a file that is no page
leads to the repository of $GITHUB_REPOSITORY (owner/name), or nowhere without it.
"""

import os
import re
import sys
from pathlib import Path
from shutil import copyfile

from markdown_it import MarkdownIt
from markdown_it.token import Token

from nanovllm.trace import save_page
from nanovllm.trace.tour import MODEL, show_scheduling

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("nanovllm/**/*.md"))]
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")
TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #d8d6cf; --panel: #f6f4ee; --link: #0b57d0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --line: #373a42; --panel: #1f2228; --link: #8ab4f8; }}
  body {{ background: #16181d; color: #e9e6df; }}
}}
body {{ font: 17px/1.55 Georgia, "DejaVu Serif", serif; max-width: 46em; margin: auto;
  padding: 1em; overflow-wrap: break-word; }}
h1 {{ font-size: 1.7em; line-height: 1.2; }}
nav {{ font-size: 15px; border-bottom: 1px solid var(--line); padding-bottom: .6em; }}
nav a {{ margin-right: .8em; white-space: nowrap; }}
a {{ color: var(--link); }}
pre, code {{ font: 14px/1.45 ui-monospace, Menlo, Consolas, monospace; }}
pre {{ background: var(--panel); padding: .8em; overflow-x: auto; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: 15px; }}
td, th {{ border: 1px solid var(--line); padding: .3em .6em; text-align: left; min-width: 5em; }}
img {{ max-width: 100%; }}
summary {{ cursor: pointer; color: var(--link); }}
</style>
<nav>{navigation}</nav>
{content}
"""


def find_target(page: Path) -> Path:
    """Return where a page is on the site."""
    path = page.relative_to(ROOT).with_suffix(".html")
    return Path("index.html") if page == ROOT / "README.md" else path


def link(page: Path, target: Path) -> str:
    return os.path.relpath(target, find_target(page).parent)


def resolve(page: Path, href: str) -> str | None:
    """Return what a link of a page becomes on the site, or None if it leads nowhere."""
    name, hash, heading = href.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return href
    path = (page.parent / name).resolve()
    if path.is_dir() and (path / "README.md") in PAGES:
        path /= "README.md"
    if path in PAGES:
        return link(page, find_target(path)) + hash + heading
    inside = path.relative_to(ROOT)
    return f"https://github.com/{REPOSITORY}/blob/main/{inside}" if REPOSITORY else None


def convert(page: Path, site: Path) -> None:
    """Write a page, and copy its pictures."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = markdown.parse(page.read_text())
    title = ""
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            text = tokens[index + 1].content
            title = title or text
            slug = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
            token.attrSet("id", slug)
        for each in token.children or ():
            change_link(each, page, site)
    navigation = [f'<a href="{link(page, Path("timeline.html"))}">Timeline</a>']
    for other in [PAGES[0], ROOT / "nanovllm/README.md", *PAGES]:
        name = other.stem[0] if other.stem[0].isdigit() else ""
        name = {PAGES[0]: "Front page", ROOT / "nanovllm/README.md": "Guide"}.get(other, name)
        entry = f'<a href="{link(page, find_target(other))}">{name}</a>'
        if name and entry not in navigation:
            navigation.append(entry)
    target = site / find_target(page)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = markdown.renderer.render(tokens, markdown.options, {})
    target.write_text(TEMPLATE.format(title=title, navigation="".join(navigation), content=content))


def change_link(token: Token, page: Path, site: Path) -> None:
    if token.type == "link_open":
        href = resolve(page, str(token.attrGet("href")))
        token.attrs.pop("href")
        if href is not None:
            token.attrSet("href", href)
    if token.type == "image":
        source = (page.parent / str(token.attrGet("src"))).resolve()
        copied = Path("pictures", source.name)
        (site / "pictures").mkdir(parents=True, exist_ok=True)
        copyfile(source, site / copied)
        token.attrSet("src", link(page, copied))


def main() -> None:
    site = Path(sys.argv[1])
    for page in PAGES:
        convert(page, site)
    save_page(show_scheduling(MODEL), str(site / "timeline.html"))


if __name__ == "__main__":
    main()
