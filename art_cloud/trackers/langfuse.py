"""Rollouts to Langfuse, by its own package (extra `langfuse`): each a trace with its reward."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from ..rollouts.trajectory import History, Trajectory, is_choice
from ..shared.protocol import Sample
from .tracker import Event, Run

if TYPE_CHECKING:
    from langfuse import Langfuse, LangfuseAgent


class LangfuseTracker:
    """Sends up to ROLLOUTS trajectories of each train call or log. Those of one model are one
    session.

    Keys and address are Langfuse's own variables; LANGFUSE_SAMPLE_RATE sends fewer.
    """

    title = "Langfuse"

    def __init__(self) -> None:
        self._client: Langfuse | None = None
        self._run: Run | None = None
        self._sent: set[str] = set()

    def open(self, run: Run) -> None:
        from langfuse import Langfuse
        from opentelemetry.sdk.trace import TracerProvider

        self._run = run
        self._client = Langfuse(tracer_provider=TracerProvider())  # the script keeps its own
        self._client.auth_check()

    def send(self, event: Event) -> None:
        assert self._client is not None
        if event.trajectories:
            self._client.auth_check()  # while it is down, its exporter would complain at length
        for trajectory in event.trajectories:
            self._trace(self._client, event, trajectory)

    def close(self) -> None:
        if self._client is not None:
            self._client.flush()

    def _trace(self, client: Langfuse, event: Event, trajectory: Trajectory) -> None:
        from langfuse import propagate_attributes

        assert self._run is not None
        messages = trajectory.messages()
        seed = f"{self._run.id} {trajectory.start_time.isoformat()} {messages}"
        id = client.create_trace_id(seed=seed)
        if id in self._sent:  # trained on, and then logged
            return
        self._sent.add(id)
        answered = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        with (
            propagate_attributes(
                trace_name=f"{self._run.name} {event.split}",
                session_id=self._run.id,
                tags=[event.split],
                metadata={"project": self._run.project, "step": str(event.step)},
            ),
            client.start_as_current_observation(
                trace_context={"trace_id": id},
                name="rollout",
                as_type="agent",
                input=messages[: len(messages) - (answered is not None)],
                output=answered,
                metadata={**trajectory.metadata, "logs": trajectory.logs},
            ) as agent,
        ):
            for history in (trajectory, *trajectory.additional_histories):
                _add_generations(agent, history)
        scores = {"reward": trajectory.reward, **trajectory.metrics}
        for name, value in scores.items():
            if isfinite(value):
                client.create_score(
                    trace_id=id, score_id=f"{id}-{name}", name=name, value=float(value)
                )


def _add_generations(agent: LangfuseAgent, history: History) -> None:
    """Add a generation for each answer of the model, with the messages that it was given."""
    messages = history.messages()
    for place, item in enumerate(history.messages_and_choices):
        if is_choice(item):
            sample = getattr(item, "sample", None)
            agent.start_observation(
                name="answer",
                as_type="generation",
                input=messages[:place],
                output=messages[place],
                **(_of_sample(Sample.model_validate(sample)) if sample else {}),
            ).end()


def _of_sample(sample: Sample) -> dict[str, Any]:
    return {
        "model": sample.policy,
        "usage_details": {
            "input": len(sample.prompt_ids),
            "output": len(sample.completion_ids),
        },
    }
