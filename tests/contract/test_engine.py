"""What every inference engine has to do."""

from __future__ import annotations

import asyncio
import re

import pytest
import pytest_asyncio
from art_server.inference import Engine
from transformers import AutoTokenizer

from art_cloud.shared.errors import (
    ConfigError,
    ConflictError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    ServerStoppingError,
)

from ..rigs.waiting import until
from .engines import (
    ANSWERS,
    BASE,
    BROKEN,
    CONTEXT,
    ENGINES,
    EXACT,
    GUIDED,
    NO_THOUGHT,
    PARAMS,
    TOOLS,
    Reference,
    chat,
    make_adapter,
    make_caller,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "chat/completions", "completions"
POLICIES = ["p/m@1", "p/m@2", "q/n.x@1"]
PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""What the first bytes of a character look like: at the end, an engine may show them or not."""
FORCED = {"type": "function", "function": {"name": "search"}}


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        policy: make_adapter(tiny_model, root / str(seed), seed)
        for seed, policy in enumerate(POLICIES)
    }


@pytest.fixture(scope="module")
def caller_model(tmp_path_factory):
    return make_caller(tmp_path_factory.mktemp("caller"))


@pytest_asyncio.fixture(params=PARAMS, scope="module", loop_scope="module")
async def caller(request, caller_model):
    engine = ENGINES[request.param](caller_model)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model, adapters):
    return Reference.load(tiny_model, adapters)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest_asyncio.fixture(params=PARAMS, scope="module", loop_scope="module")
async def started(request, tiny_model):
    """vLLM takes its time to start: all tests share one."""
    engine = ENGINES[request.param](tiny_model)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started, adapters):
    for policy in started.policies():
        if policy not in adapters:
            await started.unload(policy)
    for policy, folder in adapters.items():
        await started.load(policy, folder)
    return started


def text(prompt, **parameters):
    return {"model": "m", "prompt": prompt, "max_tokens": 12} | parameters


async def collect(engine: Engine, route, body, policy=None):
    return [chunk async for chunk in engine.stream(route, {**body, "stream": True}, policy)]


async def test_a_chat_answer_has_openai_shape_and_the_sample(engine, tokenizer):
    answer = await engine.create(CHAT, chat(n=2, temperature=0.7), "p/m@1")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "p/m@1"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    prompt_ids = answer["choices"][0]["sample"]["prompt_ids"]
    assert tokenizer.decode(prompt_ids) == (
        "<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n"
    )
    for choice in answer["choices"]:
        sample = choice["sample"]
        assert sample["policy"] == "p/m@1"
        assert sample["temperature"] == 0.7
        assert len(sample["completion_ids"]) == len(sample["logprobs"])
        assert choice["logprobs"] is None
        assert choice["message"]["role"] == "assistant"
        said = tokenizer.decode(sample["completion_ids"], skip_special_tokens=True)
        assert choice["message"]["content"].rstrip(PARTIAL) == said.rstrip(PARTIAL)
    tokens = sum(len(choice["sample"]["completion_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": tokens,
        "total_tokens": len(prompt_ids) + tokens,
    }


async def test_a_completion_takes_text_ids_and_several_prompts(engine, tokenizer):
    ids = tokenizer.encode("The quick brown")
    from_text = await engine.create(TEXT, text("The quick brown", seed=1, n=2), None)
    from_ids = await engine.create(TEXT, text(ids, seed=1, n=2), None)
    several = await engine.create(TEXT, text(["The quick brown", "fox"], seed=1, n=2), None)
    assert from_text["object"] == "text_completion"
    assert from_text["model"] == BASE
    texts = [choice["text"] for choice in from_text["choices"]]
    assert texts == [choice["text"] for choice in from_ids["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in several["choices"][:2]]
    assert len((await engine.create(TEXT, {"model": "m", "prompt": ids}, None))["choices"]) == 1


async def test_greedy_tokens_and_scores_are_the_models_own(engine, reference):
    for policy in [None, *POLICIES]:
        answer = await engine.create(CHAT, chat(temperature=0, max_tokens=6), policy)
        sample = answer["choices"][0]["sample"]
        ids = sample["prompt_ids"]
        for token in sample["completion_ids"]:
            assert token == int(reference.logits(policy, ids)[-1].argmax())
            ids = [*ids, token]
        assert reference.error(sample) < EXACT


async def test_logprobs_are_exact_in_a_mixed_batch_that_others_join_and_leave(engine, reference):
    before = engine.stats().tokens_generated

    async def one(i):
        await until(lambda: engine.stats().tokens_generated >= before + 3 * i)
        policy = [None, *POLICIES][i % 4]
        body = chat(
            "Hello " * (i * 7 % 40 + 1),
            max_tokens=[60, 3, 25][i % 3],
            temperature=[1.0, 0.0, 0.6, 1.5][i // 4 % 4],
            top_p=[1.0, 0.8][i % 2],
            n=1 + i % 2,
            ignore_eos=True,
        )
        answer = await engine.create(CHAT, body, policy)
        assert answer["model"] == (policy or BASE)
        return [choice["sample"] for choice in answer["choices"]]

    answers = await asyncio.gather(*map(one, range(24)))
    samples = [sample for answer in answers for sample in answer]
    assert len(samples) == 36
    assert max(map(reference.error, samples)) < EXACT


async def test_openai_logprobs_are_those_of_the_sample(engine, reference):
    body = chat(logprobs=True, top_logprobs=3, temperature=0.5, top_p=0.7, max_tokens=5)
    choice = (await engine.create(CHAT, body, "p/m@1"))["choices"][0]
    sample = choice["sample"]
    ids = sample["prompt_ids"] + sample["completion_ids"]
    logits_TV = reference.logits("p/m@1", ids)[len(sample["prompt_ids"]) - 1 : -1]
    entries = choice["logprobs"]["content"]
    for entry, row_V in zip(entries, (logits_TV / 0.5).log_softmax(-1), strict=True):
        top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert top == pytest.approx(row_V.topk(3).values.tolist(), abs=EXACT)
    assert [entry["logprob"] for entry in entries] == sample["logprobs"]
    completion = await engine.create(TEXT, text("The fox", logprobs=2, max_tokens=4), None)
    [choice] = completion["choices"]
    lengths = {len(values) for values in choice["logprobs"].values()}
    assert lengths == {len(choice["sample"]["completion_ids"])}


async def test_a_seed_gives_the_same_tokens_in_any_company(engine):
    def ids(answer):
        return [choice["sample"]["completion_ids"] for choice in answer["choices"]]

    body = chat(seed=11, n=3, max_tokens=20, top_p=0.95)
    alone = ids(await engine.create(CHAT, body, "p/m@1"))
    crowd = [engine.create(CHAT, chat("Some other " * i), POLICIES[i % 3]) for i in range(9)]
    together, *_ = await asyncio.gather(engine.create(CHAT, body, "p/m@1"), *crowd)
    assert ids(together) == alone
    assert len({tuple(choice) for choice in alone}) == 3
    assert ids(await engine.create(CHAT, {**body, "seed": 12}, "p/m@1")) != alone
    unseeded = [ids(await engine.create(CHAT, chat(max_tokens=20), None)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_a_stream_adds_up_to_the_whole_answer(engine, route):
    more = {"seed": 5, "n": 3, "max_tokens": 40, "stop": [" the", "zz"]}
    more["logprobs"] = True if route == CHAT else 2
    body = chat(**more) if route == CHAT else text("The fox", **more)
    whole = await engine.create(route, body, "p/m@2")
    streaming = {**body, "stream_options": {"include_usage": True}}
    *chunks, last = await collect(engine, route, streaming, "p/m@2")
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]}
    assert {chunk["model"] for chunk in chunks} == {"p/m@2"}
    for expected in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["sample"]["completion_ids"] == expected["sample"]["completion_ids"]
        assert not any("sample" in part for part in parts[:-1])
        if route == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            said = "".join(part["delta"].get("content", "") for part in parts)
            assert said == expected["message"]["content"]
            entries = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
            names = [entry["token"] for entry in expected["logprobs"]["content"]]
            assert [entry["token"] for entry in entries] == names
        else:
            assert "".join(part["text"] for part in parts) == expected["text"]
            offsets = [o for part in parts for o in part["logprobs"]["text_offset"]]
            assert offsets == expected["logprobs"]["text_offset"]


async def test_a_stop_string_cuts_the_text_and_keeps_the_ids(engine, tokenizer):
    body = chat(seed=3, max_tokens=60, ignore_eos=True)
    free = (await engine.create(CHAT, body, None))["choices"][0]
    assert free["finish_reason"] == "length"
    content = free["message"]["content"]
    stop = content[20:23]
    first = content.index(stop)
    for given in (stop, ["never seen", stop]):
        cut = (await engine.create(CHAT, {**body, "stop": given}, None))["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert cut["message"]["content"] == content[:first]
        ids = cut["sample"]["completion_ids"]
        assert ids == free["sample"]["completion_ids"][: len(ids)]
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])


async def test_the_end_token_is_sampled_and_not_shown(caller, tokenizer):
    body = chat("Break it.", temperature=0, max_tokens=80, tools=TOOLS)
    choice = (await caller.create(CHAT, body, None))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["sample"]["completion_ids"][-1] == tokenizer.eos_token_id
    assert choice["message"]["content"] == BROKEN
    assert "tool_calls" not in choice["message"]


async def test_tool_calls_are_parsed_whole_and_streamed(caller):
    body = chat("Look it up.", temperature=0, max_tokens=80, tools=TOOLS, tool_choice="auto")
    choice = (await caller.create(CHAT, body, None))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "search", "arguments": '{"query": "fox"}'}

    chunks = await collect(caller, CHAT, body, None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [c for delta in deltas for c in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    for part in ("name", "arguments"):
        parts = [call["function"].get(part) or "" for call in calls]
        assert "".join(parts) == call["function"][part]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    messages = [
        *body["messages"],
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "A fox."},
    ]
    second = await caller.create(CHAT, {**body, "messages": messages, "max_tokens": 2}, None)
    first_ids = choice["sample"]["prompt_ids"] + choice["sample"]["completion_ids"]
    assert second["choices"][0]["sample"]["prompt_ids"][: len(first_ids)] == first_ids

    plain = await caller.create(CHAT, {**body, "tool_choice": "none"}, None)
    assert "tool_calls" not in plain["choices"][0]["message"]
    assert ANSWERS["Look it up."].startswith("I look.\n<tool_call>")


async def test_thinking_is_turned_off_in_the_chat_template(caller, caller_model):
    tokenizer = AutoTokenizer.from_pretrained(caller_model)
    thinks, answers_at_once = [
        await caller.create(CHAT, chat(chat_template_kwargs=variables), None)
        for variables in ({}, {"enable_thinking": False})
    ]
    [ids, ids_without] = [
        answer["choices"][0]["sample"]["prompt_ids"] for answer in (thinks, answers_at_once)
    ]
    assert tokenizer.decode(ids_without) == tokenizer.decode(ids) + NO_THOUGHT


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"guided_choice": ["yes", "no"]}, "guided_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 13}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(engine, parameters, named):
    with pytest.raises(InvalidRequestError, match=named):
        await engine.create(CHAT, chat(**parameters), None)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "^(yes|no)$"),
        ({"structured_outputs": {"regex": "a{3}b{2}"}}, "^aaabb$"),
        ({"response_format": {"type": "json_object"}, "logit_bias": {"93": 100}}, "^[{]"),
        ({"logit_bias": {"5": 100}, "presence_penalty": -2}, r"^(.)\1*$"),
        ({"tools": TOOLS, "tool_choice": FORCED}, None),
    ],
)
async def test_guided_decoding_works_or_is_refused_by_name(engine, parameters, said):
    request = engine.create(CHAT, chat(**parameters, max_tokens=200, seed=1), "p/m@1")
    if engine.name not in GUIDED:
        with pytest.raises(InvalidRequestError, match="|".join(parameters)):
            await request
        return
    choice = (await request)["choices"][0]
    if said is None:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "search"
    else:
        assert re.search(said, choice["message"]["content"])
    assert len(choice["sample"]["logprobs"]) == len(choice["sample"]["completion_ids"])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "1000000"),
        ({"prompt": [[]]}, "prompt"),
    ],
)
async def test_what_a_completion_cannot_do_is_refused_by_name(engine, parameters, named):
    with pytest.raises(InvalidRequestError, match=named):
        await engine.create(TEXT, text("fox") | parameters, None)


async def test_what_asks_for_nothing_is_taken(engine):
    body = chat(
        user="me",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        return_token_ids=True,
        seed=None,
        stop=None,
        tools=None,
        logprobs=False,
    )
    answer = await engine.create(CHAT, body, None)
    assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_a_prompt_over_the_context_says_both_numbers(engine):
    with pytest.raises(ContextLengthError, match=rf"600 tokens.*{CONTEXT}"):
        await engine.create(TEXT, text([5] * 600), None)
    with pytest.raises(ContextLengthError, match=rf"500 tokens.*{CONTEXT}"):
        await engine.create(TEXT, text([5] * 500, max_tokens=13), None)
    for route, body in ((TEXT, text("x " * 100)), (CHAT, chat("x " * 100))):
        with pytest.raises(ContextLengthError, match=rf"{CONTEXT}.*{CONTEXT}.*Shorten"):
            await engine.create(route, body | {"max_tokens": CONTEXT}, None)
    full = chat("x " * 100, max_tokens=None, ignore_eos=True)
    choice = (await engine.create(CHAT, full, None))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["sample"]["prompt_ids"] + choice["sample"]["completion_ids"]) == CONTEXT


async def test_many_at_once_are_all_answered(engine):
    before = engine.stats().tokens_generated

    async def one(i):
        policy = [None, *POLICIES][i % 4]
        if i % 3 == 0:
            chunks = await collect(engine, CHAT, chat("Go " * (i % 11 + 1)), policy)
            return chunks[-1]["choices"][0]["sample"]
        answer = await engine.create(CHAT, chat("Go " * (i % 11 + 1)), policy)
        return answer["choices"][0]["sample"]

    samples = await asyncio.gather(*map(one, range(200)))
    for i, sample in enumerate(samples):
        assert sample["policy"] == ([None, *POLICIES][i % 4] or BASE)
        assert 0 < len(sample["completion_ids"]) <= 12
    await until(lambda: engine.stats().running == 0)
    stats = engine.stats()
    assert stats.waiting == 0
    assert stats.reason is None
    assert stats.tokens_generated - before == sum(
        len(sample["completion_ids"]) for sample in samples
    )


async def test_who_goes_away_frees_the_rows(engine):
    endless = chat(max_tokens=400, ignore_eos=True, n=4)
    before = engine.stats().tokens_generated
    task = asyncio.create_task(engine.create(CHAT, endless, "p/m@1"))
    await until(lambda: engine.stats().running == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().tokens_generated < before + 1600

    stream = engine.stream(CHAT, {**endless, "stream": True}, "p/m@1")
    await anext(stream)
    await stream.aclose()
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().tokens_generated < before + 3200


async def test_policies_come_and_go_without_losing_a_request(engine, adapters, tmp_path):
    assert engine.policies() == sorted(POLICIES)
    body = chat(max_tokens=300, ignore_eos=True)
    task = asyncio.create_task(engine.create(CHAT, body, "p/m@1"))
    await until(lambda: engine.stats().running == 1)
    await engine.load("p/m@3", adapters["p/m@2"])
    await engine.unload("p/m@1")
    assert engine.policies() == ["p/m@2", "p/m@3", "q/n.x@1"]
    with pytest.raises(NotFoundError, match="p/m@1"):
        await engine.create(CHAT, chat(), "p/m@1")
    with pytest.raises(NotFoundError, match="p/m@1"):
        await engine.unload("p/m@1")
    sample = (await task)["choices"][0]["sample"]
    assert len(sample["completion_ids"]) == 300
    await engine.load("p/m@1", adapters["p/m@1"])
    again = await engine.create(CHAT, chat(), "p/m@1")
    assert again["model"] == "p/m@1"


async def test_in_flight_samples_stay_exact_while_policies_change(engine, adapters, reference):
    body = chat(max_tokens=120, ignore_eos=True)
    policies = ["p/m@1", "p/m@2", None]
    tasks = [asyncio.create_task(engine.create(CHAT, body, policy)) for policy in policies]
    for number in range(5):
        await engine.load(f"x/y@{number}", adapters[POLICIES[number % 3]])
        await engine.create(CHAT, chat(max_tokens=2), f"x/y@{number}")
        await engine.unload(f"x/y@{number}")
    for answer in await asyncio.gather(*tasks):
        assert reference.error(answer["choices"][0]["sample"]) < EXACT


async def test_one_name_means_one_folder(engine, adapters, tmp_path):
    await engine.load("p/m@1", adapters["p/m@1"])
    with pytest.raises(ConflictError, match="p/m@1"):
        await engine.load("p/m@1", adapters["p/m@2"])
    with pytest.raises(ConfigError, match="no adapter_model"):
        await engine.load("p/m@9", tmp_path)
    with pytest.raises(NotFoundError, match="p/m@9"):
        await engine.create(CHAT, chat(), "p/m@9")
    assert (await engine.create(CHAT, chat(), "p/m@1"))["model"] == "p/m@1"


async def test_an_adapter_of_another_model_is_refused(engine, tmp_path):
    from art_server.tiny_model import make_tiny_model

    other = make_tiny_model(tmp_path / "other", hidden_size=64, layers=1)
    with pytest.raises(ConfigError, match="base model"):
        await engine.load("p/m@9", make_adapter(other, tmp_path / "adapter", 0))
    answers = [await engine.create(CHAT, chat(), policy) for policy in (None, "p/m@1")]
    assert [answer["model"] for answer in answers] == [BASE, "p/m@1"]


@pytest.mark.parametrize("name", PARAMS)
async def test_closing_ends_what_is_in_flight(name, tiny_model):
    engine = ENGINES[name](tiny_model)
    await engine.start()
    body = chat(max_tokens=400, ignore_eos=True)
    tasks = [asyncio.create_task(engine.create(CHAT, body, None)) for _ in range(2)]
    await until(lambda: engine.stats().running == 2)
    await engine.close()
    for task in tasks:
        with pytest.raises(ServerStoppingError):
            await task
    with pytest.raises(ServerStoppingError):
        await engine.create(CHAT, chat(), None)


async def test_a_freed_name_answers_with_the_weights_that_it_is_loaded_from_next(
    engine, adapters, reference
):
    body = text("The quick brown fox jumps over the lazy dog. " * 4, ignore_eos=True)
    await engine.load("p/draft@1", adapters["p/m@1"])
    await engine.create(TEXT, body, "p/draft@1")
    await engine.unload("p/draft@1")
    await engine.load("p/draft@1", adapters["p/m@2"])
    sample = (await engine.create(TEXT, body, "p/draft@1"))["choices"][0]["sample"]
    assert reference.error(sample | {"policy": "p/m@2"}) < EXACT
    assert reference.error(sample | {"policy": "p/m@1"}) > 100 * EXACT
