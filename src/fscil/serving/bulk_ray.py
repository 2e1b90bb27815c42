"""Recognise very many pictures on a Ray cluster: parts go to workers that each keep the model open."""

from __future__ import annotations

from collections.abc import Iterator

from fscil.errors import UserError
from fscil.runtime import start_ray, why_ray_gave_up
from fscil.serving.bulk import ModelAt, Output, Part, Work, answer

RESTARTS = 5  # of a worker that dies; a part that is too large for memory must not be tried for ever


class Worker:
    """Lives on one of the cluster's machines; sees model, pictures and output under the same names as the caller."""

    def __init__(self, model: ModelAt, output: Output, top: int):
        import torch

        torch.set_num_threads(1)  # as many workers as cores: more threads would only wait for one another
        self.clf, self.output, self.top = model.open(), output, top

    def answer(self, part: Part) -> tuple[int, int]:
        """Pictures of a part, and how many of them could not be read."""
        return len(part.files), answer(self.clf, part, self.output, self.top)


class RayEngine:
    """So many processes of a cluster (default: one per GPU or core). One that dies is replaced and its part done again;
    if that does not help, the call ends, and what is done is done."""

    def __init__(self, workers: int | None = None, address: str | None = None):
        if workers is not None and workers < 1:
            raise UserError(f"--workers is {workers}; it must be at least 1")
        self.workers, self.address = workers, address

    def run(self, model: ModelAt, work: Work, top: int) -> Iterator[tuple[int, int]]:
        ray, started = start_ray(self.address)
        try:
            from ray.util import ActorPool

            total = ray.cluster_resources()
            gpus = int(total.get("GPU", 0)) if model.device != "cpu" else 0
            places = gpus or max(1, int(total.get("CPU", 1)))  # a worker that has none would wait for ever
            workers = min(self.workers or places, places)
            needs = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
            remote = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS, **needs)(Worker)
            pool = ActorPool([remote.remote(model, work.output, top) for _ in range(min(workers, len(work.missing)))])
            yield from pool.map_unordered(lambda worker, part: worker.answer.remote(part), work.missing)
        except ray.exceptions.RayError as error:
            reason = why_ray_gave_up(ray, error)
            raise UserError(
                f"Ray gave up: {reason}; try fewer --workers. The same command goes on with what is missing."
            ) from error
        finally:
            if started:
                ray.shutdown()
