"""Bodies of requests, as the routes validate and /openapi.json describes them.

Types are strict: no "10", no true, no NaN. On OpenAI's routes a field that is null means its
default, and unknown fields are ignored, as clients send many; a field that would change the answer
in a way that is not offered is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from scheduling.errors import InvalidRequest

MOST_STOPS, LONGEST_STOP = 16, 256
MOST_COMPLETIONS = 16  # completions of a prompt
MOST_STOP_IDS = 64
MOST_LOGPROBS = 20
# meanings that several bodies share
MODEL = "base model or LoRA adapter; null: the base model"
TOP_K = "sample among so many likeliest tokens"
TOP_P = "sample among the likeliest tokens of this probability in all"
ECHO = "the text begins with the prompt"
MOST = "completion tokens at most"
LOGPROBS = "so many likeliest tokens beside each"
# names that other routes and servers have for fields of POST /inference
ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "num_tokens"),
    **dict.fromkeys(("prompts", "text", "inputs"), "prompt"),
}

# fail_fast: a list with 100,000 mistakes ends at the first, instead of holding the GIL while each
# is described
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Lists = Annotated[list[Integers], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
# the request's reader checks that no prompt is empty, in a sentence
_SEVERAL: dict[str, Any] = {"type": "array", "minItems": 1}
_IDS = _SEVERAL | {"items": {"type": "integer", "minimum": 0}}
Texts = Annotated[Strings, WithJsonSchema(_SEVERAL | {"items": {"type": "string", "minLength": 1}})]
Ids = Annotated[Integers, WithJsonSchema(_IDS)]
IdLists = Annotated[Lists, WithJsonSchema(_SEVERAL | {"items": _IDS})]
Prompt = Text | Texts | Ids | IdLists  # one prompt or several, as text or as ids
# a level: 1 is the highest, 0 the default. The scheduler refuses levels that it does not have
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Limit = Timeout  # a latency's, in ms; its class states it for a request that does not
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[int, Field(ge=0)]
StopIds = Annotated[list[Id], Field(max_length=MOST_STOP_IDS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=2**20)]
Range = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(sorted)]
Model = TypeVar("Model", bound=BaseModel)


def _either(*names: str) -> dict[str, Any]:
    """Return a part of a JSON schema: exactly one of two fields is given."""
    given, none = {"type": ["string", "array"]}, {"type": "null"}
    pairs = names, names[::-1]
    parts = [{"required": [a], "properties": {a: given, b: none}} for a, b in pairs]
    return {"oneOf": parts}


def with_fields(fields: Mapping[str, Any]) -> Callable[[type[Model]], type[Model]]:
    """Add fields, each as (type, default), to a model."""
    more: Any = dict(fields)
    return lambda model: create_model(model.__name__, __base__=model, __doc__=model.__doc__, **more)


class LoadRequest(BaseModel):
    """The body of POST /live/load."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rate: Annotated[NotNegative, Field(le=1000)] = Field(
        description="requests per second; 0 ends it"
    )
    # a default is cut to half the context
    num_tokens: Range = Field(default=[1, 256], description="fewest and most completion tokens")
    prompt_tokens: Range = Field(default=[4, 64], description="fewest and most prompt tokens")
    seconds: Annotated[Timeout, Field(le=60)] = Field(30.0, description="until the load ends")


class UnloadAdapterRequest(BaseModel):
    """The body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)

    lora_name: str = Field(min_length=1, description="name of the adapter")


class LoadAdapterRequest(UnloadAdapterRequest):
    """The body of POST /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=4096, description="whole path of its folder")


class Common(BaseModel):
    """Fields that all completion routes have under one name."""

    timeout_s: Timeout | None = Field(None, description="until a 504; null: --request-timeout-s")
    queue_timeout_s: Timeout | None = Field(
        None, description="longest time in the queue, where --queue-policy lets requests shorten it"
    )
    user: str | None = Field(None, max_length=256, description="name, for fairness and limits")
    priority: Priority = Field(0, description="level, 1 the highest; 0: the server's default")
    slo_class: str | None = Field(None, max_length=256, description="class of --slo-classes")
    slo_ttft_ms: Limit | None = Field(None, description="longest time to the first token")
    slo_tpot_ms: Limit | None = Field(None, description="longest time per output token after it")
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS, description="completions of each prompt")
    cache_salt: str = Field("", max_length=256, description="requests of one salt share KV blocks")
    stream: bool = Field(False, description="tokens come as server-sent events")


