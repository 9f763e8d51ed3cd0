"""Make what mkdocs does not: the front page, the nav, the API reference and mathematics."""

import importlib
import inspect
import json
import re
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([\w/]+)\.(?:md|ipynb)(?:#[\w-]+)?\)")
FOLDER = re.compile(r"\]\(((?:\.\./)*[\w/]+)\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)
PICTURE = re.compile(r'(<img [^>]*src="([^"]+)"[^>]*>)')


def on_config(config: Any) -> None:
    """Make the nav of the headings and links of the index pages."""
    contents = headings(Path(config.docs_dir), "index.md")
    sections = [{title: pages} for title, pages in contents.items()]
    config.nav = [{"Home": "index.md"}, {"Contents": "contents.md"}, *sections]


def headings(docs: Path, index: str) -> dict[str, list[Any]]:
    """Return the pages that an index links to, by heading; another index adds its own."""
    found: dict[str, list[Any]] = {}
    seen = {index}
    folder = index.removesuffix("index.md")
    for part in re.split(r"^## ", "\n" + (docs / index).read_text(), flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        for page in LINK.findall(text):
            page = f"{folder}{page}.md"
            if page not in seen and ".." not in page:
                seen.add(page)
                pages = found.setdefault(title, [])
                pages.append(page)
                if page.endswith("/index.md"):
                    below = headings(docs, page)
                    pages += below.pop("", [])
                    pages += [{heading: listed} for heading, listed in below.items()]
    return found


def on_files(files: Files, config: Any) -> None:
    """Make the README the front page, and a page for each folder of rows."""
    contents = files.src_uris["index.md"]
    files.remove(contents)
    readme = (ROOT / "README.md").read_text().replace("](docs/index.md", "](contents.md")
    made = {"index.md": readme.replace("](docs/", "]("), "contents.md": contents.content_string}
    folders: dict[str, list[str]] = {}
    for file in files:
        if file.src_uri.endswith(".ipynb"):
            made[file.src_uri.replace(".ipynb", ".md")] = notebook(file)
        folder, _, name = file.src_uri.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for folder, names in folders.items():
        if folder.startswith("results/") and not any(name.endswith(".md") for name in names):
            lines = [f"- [{name}]({name})" for name in names]
            made[f"{folder}/index.md"] = "\n".join([f"# {folder}", "", *lines])
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))


def notebook(file: File) -> str:
    """Return the cells of a notebook as a page."""
    parts = [f'<a href="{Path(file.src_uri).name}">This page as a notebook</a>']
    for cell in json.loads(file.content_string)["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join([parts[1], parts[0], *parts[2:]])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Translate what GitHub reads otherwise: links to folders and the README, pipes, comments."""
    markdown = re.sub(r"^::: ([\w.]+)\.\*((?: \w+)*)$", reference, markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\]\(((?:\.\./)*)\.\./README\.md", r"](\1index.md", markdown)
    markdown = markdown.replace(".ipynb)", ".md)")
    markdown = FOLDER.sub(r"](\1/index.md)", markdown)
    markdown = re.sub(r"^(<!--.*-->)$", r"\n\1\n", markdown, flags=re.MULTILINE)
    return re.sub(r"^\|.*`.*$", pipes, markdown, flags=re.MULTILINE)


def pipes(row: re.Match[str]) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0])


def reference(entry: re.Match[str]) -> str:
    """Return an entry for every public name of a package.

    The names on the line come first, then classes, functions and families of masks.
    """
    package, first = importlib.import_module(entry[1]), entry[2].split()
    groups: dict[str, list[str]] = {"Start here": [], "Classes": [], "Functions": []}
    for name in [*first, *(name for name in package.__all__ if name not in first)]:
        value = getattr(package, name)
        if not isinstance(value, ModuleType):
            home, shown = inspect.getmodule(value) or package, f"{entry[1]}.{name}"
            kind = "Classes" if inspect.isclass(value) else "Functions"
            options = f"    options:\n      heading: {shown}\n      toc_label: {name}"
            group = "Start here" if name in first else getattr(home, "SECTION", kind)
            groups.setdefault(group, []).append(f"::: {home.__name__}.{name}\n{options}")
    return "\n\n".join(
        "\n\n".join([f"## {title}", *lines]) for title, lines in groups.items() if lines
    )


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which needs no script, and link each picture to its full size."""
    return PICTURE.sub(r'<a href="\2">\1</a>', FORMULA.sub(formula, html))


def formula(found: re.Match[str]) -> str:
    tag, text = found[1], unescape(found[2])
    shown = convert(text, display="inline" if tag == "span" else "block")
    return f'<{tag} class="arithmatex">{shown}</{tag}>'
