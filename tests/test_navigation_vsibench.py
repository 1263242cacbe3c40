import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.environments.navigation import build_navigation
from turnwise.environments.navigation.arkitscenes import write_capture
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.questions import (
    find_named,
    make_route,
    question_task,
    route_question,
    route_start,
)
from turnwise.environments.navigation.vsibench import (
    QUESTION_TYPES,
    Question,
    read_questions,
)
from turnwise.environments.navigation.world import World
from turnwise.errors import SceneError
from turnwise.rewards.vsibench import find_letter, score_answer
from turnwise.types import Action

ROW: dict[str, Any] = {
    "id": 3, "dataset": "arkitscenes", "scene_name": "41069025", "question_type": "route_planning", "pruned": False,
    "question": "You are a robot beginning at the bed facing the tv. You want to navigate to the toilet. You will …",
    "options": ["A. Turn Back, Turn Left", "B. Turn Left, Turn Right"], "ground_truth": "B",
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("A", "A"), ("b.", "B"), ("(C)", "C"), ("The answer is A", "A"), ("Answer: (D).", "D"), ("**B**", "B"),
     ("A\nbecause I turned", "A"), ("I would choose option C, since", "C"), ("A chair is on the left", None),
     ("turn left, turn right", "B"), ("I think it must be B", "B"), ("", None), ("The answer is a chair", None), ("Banana", None)],
)  # fmt: skip
def test_a_letter_is_found_in_what_models_write(answer: str, letter: str | None) -> None:
    assert find_letter(answer, ("A. Turn Back, Turn Left", "B. Turn Left, Turn Right")) == letter


def test_both_rules_are_reported() -> None:
    found = score_answer("The answer is B.", "B", "route_planning", ROW["options"])
    assert (found.score, found.official) == (1.0, 0.0)
    number = score_answer("about 1,200 cm", "1000", "object_size_estimation")
    assert (number.score, number.official) == (pytest.approx(0.7), 0.0)
    assert score_answer("12", "10", "object_counting").official == pytest.approx(0.7)


def rows_of_all_types() -> list[dict[str, Any]]:
    rows = []
    for index, kind in enumerate(QUESTION_TYPES):
        is_choice = "estimation" not in kind and kind not in ("object_counting", "object_abs_distance")
        row = {**ROW, "id": index, "question_type": kind}
        rows.append(row if is_choice else {**row, "options": None, "ground_truth": "2.5"})
    return rows


def test_all_ten_types_are_read_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_all_types()))
    questions = read_questions(path)
    assert [question.question_type for question in questions] == list(QUESTION_TYPES)
    assert len(questions) == 10
    assert questions[0].prompt().endswith("Answer with the option's letter from the given choices directly.")
    assert "B. Turn Left, Turn Right" in questions[0].prompt()


