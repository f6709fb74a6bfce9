"""MLflow: a store of files in the run's folder, or the server that the environment names.

What it decides
    Runs go to ``MLFLOW_TRACKING_URI`` if it is set, else to ``RUN/mlflow``, which uses no network.
    A resumed run goes on as the same run there, with the parameters that it began with.

Sources
    mlflow-skinny 3.17, which needs MLFLOW_ALLOW_FILE_STORE for a store without a data base, and
    reports its use unless MLFLOW_DISABLE_TELEMETRY is set.
"""

import os
import time
from collections.abc import Mapping

from equipoise.train.sinks.sink import Sink, SinkRun

_NAME, _EXPERIMENT = "mlflow", "equipoise"
_PARAMS_AT_ONCE = 100
"""Most that ``log_batch`` takes."""


class _MlflowRun:
    def __init__(self, run: SinkRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlflow").as_uri()
        self._client, self._metric = MlflowClient(tracking_uri=where), Metric
        self._id = run.known_id(_NAME)
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        run.keep_id(_NAME, self._id)
        params = [Param(key, str(value)) for key, value in run.config.items()]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS_AT_ONCE])

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_mlflow(run: SinkRun) -> Sink:
    """Begin a run of MLflow, or continue the one that this run has."""
    return _MlflowRun(run)
