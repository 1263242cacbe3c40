import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from turnwise.environment import Environment, Restorable, action_keys
from turnwise.environments.navigation import Expert, NavigationEnvironment, NavigationSpec, build_navigation
from turnwise.environments.navigation.actions import ActionLimits, Command, action_schema, read_command
from turnwise.environments.navigation.scenes import Pose
from turnwise.errors import ConfigError, EnvironmentFailure, SceneError
from turnwise.types import Action, Role, Task

SMALL = {"generate": {"num_train_scenes": 4, "num_eval_scenes": 2, "max_rooms": 1}, "width": 64, "height": 64}


def small_spec(**params: object) -> NavigationSpec:
    spec = build_navigation({**SMALL, **params})
    assert isinstance(spec, NavigationSpec)
    return spec


def run_expert(
    spec: NavigationSpec, env: NavigationEnvironment, task: Task, mode: str = "shortest"
) -> dict[str, float]:
    expert = Expert(mode, limits=spec.params.limits(), require_done=spec.params.require_done)  # type: ignore[arg-type]
    env.reset(task)
    while True:
        transition = env.step(Action(value=expert.act(env.situation()).command.as_value()))
        if transition.is_terminal:
            return {**transition.metrics, "reward": transition.reward}


@pytest.mark.parametrize("mode", ["shortest", "sighted"])
def test_the_expert_solves_every_generated_task(mode: str) -> None:
    spec = small_spec(solvable_by=mode, generate={"num_train_scenes": 6, "max_rooms": 2}, seed=2)
    env = spec.make()
    found = [run_expert(spec, env, spec.tasks.task(i, "train"), mode) for i in range(30)]
    assert np.mean([item["success"] for item in found]) == 1.0
    assert all(item["reward"] == 1.0 for item in found)
    assert all(item["collisions"] == 0 for item in found)
    assert np.mean([item["spl"] for item in found]) > 0.8


def test_tasks_are_the_same_for_the_same_index_and_splits_share_no_scene() -> None:
    spec, again = small_spec(), small_spec()
    assert spec.tasks.task(5, "train") == again.tasks.task(5, "train")
    train = {spec.tasks.task(i, "train").data["scene_id"] for i in range(8)}
    evaluation = {spec.tasks.task(i, "eval").data["scene_id"] for i in range(8)}
    assert len(train) == 4
    assert not train & evaluation


def test_an_observation_shows_a_frame_and_a_short_text() -> None:
    spec = small_spec(instructions=False)
    env = spec.make()
    assert isinstance(env, Environment)
    assert isinstance(env, Restorable)
    task = spec.tasks.task(0, "train")
    observation = env.reset(task)
    assert [message.role for message in observation.messages] == [Role.USER]
    assert observation.text == f"Turn 1 of 10. {task.data['question']}"
    assert (observation.images[0].width, observation.images[0].height) == (64, 64)
    assert observation.info["pose"] == task.data["start"]


def test_instructions_depth_and_pose_are_options() -> None:
    spec = small_spec(instructions=True, show_depth=True, show_pose=True)
    observation = spec.make().reset(spec.tasks.task(0, "train"))
    assert observation.messages[0].role == Role.SYSTEM
    assert "forward_meters" in observation.messages[0].text
    assert len(observation.images) == 2
    assert "heading" in observation.messages[1].text


def test_turning_left_on_the_spot_changes_the_yaw_only() -> None:
    spec = small_spec()
    env = spec.make()
    env.reset(spec.tasks.task(0, "train"))
    before = env.pose
    env.step(Action(value={"rotation_angle_degrees": 30, "forward_meters": 0}))
    assert (env.pose.x, env.pose.y) == (before.x, before.y)
    assert env.pose == before.turned(30.0)


def test_the_episode_ends_after_the_last_turn_without_reward() -> None:
    spec = small_spec(max_turns=3, instructions=False)
    env = spec.make()
    env.reset(spec.tasks.task(0, "train"))
    stay = Action(value={"rotation_angle_degrees": 0, "forward_meters": 0})
    found = [env.step(stay) for _ in range(3)]
    assert [item.is_terminal for item in found] == [False, False, True]
    assert [item.reward for item in found] == [0.0, 0.0, 0.0]
    assert found[-1].metrics["success"] == 0.0
    assert found[0].observation.text.startswith("Turn 2 of 3.")
    with pytest.raises(EnvironmentFailure, match="call reset"):
        env.step(stay)


