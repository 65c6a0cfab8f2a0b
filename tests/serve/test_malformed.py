"""Requests that cannot be served get a 400 that names the field; the server is unharmed."""

from __future__ import annotations

import pytest

from tests.serve.conftest import RunningServer

HUGE = "9" * 400


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    shared.engine.reply = lambda prompt, request: "fine"
    return shared


def post(server: RunningServer, body: str):
    headers = {"Content-Type": "application/json"}
    return server.http.post("/v1/completions", content=body.encode(), headers=headers)


def assert_alive(server: RunningServer) -> None:
    reply = post(server, '{"prompt": "p", "unknown_field": {"a": 1}, "temperature": null}')
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-0.1"),
        ("temperature", '"0.5"'),
        ("temperature", "true"),
        ("temperature", HUGE),
        ("top_p", "0"),
        ("top_p", "1.01"),
        ("top_p", "NaN"),
        ("min_p", "-1"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("n", "0"),
        ("n", "129"),
        ("n", "true"),
        ("max_tokens", '"5"'),
        ("max_tokens", "5.0"),
        ("max_tokens", "-1"),
        ("max_tokens", "0"),
        ("min_tokens", "17"),
        ("min_tokens", "-1"),
        ("seed", HUGE),
        ("seed", "1.5"),
        ("presence_penalty", "2.5"),
        ("frequency_penalty", "NaN"),
        ("repetition_penalty", "0"),
        ("logprobs", "21"),
        ("logprobs", "-1"),
        ("logprobs", "true"),
        ("stop", '""'),
        ("stop", "5"),
        ("stop", '["a", ""]'),
        ("stop_token_ids", "[100000]"),
        ("stop_token_ids", "5"),
        ("logit_bias", '{"100000": 1}'),
        ("logit_bias", "[]"),
        ("logit_bias", '{"x": 1}'),
        ("echo", '"yes"'),
        ("stream", "1"),
        ("model", "5"),
        ("prompt", "null"),
        ("prompt", "5"),
        ("prompt", '""'),
        ("prompt", "[]"),
        ("prompt", '{"a": 1}'),
        ("prompt", '"' + "x" * 8192 + '"'),
        ("prompt", "[" + "1," * 8191 + "1]"),
    ],
)
def test_field(server, field, value):
    fields = {"prompt": '"p"', field: value}
    reply = post(server, "{" + ",".join(f'"{k}": {v}' for k, v in fields.items()) + "}")
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == field and field in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"]
    assert_alive(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": ["a", ""]}', "prompt[1]"),
        ('{"prompt": ["a", 5]}', "prompt[1]"),
        ('{"prompt": [5, "a"]}', "prompt[1]"),
        ('{"prompt": [true]}', "prompt[0]"),
        ('{"prompt": [1, true]}', "prompt[1]"),
        ('{"prompt": [[1], []]}', "prompt[1]"),
        ('{"prompt": [[]]}', "prompt[0]"),
        ('{"prompt": [[1], [2, -3]]}', "prompt[1][1]"),
        ('{"prompt": [1, 100000]}', "prompt[1]"),
        ('{"prompt": ["a", "' + "x" * 9000 + '"]}', "prompt[1]"),
        ('{"prompt": "p", "stop": ["a", 5]}', "stop[1]"),
        ('{"prompt": "p", "stop_token_ids": [1, "2"]}', "stop_token_ids[1]"),
        ('{"prompt": "p", "logit_bias": {"5": "x"}}', "logit_bias[5]"),
        ('{"prompt": "p", "logit_bias": {"5": 101}}', "logit_bias[5]"),
        ('{"prompt": "p", "logit_bias": {"5": NaN}}', "logit_bias[5]"),
        ('{"prompt": "p", "stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        ('{"prompt": "p", "stream_options": []}', "stream_options"),
        ('{"prompt": "p", "prefix_cache": {"recovery": "magic"}}', "prefix_cache.recovery"),
        ('{"prompt": "p", "prefix_cache": {"recovery": "dasc-wr"}}', "prefix_cache.recovery"),
        ('{"prompt": "p", "prefix_cache": {"replay_ratio": 1.5}}', "prefix_cache.replay_ratio"),
        ('{"prompt": "p", "prefix_cache": {"replay_ratio": NaN}}', "prefix_cache.replay_ratio"),
        ('{"prompt": "p", "prefix_cache": "off"}', "prefix_cache"),
        ("{}", "prompt"),
    ],
)
def test_nested_field(server, body, param):
    reply = post(server, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]
    assert_alive(server)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("n", "129", "invalid_value"),
        ("n", "0", "invalid_value"),
        ("n", '"2"', "invalid_type"),
        ("n", "2.0", "invalid_type"),
        ("prefix_cache", '{"replay_ratio": 1.5}', "invalid_value"),
        ("prefix_cache", '{"replay_ratio": -0.1}', "invalid_value"),
        ("prefix_cache", '{"replay_ratio": NaN}', "invalid_value"),
        ("prefix_cache", '{"replay_ratio": "0.1"}', "invalid_type"),
        ("prefix_cache", '{"recovery": "magic"}', "invalid_value"),
        ("prefix_cache", '{"recovery": 5}', "invalid_type"),
        ("prefix_cache", '{"replay_ration": 0.1}', "unknown_parameter"),
        ("prefix_cache", "[]", "invalid_type"),
        ("logit_bias", '{"x": 1}', "invalid_value"),
        ("prompt", "5", "invalid_type"),
        ("max_tokens", "8193", "invalid_value"),
        ("max_tokens", "1000000000000", "invalid_value"),
        ("best_of", "3", "unsupported_parameter"),
        ("length_penalty", "true", "unsupported_parameter"),
        ("best_of", '"3"', "invalid_type"),
        ("suffix", '" end"', "unsupported_parameter"),
        ("response_format", '{"type": "json_object"}', "unsupported_parameter"),
        ("guided_json", '{"type": "object"}', "unsupported_parameter"),
        ("add_special_tokens", "false", "unsupported_parameter"),
        ("max_completion_tokens", "5", "unsupported_parameter"),
    ],
)
def test_code_and_message_say_what_is_wrong(server, field, value, code):
    fields = {"prompt": '"p"', field: value}
    reply = post(server, "{" + ",".join(f'"{k}": {v}' for k, v in fields.items()) + "}")
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["code"] == code and error["param"].startswith(field)
    given = value.split(": ")[-1].rstrip("}") if field == "prefix_cache" else value
    assert error["param"] in error["message"] and given in error["message"]
    assert "Field" not in error["message"]  # no class of ours


