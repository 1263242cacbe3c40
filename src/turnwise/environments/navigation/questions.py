"""Questions as tasks: where the agent starts, what it is asked, and routes made up from a scene's own objects."""

from __future__ import annotations

import itertools
import re
import zlib

import msgspec
import numpy as np

from turnwise.environment import Split
from turnwise.environments.navigation.scenes import Doubles, Pose, Scene, SceneObject, wrap_degrees
from turnwise.environments.navigation.tasks import object_goals, seed_of
from turnwise.environments.navigation.vsibench import Question
from turnwise.environments.navigation.world import World, WorldCache
from turnwise.errors import SceneError
from turnwise.types import Task

_SYNONYMS = {
    "tv": "tv_monitor", "television": "tv_monitor", "monitor": "tv_monitor", "computer monitor": "tv_monitor",
    "couch": "sofa", "fridge": "refrigerator", "washing machine": "washer", "bath tub": "bathtub", "tub": "bathtub",
    "bookshelf": "shelf", "desk": "table", "dining table": "table", "coffee table": "table", "armchair": "chair",
    "cupboard": "cabinet", "wardrobe": "cabinet",
}  # fmt: skip
_START = re.compile(
    r"beginning (?:at|by|from) (?:the )?(?P<at>.+?),? (?:and )?(?:are )?facing (?:the |towards? the )?(?P<to>[^.]+)\.",
    re.IGNORECASE,
)
_GOAL = re.compile(r"navigate to (?:the )?(?P<goal>[^.]+)\.", re.IGNORECASE)
_TURNS = ("Turn Left", "Turn Right", "Turn Back")


def find_named(scene: Scene, phrase: str) -> SceneObject | None:
    """The object a phrase such as `black sofa` or `tv` means; None when there is none, or more than one would do."""
    phrase = phrase.strip().lower()
    exact = [item for item in scene.objects if item.name == phrase]
    if len(exact) == 1:
        return exact[0]
    for label in (_SYNONYMS.get(phrase, phrase), *(_SYNONYMS.get(part, part) for part in _endings(phrase))):
        found = [item for item in scene.objects if item.label in (label, label.replace(" ", "_"))]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _endings(phrase: str) -> list[str]:
    """`large dining table` → `dining table`, `table`: attributes come first."""
    words = phrase.split()
    return [" ".join(words[i:]) for i in range(1, len(words))]


def route_start(world: World, question: str) -> tuple[Pose, SceneObject] | None:
    """At the object the question begins at, facing the one it names; None where the annotation does not have both."""
    named = _START.search(question)
    if named is None:
        return None
    origin, target = find_named(world.scene, named["at"]), find_named(world.scene, named["to"])
    if origin is None or target is None:
        return None
    return pose_at(world, origin, target), origin


def pose_at(world: World, origin: SceneObject, target: SceneObject) -> Pose:
    """Beside `origin`, on the side of `target`, facing it."""
    cells = np.argwhere(world.grid.is_free_IJ)
    points = world.grid.centers_IJ2()[cells[:, 0], cells[:, 1]]
    aim = np.array(target.centroid[:2])
    cost = origin.floor_distance(points) + 0.05 * np.linalg.norm(points - aim, axis=1)
    x, y = points[int(np.argmin(cost))].tolist()
    return Pose(x=x, y=y, yaw_degrees=round(Pose(x=x, y=y, yaw_degrees=0.0).bearing_to(*aim.tolist()), 3))


def question_task(world: World, question: Question, *, seed: int = 0) -> Task:
    """A benchmark row as a task. `start_matches` says whether it starts where the question says."""
    found = route_start(world, question.question)
    goal_name = _GOAL.search(question.question)
    goal = find_named(world.scene, goal_name["goal"]) if goal_name else None
    start = found[0] if found else world.grid.random_pose(np.random.default_rng([seed, question.id]))
    return Task(
        task_id=f"vsibench-{question.id}",
        seed=seed,
        data={
            "kind": "question",
            "scene_id": world.scene.scene_id,
            "question": question.prompt(),
            "question_type": question.question_type,
            "options": None if question.options is None else list(question.options),
            "start": {"x": start.x, "y": start.y, "yaw_degrees": start.yaw_degrees},
            "start_matches": found is not None,
            "goal_uid": goal.uid if goal is not None and _can_reach(world, goal, start) else None,
        },
        ground_truth={"answer": question.ground_truth, "pruned": question.pruned},
    )


def _can_reach(world: World, goal: SceneObject, start: Pose) -> bool:
    return bool(np.isfinite(world.goal_field(goal.uid, 1.0).at(start.x, start.y)))


