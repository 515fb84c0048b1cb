"""OpenAI's routes, in every batching mode: completions, chat completions, models.

Unlike /inference they end at end-of-text and at `stop` strings.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Blueprint, Response, jsonify

from routes.bodies import ChatRequest, CompletionRequest
from routes.completions import Completions, read, usage_of
from scheduling.errors import ModelNotFound
from scheduling.inference import Sampling
from tokenizer import StopRule


class _Wire:
    """How the answers of one route look."""

    def __init__(self, prefix: str, answer: str, chunk: str):
        self.prefix, self.answer, self.chunk = prefix, answer, chunk

    def part(self, text: str, *, chunk: bool, first: bool) -> dict[str, Any]:
        """What a choice holds besides its index and finish_reason."""
        return {"text": text}


class _ChatWire(_Wire):
    def part(self, text: str, *, chunk: bool, first: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": text} if first else {"content": text}
        return {"delta" if chunk else "message": message}


COMPLETION = _Wire("cmpl", "text_completion", "text_completion")
CHAT = _ChatWire("chatcmpl", "chat.completion", "chat.completion.chunk")


def blueprint(shared: Completions) -> Blueprint:
    routes = Blueprint("openai", __name__, url_prefix="/v1")
    server = shared.server
    config = server.config
    started = int(time.time())

    @routes.post("/completions")
    def completions() -> Response:
        body = read(CompletionRequest)
        _check_model(body.model)
        prompts = server.encode(
            body.prompt, body.max_tokens, field="prompt", length_field="max_tokens"
        )
        return _respond(body, prompts, body.max_tokens, COMPLETION, body.echo)

    @routes.post("/chat/completions")
    def chat_completions() -> Response:
        body = read(ChatRequest)
        _check_model(body.model)
        max_tokens = body.max_completion_tokens or body.max_tokens
        length_field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        prompts = server.encode(
            body.prompt, max_tokens or 1, field="messages", length_field=length_field
        )
        return _respond(body, prompts, max_tokens or config.max_model_len - len(prompts[0]), CHAT)

    @routes.get("/models")
    def models() -> Response:
        return jsonify(object="list", data=[_model()])

    @routes.get("/models/<name>")
    def model(name: str) -> Response:
        _check_model(name)
        return jsonify(_model())

    def _model() -> dict[str, Any]:
        served = {
            "id": config.model_name,
            "object": "model",
            "created": started,
            "owned_by": "effective-batching",
        }
        return served | {"root": config.model, "max_model_len": config.max_model_len}

    def _check_model(name: str | None) -> None:
        if name not in (None, config.model_name):
            raise ModelNotFound(
                f"There is no model {name[:100]!r} here; this server has {config.model_name!r}.",
                param="model",
            )

    def _respond(
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        max_tokens: int,
        wire: _Wire,
        echo: bool = False,
    ) -> Response:
        rule = StopRule(
            server.tokenizer,
            [body.stop] if isinstance(body.stop, str) else body.stop,
            not body.ignore_eos,
        )
        sampling = Sampling(
            body.temperature if body.top_p else 0.0,
            body.top_k if body.top_k > 0 else None,
            body.top_p if 0 < body.top_p < 1 else None,
        )
        seed = None if body.seed == -1 else body.seed
        group = server.group(
            prompts,
            max_tokens,
            sampling,
            seed,
            body.timeout_s,
            rule,
            user=body.user,
            priority=body.priority,
            queue_timeout_s=body.queue_timeout_s,
            n=body.n,
            cache_salt=body.cache_salt,
        )
        created = int(time.time())

        def answer(kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
            head = {
                "id": f"{wire.prefix}-{group[0].id}",
                "object": kind,
                "created": created,
                "model": config.model_name,
            }
            return head | {"choices": choices} | more

        def choice(i: int, text: str, finish_reason: str | None, **part: bool) -> dict[str, Any]:
            return (
                {"index": i}
                | wire.part(text, **part)
                | {"logprobs": None, "finish_reason": finish_reason}
            )

        if not body.stream:
            shared.wait(group)
            texts = [server.text(member, echo, rule) for member in group]
            choices = [
                choice(i, text, group[i].finish_reason, chunk=False, first=True)
                for i, text in enumerate(texts)
            ]
            return jsonify(answer(wire.answer, choices, usage=usage_of(group)))

        include_usage = body.stream_options.include_usage
        no_usage = {"usage": None} if include_usage else {}
        begun: set[int] = set()

        def piece(i: int, text: str, n: int, last: bool) -> dict[str, Any]:
            first = i not in begun
            begun.add(i)
            return answer(
                wire.chunk,
                [
                    choice(
                        i, text, group[i].finish_reason if last else None, chunk=True, first=first
                    )
                ],
                **no_usage,
            )

        def end() -> dict[str, Any] | None:
            return answer(wire.chunk, [], usage=usage_of(group)) if include_usage else None

        return shared.stream(group, piece, end, echo=echo, rule=rule)

    return routes
