"""Results as a run writes them, from simulated predictions, for the tests of tables, figures and the report."""

import numpy as np

from fscil.evaluation.metrics import evaluate_session, summarise


def simulated_predictions(rng, labels, base_classes, seen, base_accuracy, new_accuracy):
    """Top-5 rows in which an image of a base (new) class is right with the given probability."""
    right = rng.random(len(labels)) < np.where(labels < base_classes, base_accuracy, new_accuracy)
    first = np.where(right, labels, rng.integers(0, seen, len(labels)))
    columns = min(5, seen)
    rows = np.empty((len(labels), columns), dtype=np.int64)
    for index, top in enumerate(first):
        others = rng.permutation(seen)
        rows[index] = np.concatenate([[top], others[others != top]])[:columns]
    return rows


def made_up_result(
    method="smp", seed=2023, dataset="glyphs", base=12, way=4, tasks=3, accuracy=(0.9, 0.7), per_class=10, **config
):
    """The contents of a results.json: `accuracy` is that of base and of new classes at the last session."""
    name = sum(ord(letter) * (index + 1) for index, letter in enumerate(method))
    rng = np.random.default_rng([seed, name])
    sessions = []
    for task in range(tasks + 1):
        seen = base + way * task
        labels = np.repeat(np.arange(seen), per_class)
        topk = simulated_predictions(rng, labels, base, seen, *accuracy)
        session = evaluate_session(labels, topk, base, seen, way)
        measured = {"seconds": 30.0 + task, "learning_seconds": 28.0, "evaluation_seconds": 2.0 + task}
        measured |= {"peak_memory": 3 * 10**8, "peak_gpu_memory": None}
        measured |= {"trainable_parameters": 737280, "stored_images": 0, "stored_bytes": 0, "diagnostics": {}}
        sessions.append({"session": task, **session, **measured})
    return {
        "config": {
            "method": method,
            "dataset": dataset,
            "backbone": "glyph_vit_a",
            "seed": seed,
            "data": {"shots": None, "base": None, "way": None},
            "options": {"margin": 0.2},
            **config,
        },
        "sessions": sessions,
        "summary": summarise(sessions),
        "environment": {"python": "3.11", "torch": "2.6.0"},
    }


def as_stored(result, base=12, way=4, tasks=3):
    """The same with what else a results.json has to hold."""
    names = [f"class {number}" for number in range(base + way * tasks)]
    stream = {"split_hash": "0" * 64, "base_classes": base, "way": way, "class_names": names}
    return {**result, "stream": stream, "confusion": []}
