import pytest

from art_cloud.shared.errors import ConfigError
from art_cloud.shared.names import ModelName, PolicyName, check_name


@pytest.mark.parametrize("text", ["a", "2048", "Qwen2.5-3B_x", "a" * 64])
def test_good_names(text: str) -> None:
    assert check_name(text, "name") == text
    assert ModelName.parse(f"{text}/{text}") == ModelName(text, text)


@pytest.mark.parametrize(
    "text", ["", ".", "..", ".hidden", "-flag", "a..b", "a/b", "a b", "a\n", "ä", "a" * 65, "a@1"]
)
def test_bad_names_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        check_name(text, "project")
    with pytest.raises(ConfigError):
        ModelName("p", text)


def test_a_policy_is_a_model_at_a_step() -> None:
    policy = ModelName("games", "agent-1.5").at(17)
    assert str(policy) == "games/agent-1.5@17"
    assert PolicyName.parse(str(policy)) == policy
    assert PolicyName.parse("games/agent@007").step == 7


@pytest.mark.parametrize(
    "text",
    [
        *("games/agent", "games/agent@", "games/agent@-1", "games/agent@1.0", "games/agent@\u0661"),
        *("@1", "agent@1", "a/b/c@1", "games/agent@" + "9" * 5000),
    ],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ConfigError):
        PolicyName.parse(text)


def test_names_sort_by_project_model_and_step() -> None:
    model = ModelName("p", "m")
    other, first, second = ModelName("p", "n").at(0), model.at(2), model.at(10)
    assert sorted([other, second, first]) == [first, second, other]
