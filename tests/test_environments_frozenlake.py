"""FrozenLake in words, and Gymnasium environments behind JSON actions."""

import pytest

from turnwise.config import EnvironmentConfig
from turnwise.environments import build_environment
from turnwise.environments.frozenlake import describe, make_map
from turnwise.errors import ConfigError
from turnwise.types import Action, Task


def lake(**params):
    return build_environment(EnvironmentConfig(name="frozenlake", params=params))


def test_the_description_names_position_goal_and_neighbours():
    import gymnasium

    game = gymnasium.make("FrozenLake-v1", desc=["SF", "HG"], is_slippery=False)
    game.reset()
    assert describe(game, 0) == (
        "At row 1 column 1. Goal: down 1, right 1. left wall, down hole, right ice, up wall."
    )
    assert describe(game, 1) == "At row 1 column 2. Goal: down 1. left ice, down goal, right wall, up wall."


def test_the_same_seed_gives_the_same_map_and_other_seeds_other_maps():
    maps = [
        tuple(make_map(seed, size=4, ice=0.8, min_distance=2, max_distance=16)) for seed in (1, 1, 2, 3, 4)
    ]
    assert maps[0] == maps[1]
    assert len(set(maps)) == 4


@pytest.mark.parametrize("seed", range(30))
def test_start_and_goal_are_as_far_apart_as_asked(seed):
    rows = make_map(seed, size=4, ice=0.7, min_distance=3, max_distance=4)
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    frontier, seen, moves = {k for k, v in cells.items() if v == "S"}, set(), 0
    while not any(cells[place] == "G" for place in frontier):
        seen |= frontier
        frontier = {
            (r + dr, c + dc)
            for r, c in frontier
            for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))
            if cells.get((r + dr, c + dc), "H") != "H"
        } - seen
        moves += 1
    assert 3 <= moves <= 4


def test_reaching_the_goal_pays_and_ends_the_episode():
    spec = lake(size=2, ice=1.0, min_distance=1, max_distance=1)
    environment = spec.make()
    observation = environment.reset(Task(task_id="t", seed=3))
    way = observation.text.split("Goal: ")[1].split()[0]
    transition = environment.step(Action(value={"move": way}))
    assert (transition.reward, transition.is_terminal, transition.metrics["success"]) == (1.0, True, 1.0)


def test_progress_pays_for_each_move_nearer_and_costs_for_each_away():
    spec = lake(size=3, ice=1.0, min_distance=2, max_distance=4, progress_reward=0.1)
    environment = spec.make()
    observation = environment.reset(Task(task_id="t", seed=1))
    away = {"up": "down", "down": "up", "left": "right", "right": "left"}
    way = observation.text.split("Goal: ")[1].split()[0]
    nearer = environment.step(Action(value={"move": way}))
    back = environment.step(Action(value={"move": away[way]}))
    assert (nearer.reward, back.reward) == (0.1, -0.1)


@pytest.mark.parametrize("value", [None, {}, {"move": "north"}, {"move": 3}, {"move": ["left"]}])
def test_an_invalid_action_changes_nothing_and_says_what_is_allowed(value):
    environment = lake().make()
    before = environment.reset(Task(task_id="t", seed=5))
    transition = environment.step(Action(value=value))
    assert not transition.is_action_valid
    assert transition.observation.state_key == before.state_key
    assert transition.observation.text.startswith("Invalid action: ")


def test_any_gymnasium_id_can_be_played():
    spec = build_environment(EnvironmentConfig(name="gym:CartPole-v1"))
    environment = spec.make()
    observation = environment.reset(spec.tasks.task(0, "train"))
    assert 'Answer with {"action": …}, an integer from 0 to 1.' in observation.text
    assert environment.step(Action(value={"action": 1})).reward == 1.0
    assert not environment.step(Action(value={"action": 2})).is_action_valid
    assert not environment.step(Action(value={"action": 1e400})).is_action_valid


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("frozenpond", {}, "known: frozenlake"),
        ("gym:Nothing-v9", {}, "cannot be made"),
        ("no.such.module:Thing", {}, "cannot import"),
        ("turnwise.environments.gym:nothing", {}, "has no nothing"),
        ("frozenlake", {"size": 40}, "size is 40"),
        ("frozenlake", {"ise": 0.5}, "does not take these params"),
    ],
)
def test_a_wrong_environment_is_a_clear_config_error(name, params, words):
    with pytest.raises(ConfigError, match=words):
        build_environment(EnvironmentConfig(name=name, params=params))


def test_a_pretrained_model_is_told_the_game_once():
    environment = lake(size=3, ice=1.0, min_distance=2, instructions=True).make()
    first = environment.reset(Task(task_id="t", seed=3)).text
    told, described = first.split("\n")
    assert all(f'{{"move": "{move}"}}' in told for move in ("left", "down", "right", "up"))
    assert described.startswith("At row ")
    # Away from the goal, so that the episode goes on.
    away = {"down": "up", "up": "down", "left": "right", "right": "left"}[
        described.split("Goal: ")[1].split()[0]
    ]
    assert environment.step(Action(value={"move": away})).observation.text.startswith("At row ")
