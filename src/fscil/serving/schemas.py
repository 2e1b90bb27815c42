"""What the server answers, as `/docs` describes it: FastAPI makes its schema of these, texts in `metadata` included."""

from dataclasses import dataclass, field
from typing import Any


def described(text: str, **more: Any) -> Any:
    """A field with a sentence about it."""
    default = {"default": more.pop("default")} if "default" in more else {}
    return field(**default, metadata={"description": text, **more})


@dataclass
class Guess:
    label: str | int
    probability: float


@dataclass
class Answer:
    """What one picture shows, as `fscil predict --json` has it."""

    file: str = described("The name it was sent under.")
    label: str | None = described('The class, "unknown", or null if the picture could not be read.')
    confidence: float = described("Calibrated probability of the best class.")
    unknown: bool = described("Whether it shows none of the known classes.")
    top: list[Guess] = described("The best classes, best first.")
    error: str | None = described("Why the picture could not be read.")


@dataclass
class Answers:
    answers: list[Answer] = described("One per picture, in the order they were sent.")


@dataclass(kw_only=True)
class Event:
    """One change of the model."""

    action: str = described("What was done.", examples=["learn"])
    when: str = described("In UTC.", examples=["2025-01-31T12:00:00Z"])
    classes: dict[str, int] = described("Pictures per class that the change was about.")
    known: int = described("Classes known after it.")
    held_out_accuracy: float | None = described("Accuracy on held-out base pictures after it.", default=None)
    held_out_rejection: float | None = described("Share of them called unknown.", default=None)
    taught_rejection: float | None = described("Share of taught pictures called unknown.", default=None)


@dataclass(kw_only=True)
class Change(Event):
    """A change, with what there is to say about it."""

    notes: list[str] = described("Worth knowing: pictures given twice, a class taught from one picture.")


@dataclass
class Undone:
    undone: list[Event] = described("The changes taken back, latest first.")
    known: int = described("Classes known now.")


@dataclass
class Known:
    name: str | int
    pictures: int
    since: str
    base: bool = described("Of the base classes, or taught later.")


@dataclass
class Classes:
    classes: list[Known]


@dataclass
class History:
    history: list[Event] = described("The base classes first; what was undone is not in it.")


@dataclass
class Health:
    version: str
    status: str = described("Whether it answers, or takes requests; if not, why.", examples=["ok", "ready"])


@dataclass
class Problem:
    detail: str = described("One plain sentence.")
