"""The JSON of each completion route's answers, whole or event by event, with log-probabilities."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from scheduling.inference import Inference
from scheduling.sampling import Score
from server.request import Request
from stats import times_of, timings_of

if TYPE_CHECKING:
    from tiktoken import Encoding


class Logprobs:
    """Log-probabilities of one inference, given for its next n completion tokens at a time; with
    echo the prompt's come before the first. hidden: ids that the text does not show.
    """

    def __init__(
        self, tokenizer: Encoding, inference: Inference, echo: bool, hidden: Collection[int]
    ):
        self._tokenizer, self._inference, self._hidden = tokenizer, inference, hidden
        self._next = 0 if echo else len(inference.prompt_ids)
        self._offset = 0  # characters of the text before the next token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, n: int) -> dict[str, list[Any]]:
        """The form of /v1/completions: lists with an entry for each token."""
        lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for id_, score, shown in self._take(n):
            name, top = self._name(id_), None
            if score is not None:
                top = {self._name(each): logprob for each, logprob in score.top}
                top.setdefault(name, score.logprob)
            entry = name, score and score.logprob, top, self._offset
            for values, value in zip(lists.values(), entry):
                values.append(value)
            self._offset += len(self._utf8.decode(self._bytes(id_))) if shown else 0
        return lists

    def chat(self, n: int) -> dict[str, list[Any]]:
        """The form of /v1/chat/completions: an entry for each token."""
        return {
            "content": [
                self._entry(id_, score.logprob)
                | {"top_logprobs": [self._entry(*each) for each in score.top]}
                for id_, score, _ in self._take(n)
                if score is not None
            ]
        }

    def _take(self, n: int) -> Iterator[tuple[int, Score | None, bool]]:
        """Yield each token's id, its score, if any, and whether the text shows it."""
        inference, scores = self._inference, self._inference.scores
        assert scores is not None
        n_prompt = len(inference.prompt_ids)
        first, self._next = self._next, max(self._next, n_prompt) + n
        for position in range(first, self._next):
            id_ = inference.token(position)
            score = scores.of[position - scores.first] if position >= scores.first else None
            yield id_, score, position < n_prompt or id_ not in self._hidden

    def _entry(self, id_: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(id_), "logprob": logprob, "bytes": [*self._bytes(id_)]}

    def _bytes(self, id_: int) -> bytes:
        return self._tokenizer.decode_single_token_bytes(id_)

    def _name(self, id_: int) -> str:
        """Return a token's text, or if it is no whole characters its bytes in OpenAI's form."""
        try:
            return self._bytes(id_).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(id_))


class Reply(ABC):
    """The answer to a request. epoch_offset: from the manager's clock to the epoch, in seconds."""

    def __init__(
        self,
        request: Request,
        group: Sequence[Inference],
        model: str,
        epoch_offset: float,
        logprobs: Sequence[Logprobs] = (),
    ):
        self.request, self.group = request, group
        self.model, self.epoch_offset = model, epoch_offset
        self._logprobs = logprobs

    @abstractmethod
    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the plain answer, once the whole group is answered."""

    @abstractmethod
    def piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
        """Return the event for the next n tokens of the group's i-th inference."""

    @abstractmethod
    def end(self) -> dict[str, Any] | None:
        """Return the closing event, if there is one."""

    def _usage(self) -> dict[str, Any]:
        """Count the tokens; a prompt counts once, however many completions it has."""
        leaders = [member for member in self.group if member.leader is None]
        return self._counted(leaders, sum(self._n_shown(member) for member in self.group))

    def _counted(self, leaders: Sequence[Inference], completion: int) -> dict[str, Any]:
        cached = sum(leader.cached_tokens for leader in leaders)
        prompt = sum(len(leader.prompt_ids) for leader in leaders)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _n_shown(self, member: Inference) -> int:
        return min(len(member.tokens), self.request.num_tokens)


class InferenceReply(Reply):
    """This server's own form."""

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        return {"completion": self._one_or_all(texts), **self.end()}

    def piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
        return {"index": i, "text": text, "tokens": n}

    def end(self) -> dict[str, Any]:
        return {
            "usage": self._usage(),
            "timings": self._one_or_all([self._timings(member) for member in self.group]),
            "seed": self._one_or_all([member.sampling.seed for member in self.group]),
        }

    def _one_or_all(self, values: Sequence[Any]) -> Any:
        return values[0] if self.request.alone and self.request.n == 1 else values

    def _timings(self, member: Inference) -> dict[str, Any]:
        gaps = times_of(member).itl_s.round(6).tolist()
        return timings_of(member, self.epoch_offset) | {"itl_s": gaps}


class CompletionReply(Reply):
    """OpenAI's form of a completion."""

    prefix, answer, chunk = "cmpl", "text_completion", "text_completion"
    form_logprobs = staticmethod(Logprobs.completion)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._created = int(time.time())
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"  # of this answer alone, on any server
        self._sent: Counter[int] = Counter()  # tokens of each choice in a stream

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        choices = [
            self._choice(
                i, self._part("message", text), self._n_shown(member), member.finish_reason
            )
            for i, (text, member) in enumerate(zip(texts, self.group))
        ]
        return self._body(self.answer, choices, usage=self._usage())

    def piece(self, i: int, text: str, n: int, last: bool) -> dict[str, Any]:
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

    def end(self) -> dict[str, Any] | None:
        if not self.request.include_usage:
            return None
        return self._body(self.chunk, [], usage=self._usage())

    def _part(self, name: str, text: str, first: bool = True) -> dict[str, Any]:
        return {"text": text}

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.model}
        return head | {"choices": choices} | more

    def _choice(self, i: int, part: dict[str, Any], n: int, reason: str | None) -> dict[str, Any]:
        """The choice of the next n tokens."""
        logprobs = self.form_logprobs(self._logprobs[i], n) if self._logprobs else None
        return {"index": i} | part | {"logprobs": logprobs, "finish_reason": reason}


class ChatReply(CompletionReply):
    """OpenAI's form of a chat completion."""

    prefix, answer, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    form_logprobs = staticmethod(Logprobs.chat)

    def _part(self, name: str, text: str, first: bool = True) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {name: role | {"content": text}}


REPLIES: dict[str, type[Reply]] = {
    "inference": InferenceReply,
    "completion": CompletionReply,
    "chat": ChatReply,
}