def test_metrics_follow_habitats_definitions() -> None:
    spec = small_spec()
    env = spec.make()
    task = spec.tasks.task(1, "train")
    env.reset(task)
    start = env.situation().field.at(env.pose.x, env.pose.y)
    env.step(Action(value={"rotation_angle_degrees": 90, "forward_meters": 0.25}))
    metrics = env.metrics()
    distance = env.situation().field.at(env.pose.x, env.pose.y)
    assert metrics["distance_to_goal"] == distance
    shortest = task.ground_truth["shortest_path_m"]
    share = shortest / max(shortest, metrics["path_m"])
    assert metrics["soft_spl"] == pytest.approx(max(0.0, 1 - distance / start) * share)
    assert metrics["spl"] == 0.0


def test_progress_rewards_add_up_to_the_share_of_the_way() -> None:
    spec = small_spec(progress_reward=1.0, success_reward=0.0, min_distance_m=1.5)
    env = spec.make()
    task = spec.tasks.task(0, "train")
    env.reset(task)
    expert, total = Expert(limits=spec.params.limits()), 0.0
    while True:
        transition = env.step(Action(value=expert.act(env.situation()).command.as_value()))
        total += transition.reward
        if transition.is_terminal:
            break
    assert total == pytest.approx(1.0)


def test_a_collision_is_told_counted_and_penalised() -> None:
    spec = small_spec(collision_penalty=0.25, instructions=False)
    env = spec.make()
    env.reset(spec.tasks.task(0, "train"))
    for _ in range(9):
        transition = env.step(Action(value={"rotation_angle_degrees": 0, "forward_meters": 1.0}))
        if transition.metrics["collisions"]:
            break
    assert transition.metrics["collisions"] == 1.0
    assert "Blocked." in transition.observation.text
    assert transition.reward == -0.25


def test_done_must_be_said_where_it_is_required() -> None:
    spec = small_spec(require_done=True)
    env = spec.make()
    task = spec.tasks.task(0, "train")
    assert run_expert(spec, env, task)["success"] == 1.0
    env.reset(task)
    early = env.step(Action(value={"rotation_angle_degrees": 0, "forward_meters": 0, "done": True}))
    assert early.is_terminal
    assert early.metrics["success"] == 0.0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "no action found"),
        ({"rotation_angle_degrees": math.nan, "forward_meters": 0}, "rotation_angle_degrees is nan"),
        ({"rotation_angle_degrees": 0, "forward_meters": math.inf}, "forward_meters is inf"),
        ({"rotation_angle_degrees": 0, "forward_meters": 1e9}, "between 0 and 1"),
        ({"rotation_angle_degrees": 10**5000, "forward_meters": 0}, "between -180 and 180"),
        ({"rotation_angle_degrees": 0, "forward_meters": -0.5}, "forward_meters is -0.5"),
        ({"rotation_angle_degrees": 0}, "forward_meters is missing"),
        ({"rotation_angle_degrees": "left", "forward_meters": 0}, "'left'"),
        ({"rotation_angle_degrees": True, "forward_meters": 0}, "'True'"),
        ({"rotation_angle_degrees": 0, "forward_meters": 0, "fly": 1}, "unknown key 'fly'"),
        ({"rotation_angle_degrees": 0, "forward_meters": 0, "done": "yes"}, "done is 'yes'"),
        ({"rotation_angle_degrees": 0, "forward_meters": 0, "answer": ["A"]}, "answer is"),
    ],
)
def test_bad_actions_cost_a_turn_and_move_nothing(value: dict | None, said: str) -> None:
    spec = small_spec()
    env = spec.make()
    env.reset(spec.tasks.task(0, "train"))
    before = env.pose
    transition = env.step(Action(value=value))
    assert not transition.is_action_valid
    assert said in transition.observation.text
    assert env.pose == before
    assert transition.metrics["invalid_actions"] == 1.0
    assert not transition.is_terminal


