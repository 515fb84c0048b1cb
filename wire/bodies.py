"""Bodies of requests, as the routes validate and /openapi.json describes them.

Types are strict: no "10", no true, no NaN. On OpenAI's routes a field that is null means its
default, and unknown fields are ignored, as clients send many; a field that would change the answer
in a way that is not offered is refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

MOST_STOPS, LONGEST_STOP = 16, 256
MOST_COMPLETIONS = 16  # of a prompt
MOST_STOP_IDS = 64
MOST_LOGPROBS = 20

# fail_fast: a list with 100,000 mistakes ends at the first, instead of holding the GIL while each
# is described
Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Lists = Annotated[list[Integers], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
Prompt = Text | Strings | Integers | Lists  # one prompt or several, as text or as ids
# a level: 1 is the highest, 0 the default. The scheduler refuses levels that it does not have
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _ascending(pair: list[int]) -> list[int]:
    if pair[0] > pair[1]:
        raise ValueError("give the smaller number first")
    return pair


Range = Annotated[
    list[Annotated[int, Field(ge=1, le=2**20)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_ascending),
]


def _either(*names: str) -> dict[str, Any]:
    """Return a part of a JSON schema: exactly one of two fields is given."""
    return {
        "oneOf": [
            {
                "required": [name],
                "properties": {name: {"type": ["string", "array"]}, other: {"type": "null"}},
            }
            for name, other in (names, names[::-1])
        ]
    }


class LoadRequest(BaseModel):
    """The body of POST /live/load; a rate of 0 ends the load that there is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rate: float = Field(ge=0, le=1000, allow_inf_nan=False, description="requests a second")
    num_tokens: Range = Field(default=[1, 256], description="at least and at most; each as likely")
    prompt_tokens: Range = Field(default=[4, 64], description="the same of prompts")
    seconds: float = Field(default=30.0, gt=0, le=60, allow_inf_nan=False)


class InferenceRequest(BaseModel):
    """The body of POST /inference; unknown fields are refused."""

    # the route refuses the first unknown field: pydantic would describe all of them
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={"additionalProperties": False, **_either("prompt", "prompt_ids")},
    )

    prompt: Text | Strings | None = None
    prompt_ids: Integers | Lists | None = None
    num_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1, lt=2**63)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    timeout_s: Timeout | None = None
    user: str | None = Field(None, max_length=256)
    priority: Priority = 0
    queue_timeout_s: Timeout | None = None  # in the queue alone
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    cache_salt: str = Field("", max_length=256)
    echo: bool = False
    stream: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> InferenceRequest:
        if self.prompt is None and self.prompt_ids is None:
            raise ValueError("give a prompt or prompt_ids")
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("give prompt or prompt_ids, not both")
        return self


class _Only:
    """Annotation of a field that may only have the values offered, which change nothing."""

    def __init__(self, *offered: Any):
        self._offered = offered

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self._offered]}

    def _check(self, value: Any) -> Any:
        for offered in self._offered:
            if value == offered and isinstance(value, bool) == isinstance(offered, bool):
                return value
        raise ValueError(
            f"only {' or '.join(map(json.dumps, self._offered))} is offered here; leave it out"
        )


def _check_stops(stop: str | list[str]) -> str | list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MOST_STOPS:
        raise ValueError(
            f"{len(strings)} strings, and at most {MOST_STOPS} are looked for; send fewer"
        )
    if not all(strings):
        raise ValueError("every text holds an empty string; leave it out")
    if max(map(len, strings), default=0) > LONGEST_STOP:
        raise ValueError(f"a string may have {LONGEST_STOP} characters at most; send its beginning")
    return stop


_A_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
Stop = Annotated[
    str | Strings,
    AfterValidator(_check_stops),
    WithJsonSchema(
        {"anyOf": [_A_STOP, {"type": "array", "items": _A_STOP, "maxItems": MOST_STOPS}]}
    ),
]


