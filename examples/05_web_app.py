"""A web application that trains and answers in one event loop.

uvicorn --app-dir examples 05_web_app:app      serves http://127.0.0.1:8000
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from adam_async import Config, Disk, LocalCluster, load_dataset


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Train from start to shutdown; a shutdown ends the training in good order."""
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    async with LocalCluster(app.state.config, dataset=digits) as cluster, asyncio.TaskGroup() as group:
        app.state.cluster = cluster
        app.state.training = group.create_task(cluster.train(), name="web/train")
        yield
        app.state.training.cancel()


async def progress(request: Request) -> JSONResponse:
    """Report the progress of the training."""
    now = request.app.state.cluster.driver.progress
    return JSONResponse(
        {
            "phase": now.phase,
            "epoch": now.epoch,
            "images": now.images,
            "loss": now.loss,
            "epochs": [asdict(epoch) for epoch in now.epochs],
        }
    )


def make_app(config: Config) -> Starlette:
    app = Starlette(routes=[Route("/", progress)], lifespan=lifespan)
    app.state.config = config
    return app


app = make_app(Config(epochs=50, threads=1))
