"""What a dataset gives to a run, for comparison with the files it was made of."""


def stored(dataset, split):
    """{name of an image: (class name, pixels)} of one side of the split, as a run reads it."""
    positions = [at for at, entry in enumerate(dataset.manifest.entries) if entry.split == split]
    store, kept = dataset.store(positions)
    assert kept == positions
    entries = [dataset.manifest.entries[at] for at in positions]
    names = dataset.manifest.class_names
    return {entry.image: (names[entry.label], store.image(at).numpy()) for at, entry in enumerate(entries)}
