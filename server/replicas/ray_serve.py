"""Replicas on Ray Serve behind one ingress: what runs on Ray (serve.py starts it)."""

from __future__ import annotations

import asyncio
import time
from math import ceil
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from config.config import END_S, Config
from server.replicas import replica
from server.replicas.handles import Handles
from server.replicas.ingress import create_app
from server.replicas.ray_routers import OurRouter
from server.replicas.replica import needs

APP = "effective-batching"
REPORT_S = 0.1  # between reports of a replica to routers; Ray fetches them no more often
HANGS_S = 10  # a replica or an ingress that does not answer for so long, three times, is replaced
SPARE = 64  # requests for /stats and the page, beside completions


class Replica(replica.Replica):
    """A serving.Server in a process of its own. It is up once its engine is loaded."""

    async def __init__(self, config: str):  # type: ignore[misc]  # Ray awaits it
        super().__init__(
            Config.model_validate_json(config), serve.get_replica_context().replica_id.unique_id
        )
        if not await asyncio.to_thread(self.manager.wait_until_loaded):
            raise RuntimeError(self.manager.not_ready_because())

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if (reason := self.manager.not_ready_because()) is not None:
            raise RuntimeError(reason)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return a report for `server.replicas.ray_routers.OurRouter`."""
        return {"at": time.time(), "tokens": self.manager.remaining_tokens()}

    def __del__(self) -> None:
        self.engine.close()


def application(
    config: Config, replicas: int, router: str, rule: AutoscalingConfig | None, launcher: int
) -> serve.Application:
    """Return the application for `serve.run`. launcher: the id of the process that starts it."""
    most_replicas = rule.max_replicas if rule else replicas
    # the ingress alone checks keys
    text = config.model_copy(update={"api_key": None, "api_keys": None}).handoff()
    # Ray's default is 5. The server's own limit decides, which counts completions, not requests.
    most = config.max_in_flight + SPARE
    routing = RequestRouterConfig(
        request_router_class=OurRouter,
        request_router_kwargs={"name": router, "block_size": config.block_size},
        request_routing_stats_period_s=REPORT_S,
    )
    drain_s = ceil(config.drain_timeout_s + END_S)
    one = serve.deployment(Replica).options(
        name="Replica", num_replicas=None if rule else replicas, max_ongoing_requests=most,
        autoscaling_config=rule,
        graceful_shutdown_timeout_s=drain_s, graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2, health_check_timeout_s=HANGS_S, request_router_config=routing,
        ray_actor_options={f"num_{what.lower()}s": n for what, n in needs(config).items()},
    ).bind(text)  # fmt: skip

    def build() -> FastAPI:
        handle = serve.get_deployment_handle("Replica", app_name=APP)
        least = rule.min_replicas if rule else replicas
        return create_app(config, Handles(handle, least, most_replicas), [launcher])

    return serve.deployment(serve.ingress(build)()).options(
        name="Ingress", max_ongoing_requests=most_replicas * most,
        graceful_shutdown_timeout_s=drain_s + 5, graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=1, health_check_timeout_s=HANGS_S, ray_actor_options={"num_cpus": 0},
    ).bind(one)  # fmt: skip