class _Lenient(BaseModel):
    """A body with strict types, in which null stands for a field's default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        required = schema.get("required", ())
        for name, field in schema["properties"].items():
            if name not in required:
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return schema


class _StreamOptions(_Lenient):
    include_usage: bool = False


class _OpenAIRequest(_Lenient):
    """Fields that completions and chat completions share."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**63)  # 0 and −1: off, as vLLM's clients write it
    top_p: float = Field(1.0, ge=0, le=1)  # 0: greedy
    seed: int | None = Field(None, ge=-1, lt=2**63)  # −1: none
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: Stop = []
    stop_token_ids: Annotated[Integers, Field(max_length=MOST_STOP_IDS)] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    timeout_s: Timeout | None = None
    user: str | None = Field(None, max_length=256)
    priority: Priority = 0
    queue_timeout_s: Timeout | None = None  # in the queue alone
    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    cache_salt: str = Field("", max_length=256)
    stream: bool = False
    stream_options: _StreamOptions | None = None

    # sampling that is not offered
    best_of: Annotated[Any, _Only(1)] = 1
    use_beam_search: Annotated[Any, _Only(False)] = False
    length_penalty: Annotated[Any, _Only(1)] = 1
    min_p: Annotated[Any, _Only(0)] = 0
    typical_p: Annotated[Any, _Only(1)] = 1
    repetition_penalty: Annotated[Any, _Only(1)] = 1
    no_repeat_ngram_size: Annotated[Any, _Only(0)] = 0
    logit_bias: Annotated[Any, _Only({})] = {}
    logits_processors: Annotated[Any, _Only([])] = []
    bad_words: Annotated[Any, _Only([])] = []
    allowed_token_ids: Annotated[Any, _Only([])] = []
    # where an answer ends, and what of it is shown
    include_stop_str_in_output: Annotated[Any, _Only(False)] = False
    skip_special_tokens: Annotated[Any, _Only(True)] = True
    prompt_logprobs: Annotated[Any, _Only(None)] = None
    return_token_ids: Annotated[Any, _Only(False)] = False
    return_tokens_as_token_ids: Annotated[Any, _Only(False)] = False
    # what an answer looks like
    response_format: Annotated[Any, _Only({"type": "text"})] = {"type": "text"}
    structured_outputs: Annotated[Any, _Only({})] = {}
    guided_json: Annotated[Any, _Only(None)] = None
    guided_regex: Annotated[Any, _Only(None)] = None
    guided_choice: Annotated[Any, _Only(None)] = None
    guided_grammar: Annotated[Any, _Only(None)] = None
    structural_tag: Annotated[Any, _Only(None)] = None
    json_schema: Annotated[Any, _Only(None)] = None
    regex: Annotated[Any, _Only(None)] = None
    grammar: Annotated[Any, _Only(None)] = None
    ebnf: Annotated[Any, _Only(None)] = None
    # the prompt
    truncate_prompt_tokens: Annotated[Any, _Only(None)] = None
    prompt_embeds: Annotated[Any, _Only(None)] = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: Any, info: ValidationInfo) -> Any:
        if not info.data.get("stream"):
            raise ValueError('only a stream has options; leave it out, or send "stream": true')
        return options


class CompletionRequest(_OpenAIRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    echo: bool = False
    max_tokens: int = Field(16, ge=0, description="0, with echo: the prompt alone")
    suffix: Annotated[Any, _Only("")] = ""
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @field_validator("max_tokens")
    @classmethod
    def _something(cls, most: int, info: ValidationInfo) -> int:
        if not most and not info.data.get("echo"):
            raise ValueError('0 without "echo": true asks for nothing; send 1 or more, or echo')
        return most


class _TextPart(_Lenient):
    type: Literal["text"]
    text: str


class _Message(_Lenient):
    role: Text
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise ValueError(
                    "this model reads text alone, and a part has type "
                    f"{json.dumps(part.get('type'))[:100]}; "
                    'send {"type": "text", "text": …}'
                )
        return content

    @property
    def text(self) -> str:
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or [])
        )


class ChatRequest(_OpenAIRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # its newer name
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[Any, _Only([])] = []
    tool_choice: Annotated[Any, _Only("none", "auto")] = "none"
    functions: Annotated[Any, _Only([])] = []
    function_call: Annotated[Any, _Only("none", "auto")] = "none"
    modalities: Annotated[Any, _Only(["text"])] = ["text"]
    audio: Annotated[Any, _Only(None)] = None
    web_search_options: Annotated[Any, _Only(None)] = None
    echo: Annotated[Any, _Only(False)] = False
    add_generation_prompt: Annotated[Any, _Only(True)] = True
    continue_final_message: Annotated[Any, _Only(False)] = False
    chat_template: Annotated[Any, _Only(None)] = None
    documents: Annotated[Any, _Only([])] = []

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


class TokenizeRequest(_Lenient):
    """The body of POST /tokenize, as vLLM's: a prompt, or the messages of a chat."""

    model_config = ConfigDict(json_schema_extra=_either("prompt", "messages"))

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True  # GPT-2's tokenizer has none to add
    add_generation_prompt: Annotated[Any, _Only(True)] = True
    return_token_strs: Annotated[Any, _Only(False)] = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages, one of the two")
        return self

    @property
    def text(self) -> str:
        return _prompt_of(self.messages) if self.messages is not None else self.prompt or ""
