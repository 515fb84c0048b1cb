"""What a request's answer is made of: ids, times and ends of its inferences go in, and the bytes of
its route come out, whole or event by event. Knows no HTTP and no engine.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from generate.tokenizer import Detokenizer
from scheduling.inference import Inference, TokenEvent
from scheduling.latency import times_of
from server.api.logprobs import Logprobs
from server.api.messages import DONE, event
from server.api.refusals import body_of
from server.engine import Engine
from server.request import Request, stop_rule
from stats import gaps_s, timings_of

if TYPE_CHECKING:
    from tiktoken import Encoding


class Part:
    """Progress of one inference: tokens that were read, and tokens that were shown.

    prompt_ids: tokens of the prompt to echo. most: completion tokens to show at most.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, prompt_ids: Sequence[int], most: int):
        self.index, self._most = index, most
        self._detokenizer, self._prompt_ids = detokenizer, prompt_ids
        self._text = ""
        self._read = self._shown = 0

    def read(self, update: TokenEvent) -> tuple[str, int]:
        """Return new text and its number of tokens; nothing of both while text is withheld, as an
        echoed prompt is until the first token.
        """
        if self._prompt_ids:  # now, and not for a request that was refused
            self._text, self._prompt_ids = self._detokenizer.prompt(self._prompt_ids), ()
        n = min(update.n_tokens, self._most)
        tokens = update.inference.tokens[self._read : n]
        self._text += self._detokenizer.completion(tokens, update.is_over)
        self._read = n
        ends_well = update.is_over and update.inference.error is None
        if not ends_well and not (self._text and self._read):
            return "", 0
        text, n = self._text, self._read - self._shown
        self._text, self._shown = "", self._read
        return text, n


