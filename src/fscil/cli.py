"""The command `fscil`. Each module in `fscil.commands` brings its own sub-commands; nothing is listed here.

A command module imports nothing heavy at its top (`fscil --help` imports them all) and says

    COMMANDS = {"run": run}        # name -> function; its signature and docstring are the options and the help
    PANEL = "Experiments"          # the heading it appears under, one of PANELS
"""

from __future__ import annotations

import codecs
import importlib
import io
import json
import os
import pkgutil
import re
import sys
from typing import Annotated, Any

import typer

from fscil import commands, registry
from fscil._version import __version__
from fscil.commands._help import Command, Group, wanted_number
from fscil.errors import UserError, nearest
from fscil.text import printable

LONGEST = 4000  # letters of an error: it may quote a name of any length
# The headings in their order, and the commands under each in the order of work; further ones follow.
PANELS = {
    "Your own photos": "fit learn predict evaluate review suggest classes info forget undo app serve export push pull",
    "Experiments": "list fetch run compare reproduce tune",
    "Results": "report leaderboard verify",
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


# What people type for a command that is called otherwise.
MEANT = {
    "train": "fscil fit (your own photos) or fscil run (an experiment)",
    "teach": "fscil learn",
    "add": "fscil learn",
    "classify": "fscil predict",
    "recognise": "fscil predict",
    "recognize": "fscil predict",
    "test": "fscil evaluate",
    "eval": "fscil evaluate",
    "remove": "fscil forget",
    "delete": "fscil forget",
    "demo": "fscil app --demo",
    "web": "fscil app",
    "download": "fscil fetch",
    **{kind: f"fscil list {kind}" for kind in ("methods", "heads", "datasets", "backbones", "recipes", "metrics")},
}


def meant(said: str, options: set[str]) -> str:
    """What a word that is out of place was meant for: a command's other name, or the value of an option.

    >>> meant("No such command 'teach'.", set())
    ' Did you mean fscil learn?'
    >>> meant("Got unexpected extra argument(s) (smp cub200)", {"--method", "--dataset"})
    ' Did you mean --method smp --dataset cub200?'
    """
    if (word := re.match(r"No such command '(\w+)'", said)) and word[1] in MEANT:
        return f" Did you mean {MEANT[word[1]]}?"
    if words := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", said):
        named = {**dict.fromkeys(registry.datasets(), "--dataset"), **dict.fromkeys(registry.methods(), "--method")}
        given = [(named.get(word), word) for word in words[1].split()]
        if all(option in options for option, _ in given):
            return f" Did you mean {' '.join(f'{option} {word}' for option, word in given)}?"
    return ""


USAGE: type[Any] = typer.BadParameter.__mro__[1]  # click's UsageError, of which newer versions of typer have a copy


def misuse(error: Any, words: list[str]) -> str:
    """What is wrong with an option or argument, with the value that was given and where to read on, in one line."""
    own = " ".join(["fscil", *(word for word in words[:1] if not word.startswith("-"))])
    command = error.ctx.command_path if error.ctx is not None else own
    said, param = error.format_message().strip().replace("Value error, ", ""), getattr(error, "param", None)
    if param is not None and said.startswith("Invalid value"):
        names = {*param.opts, *param.secondary_opts}
        pairs = [*zip(words, words[1:]), *(word.split("=", 1) for word in words if "=" in word)]
        name, value = next((pair for pair in pairs if pair[0] in names), (param.metavar or param.name, None))
        first, _, rest = said.partition(" is not one of ")
        if rest:  # 'a' is not one of 'b', 'c'
            value, choices = first.rpartition("'")[0].rpartition("'")[2], re.findall("'([^']*)'", rest)
            said = f'{name} "{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}'
        else:
            wanted = wanted_number(param)
            given = name if value is None else f'{name} "{value}"'
            said = f"{given}: {f'it must be {wanted}' if wanted else error.message.strip()}"
    known = error.ctx.command.params if error.ctx is not None else []
    hint = meant(said, {name for each in known for name in each.opts})
    if hint:  # instead of what looks alike
        said = said.partition(" Did you mean")[0]
    return f"{said}{'' if said[-1] in '.?' else '.'}{hint} See: {command} --help"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, as JSON writes it, so that answers in JSON stay JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("fscil", _escaped)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. What a user can mend is one line on stderr and exit status 2."""
    # Before torch is imported: threads that wait for the next small matrix sleep instead of spinning. On a machine that
    # is busy with other things, spinning takes the cores from those who have work (benchmarks/startup.py).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):  # names may hold any letter, a terminal or a file on Windows few
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="fscil")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(words, prog_name="fscil", standalone_mode=False)
    except USAGE as error:
        if not error.format_message() or "NoArgs" in type(error).__name__:  # `fscil` alone: the help
            error.show()
            sys.exit(error.exit_code)
        problem = misuse(error, words)
    except typer.Abort:  # Ctrl-C in older versions of typer, or the end of input at a question
        sys.exit(130)
    except UserError as error:
        problem = str(error)
    except OSError as error:  # a file that vanished, a disk that fails
        problem = f'"{error.filename}": {error.strerror}' if error.filename else str(error.strerror or error)
    except MemoryError:
        problem = "the memory of this machine does not suffice; close other programs or work on fewer pictures at once"
    else:
        sys.exit(status if isinstance(status, int) else 0)
    line = printable(" ".join(problem.split()))
    print(f"fscil: error: {line if len(line) < LONGEST else line[:LONGEST] + '…'}", file=sys.stderr)
    sys.exit(2)
