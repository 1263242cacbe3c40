import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from typer.testing import CliRunner

import turnwise
from turnwise.cli import app
from turnwise.environments.navigation import Expert, NavigationSpec, build_navigation
from turnwise.environments.navigation.film import film_episode, save_gif, side_by_side
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.maps import FloorMap, draw_task
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.sources import GeneratedScenes
from turnwise.environments.navigation.world import World
from turnwise.errors import SceneError
from turnwise.types import (
    Action,
    Episode,
    FinishReason,
    MaskingMethod,
    SamplingParams,
    StopReason,
    TokenStream,
    Turn,
)

run = CliRunner()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes")
    made = run.invoke(
        app, ["scenes", "make", "--num", "2", "--num-eval", "1", "--seed", "3", "--out", str(out), "--json"]
    )
    assert made.exit_code == 0, made.output
    names = json.loads(made.stdout.splitlines()[-1])["scenes"]
    assert names == ["made-3-train-00000", "made-3-train-00001", "made-3-eval-00000"]
    return out


def test_made_scenes_lie_in_the_published_layout(dataset: Path) -> None:
    folder = dataset / "Training" / "made-3-train-00000"
    assert (folder / "made-3-train-00000_3dod_mesh.ply").is_file()
    assert (folder / "made-3-train-00000_3dod_annotation.json").is_file()
    assert len(list((folder / "made-3-train-00000_frames" / "lowres_depth").glob("*.png"))) == 4
    assert (dataset / "Validation" / "made-3-eval-00000").is_dir()


def test_made_scenes_equal_those_the_environment_makes_in_memory(dataset: Path) -> None:
    from turnwise.environments.navigation.sources import CaptureFolder

    in_memory = GeneratedScenes(SceneOptions(), seed=3, num_train=2, num_eval=1)
    on_disk = CaptureFolder(dataset)
    for scene_id in ("made-3-train-00001", "made-3-eval-00000"):
        a, b = in_memory.load(scene_id), on_disk.load(scene_id)
        assert a.mesh.vertices_V3.tobytes() == b.mesh.vertices_V3.tobytes()
        assert a.objects == b.objects
        assert (a.floor_z, a.fold) == (b.floor_z, b.fold)