class Renderer(ABC):
    """Renders the answer to a request in its form, once `group` is computed or while it is.

    model: its name in the answer. epoch_offset: from the manager's clock to the epoch, in seconds.
    """

    def __init__(
        self,
        request: Request,
        group: Sequence[Inference],
        tokenizer: Encoding,
        model: str,
        epoch_offset: float,
    ):
        self.request, self.group = request, group
        self._model, self._epoch_offset = model, epoch_offset
        rule, echo = stop_rule(request, tokenizer), request.echo
        hidden = rule.hidden if rule else ()
        self._logprobs = []
        self._parts = {}  # by the id() of each inference that is not over
        for i, member in enumerate(group):
            echoed = member.prompt_ids if echo else ()
            part = Part(i, Detokenizer(tokenizer, rule), echoed, request.num_tokens)
            self._parts[id(member)] = part
            if member.scores is not None:
                self._logprobs.append(Logprobs(tokenizer, member, echo, hidden))
        self.begun = False  # some event is rendered

    def whole(self) -> dict[str, Any]:
        """Return the plain answer, once the whole group is answered."""
        parts = zip(self._parts.values(), self.group)
        return self._answer(
            [part.read(TokenEvent(each, len(each.tokens), True)) for part, each in parts]
        )

    @property
    def over(self) -> bool:
        """True once all is rendered."""
        return not self._parts

    def ends(self, over: Collection[int]) -> bool:
        """Return whether the stream ends with these inferences."""
        return not self._parts.keys() - over

    def render(self, updates: Mapping[int, TokenEvent]) -> bytes:
        """Return events for the updates, given by the id() of each inference; [DONE] ends the last.
        Tokens that piled up are one event.

        Raises a ServingError that comes before any text; a later one becomes the last event.
        """
        out: list[Any] = []
        failure = None
        for key, update in updates.items():
            if (part := self._parts.get(key)) is None:  # already over
                continue
            text, n = part.read(update)
            if update.is_over:
                del self._parts[key]
                failure = failure or update.inference.error
            last = update.is_over and update.inference.error is None
            if text or last:
                out.append(self._piece(part.index, text, n, last))
        if failure is not None:
            if not self.begun and not out:
                raise failure
            out.append(body_of(failure))
            self._parts.clear()
        elif not self._parts and (closing := self._end()) is not None:
            out.append(closing)
        self.begun = self.begun or bool(out)
        return b"".join(map(event, out)) + (b"" if self._parts else DONE)

    @abstractmethod
    def _answer(self, shown: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """Return the plain answer. shown: text and number of tokens of each inference."""

    @abstractmethod
    def _piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
        """Return the event for the next n tokens of the group's i-th inference."""

    @abstractmethod
    def _end(self) -> dict[str, Any] | None:
        """Return the closing event, if there is one."""

    def _usage(self) -> dict[str, Any]:
        """Count the tokens; a prompt counts once, however many completions it has."""
        leaders, most = self.group[:: self.request.n], self.request.num_tokens
        return self._counted(leaders, sum([min(len(each.tokens), most) for each in self.group]))

    def _counted(self, leaders: Sequence[Inference], completion: int) -> dict[str, Any]:
        cached = sum(leader.cached_tokens for leader in leaders)
        prompt = sum(len(leader.prompt_ids) for leader in leaders)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class InferenceRenderer(Renderer):
    """This server's own form."""

    def _answer(self, shown: Sequence[tuple[str, int]]) -> dict[str, Any]:
        return {"completion": self._one_or_all([text for text, _ in shown]), **self._end()}

    def _piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
        return {"index": i, "text": text, "tokens": n}

    def _end(self) -> dict[str, Any]:
        return {
            "usage": self._usage(),
            "timings": self._one_or_all([self._timings(member) for member in self.group]),
            "seed": self._one_or_all([member.sampling.seed for member in self.group]),
        }

    def _one_or_all(self, values: Sequence[Any]) -> Any:
        return values[0] if self.request.alone and self.request.n == 1 else values

    def _timings(self, member: Inference) -> dict[str, Any]:
        gaps = gaps_s(times_of(member)).round(6).tolist()
        return timings_of(member, self._epoch_offset) | {"itl_s": gaps}


class CompletionRenderer(Renderer):
    """OpenAI's form of a completion."""

    prefix, answer, chunk = "cmpl", "text_completion", "text_completion"
    form_logprobs = staticmethod(Logprobs.completion)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._created = int(time.time())
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"  # this answer's alone, on any server
        self._sent: Counter[int] = Counter()  # tokens of each choice in a stream

    def _answer(self, shown: Sequence[tuple[str, int]]) -> dict[str, Any]:
        choices = [
            self._choice(i, self._part("message", text), n, self.group[i].finish_reason)
            for i, (text, n) in enumerate(shown)
        ]
        return self._body(self.answer, choices, usage=self._usage())

    def _piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
        first = i not in self._sent
        self._sent[i] += n
        reason = self.group[i].finish_reason if last else None
        choice = self._choice(i, self._part("delta", text, first), n, reason)
        if not self.request.include_usage:
            return self._body(self.chunk, [choice])
        so_far = self._counted([self.group[i]], self._sent[i])
        return self._body(
            self.chunk, [choice], usage=so_far if self.request.continuous_usage else None
        )

    def _end(self) -> dict[str, Any] | None:
        if not self.request.include_usage:
            return None
        return self._body(self.chunk, [], usage=self._usage())

    def _part(self, name: str, text: str, first: bool = True) -> dict[str, Any]:
        return {"text": text}

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": choices} | more

    def _choice(self, i: int, part: dict[str, Any], n: int, reason: str | None) -> dict[str, Any]:
        """The choice of the next n tokens."""
        logprobs = self.form_logprobs(self._logprobs[i], n) if self._logprobs else None
        return {"index": i} | part | {"logprobs": logprobs, "finish_reason": reason}


class ChatRenderer(CompletionRenderer):
    """OpenAI's form of a chat completion."""

    prefix, answer, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    form_logprobs = staticmethod(Logprobs.chat)

    def _part(self, name: str, text: str, first: bool = True) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {name: role | {"content": text}}


FORMS: dict[str, type[Renderer]] = {
    "inference": InferenceRenderer,
    "completion": CompletionRenderer,
    "chat": ChatRenderer,
}


def renderer_of(engine: Engine, request: Request) -> Renderer:
    """Return the renderer of a request's answer; its group is to be queued. Raises what
    Engine.group does.
    """
    model = request.adapter or engine.config.model_name
    made = FORMS[request.form]
    return made(request, engine.group(request), engine.tokenizer, model, engine.epoch_offset)