def test_a_snapshot_brings_back_pose_turn_and_metrics() -> None:
    spec = small_spec()
    env, other = spec.make(), spec.make()
    env.reset(spec.tasks.task(0, "train"))
    env.step(Action(value={"rotation_angle_degrees": 15, "forward_meters": 0.25}))
    saved = env.snapshot()
    action = Action(value={"rotation_angle_degrees": -60, "forward_meters": 0.5})
    after = env.step(action)
    env.step(action)
    for target in (env, other):
        target.restore(saved)
        again = target.step(action)
        assert again.observation.images == after.observation.images
        assert again.observation.info == after.observation.info
        assert again.metrics == after.metrics


def test_a_pickled_environment_goes_on_in_its_own_worlds() -> None:
    spec = small_spec()
    env = spec.make()
    env.reset(spec.tasks.task(0, "train"))
    env.step(Action(value={"rotation_angle_degrees": 15, "forward_meters": 0.25}))
    copy = pickle.loads(pickle.dumps(env))
    assert copy.worlds is not env.worlds
    action = Action(value={"rotation_angle_degrees": -60, "forward_meters": 0.5})
    assert copy.step(action).observation.images == env.step(action).observation.images
    other = pickle.loads(pickle.dumps(spec))
    assert other.tasks.task(3, "eval") == spec.tasks.task(3, "eval")
    assert other.tasks.worlds is other.worlds


def test_threads_share_a_world() -> None:
    spec = small_spec()
    task = spec.tasks.task(0, "train")
    fresh = small_spec()
    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda _: fresh.make().reset(task).images[0].sha256, range(16)))
    assert set(seen) == {spec.make().reset(task).images[0].sha256}


def test_equal_poses_have_equal_state_keys() -> None:
    spec = small_spec()
    env = spec.make()
    task = spec.tasks.task(0, "train")
    key = env.reset(task).state_key
    assert (
        env.step(Action(value={"rotation_angle_degrees": 180, "forward_meters": 0})).observation.state_key
        != key
    )
    assert (
        env.step(Action(value={"rotation_angle_degrees": 180, "forward_meters": 0})).observation.state_key
        == key
    )
    assert json.loads(json.dumps(key)) == key


def test_the_environment_can_be_used_by_hand() -> None:
    env = NavigationEnvironment(**SMALL)
    with pytest.raises(EnvironmentFailure, match="load_scene"):
        env.get_random_pose()
    env.load_scene("made-0-train-00001")
    pose = env.get_random_pose(seed=3)
    assert isinstance(pose, Pose)
    assert env.world.grid.is_free(pose.x, pose.y)
    task = env.task_from_pose(pose, "ep001")
    assert env.reset(task).images
    with pytest.raises(SceneError, match="has no spaceship"):
        env.task_from_pose(pose, "ep002", goal="spaceship")
    with pytest.raises(SceneError, match="not one of the made scenes"):
        env.load_scene("42445173")


def test_tasks_survive_a_trip_through_json() -> None:
    task = small_spec().tasks.task(0, "train")
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="max_turn"):
        build_navigation({"max_turn": 3})
    with pytest.raises(ConfigError, match="width"):
        build_navigation({"width": 3})


def test_the_schema_names_the_two_keys_that_make_an_action() -> None:
    schema = action_schema(ActionLimits(), has_answer=True, has_done=True)
    assert action_keys(schema) == {"rotation_angle_degrees", "forward_meters"}
    assert set(schema["properties"]) == {"rotation_angle_degrees", "forward_meters", "answer", "done"}


def test_commands_are_written_without_needless_fractions() -> None:
    value = Command(rotation_degrees=-90.0, forward_m=0.25).as_value()
    assert json.dumps(value) == '{"rotation_angle_degrees": -90, "forward_meters": 0.25}'
    assert read_command(Action(value=value), ActionLimits()) == Command(
        rotation_degrees=-90.0, forward_m=0.25
    )
    assert read_command(Action(value={"answer": 3}), ActionLimits()) == Command(answer="3")
