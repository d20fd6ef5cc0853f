# SPDX-License-Identifier: Apache-2.0
"""Models inside a FastAPI app: `uvicorn examples.fastapi_app:app`, or run this file (`PORT=…`)."""

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from actorserve import ActorserveError, Supervisor

models = Supervisor(Path(__file__).parent / "repository")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Start the models with the app, and stop them with it."""
    async with models:
        yield


app = FastAPI(title="actorserve in FastAPI", lifespan=lifespan)


class Pair(BaseModel):
    a: list[float]
    b: list[float]


@app.exception_handler(ActorserveError)
async def answer_error(_: Request, error: ActorserveError) -> JSONResponse:
    """Answer with the error's own status, and say when to come back where it knows."""
    wait_s = getattr(error, "retry_after_s", None)
    headers = {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return JSONResponse({"error": error.message}, error.http_status, headers)


@app.get("/ready")
async def ready() -> JSONResponse:
    """Answer 200 while every model has all its instances, else 503."""
    return JSONResponse({"failures": models.failures}, 200 if models.is_ready() else 503)


@app.post("/add_sub")
async def add_sub(pair: Pair) -> dict[str, list[float]]:
    """Return the sum and the difference of two vectors of four."""
    inputs = {"INPUT0": np.array(pair.a, np.float32), "INPUT1": np.array(pair.b, np.float32)}
    outputs = await models.infer("add_sub", inputs, timeout_s=10)
    return {"sum": outputs["OUTPUT0"].tolist(), "difference": outputs["OUTPUT1"].tolist()}


@app.post("/double")
async def double(numbers: list[int]) -> list[int]:
    """Return twice the numbers."""
    outputs = await models.infer("async_double", {"INPUT": numbers}, timeout_s=10)
    doubled: list[int] = outputs["OUTPUT"].tolist()
    return doubled


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
