"""`fscil classes` and `fscil info`: what a model knows and how it came to be. Neither needs torch."""

from __future__ import annotations

from typing import Annotated

import typer

from fscil.commands.teach import Model

PANEL = "Your own photos"


def classes(model: Model, as_json: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False) -> None:
    """List the classes a model knows.

    **Example**

    `fscil classes birds`
    """
    from fscil.commands._shared import columns, print_json, read_head

    known = read_head(model).current.record["classes"]
    if as_json:
        print_json(known)
        return
    rows = [(info["name"], info["pictures"], "base" if info["base"] else "taught", info["since"]) for info in known]
    print(columns([("class", "pictures", "origin", "since"), *rows], right=[1]))


def info(model: Model, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what a model is made of, its calibration, and what was taught when.

    **Example**

    `fscil info birds`
    """
    from fscil.commands._shared import columns, event_line, print_json, read_head
    from fscil.teachable.health import model_notes
    from fscil.text import percent, size

    head = read_head(model)
    record, backbone = head.current.record, head.config["backbone"]
    facts = record["calibration"]
    said = model_notes(facts, len(record["classes"]), backbone["name"])
    if as_json:
        history = [version.record["event"] for version in head.versions]
        print_json({"config": head.config, "bytes": head.bytes, **record, "history": history, "notes": said})
        return
    where = "embedded" if backbone["embedded"] else "not embedded: fetched by name, or given with --weights"
    trained = "trained" if head.config["trained"] else "not trained: the backbone is as it came"
    threshold, taught = facts["threshold"], facts["taught_rejection"]
    rejects = "never: too few held-out pictures" if threshold is None else f"below score {threshold:.2f}"
    rows = [
        ("classes", len(record["classes"])),
        ("method", f"{head.config['method']} ({trained})"),
        ("backbone", f"{backbone['name']}, hash {backbone['hash']} ({where})"),
        ("size", f"{size(head.bytes)}, {record['stored_pictures'] or 'no'} pictures stored"),
        ("held-out base pictures", f"{facts['held_out']}, accuracy {percent(facts['held_out_accuracy'])}"),
        ("unknown", f"{rejects} ({facts['score']}, false rejection {percent(facts['false_rejection'])})"),
        ("taught pictures rejected", percent(taught)),
        ("temperature", f"{facts['temperature']:.3g}"),
    ]
    print(columns(rows))
    for text in said:
        print(f"note: {text}.")
    print("\nhistory")
    for version in head.versions:
        print(f"  {event_line(version.record['event'])}")


COMMANDS = {"classes": classes, "info": info}
