"""How the repository becomes the site: what mkdocs calls while it builds (see mkdocs.yml).

Pages read the same in the repository and on the site: links are those of the repository, equations are $...$, and
options stand where ``<!-- options of COMMAND -->`` does, made from the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import itertools
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import help_texts
from pipesgd.config import TrainConfig, options_of
from timing_model import cli
from timing_model.arguments import Parser

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"""(?<=\]\()([^)#:\s]+)(?=(#[^)\s]*)?\))|(?<= src=")[^":]+(?=")|(?<= srcset=")[^":]+(?=")""")
"""A file that a page links to or shows, without the anchor, unless that is on the page or elsewhere in the world."""
SHOWN = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".toml": "toml"}
"""Files that are pages of the site, and their languages."""
NOTEBOOK = ".ipynb"
NOT_SEARCHED = ("experiments/LOG.md", "CHANGELOG.md")
WIDE = ("reference.md", "systems.md")
"""Pages whose tables need the place of the table of contents."""
OPTIONS = re.compile(r"<!-- options of ([\w. -]+?) -->")
CONFIGS = {"pipesgd.train": TrainConfig, "pipesgd.calibrate": CalibrateConfig}
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')
PRIMED = re.compile("<msup>(<mi>.</mi>)<mi>&#x02032;</mi></msup>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The README is the first page; what pages link to is there, too."""
    linked = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    for path in linked:  # which grows meanwhile
        ending = posixpath.splitext(path)[1]
        language, hidden = SHOWN.get(ending), InclusionLevel.NOT_IN_NAV
        if ending == NOTEBOOK:
            text, pictures = notebook(REPOSITORY / path)
            files.append(File.generated(config, site_path(path), content=text, inclusion=hidden))
            for name, picture in pictures.items():
                files.append(File.generated(config, f"{posixpath.dirname(path)}/{name}", content=picture))
        elif language:
            code = (REPOSITORY / path).read_text(encoding="utf-8")
            text = f"# {posixpath.basename(path)}\n\n~~~~ {language}\n{code}~~~~\n"
            files.append(File.generated(config, site_path(path), content=text, inclusion=hidden))
        elif not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(REPOSITORY / path)))
        if path.endswith(".md"):
            text = (REPOSITORY / path).read_text(encoding="utf-8")
            targets = [in_repository(path, found[0]) for found in LINK.finditer(text)]
            linked += [one for one in dict.fromkeys(targets) if one not in linked and (REPOSITORY / one).is_file()]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site, and options."""
    uri = page.file.src_uri
    if uri in NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    if posixpath.splitext(uri.removesuffix(".md"))[1] in (*SHOWN, NOTEBOOK):
        return markdown
    path = next(
        one for one in (uri, f"docs/{uri}", "README.md") if site_path(one) == uri and (REPOSITORY / one).exists()
    )
    here = posixpath.dirname(uri)
    markdown = LINK.sub(lambda link: posixpath.relpath(site_path(in_repository(path, link[0])), here or "."), markdown)
    return OPTIONS.sub(lambda marker: "\n\n".join(options(marker[1])), markdown)


def on_page_content(html_text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Equations as MathML, which browsers draw by themselves; a picture is a link to itself, for small screens."""

    def equation(found: re.Match[str]) -> str:
        drawn = convert(html.unescape(found[2]), display="inline" if found[1] == "span" else "block")
        return PRIMED.sub(r"<mrow>\1<mo>&#x02032;</mo></mrow>", drawn)  # as an exponent it is too small to be seen

    return EQUATION.sub(equation, PICTURE.sub(r'<p><a href="\2">\1</a></p>', html_text))


def on_post_build(config: MkDocsConfig) -> None:
    """No page for what a server does not find: its links begin at the server's root, where the site need not be."""
    Path(config.site_dir, "404.html").unlink()


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its outputs as a page, and the pictures on it by their names."""
    exporter = MarkdownExporter()
    body, resources = exporter.from_filename(str(path), resources={"unique_key": path.stem})
    numbers = itertools.count(1)
    body = re.sub(r"!\[png\]", lambda _: f"![Picture {next(numbers)} of this notebook]", body)
    return body, resources["outputs"]


def in_repository(path: str, link: str) -> str:
    """The file that ``link`` on the page ``path`` is, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(path: str) -> str:
    """Where the repository's file ``path`` is on the site."""
    page = ".md" if posixpath.splitext(path)[1] in (*SHOWN, NOTEBOOK) else ""
    return "index.md" if path == "README.md" else path.removeprefix("docs/") + page


def options(command: str) -> Iterator[str]:
    """Tables of all options of a command, one for each section."""
    if command in CONFIGS:
        config = CONFIGS[command]()
        for field in dataclasses.fields(config):
            section = getattr(config, field.name)
            texts = help_texts(type(section))
            values = {name: value for name, value in options_of(section).items() if name in config.options()}
            rows = [(f"--{name}", shown(value), texts[name.replace("-", "_")]) for name, value in values.items()]
            yield table(type(section).__doc__ or "", "by default", rows)
    else:
        add_options, _ = cli.COMMANDS[command.removeprefix("timing-model ")]
        parser = Parser(prog=command, add_help=False)
        add_options(parser)
        for group in parser._action_groups:
            rows = [
                (
                    one.option_strings[0] if one.option_strings else "",
                    value_of(one),
                    (one.help or "").replace("%%", "%"),
                )
                for one in group._group_actions
            ]
            if rows:
                yield table(f"{group.title}.".capitalize(), "value", rows)


def shown(value: object) -> str:
    """A default, as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def value_of(action: argparse.Action) -> str:
    """What follows an option of argparse."""
    return "" if action.nargs == 0 else action.metavar or action.dest.upper()


def table(title: str, second: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Of options, their values, and what they mean."""
    lines = [title, "", f"| option | {second} | |", "|---|---|---|"]
    for name, value, text in rows:
        lines.append(
            " | ".join(
                ["", name and f"`{name}`", value and f"`{value}`", html.escape(" ".join(text.split())), ""]
            ).strip()
        )
    return "\n".join(lines)