def test_all_ten_types_are_read_from_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="parquet files need the extra `data`")
    import pyarrow.parquet

    rows = rows_of_all_types()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_questions(tmp_path / "test.parquet") == read_questions(tmp_path / "test.jsonl")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question_type": "mind_reading"}, "mind_reading"),
        ({"dataset": "matterport"}, "matterport"),
        ({"options": None}, "no options"),
        ({"question_type": "object_counting", "ground_truth": "many"}, "needs a number"),
        ({"id": None}, "not a VSI-Bench row"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(SceneError, match=rf"row 2.*{said}"):
        read_questions(tmp_path / "q.jsonl")


def furnished_world() -> World:
    options = SceneOptions(max_rooms=1, min_room_m=4.5, max_room_m=5.0, min_objects=6)
    return World(make_scene("41069025", 12, options), Agent())


def test_phrases_find_annotated_objects() -> None:
    world = furnished_world()
    unique = [
        item for item in world.scene.objects if [o.label for o in world.scene.objects].count(item.label) == 1
    ]
    for item in unique:
        assert find_named(world.scene, item.name) == item
        assert find_named(world.scene, item.label.replace("_", " ")) == item
        assert find_named(world.scene, f"very {item.label.replace('_', ' ')}") == item
    assert find_named(world.scene, "grand piano") is None


def test_a_route_starts_at_the_named_object_facing_the_named_object() -> None:
    world = furnished_world()
    first, second = world.scene.objects[0], world.scene.objects[1]
    for joint in (" facing the", " and facing the", ", and facing the"):
        text = f"You are a robot beginning at the {first.name}{joint} {second.name}. You want to navigate to the moon."
        found = route_start(world, text)
        assert found is not None
        pose = found[0]
        assert world.grid.is_free(pose.x, pose.y)
        assert first.floor_distance([[pose.x, pose.y]])[0] < 0.6  # type: ignore[arg-type]
        assert abs(pose.bearing_to(*second.centroid[:2])) < 0.01


def test_a_question_about_an_absent_object_starts_anywhere_and_says_so() -> None:
    world = furnished_world()
    question = Question(
        **{**ROW, "options": tuple(ROW["options"]), "question": ROW["question"].replace("bed", "piano")}
    )
    task = question_task(world, question)
    assert task.data["start_matches"] is False
    assert world.grid.is_free(task.data["start"]["x"], task.data["start"]["y"])
    assert task == question_task(world, question)


def test_made_routes_ask_for_the_turns_one_really_takes() -> None:
    world = furnished_world()
    route = make_route(world, seed=1, num_turns=1)
    assert route is not None
    a, b, c = (item.centroid for item in route.stops)
    cross = (b[0] - a[0]) * (c[1] - b[1]) - (b[1] - a[1]) * (c[0] - b[0])
    dot = (b[0] - a[0]) * (c[0] - b[0]) + (b[1] - a[1]) * (c[1] - b[1])
    if route.turns == ("Turn Back",):
        assert dot < 0
    else:
        assert route.turns == ("Turn Left" if cross > 0 else "Turn Right",)
    question = route_question(route, 1, world.scene, seed=1)
    chosen = {option[0]: option[3:] for option in question.options or ()}
    assert chosen[question.ground_truth] == ", ".join(route.turns)
    assert len(set(chosen.values())) == len(chosen)
    task = question_task(world, question)
    assert task.data["start_matches"] is True


def test_answers_end_the_episode_and_pay_their_score(tmp_path: Path) -> None:
    scene = make_scene("41069025", 12)
    import msgspec

    write_capture(msgspec.structs.replace(scene, fold="Validation"), tmp_path)
    write_capture(make_scene("40000001", 13), tmp_path)
    rows = [ROW, {**ROW, "id": 4, "question_type": "object_counting", "options": None, "ground_truth": "10"},
            {**ROW, "id": 5, "scene_name": "99999999"}]  # fmt: skip
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dataset_path": str(tmp_path), "questions_path": str(tmp_path / "test.jsonl")}
    spec = build_navigation(settings)
    assert spec.tasks.num_tasks("eval") == 2
    assert spec.tasks.task(0, "train").data["scene_id"] == "40000001"
    env = spec.make()
    assert "answer" in (env.action_schema or {})["properties"]
    observation = env.reset(spec.tasks.task(0, "eval"))
    assert "Turn Left, Turn Right" in observation.text
    moved = env.step(Action(value={"rotation_angle_degrees": 90, "forward_meters": 0}))
    assert not moved.is_terminal
    answered = env.step(Action(value={"answer": "The answer is (B)"}))
    assert answered.is_terminal
    assert (answered.reward, answered.metrics["score"], answered.metrics["score_official"]) == (1.0, 1.0, 0.0)
    env.reset(spec.tasks.task(1, "eval"))
    assert env.step(Action(value={"answer": 12})).reward == pytest.approx(0.7)
    only_counting = build_navigation({**settings, "question_types": ["object_counting"]})
    assert only_counting.tasks.num_tasks("eval") == 1
    with pytest.raises(SceneError, match="none of the"):
        build_navigation({**settings, "question_types": ["room_size_estimation"]})


def test_route_tasks_are_made_for_training() -> None:
    params = {"train_tasks": "route", "generate": {"num_train_scenes": 3, "max_rooms": 1, "min_objects": 6}}
    spec = build_navigation(params)
    task = spec.tasks.task(0, "train")
    assert task == spec.tasks.task(0, "train")
    env = spec.make()
    env.reset(task)
    assert env.step(Action(value={"answer": task.ground_truth["answer"]})).reward == 1.0
