"""Watch a run in a tool of your choice: a callback gets the events, in a thread of its own, also offline.

python examples/10_watch.py [print | wandb | mlflow] [FOLDER]   (mlflow-skinny lacks the database of mlflow)
"""

import asyncio
import sys
from typing import Any

from adam_async import Callback, Config, LocalCluster, RunResult
from adam_async.report.tensorboard import scalars_of
from adam_async.run.events import AnyEvent, text_of


class Print(Callback):
    def on_event(self, event: AnyEvent) -> None:
        step, scalars = scalars_of(event)
        print(text_of(event) or type(event).__name__)
        for name, value in scalars.items():
            print(step, name, value)


class WeightsAndBiases(Callback):
    def __init__(self, folder: str) -> None:
        import wandb

        self.run: Any = wandb.init(project="adam-async", mode="offline", dir=folder)

    def on_event(self, event: AnyEvent) -> None:
        if scalars := scalars_of(event)[1]:
            self.run.log(scalars)

    def close(self) -> None:
        self.run.finish()


class MLflow(Callback):
    def __init__(self, folder: str) -> None:
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        self.run, self.mlflow = mlflow.start_run(), mlflow

    def on_event(self, event: AnyEvent) -> None:
        step, scalars = scalars_of(event)
        self.mlflow.log_metrics(scalars, step=step, run_id=self.run.info.run_id)

    def close(self) -> None:
        self.mlflow.MlflowClient().set_terminated(self.run.info.run_id)


async def main(tool: str = "print", folder: str = ".", *, epochs: int = 3) -> RunResult:
    callback = {"print": Print, "wandb": lambda: WeightsAndBiases(folder), "mlflow": lambda: MLflow(folder)}
    async with LocalCluster(Config(data="digits", epochs=epochs), callbacks=[callback[tool]()]) as cluster:
        return await cluster.train()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
