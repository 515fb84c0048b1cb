"""Models of the routes' answers, for /openapi.json. Routes write plain dictionaries; tests validate
answers by these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from scheduling.latency import PARTS
from server.api.bodies import with_fields
from stats import DEFINITIONS, MEASURES, ROW_KINDS, TIMINGS

# meanings that several answers share
INDEX = "number of the completion: the prompt's index × n + which of its n"
TOKEN = "a token that is no whole characters is bytes:\\xNN…"
CONTEXT = "tokens of prompt and completion at most"
OF_LATENCY = ", ".join(f"{name} ({meaning})" for name, meaning in PARTS.items())
OF_LATENCY = f"seconds of each part of the latency that took any: {OF_LATENCY}"


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _all(kind: Any, *names: str) -> dict[str, Any]:
    """Return required fields of one kind."""
    return dict.fromkeys(names, (kind, ...))


class ErrorDetail(_Answer):
    message: str = Field(description="one sentence, which names the fix")
    type: str = Field(description="OpenAI's word for the kind of error")
    param: str | None = Field(description="the field that is wrong")
    code: str = Field(description="which error it is")


class Error(_Answer):
    error: ErrorDetail


class PromptTokensDetails(_Answer):
    cached_tokens: int = Field(description="found in the prefix cache, and not computed again")


class Usage(_Answer):
    """A prompt counts once, however many completions it has."""

    prompt_tokens: int = Field(description="of all prompts; each counts once, whatever n is")
    completion_tokens: int = Field(description="of all completions")
    total_tokens: int = Field(description="the sum of both")
    prompt_tokens_details: PromptTokensDetails


@with_fields({each.field: (float, Field(description=each.formula_at_server)) for each in TIMINGS})
class Timings(_Answer):
    """Times and counts of one completion, by the server's clock."""

    arrived_at: float = Field(description="seconds since the epoch")
    recomputed_tokens: int = Field(description=DEFINITIONS["recomputed_tokens"])
    draft_tokens: int = Field(description=DEFINITIONS["draft_tokens"])
    accepted_tokens: int = Field(description=DEFINITIONS["accepted_tokens"])
    itl_s: list[float] = Field(description=MEASURES["itl"].formula)
    parts: dict[str, float] = Field(description=OF_LATENCY)


class InferenceEnd(_Answer):
    """The last event of a stream of /inference, and what else a plain answer holds; lists of a
    group, or of n completions.
    """

    usage: Usage
    timings: Timings | list[Timings] = Field(description="a list for a group or n over 1")
    seed: int | list[int] = Field(description="the same seed draws the same text again")


class InferenceAnswer(InferenceEnd):
    completion: str | list[str] = Field(description="the text; a list for a group or n over 1")


class InferencePiece(_Answer):
    """An event of a stream of /inference: the next tokens of a completion."""

    index: int = Field(description=INDEX)
    text: str = Field(description="the text of these tokens")
    tokens: int = Field(description="their number")


class CompletionLogprobs(_Answer):
    """An entry for each token, with echo the prompt's too, the first of which has no logprob. Of
    tokens that the text does not show, as at a stop string, too.
    """

    tokens: list[str] = Field(description=TOKEN)
    token_logprobs: list[float | None] = Field(description="null: the first token of a prompt")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="the likeliest tokens there, and the token itself"
    )
    text_offset: list[int] = Field(description="where each begins in `text`, in characters")


class TopLogprob(_Answer):
    token: str = Field(description=TOKEN)
    logprob: float = Field(description="its log-probability")
    bytes: list[int] = Field(description="its bytes")


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]


class Message(_Answer):
    role: Literal["assistant"] = Field(description="author of the text")
    content: str = Field(description="the text")


class Delta(_Answer):
    role: Literal["assistant"] | None = Field(None, description="in the first event")
    content: str = Field(description="the text of these tokens")


class _Choice(_Answer):
    index: int = Field(description=INDEX)
    finish_reason: Literal["stop", "length"] | None = Field(
        description="stop: an end-of-text, a stop string or token; null: it goes on"
    )


class Choice(_Choice):
    text: str = Field(description="the text; in a stream, of the next tokens")
    logprobs: CompletionLogprobs | None


class ChatChoice(_Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class _Head(_Answer):
    id: str = Field(description="of this answer, random; X-Request-Id is another")
    created: int = Field(description="seconds since the epoch")
    model: str = Field(description="name of the model or adapter")


class CompletionChunk(_Head):
    """An event of a stream; the usage is in one without choices, if it was asked for."""

    object: Literal["text_completion"] = Field(description="kind of the answer")
    choices: list[Choice]
    usage: Usage | None = None


class Completion(CompletionChunk):
    usage: Usage


class ChatCompletion(_Head):
    object: Literal["chat.completion"] = Field(description="kind of the answer")
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Head):
    object: Literal["chat.completion.chunk"] = Field(description="kind of the answer")
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(_Answer):
    id: str = Field(description="name of the model or adapter")
    object: Literal["model"] = Field(description="kind of the answer")
    created: int = Field(description="start of the server, in seconds since the epoch")
    owned_by: str = Field(description="effective-batching")
    root: str = Field(description="its folder, or its name")
    parent: str | None = Field(description="of an adapter: the base model")
    max_model_len: int = Field(description=CONTEXT)


