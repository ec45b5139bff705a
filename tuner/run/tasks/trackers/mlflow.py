"""MLflow: one run over all launches, on the server of MLFLOW_TRACKING_URI, else in a database next to the run."""

import logging
import os
from collections.abc import Mapping, Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from tuner.config.load import flatten
from tuner.run.tasks.trackers.choose import TrackedPoint, TrackedRun

# MLflow would otherwise report its use to its makers, over the network; it reads this when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
EVERY_LINE = {
    "train": "train/tokens",
    "eval": "eval/loss",
    **{kind: f"{kind}/tokens" for kind in ("internals", "times", "health")},
}
# MLflow's own limits of one call, and of one value in characters.
CALL_METRICS, CALL_PARAMS, LONGEST_PARAM = 1000, 100, 6000


class Mlflow:
    """A tracker whose run MLflow names; its id is kept for the next launch."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        database = run.facts.run_dir.parent / "mlflow.db"  # that all runs of a directory share
        self.place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        self._client = MlflowClient(self.place)
        if known_id is None:
            self.id = self._create(run)
        else:
            self.id = known_id
            self._client.update_run(known_id, status="RUNNING")

    def held(self) -> Mapping[str, int]:
        """The newest steps that MLflow has, by a number that every line of the kind holds."""
        found = {kind: self._client.get_metric_history(self.id, name) for kind, name in EVERY_LINE.items()}
        return {kind: max(item.step for item in history) for kind, history in found.items() if history}

    def send(self, points: Sequence[TrackedPoint]) -> None:
        """Log every number of the points at its step."""
        metrics = [
            Metric(name, value, round(point.time_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), CALL_METRICS):
            self._client.log_batch(self.id, metrics=metrics[start : start + CALL_METRICS])

    def close(self, status: str) -> None:
        """Say how the launch ended."""
        self._client.set_terminated(self.id, STATUS[status])

    def _create(self, run: TrackedRun) -> str:
        if (found := self._client.get_experiment_by_name(run.logging.project)) is not None:
            experiment = found.experiment_id
        else:
            local = None if "MLFLOW_TRACKING_URI" in os.environ else (run.facts.run_dir.parent / "mlartifacts").as_uri()
            experiment = self._client.create_experiment(run.logging.project, artifact_location=local)
        tags = {"tuner.run_id": run.facts.run_id, "tuner.tags": ", ".join(run.logging.tags)}
        tags |= {} if run.logging.group is None else {"tuner.group": run.logging.group}
        created = self._client.create_run(experiment, run_name=run.name, tags=tags)
        id_ = str(created.info.run_id)
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flatten(run.facts.recipe).items()]
        for start in range(0, len(params), CALL_PARAMS):
            self._client.log_batch(id_, params=params[start : start + CALL_PARAMS])
        return id_
