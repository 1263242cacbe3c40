"""Config: both file formats, overrides, and mistakes that name themselves."""

import json

import pytest

from turnwise import Config, get_debug_config, get_full_scale_config, get_small_scale_config
from turnwise.errors import ConfigError

TEMPLATES = [get_debug_config, get_small_scale_config, get_full_scale_config]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config_survives_a_file_in_either_format(template, suffix, tmp_path):
    config = template()
    path = tmp_path / f"config{suffix}"
    config.to_json(path) if suffix == ".json" else config.to_yaml(path)
    assert Config.from_file(path) == config


def test_overrides_replace_single_fields_and_read_numbers_as_people_mean_them():
    config = Config().with_overrides(
        ["training.learning_rate=1e-5", "rollout.group_size=4", "model.path=tiny"]
    )
    assert (config.training.learning_rate, config.rollout.group_size, config.model.path) == (1e-5, 4, "tiny")


def test_changing_the_algorithm_forgets_knobs_that_were_only_filled_in():
    assert get_small_scale_config().loss.clip_low == 0.2
    assert get_small_scale_config().with_overrides(["loss.name=reinforce"]).loss.clip_low is None


def test_a_chosen_algorithm_gets_its_own_defaults():
    config = Config().with_overrides(["credit.estimator=gigpo", "loss.name=dapo"])
    assert (config.credit.gamma, config.credit.omega, config.loss.clip_high) == (0.95, 1.0, 0.28)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.lerning_rate=1"], ["training.lerning_rate", "did you mean learning_rate"]),
        (["model.lora.rnk=4"], ["model.lora.rnk", "did you mean rank"]),
        (["trainig.seed=1"], ["trainig", "did you mean training"]),
        (["training.seed=abc"], ["training.seed", "abc", "integer"]),
        (["rollout.group_size=0"], ["rollout.group_size", "0"]),
        (["rollout.tasks_per_step=0"], ["rollout.tasks_per_step", "0"]),
        (
            ["loss.name=reinforce", "loss.clip_low=0.1"],
            ["loss.clip_low", "0.1", "reinforce does not read it", "ppo"],
        ),
        (
            ["credit.estimator=rloo", "credit.gamma=0.9"],
            ["credit.gamma", "0.9", "rloo does not read it", "gigpo"],
        ),
        (["loss.kl_kind=k1"], ["loss.kl_kind", "kl_coefficient is 0"]),
        (["loss.kl_coefficient=0.1", "loss.reference=adapter_off"], ["adapter_off", "model.lora"]),
        (["rollout.group_size=1"], ["rollout.group_size is 1", "rloo", "at least 2"]),
        (["rollout.temperature=-1"], ["rollout.temperature", "-1"]),
        (["nonsense"], ["nonsense", "stage.field=value"]),
    ],
)
def test_mistakes_name_the_setting_the_value_and_the_way_out(overrides, words):
    with pytest.raises(ConfigError) as caught:
        Config().with_overrides(overrides)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; `turnwise init"):
        Config.from_file(tmp_path / "none.yaml")


def test_a_file_that_is_not_yaml_or_json_is_named(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "list.yaml").write_text(json.dumps([1]))
    for name, words in (
        ("bad.json", "not valid json"),
        ("bad.yaml", "not valid yaml"),
        ("list.yaml", "holds a list"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config.from_file(tmp_path / name)
