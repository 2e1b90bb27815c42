"""A run and its table: two methods on the built-in benchmark, cut small, and their accuracies side by side."""

import tempfile

import fscil

SMALL = {"data.base": 10, "data.way": 2, "data.tasks": 2, "options.epochs": 1}  # leave it out for the real thing


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        for method in ("baseline", "smp"):
            results = fscil.run(method, limit=8, settings=SMALL, folder=f"{place}/{method}", device="cpu")
            print(results.table())
            print(f"{method}: {results.summary['A_final']:.1f} % after the last task")


if __name__ == "__main__":
    main()
