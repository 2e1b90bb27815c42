"""The command `fscil`. Each module in `fscil.commands` brings its own sub-commands; nothing is listed here.

A command module imports nothing heavy at its top (`fscil --help` imports them all) and says

    COMMANDS = {"run": run}        # name -> function; its signature and docstring are the options and the help
    PANEL = "Experiments"          # the heading it appears under, one of PANELS
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

from fscil import commands
from fscil._version import __version__
from fscil.commands._help import Command, Group
from fscil.errors import UserError

# The headings in their order, and the commands under each in the order of work; further ones follow.
PANELS = {
    "Your own photos": "fit learn predict evaluate review suggest classes info forget undo app serve export push pull",
    "Experiments": "list run compare reproduce",
    "Results": "report verify",
}

app = typer.Typer(
    name="fscil",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fscil {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Few-shot class-incremental learning on pretrained Vision Transformers.

    With photos, start with `fscil fit`, or with `fscil app --demo` to see what it does; for experiments, with
    `fscil run`: SMP on the built-in benchmark, no data or network needed.
    """


def _add_commands() -> None:
    names = [found.name for found in pkgutil.iter_modules(commands.__path__) if found.name[0] != "_"]
    modules = [importlib.import_module(f"{commands.__name__}.{name}") for name in names]
    found = {name: (module.PANEL, function) for module in modules for name, function in module.COMMANDS.items()}
    for panel, line in PANELS.items():
        order = line.split()
        own = [name for name, (heading, _) in found.items() if heading == panel]
        for name in sorted(own, key=lambda name: order.index(name) if name in order else len(order)):
            app.command(name, rich_help_panel=panel, cls=Command)(found[name][1])


_add_commands()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A UserError is one line on stderr and exit status 2."""
    try:
        app(arguments)
    except UserError as error:
        print(f"fscil: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
