"""What AutoRL makes of its tasks and its results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.rewards.auto_rl import SHOWN, _chosen, print_result


def test_every_task_comes_once_in_each_pass() -> None:
    tasks = [art.Scenario(task=str(n)) for n in range(7)]
    found = [one.task for step in range(7) for one in _chosen(tasks, 4 * step, 4, seed=1)]
    assert Counter(found) == Counter({str(n): 4 for n in range(7)})
    assert all(len(set(found[start : start + 7])) == 7 for start in range(0, 28, 7))
    assert found[:7] != found[7:14]
    again = [one.task for step in range(7) for one in _chosen(tasks, 4 * step, 4, seed=1)]
    assert found == again


def task(score: float) -> dict[str, float]:
    return {"score": score, **dict.fromkeys(SHOWN, 1.0)}


def test_the_result_counts_tasks_and_says_how_sure_it_is() -> None:
    result = art.AutoResult(
        "p/m",
        3,
        base=[task(s) for s in (0.1, 0.5, 0.5, 0.9)],
        trained=[task(s) for s in (0.5, 0.9, 0.5, 0.7)],
    )
    summary = result.summary()
    assert (summary["wins"], summary["losses"], summary["ties"]) == (2, 1, 1)
    assert summary["difference"] == pytest.approx(0.15)
    # gains 0.4, 0.4, 0, -0.2: std 0.3, so 1.96 * 0.3 / sqrt(4)
    assert summary["error"] == pytest.approx(0.294)
    console = Console(record=True, width=100)
    print_result(result, console)
    text = console.export_text()
    assert "4 held-out tasks" in text
    assert "0.500" in text
    assert "0.650" in text
    assert "+0.150 (95 % interval ± 0.294); better at 2 tasks, worse at 1" in text
    assert art.AutoResult("p/m", 1, [task(0)], [task(1)]).summary()["error"] is None


@pytest.mark.parametrize("split", ["train", "test"])
async def test_tasks_of_both_kinds_are_needed(split: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"task": "x", "split": "{split}"}}\n')
    model: art.TrainableModel = art.TrainableModel(name="m", project="p", base_model="tiny")
    backend = art.Backend("http://127.0.0.1:9", "token")
    with pytest.raises(art.ConfigError, match="It needs both"):
        await art.auto(model, backend, "x", judge_model="j", scenarios=path, api_key="k")
    await backend.close()


def test_without_a_key_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("tasks.jsonl").write_text('{"task": "x"}\n{"task": "y", "split": "test"}\n')
    command = ["auto", "Answers", "--base-model", "tiny", "--judge", "j"]
    result = CliRunner().invoke(app, [*command, "--scenarios", "tasks.jsonl"])
    assert result.exit_code == 1
    assert "set OPENAI_API_KEY" in result.output
    assert not list(tmp_path.glob("home/**/*.log"))
    wrong = CliRunner().invoke(app, [*command, "--tools", "none.py"])
    assert (wrong.exit_code, "no Python file" in wrong.output) == (1, True)