class Models(_Answer):
    object: Literal["list"] = Field(description="kind of the answer")
    data: list[Model]


class Tokens(_Answer):
    """POST /tokenize."""

    count: int = Field(description="number of tokens")
    max_model_len: int = Field(description=CONTEXT)
    tokens: list[int] = Field(description="ids of the tokens")
    token_strs: None = Field(description="always null")


class OfLength(_Answer):
    requests: int
    mean_latency_s: float


ENDINGS = ("completed", "failed", "cancelled", "expired", "refused")
MS = [f"{part}_{name}_ms" for name in ("e2el", "queue_time") for part in ("mean", "p50", "p99")]


@with_fields(_all(int, *ENDINGS, "prompt_tokens", "completion_tokens") | _all(float | None, *MS))
class OfName(_Answer):
    """Measures of a user, or of a priority; times are there once one was answered."""


COUNTS = _all(
    int, *ENDINGS, "invalid", "kv_blocks", "total_input_tokens", "total_output_tokens",
    "largest_batch", *(f"{kind}_rows" for kind in ROW_KINDS), "preemptions", "recomputed_tokens",
    "cached_tokens", "draft_tokens", "accepted_tokens", "adapter_loads",
)  # fmt: skip
NUMBERS = _all(
    float, "request_throughput", "output_throughput", "total_token_throughput", "throughput",
    "occupancy", "useful_fraction", "preempted_s", "paused_s", "busy_s",
)  # fmt: skip


@with_fields(COUNTS | NUMBERS)
class Stats(_Answer):
    """Measures of the run since the last reset, as `definitions` says; distributions are there once
    they have values.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "patternProperties": {
                "^(mean|std|min|max|p50|p90|p95|p99)_[a-z0-9_]+_ms$": {"type": "number"}
            }
        }
    )

    mode: str
    model: str
    latency_per_token: float = Field(alias="latency-per-token")
    total_tokens_handled: int = Field(alias="total-tokens-handled")
    total_elapsed_time: float = Field(alias="total-elapsed-time")
    batches_formed: dict[str, int]
    latency_by_requested_tokens: dict[str, OfLength] = Field(alias="latency-by-requested-tokens")
    users: dict[str, OfName]
    priorities: dict[str, OfName]
    adapters: dict[str, OfName]
    definitions: dict[str, str]
    iterations: list[tuple[float, float, int, int, int, int, int]] = Field(
        [],
        description="with ?iterations=1: started_at, seconds, live, idle, padding, recomputed "
        "and rejected rows of each",
    )
    iterations_lost: int = Field(
        0, description="with ?iterations=1: iterations from `since` on that are no longer kept"
    )
    next_iteration: int | None = Field(
        None, description="with ?iterations=1: the `since` of the next page; null on the last"
    )


class Neighbours(_Answer):
    ran_before: int = Field(description="requests that ran while it waited")
    ran_beside: int = Field(description="requests that ran while it ran")
    longest_beside: list[int] = Field(description="numbers of those that ran beside it longest")
    mean_rows: float = Field(description="how many ran beside it at a time")
    long_prompts: dict[str, int] = Field(description="tokens of the longest computed then")


class RecentRequest(_Answer):
    """A completion, up to its end or up to now."""

    id: int = Field(description="its number, as on the page")
    request_id: str | None = Field(description="X-Request-Id")
    state: str = Field(description="waiting, running, finished, failed, cancelled or expired")
    error: str | None = Field(description="code of its error")
    arrived_at: float = Field(description="seconds since the epoch")
    latency_s: float = Field(description="the sum of its parts")
    prompt_tokens: int = Field(description="of the first completion of a prompt; the others have 0")
    completion_tokens: int
    parts: dict[str, float] = Field(description=OF_LATENCY)
    neighbours: Neighbours


class RecentRequests(_Answer):
    requests: list[RecentRequest] = Field(description="one for each completion")


def _small(name: str, **kinds: Any) -> type[BaseModel]:
    """Return a model of required fields, which say what they are."""
    fields: Any = {field: (kind, ...) for field, kind in kinds.items()}
    return create_model(name, __base__=_Answer, **fields)


Reset = _small("Reset", reset=Literal[True])
Forgotten = _small("Forgotten")
Health = _small("Health", status=Literal["ok"])
Ready = _small("Ready", status=Literal["ready"])
NotReady = _small("NotReady", status=Literal["not ready"], reason=str)


class Description(_Answer):
    name: str
    mode: str
    model: str
    config: dict[str, Any] = Field(description="every setting, as it is used")
    routes: dict[str, str]
    definitions: dict[str, str]
    pids: list[int]


class LoadStarted(_Answer):
    id: str | None = Field(description="of the load, to be sent with each poll; none: it was ended")


class MadeLoad(_Answer):
    id: str
    rate: float
    left_s: float
    sent: int
    in_flight: int


class Events(_Answer):
    """Events for the page; docs/live.md has the format of the lists."""

    about: dict[str, Any]
    now: float
    cursor: int
    restart: bool
    first: int
    next: int
    load: MadeLoad | None
    lines: list[list[Any]] | None = None
    iterations: list[list[Any]]
    requests: list[list[Any]]
    ended: list[list[Any]]
    snapshots: list[list[Any]]
