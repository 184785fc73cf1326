"""Request bodies of the OpenAI endpoints, checked.

Fields fall in four kinds: honoured; known to OpenAI and without effect on what is generated, hence ignored; known and
not supported, hence refused unless they hold the value that asks for nothing; unknown, hence refused (most are typing
errors, and a parameter that is silently dropped changes results). Fields beyond OpenAI's are marked as extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.core.errors import InputError

TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class SamplingFields(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extensions, named as in other engines.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 or 0: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and each choice's `token_ids`."""

    # Without effect on what is generated.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(SamplingFields):
    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    # Known and not supported.
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: str | None = None


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(BaseModel):
    """`prompt` as plain text, or `messages` as the chat endpoint would render them."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse_body(cls: type[Body], data: Any) -> Body:
    """Validate a decoded JSON body. Raises InputError naming the first wrong field, its value and what is expected."""
    if not isinstance(data, Mapping):
        raise InputError(f"the request body is a JSON {type(data).__name__}, expected an object")
    try:
        return cls.model_validate(data)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        # Unions report each alternative; the path down to the field is what the caller can use.
        where = ".".join(str(p) for p in error["loc"] if isinstance(p, int) or p in cls.model_fields or p in data)
        field = where or str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            raise InputError(f"unknown field {field!r}", field=field,
                             remedy="Check its spelling; fields this server does not know are refused.") from e
        shown = repr(error.get("input"))
        shown = shown if len(shown) <= 80 else shown[:79] + "…"
        raise InputError(f"{field} = {shown}: {error['msg']}", field=field) from e


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """Raise InputError for known fields that ask for what this server cannot do."""
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options", "verbosity"):
        if getattr(body, name) is not None:
            raise InputError(f"{name} is not supported", field=name)
    if body.modalities not in (None, ["text"]):
        raise InputError(f"modalities = {body.modalities}: expected ['text']", field="modalities")
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise InputError(f"response_format.type = {kind!r}: only 'text' is supported", field="response_format",
                         remedy="This server cannot constrain what is generated.")
    if body.parallel_tool_calls is False:
        raise InputError("parallel_tool_calls = false is not supported", field="parallel_tool_calls",
                         remedy="This server cannot constrain what is generated.")
    if body.tool_choice not in (None, "auto", "none"):
        raise InputError(f"tool_choice = {body.tool_choice!r}: only 'auto' and 'none' are supported",
                         field="tool_choice", remedy="This server cannot force a tool call.")


def refuse_unsupported_completion(body: CompletionRequest) -> None:
    """Raise InputError for known fields that ask for what this server cannot do."""
    if body.suffix:
        raise InputError("suffix is not supported", field="suffix", remedy="Put everything into the prompt.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InputError(f"best_of = {body.best_of}: only best_of equal to n is supported", field="best_of",
                         remedy="Ask for n choices and pick one.")
    if body.echo and body.stream:
        raise InputError("echo and stream together are not supported", field="echo")
