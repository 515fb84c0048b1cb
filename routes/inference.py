"""POST /inference: this server's own form of a completion. It runs to `num_tokens`, whatever tokens
come.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from routes.bodies import InferenceRequest
from routes.completions import Completions, read, usage_of
from scheduling.errors import InvalidRequest
from scheduling.inference import Inference, Sampling
from serving import is_alone
from stats import times_of


def blueprint(completions: Completions) -> Blueprint:
    server = completions.server
    routes = Blueprint("inference", __name__)

    @routes.post("/inference")
    def inference() -> Response:
        body = read(InferenceRequest)
        for field in body.model_extra or ():
            valid = ", ".join(InferenceRequest.model_fields)
            raise InvalidRequest(
                f"{field[:100]}: unknown field; valid ones are {valid}", param=field[:100]
            )
        field, prompt = (
            ("prompt", body.prompt) if body.prompt is not None else ("prompt_ids", body.prompt_ids)
        )
        assert prompt is not None
        prompts = server.encode(prompt, body.num_tokens, field=field, length_field="num_tokens")
        sampling = Sampling(body.temperature, body.top_k, body.top_p)
        group = server.group(
            prompts,
            body.num_tokens,
            sampling,
            body.seed,
            body.timeout_s,
            user=body.user,
            priority=body.priority,
            queue_timeout_s=body.queue_timeout_s,
            n=body.n,
            cache_salt=body.cache_salt,
        )
        one = is_alone(prompt) and body.n == 1

        def measures() -> dict[str, Any]:
            timings = [_timings(member, server.manager.epoch_offset) for member in group]
            seeds = [member.sampling.seed for member in group]
            return {
                "usage": usage_of(group),
                "timings": timings[0] if one else timings,
                "seed": seeds[0] if one else seeds,
            }

        if body.stream:
            return completions.stream(
                group,
                lambda i, text, n, last: {"index": i, "text": text, "tokens": n},
                measures,
                echo=body.echo,
            )
        completions.wait(group)
        texts = [server.text(member, body.echo) for member in group]
        return jsonify(completion=texts[0] if one else texts, **measures())

    return routes


def _timings(member: Inference, epoch_offset: float) -> dict[str, Any]:
    times = times_of(member)
    seconds = {
        name: round(getattr(times, name), 6)
        for name in ("queue_s", "ttft_s", "decode_s", "held_s", "e2e_s")
    }
    return {
        "arrived_at": times.arrived_at + epoch_offset,
        **seconds,
        "preempted_s": round(member.preempted_s, 6),
        "paused_s": round(member.paused_s, 6),
        "recomputed_tokens": member.recomputed_tokens,
        "itl_s": times.itl_s.round(6).tolist(),
    }
