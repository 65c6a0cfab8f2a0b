"""/v1/completions as the openai client and evaluation harnesses use it."""

from __future__ import annotations

import pytest

from tests.serve.conftest import RunningServer


def ids(server: RunningServer, text: str) -> list[int]:
    return server.engine.tokenizer.encode(text)


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    shared.engine.reply = lambda prompt, request: f"<{prompt}> " + "ünïcödé 日本語 🦄👩‍👩‍👧 ไทย"
    return shared


def test_string_prompt(server):
    answer = server.openai.completions.create(model="fake", prompt="hi", max_tokens=100)
    (choice,) = answer.choices
    assert choice.text == "<hi> ünïcödé 日本語 🦄👩‍👩‍👧 ไทย"
    assert choice.finish_reason == "stop" and choice.index == 0 and choice.logprobs is None
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    produced = len(ids(server, choice.text)) + 1
    assert answer.usage.prompt_tokens == 2 and answer.usage.completion_tokens == produced
    assert answer.usage.total_tokens == 2 + produced


def test_every_form_of_prompt(server):
    def texts(prompt):
        answer = server.openai.completions.create(model="fake", prompt=prompt, max_tokens=4)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts("one") == ["<one"]
    assert texts(["one", "two"]) == ["<one", "<two"]
    assert texts(ids(server, "one")) == ["<one"]
    assert texts([ids(server, "one"), ids(server, "two")]) == ["<one", "<two"]


@pytest.mark.parametrize("stop", [None, ["日本"], ["é ", "é 日本"], ["ไท", "🦄👩"]])
@pytest.mark.parametrize("max_tokens", [3, 17, 200])
def test_stream_joins_to_the_whole_and_never_splits_a_character(server, stop, max_tokens):
    fields = {"model": "fake", "prompt": "p", "max_tokens": max_tokens, "stop": stop}
    whole = server.openai.completions.create(**fields).choices[0]
    chunks = list(server.openai.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    if max_tokens == 200:
        assert "\ufffd" not in whole.text
        full = "<p> ünïcödé 日本語 🦄👩‍👩‍👧 ไทย"
        first = min((full.index(text) for text in stop or []), default=len(full))
        assert whole.text == full[:first]
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompt_ending_inside_a_character(server):
    unicorn = ids(server, "🦄")
    server.engine.reply = lambda prompt, request: [*unicorn[2:], *ids(server, "!")]
    fields = {"model": "fake", "prompt": [*ids(server, "a"), *unicorn[:2]], "max_tokens": 9}
    assert server.openai.completions.create(**fields).choices[0].text == "🦄!"
    echoed = server.openai.completions.create(**fields, echo=True).choices[0].text
    assert echoed == "a🦄!"
    chunks = server.openai.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "🦄!"
    server.engine.reply = lambda prompt, request: "plain"
    assert server.openai.completions.create(**fields).choices[0].text == "plain"


def test_usage_in_streams_only_when_asked(server):
    fields = {"model": "fake", "prompt": ["abcdefgh", "ij"], "n": 2, "max_tokens": 5}
    whole = server.openai.completions.create(**fields).usage
    assert whole.prompt_tokens == 10 and whole.completion_tokens == 4 * 5
    assert whole.prompt_tokens_details.cached_tokens == 2  # 8 // 4 + 2 // 4
    assert whole.model_extra["prefix_cache"] == {
        "recovery": "dense",
        "matched_tokens": 5,
        "restored_tokens": 2,
        "replayed_tokens": 0,
        "reason": "no_checkpoint",
    }
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.openai.completions.create(**fields, **asked)
    assert last.choices == [] and last.usage == whole
    assert all(chunk.usage is None for chunk in chunks)
    silent = list(server.openai.completions.create(**fields, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in silent)


def test_choices_have_their_own_seeds(server):
    server.engine.reply = lambda prompt, request: f"seed {request.params.seed}"
    answer = server.openai.completions.create(model="fake", prompt="p", n=3, seed=7, max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["seed 7", "seed 8", "seed 9"]
    top = server.openai.completions.create(
        model="fake", prompt="p", n=2, seed=2**64 - 1, max_tokens=30
    )
    assert [choice.text for choice in top.choices] == [f"seed {2**64 - 1}", "seed 0"]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in server.openai.completions.create(
        model="fake", prompt="p", n=3, seed=7, max_tokens=20, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == ["seed 7", "seed 8", "seed 9"]


def test_echo_with_logprobs(server):
    """As loglikelihood tasks ask: token ids, echo, logprobs 1, one token more."""
    server.engine.reply = lambda prompt, request: "é!"
    prompt = ids(server, "aé")
    answer = server.openai.completions.create(
        model="fake", prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    output = ids(server, "é")[0]
    assert choice.text == "aé\ufffd"  # one token is half of the é
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3"]
    assert logprobs.token_logprobs == [None, *(-t / 1000 for t in [*prompt[1:], output])]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs[0] is None
    for token, top, own in zip(
        logprobs.tokens[1:], logprobs.top_logprobs[1:], logprobs.token_logprobs[1:], strict=True
    ):
        assert top[token] == own and max(top, key=top.__getitem__) == "!"  # token id 0


def test_echo_scores_a_prompt_without_generating(server):
    fields = {"model": "fake", "prompt": ["abc", "de"], "echo": True, "max_tokens": 0}
    answer = server.openai.completions.create(**fields, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["abc", "de"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage.completion_tokens == 0
    chunks = list(server.openai.completions.create(**fields, stream=True))
    assert [c.choices[0].text for c in chunks if c.choices[0].index == 0] == ["abc"]


def test_streamed_logprobs_equal_whole_ones(server):
    server.engine.reply = lambda prompt, request: "日本 done"
    fields = {"model": "fake", "prompt": "xy", "logprobs": 2, "max_tokens": 50, "echo": True}
    whole = server.openai.completions.create(**fields).choices[0].logprobs
    joined = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in server.openai.completions.create(**fields, stream=True):
        for name, values in joined.items():
            values.extend(getattr(chunk.choices[0].logprobs, name))
    assert joined == {name: getattr(whole, name) for name in joined}
    assert whole.tokens[-1] == "<|im_end|>"


def test_stop_token_ids_and_stop_reason(server):
    server.engine.reply = lambda prompt, request: "one two three"
    (space,) = ids(server, " ")
    extra = {"stop_token_ids": [space]}
    choice = server.openai.completions.create(
        model="fake", prompt="p", extra_body=extra, stop="never"
    ).choices[0]
    assert choice.text == "one" and choice.finish_reason == "stop"
    choice = server.openai.completions.create(model="fake", prompt="p", stop=[" t"]).choices[0]
    assert choice.text == "one" and choice.model_extra["stop_reason"] == " t"


def test_output_is_cut_to_the_context(server):
    server.engine.reply = lambda prompt, request: "z" * 10_000
    answer = server.openai.completions.create(model="fake", prompt="p" * 8190, max_tokens=500)
    assert answer.choices[0].text == "zz" and answer.choices[0].finish_reason == "length"


def test_request_chooses_its_recovery(server):
    extra = {"prefix_cache": {"recovery": "off", "replay_ratio": 0.05}}
    answer = server.openai.completions.create(model="fake", prompt="p", extra_body=extra)
    assert answer.usage.model_extra["prefix_cache"]["recovery"] == "off"
    assert server.engine.added[-1].prefix_cache.replay_ratio == 0.05