class QuestionTasks:
    """The rows of a benchmark file whose scenes are at hand; all of them are for evaluation."""

    def __init__(self, worlds: WorldCache, questions: tuple[Question, ...]) -> None:
        self.worlds = worlds
        at_hand = {scene_id for split in ("train", "eval") for scene_id in worlds.source.scene_ids(split)}
        self.questions = tuple(question for question in questions if question.scene_name in at_hand)
        if not self.questions:
            raise SceneError(
                f"none of the {len(questions)} questions is about a scene at hand ({len(at_hand)}); "
                "check dataset_path, questions_path and question_types"
            )

    def num_tasks(self, split: Split) -> int | None:
        return len(self.questions) if split == "eval" else 0

    def task(self, index: int, split: Split) -> Task:
        if split != "eval":
            raise SceneError(
                "benchmark questions are for evaluation; train on tasks generated from other scenes"
            )
        question = self.questions[index % len(self.questions)]
        return question_task(self.worlds.get(question.scene_name), question)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A way past named objects: start at the first, face the second, end at the last."""

    stops: tuple[SceneObject, ...]
    turns: tuple[str, ...]
    """One at each stop between start and goal."""


def make_route(world: World, seed: int, *, num_turns: int = 2, tries: int = 200) -> Route | None:
    """A route over objects that see each other, with turns that are clearly left, right or back."""
    rng = np.random.default_rng([seed, zlib.crc32(world.scene.scene_id.encode()), 7])
    goals = object_goals(world.scene)
    if len(goals) < num_turns + 2:
        return None
    for _ in range(tries):
        stops = tuple(goals[int(i)] for i in rng.permutation(len(goals))[: num_turns + 2])
        legs = list(itertools.pairwise(stops))
        if not all(_is_open(world, a, b) for a, b in legs):
            continue
        headings = [_heading(a, b) for a, b in legs]
        turns = [_name_turn(wrap_degrees(after - before)) for before, after in itertools.pairwise(headings)]
        if all(turn is not None for turn in turns):
            return Route(stops=stops, turns=tuple(turn for turn in turns if turn is not None))
    return None


def route_question(route: Route, number: int, scene: Scene, seed: int) -> Question:
    """The route in the benchmark's own words, with the turns left to fill in."""
    names = [item.name for item in route.stops]
    steps = [f"Go forward until the {names[1]}"]
    for name in names[2:]:
        steps += ["[please fill in]", f"Go forward until the {name}"]
    listed = " ".join(f"{i}. {step}" for i, step in enumerate(steps, start=1))
    text = (
        f"You are a robot beginning at the {names[0]} facing the {names[1]}. You want to navigate to the {names[-1]}. "
        "You will perform the following actions (Note: for each [please fill in], choose either 'turn back,' 'turn left,' "
        f"or 'turn right.'): {listed}. You have reached the final destination."
    )
    rng = np.random.default_rng([seed, 11])
    others = [turns for turns in itertools.product(_TURNS, repeat=len(route.turns)) if turns != route.turns]
    chosen = [others[int(i)] for i in rng.permutation(len(others))[:3]]
    answer = int(rng.integers(len(chosen) + 1))
    chosen.insert(answer, route.turns)
    options = tuple(f"{letter}. {', '.join(turns)}" for letter, turns in zip("ABCD", chosen, strict=False))
    return Question(
        id=number, dataset="arkitscenes", scene_name=scene.scene_id, question_type="route_planning", question=text,
        options=options, ground_truth="ABCD"[answer],
    )  # fmt: skip


class RouteTasks:
    """Endless route questions made from scenes that no benchmark tests on."""

    def __init__(self, worlds: WorldCache, *, seed: int = 0) -> None:
        self.worlds = worlds
        self.seed = seed

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, index: int, split: Split) -> Task:
        scene_ids = self.worlds.source.scene_ids(split)
        seed = seed_of(self.seed, split, index)
        for attempt in range(min(len(scene_ids), 20)):
            world = self.worlds.get(scene_ids[(index + attempt) % len(scene_ids)])
            route = make_route(world, seed, num_turns=1 + seed % 2)
            if route is not None:
                task = question_task(world, route_question(route, index, world.scene, seed), seed=seed)
                return msgspec.structs.replace(task, task_id=f"{split}-route-{index:06d}")
        raise SceneError(
            f"no {split} scene has enough objects in sight of each other to make a route of; give more scenes"
        )


def _heading(a: SceneObject, b: SceneObject) -> float:
    offset: Doubles = np.array(b.centroid[:2]) - np.array(a.centroid[:2])
    return float(np.degrees(np.arctan2(offset[1], offset[0])))


def _name_turn(degrees: float) -> str | None:
    """None where people would disagree: straight on, or halfway between two names."""
    if 30.0 <= degrees <= 120.0:
        return "Turn Left"
    if -120.0 <= degrees <= -30.0:
        return "Turn Right"
    return "Turn Back" if abs(degrees) >= 150.0 else None


def _is_open(world: World, a: SceneObject, b: SceneObject) -> bool:
    """Nothing but the two objects stands on the straight line between them."""
    start, end = np.array(a.centroid[:2]), np.array(b.centroid[:2])
    length = float(np.linalg.norm(end - start))
    if length < 1.0:
        return False
    line = start + np.linspace(0.0, 1.0, int(length / world.grid.cell_m * 2) + 2)[:, None] * (end - start)
    between = (a.floor_distance(line) > 2 * world.grid.cell_m) & (
        b.floor_distance(line) > 2 * world.grid.cell_m
    )
    cells = np.floor((line - world.grid.low) / world.grid.cell_m).astype(int)
    cells = np.clip(cells, 0, np.array(world.grid.shape) - 1)
    return not bool((world.grid.is_obstacle_IJ[cells[:, 0], cells[:, 1]] & between).any())
