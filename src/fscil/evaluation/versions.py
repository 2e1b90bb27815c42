"""Whether the rows of a table were computed by the same code: runs carry hashes of the modules they used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fscil.evaluation.tables import Groups, Result

SPELLED_OUT = 2  # modules whose rows are named; of more, the names alone
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}


def modules_of(result: Result) -> Mapping[str, str]:
    """Hashes of the modules that a run used, by path; empty of a run from before they were kept."""
    return (result.get("environment") or {}).get("modules") or {}


def code_notes(groups: Groups) -> list[str]:
    """One line where the rows of a table do not come from the same code, or from code that is not known; else none.

    >>> runs = {name: [{"environment": {"modules": {"methods/teen.py": name * 16}}, "sessions": []}] for name in "ab"}
    >>> code_notes(runs)
    ['Rows come from two versions of methods/teen.py: aaaaaaa (a), bbbbbbb (b).']
    """
    said = [*_different(groups), *_resumed(groups), *_unknown(groups)]
    return [" ".join(said)] if said else []


def module_line(results: Sequence[Result]) -> str:
    """The versions of the code behind some runs, in a few words: "36 modules, 1a2b3c4d" or "unknown"."""
    codes = dict.fromkeys(_code(result) for result in results)
    return ", ".join(codes)


def _code(result: Result) -> str:
    modules = modules_of(result)
    last = result["sessions"][-1].get("code") if result["sessions"] else None
    return f"{len(modules)} modules, {str(last)[:8]}" if modules else "unknown"


def _different(groups: Groups) -> list[str]:
    versions: dict[str, dict[str, dict[str, None]]] = {}  # module -> hash -> labels of the rows
    for label, members in groups.items():
        for result in members:
            for name, digest in modules_of(result).items():
                versions.setdefault(name, {}).setdefault(digest, {})[label] = None
    several = {name: found for name, found in sorted(versions.items()) if len(found) > 1}
    if not several:
        return []
    parts = [
        f"{NUMBERS.get(len(found), len(found))} versions of {name}: "
        + ", ".join(f"{digest[:7]} ({'; '.join(labels)})" for digest, labels in found.items())
        for name, found in list(several.items())[:SPELLED_OUT]
    ]
    rest = list(several)[SPELLED_OUT:]
    parts += [f"several versions of {', '.join(rest)}"] if rest else []
    return [f"Rows come from {'; from '.join(parts)}."]


def _resumed(groups: Groups) -> list[str]:
    """Rows with a run that began with other code than it ended with."""
    labels = [
        label
        for label, members in groups.items()
        if any(len({session.get("code") for session in result["sessions"]}) > 1 for result in members)
    ]
    return [f"Resumed with other code than it began with: {'; '.join(labels)}."] if labels else []


def _unknown(groups: Groups) -> list[str]:
    labels = [label for label, members in groups.items() if not all(modules_of(result) for result in members)]
    which = "all rows" if len(labels) == len(groups) else "; ".join(labels)
    return [f"Version of the code: unknown for {which}."] if labels else []
