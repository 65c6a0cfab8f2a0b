"""/v1/chat/completions: templates, continued answers, chunks, logprobs."""

from __future__ import annotations

import openai
import pytest

from tests.serve.conftest import RunningServer

USER = {"role": "user", "content": "hi"}
TURN = "<|im_start|>user\nhi<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    shared.engine.reply = lambda prompt, request: "Hello, 世界! 🦄"
    return shared


def rendered(server: RunningServer, messages, **extra) -> str:
    """The prompt that the engine saw."""
    server.openai.chat.completions.create(
        model="fake", messages=messages, max_tokens=1, extra_body=extra
    )
    return server.engine.tokenizer.decode(server.engine.added[-1].prompt_token_ids)


def test_whole_answer(server):
    answer = server.openai.chat.completions.create(model="fake", messages=[USER])
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == "Hello, 世界! 🦄"
    assert choice.finish_reason == "stop" and answer.object == "chat.completion"
    prompt = server.engine.tokenizer.encode(TURN + OPEN)
    assert list(server.engine.added[-1].prompt_token_ids) == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 4
    assert server.engine.added[-1].params.max_tokens is None


def test_stream(server):
    *chunks, last = server.openai.chat.completions.create(
        model="fake", messages=[USER], n=2, stream=True, stream_options={"include_usage": True}
    )
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in own) == "Hello, 世界! 🦄"
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["stop"]
    assert last.choices == [] and last.object == "chat.completion.chunk"
    whole = server.openai.chat.completions.create(model="fake", messages=[USER], n=2)
    assert whole.usage == last.usage


def test_content_parts_are_joined(server):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert rendered(server, [{"role": "user", "content": parts}]) == TURN + OPEN


def test_final_assistant_message_is_continued(server):
    last = {"role": "assistant", "content": "The answer is "}
    begun = TURN + OPEN + "The answer is "
    assert rendered(server, [USER, last]) == begun
    assert rendered(server, [USER, last], continue_final_message=True) == begun
    assert rendered(server, [USER, last], add_generation_prompt=False) == begun.rstrip() + (
        " <|im_end|>\n"
    )
    new_turn = begun + "<|im_end|>\n" + OPEN
    assert rendered(server, [USER, last], add_generation_prompt=True) == new_turn
    assert rendered(server, [USER, last], continue_final_message=False) == new_turn
    empty = {"role": "assistant", "content": ""}
    assert rendered(server, [USER, empty]) == TURN + OPEN


def test_continue_any_message_when_asked(server):
    assert rendered(server, [USER], continue_final_message=True) == "<|im_start|>user\nhi"


def test_template_kwargs(server):
    kwargs = {"enable_thinking": False}
    assert rendered(server, [USER], chat_template_kwargs=kwargs).endswith("<think>\n\n</think>\n\n")


def test_logprobs(server):
    answer = server.openai.chat.completions.create(
        model="fake", messages=[USER], logprobs=True, top_logprobs=2, max_tokens=8
    )
    entries = answer.choices[0].logprobs.content
    assert [e.token for e in entries][:2] == ["H", "e"] and len(entries) == 8
    assert bytes(b for e in entries for b in e.bytes) == "Hello, 世".encode()[:8]
    assert [t.token for t in entries[0].top_logprobs] == ["!", '"']
    bare = server.openai.chat.completions.create(
        model="fake", messages=[USER], logprobs=True, max_tokens=1
    )
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "system"}]}, "messages[1].content"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 8193}, "max_completion_tokens"),
        ({"max_tokens": 8193}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [{"role": "assistant", "content": None}], "continue_final_message": True},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
    ],
)
def test_wrong_fields_are_named(server, fields, param):
    reply = server.http.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)
    assert param in reply.json()["error"]["message"]


def test_what_is_done_anyway_may_be_asked_for(server):
    fields = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "functions": None,
        "modalities": ["text"],
        "echo": False,
        "parallel_tool_calls": True,
        "user": "u",
    }
    reply = server.http.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert reply.status_code == 200, reply.text


def test_model_without_a_template(start):
    server = start()
    server.engine.tokenizer.chat_template = None
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server.openai.chat.completions.create(model="fake", messages=[USER])