class InferenceRequest(Common):
    """The body of POST /inference; unknown fields are refused."""

    # not extra="forbid", which would describe every unknown field
    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"additionalProperties": False, **_either("prompt", "prompt_ids")},
    )

    prompt: Text | Texts | None = Field(None, description="one prompt or several")
    prompt_ids: Ids | IdLists | None = Field(None, description="or their token ids")
    model: str | None = Field(None, description=MODEL)
    num_tokens: int = Field(ge=1, description="completion tokens; all are computed")
    temperature: NotNegative = Field(1.0, description="0: greedy, the likeliest token")
    top_k: int | None = Field(None, ge=1, lt=2**63, description=TOP_K)
    top_p: float | None = Field(None, gt=0, le=1, description=TOP_P)
    seed: int | None = Field(None, ge=0, lt=2**63, description="of sampling; null: a new one")
    echo: bool = Field(False, description=ECHO)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        """Refuse the first unknown field, which may stand for one that is missing."""
        for name in body if isinstance(body, dict) else ():
            if name not in cls.model_fields:
                valid = f"unknown field; valid ones are {', '.join(sorted(cls.model_fields))}"
                fix = f"this route calls it {ELSEWHERE[name]}" if name in ELSEWHERE else valid
                raise InvalidRequest(f"{name[:100]}: {fix}", param=name[:100])
        return body

    @model_validator(mode="after")
    def _one_prompt(self) -> InferenceRequest:
        if self.prompt is None and self.prompt_ids is None:
            raise ValueError("give a prompt or prompt_ids")
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("give prompt or prompt_ids, not both")
        return self


def _only(names: str, *offered: Any) -> dict[str, Any]:
    """Return fields that may only have the values offered, which change nothing."""

    def check(value: Any) -> Any:
        for each in offered:
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return value
        values = " or ".join(map(json.dumps, offered))
        raise ValueError(f"only {values} is offered here; leave it out")

    schema = WithJsonSchema({"enum": [*offered]})
    return dict.fromkeys(names.split(), (Annotated[Any, PlainValidator(check), schema], offered[0]))


def _check_stops(stop: str | list[str]) -> str | list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    if (n := len(strings)) > MOST_STOPS:
        raise ValueError(f"{n} strings, and at most {MOST_STOPS} are looked for; send fewer")
    if not all(strings):
        raise ValueError("every text holds an empty string; leave it out")
    if max(map(len, strings), default=0) > LONGEST_STOP:
        raise ValueError(f"a string may have {LONGEST_STOP} characters at most; send its beginning")
    return stop


_A_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_STOPS = {"type": "array", "items": _A_STOP, "maxItems": MOST_STOPS}
_STOP = WithJsonSchema({"anyOf": [_A_STOP, _STOPS]})
Stop = Annotated[str | Strings, AfterValidator(_check_stops), _STOP]


def _allow_null(schema: dict[str, Any]) -> None:
    """Let the fields of a JSON schema that are not required be null."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class _Lenient(BaseModel):
    """A body with strict types, in which null stands for a field's default."""

    model_config = ConfigDict(strict=True, json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


@with_fields(_only("include_obfuscation", False))
class _StreamOptions(_Lenient):
    include_usage: bool = Field(False, description="the last event has the usage")
    continuous_usage_stats: bool = Field(
        False, description="each event has the usage of its choice so far"
    )


class _OpenAIRequest(_Lenient, Common):
    """Fields that completions and chat completions share besides."""

    model: str | None = Field(None, description=MODEL)
    temperature: NotNegative = Field(1.0, description="0: greedy, the likeliest token")
    top_k: int = Field(0, ge=-1, lt=2**63, description=f"{TOP_K}; 0 and -1: all")
    top_p: float = Field(1.0, ge=0, le=1, description=f"{TOP_P}; 0: greedy")
    seed: int | None = Field(None, ge=-1, lt=2**63, description="of sampling; null, -1: a new one")
    presence_penalty: Penalty = Field(0.0, description="lowers logits of the answer's tokens")
    frequency_penalty: Penalty = Field(0.0, description="the same for each time they occur")
    stop: Stop = Field([], description="strings that end the answer")
    stop_token_ids: StopIds = Field([], description="ids that end the answer")
    min_tokens: int = Field(0, ge=0, description="no stop and no end-of-text before so many tokens")
    ignore_eos: bool = Field(False, description="end-of-text does not end the answer")
    best_of: int = Field(1, ge=1, description="1, or the value of n: every completion is sent")
    stream_options: _StreamOptions | None = Field(None, description="of a stream alone")

    @field_validator("best_of")
    @classmethod
    def _as_n(cls, best_of: int, info: ValidationInfo) -> int:
        if best_of not in (1, info.data.get("n", best_of)):
            raise ValueError("only 1 or the value of n is offered here; leave it out")
        return best_of

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: Any, info: ValidationInfo) -> Any:
        if not info.data.get("stream"):
            raise ValueError('only a stream has options; leave it out, or send "stream": true')
        return options