def test_a_frame_and_its_depth_are_written(dataset: Path, tmp_path: Path) -> None:
    arguments = ["scenes", "render", str(dataset), "made-3-train-00000", "--width", "96", "--height", "64"]
    done = run.invoke(
        app, [*arguments, "--out", str(tmp_path / "f.png"), "--depth-out", str(tmp_path / "d.png"), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert PIL.Image.open(tmp_path / "f.png").size == (96, 64)
    assert np.asarray(PIL.Image.open(tmp_path / "d.png")).max() > 500
    pose = json.loads(done.stdout.splitlines()[-1])["pose"]
    again = run.invoke(
        app,
        [
            *arguments,
            "--out",
            str(tmp_path / "g.png"),
            "--pose",
            f"{pose['x']},{pose['y']},{pose['yaw_degrees']}",
        ],
    )
    assert again.exit_code == 0, again.output
    assert (tmp_path / "f.png").read_bytes() == (tmp_path / "g.png").read_bytes()


def test_a_map_shows_the_way_to_a_goal(dataset: Path, tmp_path: Path) -> None:
    arguments = [
        "scenes",
        "map",
        str(dataset),
        "made-3-train-00000",
        "--out",
        str(tmp_path / "m.png"),
        "--json",
    ]
    plain = run.invoke(app, arguments)
    names = json.loads(plain.stdout.splitlines()[-1])["objects"]
    done = run.invoke(app, [*arguments, "--goal", names[0]])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["path_m"] >= 0
    assert (np.asarray(PIL.Image.open(tmp_path / "m.png")) == (250, 180, 20)).all(axis=-1).any()


@pytest.mark.parametrize(
    "arguments",
    [["render", "nowhere", "x", "--out", "f.png"], ["map", "{dataset}", "made-3-train-00000", "--goal", "moon", "--out", "m.png"],
     ["render", "{dataset}", "made-3-train-00000", "--pose", "1,2", "--out", "f.png"]],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(
    dataset: Path, tmp_path: Path, arguments: list[str]
) -> None:
    words = [word.replace("{dataset}", str(dataset)) for word in arguments]
    code = "from turnwise.cli import main; main()"
    # The package under test, also when another one is installed.
    environment = {**os.environ, "PYTHONPATH": str(Path(turnwise.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code, "scenes", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_contact_sheet_shows_every_scene(dataset: Path, tmp_path: Path) -> None:
    done = run.invoke(
        app, ["scenes", "sheet", "--dataset", str(dataset), "--num", "2", "--out", str(tmp_path / "s.png")]
    )
    assert done.exit_code == 0, done.output
    assert PIL.Image.open(tmp_path / "s.png").height == 2 * (2 * 192 + 6)


def test_things_are_drawn_at_their_place() -> None:
    world = World(make_scene("s", 2, SceneOptions(max_rooms=1)), Agent())
    item = world.scene.objects[0]
    plain, marked = draw_task(world, None, []), draw_task(world, item, [])
    changed = np.argwhere((plain != marked).any(axis=-1))
    picture = FloorMap(world)
    corners = np.array([picture._at(*corner) for corner in item.footprint().tolist()])
    assert changed[:, 1].min() >= corners[:, 0].min() - 4
    assert changed[:, 1].max() <= corners[:, 0].max() + 4
    assert changed[:, 0].min() >= corners[:, 1].min() - 4
    assert changed[:, 0].max() <= corners[:, 1].max() + 4


def test_the_expert_command_reports_success(dataset: Path) -> None:
    done = run.invoke(app, ["scenes", "expert", "--num", "10", "--dataset", str(dataset), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["success"] == 1.0
    with pytest.raises(SceneError, match="shortest or sighted"):
        run.invoke(app, ["scenes", "expert", "--mode", "lucky"], catch_exceptions=False)


@pytest.mark.slow
def test_two_hundred_expert_episodes_succeed_in_flat_memory() -> None:
    from turnwise.environments.navigation.studio import run_expert

    report = run_expert(200, "shortest", None, seed=1)
    assert report["success"] >= 0.99
    assert report["memory_mb_at_end"] - report["memory_mb_at_half"] < 30


def played_episode(spec: NavigationSpec) -> Episode:
    """An expert's episode, as a rollout would store it."""
    task, env, expert = spec.tasks.task(0, "train"), spec.make(), Expert("sighted")
    observation, turns = env.reset(task), []
    stream = TokenStream(
        ids=np.zeros(0, np.int32), is_sampled=np.zeros(0, bool), logprobs=np.zeros(0, np.float32)
    )
    while True:
        said = expert.act(env.situation())
        action = Action(value=said.command.as_value())
        transition = env.step(action)
        turns.append(
            Turn(
                turn_index=len(turns), stream=stream, prompt_start=0, completion_start=0, completion_end=0,
                observation=observation, action=action, text=f"{said.reasoning} {json.dumps(action.value)}",
                action_token_mask=np.zeros(0, bool), masking_method=MaskingMethod.BRACE_DEPTH, masking_confidence=1.0,
                finish_reason=FinishReason.ACTION, policy_version=0, reward=transition.reward,
            )
        )  # fmt: skip
        observation = transition.observation
        if transition.is_terminal:
            break
    return Episode(
        episode_id="e", group_id="g", task=task, turns=tuple(turns), streams=(stream,), stop_reason=StopReason.TERMINAL,
        sampling=SamplingParams(), metrics=transition.metrics,
    )  # fmt: skip


def test_an_episode_becomes_a_film(tmp_path: Path) -> None:
    spec = build_navigation(
        {
            "generate": {"num_train_scenes": 2, "max_rooms": 1},
            "solvable_by": "sighted",
            "width": 96,
            "height": 96,
        }
    )
    assert isinstance(spec, NavigationSpec)
    episode = played_episode(spec)
    pictures = film_episode(spec.worlds, episode)
    assert len(pictures) == episode.num_turns + 1
    save_gif(tmp_path / "a.gif", side_by_side(pictures, pictures[:2]))
    with PIL.Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == len(pictures)
    with pytest.raises(ValueError, match="at least one picture"):
        save_gif(tmp_path / "b.gif", [])
