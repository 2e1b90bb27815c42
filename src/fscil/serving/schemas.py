"""What the server answers, as `/docs` describes it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Guess(BaseModel):
    label: str | int
    probability: float


class Answer(BaseModel):
    """What one picture shows, as `fscil predict --json` has it."""

    file: str = Field(description="The name it was sent under.")
    label: str | None = Field(description='The class, "unknown", or null if the picture could not be read.')
    confidence: float = Field(description="Calibrated probability of the best class.")
    unknown: bool = Field(description="Whether it shows none of the known classes.")
    top: list[Guess] = Field(description="The best classes, best first.")
    error: str | None = Field(description="Why the picture could not be read.")


class Answers(BaseModel):
    answers: list[Answer] = Field(description="One per picture, in the order they were sent.")


class Event(BaseModel):
    """One change of the model."""

    action: str = Field(examples=["learn"])
    when: str = Field(examples=["2025-01-31T12:00:00Z"])
    classes: dict[str, int] = Field(description="Pictures per class that the change was about.")
    known: int = Field(description="Classes known after it.")
    held_out_accuracy: float | None = Field(None, description="Accuracy on held-out base pictures after it.")
    held_out_rejection: float | None = Field(None, description="Share of them called unknown.")
    taught_rejection: float | None = Field(None, description="Share of taught pictures called unknown.")


class Change(Event):
    notes: list[str] = Field(description="Worth knowing: pictures given twice, a class taught from one picture.")


class Undone(BaseModel):
    undone: list[Event] = Field(description="The changes taken back, latest first.")
    known: int = Field(description="Classes known now.")


class Known(BaseModel):
    name: str | int
    pictures: int
    base: bool = Field(description="Of the base classes, or taught later.")
    since: str


class Classes(BaseModel):
    classes: list[Known]


class History(BaseModel):
    history: list[Event] = Field(description="The base classes first; what was undone is not in it.")


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    version: str


class Problem(BaseModel):
    detail: str = Field(description="One plain sentence.")