# fields of clients, of which every other value would change an answer in a way that is not offered
NEUTRAL = {
    **_only("use_beam_search include_stop_str_in_output return_token_ids", False),
    **_only("return_tokens_as_token_ids", False),
    **_only("length_penalty typical_p repetition_penalty", 1),
    **_only("min_p no_repeat_ngram_size", 0),
    **_only("logit_bias structured_outputs", {}),
    **_only("logits_processors bad_words allowed_token_ids", []),
    **_only("skip_special_tokens", True),
    **_only("prompt_logprobs guided_json guided_regex guided_choice guided_grammar", None),
    **_only("structural_tag json_schema regex grammar ebnf", None),
    **_only("truncate_prompt_tokens prompt_embeds", None),
    **_only("response_format", {"type": "text"}),
}
NEUTRAL_OF_CHAT = {
    **NEUTRAL,
    **_only("tools functions documents", []),
    **_only("tool_choice function_call", "none", "auto"),
    **_only("modalities", ["text"]),
    **_only("audio web_search_options chat_template", None),
    **_only("echo continue_final_message", False),
    **_only("add_generation_prompt", True),
}


@with_fields(NEUTRAL | _only("suffix", ""))
class CompletionRequest(_OpenAIRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt = Field(description="one prompt or several, as text or token ids")
    echo: bool = Field(False, description=ECHO)
    max_tokens: int = Field(16, ge=0, description=f"{MOST}; 0, with echo: the prompt is scored")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description=LOGPROBS)

    @field_validator("max_tokens")
    @classmethod
    def _something(cls, most: int, info: ValidationInfo) -> int:
        if not most and not info.data.get("echo"):
            raise ValueError('0 without "echo": true asks for nothing; send 1 or more, or echo')
        return most


class _TextPart(_Lenient):
    type: Literal["text"] = Field(description="kind of the part")
    text: str = Field(description="its text; parts are joined")


TextParts = Annotated[list[_TextPart], Field(fail_fast=True)]


class _Message(_Lenient):
    role: Text = Field(description="author of the text")
    content: str | TextParts | None = Field(None, description="text, or parts of it")

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                kind = json.dumps(part.get("type"))[:100]
                fix = 'send {"type": "text", "text": …}'
                raise ValueError(f"this model reads text alone, and a part has type {kind}; {fix}")
        return content

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


Messages = Annotated[list[_Message], Field(min_length=1, fail_fast=True)]


@with_fields(NEUTRAL_OF_CHAT)
class ChatRequest(_OpenAIRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages = Field(description="the chat: lines `ROLE: TEXT` of the prompt")
    max_tokens: int | None = Field(None, ge=1, description=f"{MOST}; null: to the context's end")
    max_completion_tokens: int | None = Field(None, ge=1, description="newer name of max_tokens")
    logprobs: bool = Field(False, description="each token's log-probability")
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS, description=LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, n: int, info: ValidationInfo) -> int:
        if n and not info.data.get("logprobs"):
            raise ValueError('send "logprobs": true with it')
        return n

    @property
    def prompt(self) -> str:
        return _prompt_of(self.messages)


def _prompt_of(messages: list[_Message]) -> str:
    """Return a chat as a prompt, for which GPT-2 has no format: a line for each message."""
    return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant:"


def _tokenize_schema(schema: dict[str, Any]) -> None:
    _allow_null(schema)
    schema |= _either("prompt", "messages")


@with_fields(_only("add_generation_prompt", True) | _only("return_token_strs", False))
class TokenizeRequest(_Lenient):
    """The body of POST /tokenize, as vLLM's: a prompt, or the messages of a chat."""

    model_config = ConfigDict(json_schema_extra=_tokenize_schema)

    model: str | None = Field(None, description=MODEL)
    prompt: str | None = Field(None, description="text")
    messages: Messages | None = Field(None, description="or a chat")
    add_special_tokens: bool = Field(True, description="no effect: GPT-2's tokenizer has none")

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages, one of the two")
        return self

    @property
    def text(self) -> str:
        return _prompt_of(self.messages) if self.messages is not None else self.prompt or ""