def test_misspelt_fields_of_the_prefix_cache_are_told_the_right_ones(server):
    reply = post(server, '{"prompt": "p", "prefix_cache": {"recovry": "off"}}')
    assert reply.json()["error"] == {
        "message": "prefix_cache.recovry: is not known, expected one of recovery, replay_ratio, "
        'got "off"',
        "type": "invalid_request_error",
        "param": "prefix_cache.recovry",
        "code": "unknown_parameter",
    }


@pytest.mark.parametrize(
    "fields",
    [
        '"best_of": 1, "suffix": "", "response_format": {"type": "text"}',
        '"n": 2, "best_of": 2, "max_tokens": 8192',
        '"best_of": null, "guided_json": null, "use_beam_search": false, "length_penalty": 1.0',
        '"user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "flex"',
    ],
)
def test_fields_that_change_no_answer_pass(server, fields):
    assert post(server, f'{{"prompt": "p", {fields}}}').status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000]
    + [b'{"prompt": "\\ud800"}', b'{"model": "\\udfff", "prompt": "p"}']
    # what Python's json would take, given bytes: encoded surrogates, and UTF-16
    + [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "\\ud800"}'.encode("utf-16")]
    + [b'{"prompt": "p", "seed": ' + b"9" * 5000 + b"}"],
)
def test_body_that_is_no_request(server, body):
    reply = server.http.post("/v1/completions", content=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] is None and error["type"] == "invalid_request_error"
    assert_alive(server)


def test_prompt_of_the_longest_length(server):
    assert post(server, '{"prompt": "' + "x" * 8191 + '"}').status_code == 200
    reply = post(server, '{"prompt": "' + "x" * 8192 + '"}')
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_unknown_model_and_routes(server):
    reply = post(server, '{"prompt": "p", "model": "gpt-4"}')
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert reply.json()["error"]["param"] == "model"
    for method, path, status in (
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ):
        reply = server.http.request(method, path)
        assert reply.status_code == status and reply.json()["error"]["message"]
    assert server.http.get("/v1/models/fake").json()["id"] == "fake"


def test_body_that_is_too_large(server, monkeypatch):
    monkeypatch.setattr("jhybrid.serve.app.MAX_BODY_BYTES", 100)
    assert post(server, '{"prompt": "' + "x" * 200 + '"}').status_code == 413
