"""What `mkdocs build` makes beside the pages: the page of options, from the parsers."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
from typing import Any

from mkdocs.structure.files import File

from vocagnolm.__main__ import COMMANDS
from vocagnolm.run.parser import make_parser

_HEAD = """\
# Options

```
vocagnolm --help
```

```text
{commands}
```

Here is every option of every command, as `vocagnolm COMMAND --help` prints it.

## vocagnolm train

`python train.py` is the same. `--help_all` adds the fields of `transformers.TrainingArguments`.
"""


def on_config(config: Any) -> Any:
    """Link pages to their sources where the repository has an address."""
    if source := os.environ.get("VOCAGNOLM_SOURCE", "").rstrip("/"):
        config.repo_url, config.edit_uri = source, f"{source}/edit/main/docs/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Put the options into their page, which in the repository only says how to print them."""
    files.remove(files.get_file_from_path("options.md"))
    files.append(File.generated(config, "options.md", content="\n".join(_page())))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Lead to files outside of the pages, or only name them."""

    def lead(found: re.Match[str]) -> str:
        shown, path = found.groups()
        return f"[{shown}]({config.repo_url}/blob/main/{path})" if config.repo_url else shown

    return re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", lead, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep numbers of a cell on one line, and let long commands in a sentence break at spaces."""

    def keep(found: re.Match[str]) -> str:
        text = found[1].replace(" +- ", "&nbsp;±&nbsp;").replace(r"\|", "|")
        numbers = re.fullmatch(r"(?:[-+.,\d\s()±%]|to|&nbsp;)+", text)
        return f'<td class="numbers">{text}</td>' if numbers else f"<td>{text}</td>"

    def split(found: re.Match[str]) -> str:
        return re.sub(r"\s", " <wbr>", found[0]) if len(found[0]) > 50 else found[0]

    html = re.sub(r"<td>(.*?)</td>", keep, html)
    return re.sub(r"(?<!span>)<code>[^<]*</code>", split, html)


def _page() -> list[str]:
    parser = make_parser()
    lines = [_HEAD.format(commands=_help("vocagnolm.__main__").partition("\n\npositional")[0])]
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
        if rows := [_row(action, parser.formatter_class("")) for action in shown]:
            lines += ["", f"### {str(group.title).capitalize()}", ""]
            lines += ["| option | |", "|---|---|", *rows]
    for name, (module, sentence) in COMMANDS.items():
        # Its options are in the tables above.
        if name != "train":
            lines += ["", f"## vocagnolm {name}", "", f"{sentence}.", ""]
            lines += ["```", _help(module), "```"]
    return lines


def _row(action: argparse.Action, layout: argparse.HelpFormatter) -> str:
    """Return name and help of one option, as the help page lays them out."""
    name, _, values = layout._format_action_invocation(action).partition(" ")
    about = re.sub(r"(--\w+)", r"`\1`", (action.help or "").replace("%%", "%"))
    if action.choices:
        about += " One of " + ", ".join(f"`{choice}`" for choice in action.choices) + "."
    elif values:
        name = f"{name}` `{values}"
    return f"| `{name}` | {about} |".replace("||", r"\|\|")


def _help(module: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return printed.getvalue().rstrip()
