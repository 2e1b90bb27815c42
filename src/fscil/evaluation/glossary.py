"""What the columns of tables mean, in a sentence each. docs/metrics.md has the formulas and a worked example."""

from __future__ import annotations

import re

from fscil.evaluation.sessions import COLUMNS

WHERE = "What the columns mean: `fscil list metrics`."  # below tables that leave the terminal

GLOSSARY: dict[str, str] = {  # by the title of a column
    "A_t": "Accuracy after task t, in percent of the test images of all classes seen so far; t = 0 is the base task.",
    "A_0": "Accuracy after the base task.",
    "A_final": "Accuracy after the last task, on the test images of all classes.",
    "A_avg": "Mean of A_0, A_1, … after every task.",
    "PD": "Performance drop: A_0 − A_final.",
    **{column.title: column.about for column in COLUMNS.values() if column.about},
    "Forgetting": "How far each task but the last fell from its best accuracy before the last session, on average; "
    "negative where tasks improved.",
    "AUROC": "Open set: how often, in percent, the best class of a test image of a class seen has a higher probability "
    "than that of an image of a class still to come; mean over the tasks. 50 is chance.",
    "FPR@95": "Open set: percent of the images of classes still to come that pass the threshold which 95 % of the "
    "others pass; mean over the tasks.",
    "Trainable": "Numbers that the method trains.",
    "Stored images": "Training images that the method keeps for later tasks.",
    "Minutes": "Time of all tasks, evaluation included; parts that another run had trained are not counted.",
    "Seconds": "Time of all tasks in seconds, evaluation included; parts that another run had trained are not counted.",
    "Passes": "Images that a run sends through the backbone, in forward passes; a training pass counts as 2.3.",
}


def entry_of(title: str) -> str | None:
    """The entry that explains a column of this title; None where there is none.

    >>> entry_of("HAcc (class)"), entry_of("A_final (paper)"), entry_of("8"), entry_of("Common seeds")
    ('HAcc', 'A_final', 'A_t', None)
    """
    name = re.sub(r" \(.*\)$", "", title)
    return "A_t" if name.isdigit() else name if name in GLOSSARY else None


def anchor(entry: str) -> str:
    """Where an entry stands on a page."""
    return "metric-" + entry.lower().replace(" ", "-")
