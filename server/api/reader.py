"""Bodies of requests: read, checked, and tokenized once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from config.config import MAX_BODY_BYTES
from generate.tokenizer import LONGEST_TOKEN
from scheduling.errors import ContextTooLong, InvalidRequest
from scheduling.sampling import Sampling
from server.api.bodies import (
    ChatRequest,
    Common,
    CompletionRequest,
    InferenceRequest,
    TokenizeRequest,
)
from server.api.refusals import too_large
from server.api.routes import CHAT, COMPLETION, INFERENCE, Call, Route
from server.request import Models, Request

if TYPE_CHECKING:
    from tiktoken import Encoding

    from config.config import Config

Body = TypeVar("Body", bound=BaseModel)
Completing = TypeVar("Completing", InferenceRequest, CompletionRequest, ChatRequest)
Prompt = str | list[str] | list[int] | list[list[int]]  # one prompt or several, as text or as ids


def is_alone(prompt: Prompt) -> bool:
    """Return whether this is one prompt, and not a group (as a list of one prompt is)."""
    return isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))


def parse(kind: type[Body], raw: bytes) -> Body:
    """Validate a body. Raises Refused for a large one, InvalidRequest with the wrong field."""
    if len(raw) > MAX_BODY_BYTES:
        raise too_large()
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])[:100] if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field}: {message}" if field else message, param=field) from None


class RequestReader:
    """Reader of bodies for a server of this Config. Raises ServingError for invalid ones."""

    def __init__(self, config: Config, tokenizer: Encoding, models: Models | None = None):
        self.config, self.tokenizer = config, tokenizer
        self.models = models or Models(config)

    def readers(self) -> dict[Route, Callable[[Call], Request]]:
        """Return the reader of each completion route's calls."""
        return {INFERENCE: self.inference, COMPLETION: self.completion, CHAT: self.chat}

    def inference(self, call: Call) -> Request:
        body, more = self._read(InferenceRequest, call)
        field = "prompt" if body.prompt is not None else "prompt_ids"
        prompt = body.prompt if body.prompt is not None else body.prompt_ids
        assert prompt is not None
        more |= {"alone": is_alone(prompt), "echo": body.echo}
        prompts = self._encode(prompt, body.num_tokens, field=field, length_field="num_tokens")
        sampling = Sampling(body.temperature, body.top_k, body.top_p)
        return Request(prompts, body.num_tokens, sampling, body.seed, **more)

    def completion(self, call: Call) -> Request:
        body, more = self._read(CompletionRequest, call)
        most = body.max_tokens
        prompts = self._encode(body.prompt, most, field="prompt", length_field="max_tokens")
        more |= {"form": "completion", "logprobs": body.logprobs, "echo": body.echo}
        return self._openai(body, prompts, most, more)

    def chat(self, call: Call) -> Request:
        body, more = self._read(ChatRequest, call)
        most = body.max_completion_tokens or body.max_tokens
        length_field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        prompts = self._encode(body.prompt, most or 1, field="messages", length_field=length_field)
        most = most or self.config.max_model_len - len(prompts[0])
        more |= {"form": "chat", "logprobs": body.top_logprobs if body.logprobs else None}
        return self._openai(body, prompts, most, more)

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """Return the answer of POST /tokenize."""
        body = parse(TokenizeRequest, raw)
        self.models.adapter_of(body.model)
        field, most = "prompt" if body.messages is None else "messages", self.config.max_model_len
        # also of a text beyond the context: its client wants to know by how much
        ids = self._ids(body.text, field, max(LONGEST_TOKEN.values()))
        return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None}

    def _read(self, kind: type[Completing], call: Call) -> tuple[Completing, dict[str, Any]]:
        """Return the body of a call, and fields that requests of all routes have."""
        body = parse(kind, call.body)
        adapter = self.models.adapter_of(body.model)
        own = {"adapter": adapter, "user": call.user or body.user, "id": call.id}
        return body, body.model_dump(include={*Common.model_fields}) | own

    def _openai(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        num_tokens: int,
        more: dict[str, Any],
    ) -> Request:
        if more["logprobs"] is not None and self.config.model == "fake":
            raise InvalidRequest(
                "logprobs: the model fake has none; start the server with another --model.",
                param="logprobs",
            )
        if body.min_tokens > num_tokens:
            raise InvalidRequest(
                f"min_tokens: {body.min_tokens} are more than the {num_tokens} tokens at most; "
                "lower it.",
                param="min_tokens",
            )
        stop_ids = {*body.stop_token_ids}
        self._check_ids(stop_ids, "stop_token_ids", "Every stop token id")
        if not body.ignore_eos:
            stop_ids.add(self.tokenizer.eot_token)
        sampling = Sampling(
            body.temperature if body.top_p else 0.0,
            body.top_k if body.top_k > 0 else None,
            body.top_p if 0 < body.top_p < 1 else None,
            **body.model_dump(include={"presence_penalty", "frequency_penalty", "min_tokens"}),
            stop_ids=tuple(sorted(stop_ids)),
        )
        more["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if options := body.stream_options:
            more["continuous_usage"] = options.continuous_usage_stats
            more["include_usage"] = options.include_usage or options.continuous_usage_stats
        seed = None if body.seed == -1 else body.seed
        return Request(prompts, num_tokens, sampling, seed, **more)

    def _encode(
        self, prompt: Prompt, num_tokens: int, *, field: str, length_field: str
    ) -> list[list[int]]:
        """Return the ids of every prompt, each checked to leave room for num_tokens. field,
        length_field: the route's names in errors.
        """
        config, alone = self.config, is_alone(prompt)
        if not alone and len(prompt) > config.max_in_flight:
            raise InvalidRequest(
                f"This server holds {config.max_in_flight} prompts at most; send fewer at once.",
                param=field,
            )
        several: Sequence[Any] = [prompt] if alone else prompt
        longest = LONGEST_TOKEN[config.tokenizer]
        prompts = [
            self._ids(text, field, longest) if isinstance(text, str) else text for text in several
        ]
        if not prompts or not all(prompts):
            raise InvalidRequest("A prompt must not be empty.", param=field)
        for ids in prompts:
            if len(ids) + num_tokens > config.max_model_len:
                raise ContextTooLong(
                    f"{len(ids)} prompt tokens + {num_tokens} completion tokens is beyond the "
                    f"context of {config.max_model_len}; shorten the prompt or lower "
                    f"{length_field}.",
                    param=length_field if len(ids) < config.max_model_len else field,
                )
            self._check_ids(ids, field, "Every prompt id")
        return prompts

    def _ids(self, text: str, field: str, longest: int) -> list[int]:
        """Tokenize a text, unless it exceeds the context even in tokens of the longest kind."""
        if len(text.encode()) > self.config.max_model_len * longest:
            raise ContextTooLong(
                f"The prompt is longer than the context of {self.config.max_model_len} tokens; "
                "shorten it.",
                param=field,
            )
        return self.tokenizer.encode_ordinary(text)

    def _check_ids(self, ids: Collection[int], field: str, which: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.n_vocab:
            raise InvalidRequest(
                f"{which} must be in 0 … {self.tokenizer.n_vocab - 1}.", param=field
            )
