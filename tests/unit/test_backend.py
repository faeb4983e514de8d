"""The backend against a real HTTP server that can be told to misbehave."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.responses import HTMLResponse, JSONResponse, Response

import art_cloud as art
from art_cloud.shared.names import ModelName

from .stand_in import DROP, PING, TOKEN, StandIn, checkpoint, error, serve


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    with serve(stand_in.app()) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
async def backend(server: StandIn) -> AsyncIterator[art.Backend]:
    async with art.Backend(server.url, TOKEN, patience=20) as backend:
        yield backend


@pytest.fixture
async def model(backend: art.Backend) -> art.TrainableModel[None]:
    model: art.TrainableModel[None] = art.TrainableModel(name="m", project="p", base_model="tiny")
    await model.register(backend)
    return model


async def ask(model: art.Model[None], reward: float) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": "a number?"}]
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages
    )
    return art.Trajectory(messages_and_choices=[*messages, response.choices[0]], reward=reward)


async def groups(model: art.Model[None]) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(ask(model, reward) for reward in (0, 1))], pbar_desc=None
    )


def proxy_page() -> Response:
    return HTMLResponse("<html>Bad   gateway</html>", 502)


async def test_a_step(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    result = await backend.train(
        model, await groups(model), art.TrainConfig(loss="cispo"), learning_rate=3e-5
    )
    assert (result.step, result.policy, result.metrics) == (1, "p/m@1", {"loss": 0.5})
    assert await model.get_step() == 1
    batch = server.batches[0]
    assert batch.groups[0].rewards == [0, 1]
    assert (batch.config.loss, batch.config.learning_rate) == ("cispo", 3e-5)
    assert [s.completion_ids for s in batch.samples] == [[5, 6], [5, 6]]
    assert batch.samples[0].policy == "p/m@0"


async def test_the_shorthand_of_older_scripts(model: art.TrainableModel[None]) -> None:
    result = await model.train(await groups(model), config=art.TrainConfig(learning_rate=1e-5))
    assert result.step == 1


async def test_events_are_resumed_where_they_broke_off(
    backend: art.Backend,
    model: art.TrainableModel[None],
    server: StandIn,
    capfd: pytest.CaptureFixture[str],
) -> None:
    batch = await groups(model)
    server.last_event_ids.clear()
    server.scripts = [[1, 2, PING, DROP], [DROP], [3, PING], [4]]
    assert (await backend.train(model, batch)).step == 1
    assert server.last_event_ids == ["0", "2", "2", "3"]
    assert server.calls["train"] == 1
    assert "Trying again" in capfd.readouterr().err


async def test_a_call_that_a_proxy_answered_is_sent_again_and_counts_once(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    server.faults["train"] = [proxy_page, lambda: error("on my way out", "server_stopping", 503)]
    assert (await backend.train(model, await groups(model))).step == 1
    assert server.calls["train"] == 3
    assert len(server.batches) == 1


async def test_an_answer_lost_on_the_way_does_not_make_a_second_step(server: StandIn) -> None:
    class LosesAnswers(httpx.AsyncHTTPTransport):
        lost = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.url.path.endswith("/train") and self.lost < 2:
                self.lost += 1
                await response.aclose()
                raise httpx.ReadError("connection reset", request=request)
            return response

    transport = LosesAnswers()
    async with art.Backend(server.url, TOKEN, patience=20, transport=transport) as backend:
        model: art.TrainableModel[None] = art.TrainableModel(name="m", project="p", base_model="t")
        await model.register(backend)
        result = await backend.train(model, await groups(model))
    assert (transport.lost, server.calls["train"]) == (2, 3)
    assert result.step == server.step == 1


async def test_a_server_that_was_replaced_gets_the_call_again(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    batch = await groups(model)
    server.faults["events"] = [lambda: error("no such job", "not_found", 404)]
    assert (await backend.train(model, batch)).step == 1
    assert server.calls["train"] == 2


async def test_a_failed_job_raises_the_class_that_the_server_named(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    batch = await groups(model)
    server.fails_with = {"message": "someone else trains p/m", "code": "rival_server"}
    with pytest.raises(art.RivalError, match="someone else"):
        await backend.train(model, batch)


async def test_progress_names_the_call_and_ends(
    backend: art.Backend,
    model: art.TrainableModel[None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ART_PROGRESS", raising=False)
    batch = await groups(model)
    capfd.readouterr()
    await backend.train(model, batch)
    assert "train m: 1/2" in capfd.readouterr().err


async def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(art.ServerUnavailableError, match=rf"127.0.0.1:{port}.*art-cloud status"):
        await art.Backend(f"http://127.0.0.1:{port}", TOKEN, patience=0.3).info()


@pytest.mark.parametrize("url", ["127.0.0.1:1", "box", "s3://bucket"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(art.ConfigError, match="not the address of a server"):
        art.Backend(url, TOKEN)


@pytest.mark.parametrize("token", ["5ecret\n", "5e\ncret", "5\u00f6cret"])
def test_a_token_that_no_request_can_carry_is_refused(server: StandIn, token: str) -> None:
    with pytest.raises(art.ConfigError, match="line break") as refused:
        art.Backend(server.url, token, patience=3600)
    assert token.strip() not in str(refused.value)


async def test_after_its_block_a_backend_says_that_it_has_ended(server: StandIn) -> None:
    async with art.Backend(server.url, TOKEN) as backend:
        model = art.TrainableModel[None](name="m", project="p", base_model="tiny")
        await model.register(backend)
        made = await groups(model)
    for call in (backend.info(), backend.train(model, made), model.get_step(), model.log(made)):
        with pytest.raises(art.ConfigError, match=r"was closed: its `async with` block has ended"):
            await call


async def test_after_its_block_a_client_says_that_it_has_ended(server: StandIn) -> None:
    async with art.Backend(server.url, TOKEN) as backend:
        model = art.TrainableModel[None](name="m", project="p", base_model="tiny")
        await model.register(backend)
        client = model.openai_client()
    with pytest.raises(art.ConfigError, match=r"backend that this client belongs to was closed"):
        await client.chat.completions.create(
            model="p/m", messages=[{"role": "user", "content": "?"}]
        )


async def test_a_model_without_a_base_model(backend: art.Backend) -> None:
    model = art.TrainableModel[None](name="m", project="p", base_model="")
    with pytest.raises(art.ConfigError, match="p/m names no base_model"):
        await model.register(backend)


async def test_what_is_no_list_of_groups(
    backend: art.Backend, model: art.TrainableModel[None]
) -> None:
    [group] = await groups(model)
    with pytest.raises(art.ConfigError, match=r"a Trajectory\. Of one group: train\("):
        await backend.train(model, group)  # type: ignore[arg-type]
    with pytest.raises(art.ConfigError, match="one item is a list"):
        await backend.train(model, [[group]])  # type: ignore[list-item]


async def test_steps_without_a_signal_are_told_of_now_and_then(
    backend: art.Backend, server: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in range(20):
        metrics = {"groups": 2.0, "groups_without_signal": 2.0}
        backend._say_nothing_learned(
            art.TrainResult(step=step, policy=f"p/m@{step}", metrics=metrics)
        )
    told = capfd.readouterr().err
    assert told.count("all rewards are equal") == 1
    assert told.count("nothing to learn in") == 2
    assert "p/m@19: nothing to learn in 20 steps so far." in told


async def test_a_wrong_token_gives_no_hint(server: StandIn) -> None:
    with pytest.raises(art.AuthError) as info:
        await art.Backend(server.url, "another-token").info()
    assert "token" in str(info.value)
    assert not any(secret in str(info.value) for secret in (TOKEN, "another-token"))
    assert "another-token" not in repr(art.Backend(server.url, "another-token"))


@pytest.mark.parametrize(("version", "side"), [("99.0.0", "this client"), ("0.0.1", "the server")])
async def test_versions_that_differ(server: StandIn, version: str, side: str) -> None:
    server.version = version
    with pytest.raises(art.VersionMismatchError, match=f"{version}.*Upgrade {side}"):
        await art.Backend(server.url, TOKEN).__aenter__()


async def test_a_later_protocol_whose_answer_has_another_form(server: StandIn) -> None:
    server.faults["server"] = [lambda: JSONResponse({"version": "99.0.0", "protocol": 7})]
    with pytest.raises(art.VersionMismatchError, match="protocol 7"):
        await art.Backend(server.url, TOKEN).info()


@pytest.mark.parametrize(
    "answer",
    [
        HTMLResponse("<h1>It works!</h1>"),
        HTMLResponse("<h1>No such page</h1>", 404),
        JSONResponse([1, 2]),
        Response(b"\xff\xfe\x00", 500),
    ],
)
async def test_another_program_at_the_port(server: StandIn, answer: Response) -> None:
    server.faults["server"] = [lambda: answer]
    with pytest.raises(art.ServerError, match="art-server"):
        await art.Backend(server.url, TOKEN).info()


async def test_an_event_that_is_none(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    batch = await groups(model)
    server.scripts = [["what?"]]
    with pytest.raises(art.ServerError, match="'what\\?'"):
        await backend.train(model, batch)


async def test_nothing_is_sent_when_the_batch_cannot_be_trained_on(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    batch = await groups(model)
    batch[0].trajectories[1].reward = float("nan")
    with pytest.raises(art.UntrainableError, match="Group 0, trajectory 1 has reward nan"):
        await backend.train(model, batch)
    assert server.calls["train"] == 0


async def test_an_override_that_is_no_field(
    backend: art.Backend, model: art.TrainableModel[None]
) -> None:
    with pytest.raises(art.ConfigError, match=r"kl_penalty_coef: not among .* kl_coef"):
        await backend.train(model, [], kl_penalty_coef=0.1)
    with pytest.raises(art.ConfigError, match="learning_rate"):
        await backend.train(model, [], learning_rate=-1)


async def test_fine_tuning_takes_trajectories_and_messages(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    plain: art.Messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    told = await ask(model, 0)
    assert (await backend.train_sft(model, [plain, told], batch_size=2)).step == 1
    sent = next(
        server.bodies[id].decode() for id, job in server.jobs.items() if job["kind"] == "sft"
    )
    assert '"content":"2"' in sent
    assert '"content":"5"' in sent
    assert '"batch_size":2' in sent
    with pytest.raises(art.ConfigError, match="no trajectory"):
        await model.train_sft([])


async def test_an_evaluation_is_logged(model: art.TrainableModel[None], server: StandIn) -> None:
    kept = await model.log(await groups(model), split="val", metrics={"extra": 2})
    assert kept == {"reward": 0.5, "reward_std": 0.5, "exception_rate": 0, "extra": 2}
    entry = server.logged[0]
    assert (entry["split"], entry["step"], entry["metrics"]) == ("val", 0, kept)
    assert [row["reward"] for row in entry["trajectories"]] == [0, 1]
    assert entry["trajectories"][0]["messages"][1]["content"] == "5"
    await model.log(metrics={"win_rate": 0.5}, step=3)
    assert (server.logged[1]["step"], server.logged[1]["metrics"]) == (3, {"win_rate": 0.5})
    with pytest.raises(art.ConfigError, match=r"can't be logged: metrics\.bad"):
        await model.log(metrics={"bad": float("nan")})


async def test_checkpoints(
    backend: art.Backend, model: art.TrainableModel[None], server: StandIn
) -> None:
    checkpoints = backend.checkpoints(model)
    server.checkpoints = [
        checkpoint(0),
        checkpoint(1, **{"val/reward": 0.9}),
        checkpoint(2, **{"val/reward": 0.4}),
        checkpoint(3),
    ]
    assert [info.step for info in await checkpoints.list()] == [0, 1, 2, 3]
    assert (await checkpoints.best("val/reward")).step == 1
    with pytest.raises(art.NotFoundError, match=r"'val/x'. There are: val/reward"):
        await checkpoints.delete(keep_best="val/x")
    assert server.deleted == []
    await model.delete_checkpoints()
    assert server.deleted == [0, 2]
    assert list(await checkpoints.delete(3)) == [3]
    with pytest.raises(art.ConfigError, match="Say which"):
        await checkpoints.delete()
    child = await checkpoints.fork("p/child", step=1)
    assert (child.model, child.step) == ("child", 1)
    assert server.forks == [{"to_project": "p", "to_model": "child", "step": 1}]


async def test_names(backend: art.Backend, model: art.TrainableModel[None]) -> None:
    assert model.get_inference_name() == "p/m"
    assert model.get_inference_name(step=4) == "p/m@4"
    assert model.full_name == ModelName("p", "m")
    assert model.openai_client() is model.openai_client()
    assert TOKEN not in repr(model)
    assert TOKEN not in model.model_dump_json()


async def test_a_model_that_is_not_registered() -> None:
    model: art.TrainableModel[None] = art.TrainableModel(name="m", project="p", base_model="t")
    with pytest.raises(art.ConfigError, match="register"):
        model.openai_client()
    with pytest.raises(art.ConfigError, match="register"):
        await model.get_step()
    with pytest.raises(art.ConfigError, match="'a/b' is not a valid name"):
        art.TrainableModel(name="a/b", project="p", base_model="t")


async def test_a_prompted_model(backend: art.Backend, server: StandIn) -> None:
    prompted: art.Model[None] = art.Model(
        name="gpt",
        project="p",
        inference_model_name="gpt-5",
        inference_base_url=f"{server.url}/v1",
        inference_api_key=TOKEN,
    )
    assert prompted.get_inference_name() == "gpt-5"
    assert (await ask(prompted, 1)).messages()[1] == {"role": "assistant", "content": "5"}
    await prompted.register(backend)
    await prompted.log([await ask(prompted, 1)])
    assert server.logged[0]["metrics"]["reward"] == 1
    await prompted.close()
