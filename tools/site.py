"""A hook of MkDocs: links from pages to files of the repository lead to copies of these in the
site.

``../README.md`` becomes the page ``repository/README.md``, ``../deploy/rules.yml``
``repository/deploy/rules.yml``, and a folder the list of its files. So every link of the
documentation works in the repository and in the site alike.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
COPIES = "repository"
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)")
OWN_LINK = re.compile(r"\]\((?!docs/|[a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of every file outside of docs/ that a page links to, and of what a copied page
    links to.
    """
    linked: set[str] = set()
    for file in files.documentation_pages():
        text = Path(file.abs_src_path or "").read_text(encoding="utf-8")
        linked.update(name for up, name in LINK.findall(text) if _leaves(up, file.src_uri))
    for name in sorted(linked):
        if name.endswith(".md"):
            linked.update(OWN_LINK.findall((ROOT / name).read_text(encoding="utf-8")))
    for name in sorted(linked):
        path = ROOT / name
        members = (
            [each for each in sorted(path.rglob("*")) if each.is_file()]
            if path.is_dir()
            else [path]
        )
        members = [each for each in members if "__pycache__" not in each.parts]
        for member in members:
            copy = f"{COPIES}/{member.relative_to(ROOT).as_posix()}"
            if files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, content=_text(member)))
        if path.is_dir():
            files.append(File.generated(config, _copy_of(name), content=_listing(path, members)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The page with its links to files of the repository led to their copies."""
    del config, files
    if page.file.src_uri.startswith(COPIES):
        return markdown
    here = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        up, name = match.groups()
        if not _leaves(up, here):
            return match[0]
        return f"]({'../' * here.count('/')}{_copy_of(name)}"

    return LINK.sub(led, markdown)


def _leaves(up: str, page: str) -> bool:
    """Whether so many steps up from a page lead out of docs/."""
    return up.count("/") > page.count("/")


def _copy_of(name: str) -> str:
    return f"{COPIES}/{name.rstrip('/')}/index.md" if (ROOT / name).is_dir() else f"{COPIES}/{name}"


def _text(path: Path) -> str:
    """A file; what a page at the repository's top links to below docs/ is the site's own page."""
    text = path.read_text(encoding="utf-8")
    return (
        re.sub(r"\]\(docs/", "](../", text)
        if path.suffix == ".md" and path.parent == ROOT
        else text
    )


def _listing(folder: Path, members: list[Path]) -> str:
    names = [each.relative_to(folder).as_posix() for each in members]
    return "\n".join([f"# {folder.name}", "", *(f"- [{name}]({name})" for name in names), ""])
