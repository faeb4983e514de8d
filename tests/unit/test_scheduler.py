"""The running batch under limits and faults."""

import asyncio

import pytest
import torch
from art_server.inference import TransformersEngine
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from art_cloud.shared.errors import ConfigError, InvalidRequestError, ServerError

from ..rigs.waiting import until


def body(prompt="The fox", **parameters):
    return {"model": "m", "prompt": prompt, "max_tokens": 8, "ignore_eos": True} | parameters


@pytest.fixture
async def make_engine(tiny_model):
    engines = []

    async def make(model=None, **options):
        engine = TransformersEngine(
            model or AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
            AutoTokenizer.from_pretrained(tiny_model),
            "tiny",
            2048,
            **options,
        )
        await engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


def failing(forward, when):
    """`forward` of the engine's model, but a fault where `when(ids)` holds."""

    def wrapped(*args, **kwargs):
        if when(kwargs["input_ids"]):
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    return wrapped


async def test_what_waits_for_a_row_says_so(make_engine):
    engine = await make_engine(max_rows=4)
    tasks = [asyncio.create_task(engine.create("completions", body(n=3), None)) for _ in range(3)]
    await until(lambda: engine.stats().waiting == 6)
    assert engine.stats().running == 3
    assert "4 choices" in engine.stats().reason
    for answer in await asyncio.gather(*tasks):
        assert [len(c["sample"]["completion_ids"]) for c in answer["choices"]] == [8, 8, 8]
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().reason is None
    with pytest.raises(InvalidRequestError, match="n is 5"):
        await engine.create("completions", body(n=5), None)


async def test_what_waits_for_cache_says_so(make_engine):
    engine = await make_engine(max_cache_tokens=300)
    long = body("x " * 100, max_tokens=60)
    tasks = [asyncio.create_task(engine.create("completions", long, None)) for _ in range(2)]
    await until(lambda: engine.stats().reason is not None)
    assert "300 tokens" in engine.stats().reason
    assert engine.stats().waiting == 1
    for answer in await asyncio.gather(*tasks):
        assert len(answer["choices"][0]["sample"]["completion_ids"]) == 60


async def test_equal_prompts_that_wait_together_are_read_once(make_engine, monkeypatch):
    engine = await make_engine()
    shapes = []
    forward = engine._model._model.forward

    def spy(*args, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._model._model, "forward", spy)
    answer = await engine.create("completions", body([[5, 6, 7]] * 3 + [[8]], n=2), None)
    assert len(answer["choices"]) == 8
    assert shapes[0] == (2, 3)
    assert set(shapes[1:]) == {(8, 1)}


async def test_a_fault_while_reading_fails_the_newcomers_only(make_engine, monkeypatch):
    engine = await make_engine()
    model = engine._model._model
    running = asyncio.create_task(engine.create("completions", body(max_tokens=200), None))
    await until(lambda: engine.stats().running == 1)
    monkeypatch.setattr(model, "forward", failing(model.forward, lambda ids: ids.shape[1] > 1))
    with pytest.raises(ServerError, match="prefill: RuntimeError: out of memory"):
        await engine.create("completions", body(), None)
    assert len((await running)["choices"][0]["sample"]["completion_ids"]) == 200


async def test_a_fault_in_a_step_fails_its_rows_and_the_engine_goes_on(make_engine, monkeypatch):
    engine = await make_engine()
    model = engine._model._model
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", failing(model.forward, lambda ids: ids.shape == (2, 1)))
        with pytest.raises(ServerError, match="decoding"):
            await engine.create("completions", body(n=2), None)
    assert engine.stats().running == 0
    answer = await engine.create("completions", body(n=2), None)
    assert len(answer["choices"]) == 2


async def test_nobody_waits_for_a_thread_that_died(make_engine, monkeypatch):
    engine = await make_engine()
    task = asyncio.create_task(engine.create("completions", body(max_tokens=1000), None))
    await until(lambda: engine.stats().running == 1)
    monkeypatch.setattr(engine._scheduler, "_step", None)
    with pytest.raises(ServerError, match="died of TypeError"):
        await asyncio.wait_for(task, 30)
    with pytest.raises(ServerError, match="died of TypeError"):
        await engine.create("completions", body(), None)


async def test_sliding_windows_are_kept(make_engine):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=8,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    engine = await make_engine(model)
    prompts = [[*range(5, 5 + length)] for length in (3, 30, 11)]
    answer = await engine.create("completions", body(prompts, max_tokens=20), None)
    for choice in answer["choices"]:
        sample = choice["sample"]
        prompt, completion = sample["prompt_ids"], sample["completion_ids"]
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + completion])).logits[0]
        logprobs_CV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected_C = logprobs_CV.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert sample["logprobs"] == pytest.approx(expected_C.tolist(), abs=1e-4)


async def test_the_callers_model_is_left_as_it_was(make_engine, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    engine = await make_engine(model)
    copied = engine._model._model
    assert copied is not model
    for name, parameter in model.named_parameters():
        assert copied.get_parameter(name) is parameter


async def test_layers_that_it_cannot_cache_are_refused(make_engine, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.layer_types = ["linear_attention"] * len(model.config.layer_types)
    with pytest.raises(ConfigError, match="linear_attention"):
        await make_engine(model)
