"""Recognise very many pictures on a Ray cluster: Ray Data hands parts to workers that each keep the model open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fscil.errors import UserError
from fscil.runtime import start_ray
from fscil.serving.bulk import ModelAt, Output, Part, Work, answer


class Worker:
    """Lives on one of the cluster's machines; sees model, pictures and output under the same names as the caller."""

    def __init__(self, model: ModelAt, output: Output, top: int):
        import torch

        torch.set_num_threads(1)  # as many workers as cores: more threads would only wait for one another
        self.clf, self.output, self.top = model.open(), output, top

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = Part(int(row["number"]), [str(file) for file in row["files"]])
        return {"pictures": len(part.files), "unreadable": answer(self.clf, part, self.output, self.top)}


class RayEngine:
    """So many processes of a cluster (default: one per GPU or core); one that dies is replaced, its part done again."""

    def __init__(self, workers: int | None = None, address: str | None = None):
        if workers is not None and workers < 1:
            raise UserError(f"--workers is {workers}; it must be at least 1")
        self.workers, self.address = workers, address

    def run(self, model: ModelAt, work: Work, top: int) -> Iterator[tuple[int, int]]:
        ray, started = start_ray(self.address)
        try:
            from ray import data

            total = ray.cluster_resources()
            gpus = int(total.get("GPU", 0)) if model.device != "cpu" else 0
            workers = self.workers or gpus or max(1, int(total.get("CPU", 1)))
            workers = min(workers, len(work.missing))
            context = data.DataContext.get_current()
            context.enable_progress_bars = False  # parts are counted by the caller
            context.execution_options.preserve_order = False
            rows = [{"number": part.number, "files": part.files} for part in work.missing]
            worker: Any = Worker  # a class is what `map` keeps open; its types know functions only
            answers = data.from_items(rows, override_num_blocks=len(rows)).map(
                worker,
                fn_constructor_args=(model, work.output, top),
                compute=data.ActorPoolStrategy(size=workers),
                num_cpus=1,
                num_gpus=1 if gpus else 0,
            )
            for row in answers.iter_rows():
                yield int(row["pictures"]), int(row["unreadable"])
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[-300:]
            raise UserError(
                f"the Ray workers gave up: {text}; the same command goes on with what is missing."
            ) from error
        finally:
            if started:
                ray.shutdown()
