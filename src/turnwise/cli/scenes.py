"""`turnwise scenes`: make scenes, look at them through a camera, and draw their maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import SceneError

scenes = typer.Typer(help="Make 3-D scenes, render frames and draw maps.", no_args_is_help=True)

_Pose = Annotated[
    str | None, typer.Option(help="x,y,yaw in metres and degrees; a random free pose when left out.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def register(app: typer.Typer) -> None:
    app.add_typer(scenes, name="scenes")


@scenes.command()
def make(
    out: Annotated[Path, typer.Option(help="Folder to write to, in the layout of ARKitScenes.")],
    num: Annotated[int, typer.Option(min=0, help="Scenes of fold Training.")] = 8,
    num_eval: Annotated[int, typer.Option(min=0, help="Scenes of fold Validation.")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    min_rooms: Annotated[int, typer.Option(min=1, max=4)] = 1,
    max_rooms: Annotated[int, typer.Option(min=1, max=4)] = 3,
    frames: Annotated[
        int, typer.Option(min=0, help="Camera frames per scene, with depth, intrinsics and path.")
    ] = 4,
    json: _Json = False,
) -> None:
    """Make furnished rooms from a seed; the same seed gives the same bytes."""
    from turnwise.environments.navigation.generator import SceneOptions
    from turnwise.environments.navigation.studio import write_scenes

    options = SceneOptions(min_rooms=min_rooms, max_rooms=max_rooms)
    folders = write_scenes(out, options, seed=seed, num_train=num, num_eval=num_eval, num_frames=frames)
    console.print(f"{len(folders)} scenes in {out}")
    if json:
        print_json({"out": str(out), "scenes": [folder.name for folder in folders]})


@scenes.command()
def render(
    dataset: Annotated[Path, typer.Argument(help="Folder of captures.")],
    scene: Annotated[str, typer.Argument(help="Scene id.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")],
    pose: _Pose = None,
    width: Annotated[int, typer.Option(min=1)] = 640,
    height: Annotated[int, typer.Option(min=1)] = 480,
    fov: Annotated[float, typer.Option(help="Degrees from left to right.")] = 90.0,
    pitch: Annotated[float, typer.Option(help="Degrees; negative looks down.")] = 0.0,
    depth_out: Annotated[
        Path | None, typer.Option(help="Also write depth: uint16 millimetres, 0 for none.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random pose.")] = 0,
    json: _Json = False,
) -> None:
    """Render what a camera at head height sees."""
    from turnwise.environments.navigation.studio import open_world, read_pose, save_frame

    world = open_world(dataset, scene)
    chosen = read_pose(pose, world, seed)
    save_frame(world, chosen, (width, height), fov, pitch, out, depth_out)
    console.print(f"{out}: {scene} from ({chosen.x:.2f}, {chosen.y:.2f}) heading {chosen.yaw_degrees:.0f}")
    if json:
        print_json(
            {"out": str(out), "pose": {"x": chosen.x, "y": chosen.y, "yaw_degrees": chosen.yaw_degrees}}
        )


@scenes.command("map")
def draw_map(
    dataset: Annotated[Path, typer.Argument(help="Folder of captures.")],
    scene: Annotated[str, typer.Argument(help="Scene id.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")],
    goal: Annotated[
        str | None, typer.Option(help="Draw the shortest way to this object: `red chair`, or a uid.")
    ] = None,
    pose: _Pose = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random pose.")] = 0,
    json: _Json = False,
) -> None:
    """Draw a scene from above, with its boxes, and the shortest way to a goal."""
    from turnwise.environments.navigation.studio import open_world, read_pose, save_map

    world = open_world(dataset, scene)
    length = save_map(world, goal, read_pose(pose, world, seed), out)
    console.print(
        f"{out}: {len(world.scene.objects)} objects"
        + (f", {length:.2f} m to go" if length is not None else "")
    )
    if json:
        print_json(
            {"out": str(out), "objects": [item.name for item in world.scene.objects], "path_m": length}
        )


@scenes.command()
def sheet(
    out: Annotated[Path, typer.Option(help="PNG to write.")],
    dataset: Annotated[
        Path | None, typer.Option(help="Folder of captures; made-to-order rooms when left out.")
    ] = None,
    num: Annotated[int, typer.Option(min=1, max=24, help="Scenes to show.")] = 4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """A contact sheet: frames, depth and map of some scenes."""
    from turnwise.environments.navigation.studio import save_sheet

    save_sheet(out, dataset, num, seed)
    console.print(str(out))


@scenes.command()
def expert(
    num: Annotated[int, typer.Option(min=1, help="Episodes.")] = 100,
    mode: Annotated[str, typer.Option(help="shortest or sighted.")] = "shortest",
    dataset: Annotated[
        Path | None, typer.Option(help="Folder of captures; made-to-order rooms when left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: _Json = False,
) -> None:
    """Let the expert solve tasks, and report success, SPL, turns and memory."""
    from turnwise.environments.navigation.studio import run_expert

    if mode not in ("shortest", "sighted"):
        raise SceneError(f"mode is {mode!r}; use shortest or sighted")
    report = run_expert(num, mode, dataset, seed)
    console.print("  ".join(f"{name} {value:g}" for name, value in report.items()))
    if json:
        print_json(report)
