"""What a client may ask for, as types, and the refusal of everything else: a status and one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Refused(Exception):  # noqa: N818 - it is an answer
    """A request that is not answered.

    Args:
        status: HTTP's.
        sentence: what the client reads.
        headers: more of the response.
    """

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}

    def as_data(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.sentence, "type": kind, "code": self.status, "param": None}}


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Address(msgspec.Struct):
    url: str
    detail: str | None = None


class _Image(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _Address


class _Encoded(msgspec.Struct):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class _Sound(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: _Encoded


class _SoundAddress(msgspec.Struct, tag_field="type", tag="audio_url"):
    audio_url: _Address


class _Called(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    function: _Called
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text | _Image | _Sound | _SoundAddress] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Function(msgspec.Struct, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    enable_thinking: bool | None = None


class _Format(msgspec.Struct):
    type: Literal["text"]


class Chat(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /v1/chat/completions``. The last fields are accepted, and change nothing."""

    messages: Annotated[list[_Message], Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Annotated[str, Meta(min_length=1)] | list[Annotated[str, Meta(min_length=1)]] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    reasoning_effort: str | None = None
    # Only the default: any other value would be ignored silently.
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    response_format: _Format | None = None
    tool_choice: Literal["auto", "none"] | None = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    user: Any = None

    @property
    def stops(self) -> list[str]:
        """The texts before which an answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most(self) -> int | None:
        """Tokens of the answer, if the request says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_options(self) -> dict[str, Any]:
        """For the chat template."""
        thinking = self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs is not None else None
        if thinking is None and self.reasoning_effort is not None:
            thinking = self.reasoning_effort not in ("none", "minimal")
        return {} if thinking is None else {"enable_thinking": thinking}


def read(body: bytes) -> Chat:
    """The request in a body.

    Raises:
        Refused: it is not JSON (400), or not a request (422).
    """
    try:
        return msgspec.json.decode(body, type=Chat, strict=True)
    except msgspec.ValidationError as error:
        raise Refused(422, f"The request is not understood: {error}.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(400, f"The body is not JSON: {error}.") from None


def named(model: str | None, names: Iterable[str]) -> str:
    """The name of the model that is asked for; the first one if none is.

    Raises:
        Refused: there is no such model (404).
    """
    known = list(names)
    if model is None:
        return known[0]
    if model not in known:
        raise Refused(404, f"There is no model {model[:100]!r} here; there are {', '.join(known)}.")
    return model


def choose_likeliest(config: Any) -> None:
    """Have a configuration of ``generate`` be greedy, without options of sampling, about which transformers warns."""
    config.do_sample = False
    config.temperature = config.top_p = config.top_k = config.min_p = None
