import json
from pathlib import Path

import numpy as np
import pytest

from turnwise.environments.navigation import NavigationEnvironment, NavigationSpec, build_navigation
from turnwise.environments.navigation.arkitscenes import (
    CameraPose,
    CapturedFrame,
    find_pincam,
    load_capture,
    read_annotation,
    read_pincam,
    read_traj,
    write_capture,
    write_pincam,
    write_traj,
)
from turnwise.environments.navigation.generator import make_scene
from turnwise.environments.navigation.ply import read_ply, write_ply
from turnwise.environments.navigation.render import Camera, RayCaster, camera_to_world
from turnwise.environments.navigation.scannet import load_scannet, load_scannetpp
from turnwise.environments.navigation.scenes import Mesh, Pose, Scene
from turnwise.environments.navigation.sources import CaptureFolder
from turnwise.errors import SceneError


def same_bytes(a: Path, b: Path) -> bool:
    names = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(b) for path in b.rglob("*") if path.is_file())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_a_made_scene_is_the_same_in_memory_and_through_its_files(tmp_path: Path) -> None:
    scene = make_scene("42", 7)
    loaded = load_capture(write_capture(scene, tmp_path), fold="Training")
    assert np.array_equal(loaded.mesh.vertices_V3, scene.mesh.vertices_V3)
    assert np.array_equal(loaded.mesh.faces_F3, scene.mesh.faces_F3)
    assert np.array_equal(loaded.mesh.colors_V3, scene.mesh.colors_V3)
    assert loaded.objects == scene.objects
    assert loaded.floor_z == scene.floor_z


def test_the_written_files_are_byte_identical_for_a_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        scene = make_scene("42", 7)
        camera = Camera.with_view(64, 48, 60)
        matrix = camera_to_world(Pose(x=0.0, y=0.0, yaw_degrees=30.0), 0.0)
        frame = RayCaster(scene.mesh).render(camera, matrix)
        captured = CapturedFrame(timestamp=1.5, camera=camera, world_from_camera=matrix, frame=frame)
        write_capture(scene, tmp_path / name, frames=[captured])
    assert same_bytes(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / "a" / "Training" / "42" / "42_frames"
    assert read_pincam(find_pincam(folder / "lowres_wide_intrinsics", "42", 1.501)) == camera
    import PIL.Image

    depth = np.asarray(PIL.Image.open(folder / "lowres_depth" / "42_1.500.png"))
    assert depth.dtype == np.uint16
    assert depth.astype(np.float32) / 1000 == pytest.approx(frame.depth, abs=6e-4)


def test_a_camera_path_survives_the_round_trip(tmp_path: Path) -> None:
    poses = [
        CameraPose(
            timestamp=10.25 + i,
            world_from_camera=camera_to_world(Pose(x=i, y=-i, yaw_degrees=50.0 * i), 1.0, -20.0),
        )
        for i in range(5)
    ]
    write_traj(tmp_path / "a.traj", poses)
    for pose, again in zip(poses, read_traj(tmp_path / "a.traj"), strict=True):
        assert again.timestamp == pose.timestamp
        assert again.world_from_camera == pytest.approx(pose.world_from_camera, abs=1e-6)


def test_a_camera_path_is_stored_world_to_camera(tmp_path: Path) -> None:
    # No rotation, t = (1, 2, 3): the camera's axes are the world's and it stands at (-1, -2, -3).
    (tmp_path / "a.traj").write_text("0.5 0 0 0 1 2 3\n\n")
    (pose,) = read_traj(tmp_path / "a.traj")
    assert pose.world_from_camera[:3, 3].tolist() == [-1.0, -2.0, -3.0]
    assert np.array_equal(pose.world_from_camera[:3, :3], np.eye(3))


@pytest.mark.parametrize("line", ["1 2 3", "0.5 a 0 0 1 2 3", "0.5 0 0 0 1 2 nan", "0.5 0 0 0 1 2 3 4"])
def test_a_malformed_line_of_a_camera_path_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.traj").write_text(f"0.5 0 0 0 1 2 3\n{line}\n")
    with pytest.raises(SceneError, match=r"a\.traj, line 2"):
        read_traj(tmp_path / "a.traj")


def test_intrinsics_survive_the_round_trip(tmp_path: Path) -> None:
    camera = Camera(width=256, height=192, fx=211.949, fy=211.9491234, cx=127.933, cy=95.9333)
    write_pincam(tmp_path / "a.pincam", camera)
    assert read_pincam(tmp_path / "a.pincam") == camera
    (tmp_path / "b.pincam").write_text("256 192 211.9")
    with pytest.raises(SceneError, match="w h fx fy cx cy"):
        read_pincam(tmp_path / "b.pincam")


def test_rows_of_the_published_axes_are_the_boxs_axes(tmp_path: Path) -> None:
    # A box of 4 × 2 × 1 m turned by 90°: its long side lies along world y.
    box = {"centroid": [1, 2, 3], "axesLengths": [4, 2, 1], "normalizedAxes": [0, 1, 0, -1, 0, 0, 0, 0, 1]}
    item = {"uid": "u", "label": "bed", "segments": {"obbAligned": box}}
    (tmp_path / "a.json").write_text(json.dumps({"data": [item], "skipped": False}))
    (bed,) = read_annotation(tmp_path / "a.json")
    corners = bed.corners()
    assert corners.min(axis=0).tolist() == [0.0, 0.0, 2.5]
    assert corners.max(axis=0).tolist() == [2.0, 4.0, 3.5]
    assert bed.floor_distance(np.array([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]])).tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "no list `data`"),
        ('{"data": [{"label": "bed"}]}', "object 0 cannot be read"),
        (
            '{"data": [{"label": "dragon", "segments": {"obbAligned": {"centroid": [0,0,0], "axesLengths": [1,1,1],'
            ' "normalizedAxes": [1,0,0,0,1,0,0,0,1]}}}]}',
            "unknown class 'dragon'",
        ),
        (
            '{"data": [{"label": "bed", "segments": {"obbAligned": {"centroid": [0,0,NaN], "axesLengths": [1,1,1],'
            ' "normalizedAxes": [1,0,0,0,1,0,0,0,1]}}}]}',
            "not finite",
        ),
    ],
)
def test_bad_annotations_say_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SceneError, match=said):
        read_annotation(tmp_path / "a.json")


def test_other_classes_can_be_let_through(tmp_path: Path) -> None:
    box = {"centroid": [0, 0, 0], "axesLengths": [1, 1, 1], "normalizedAxes": [1, 0, 0, 0, 1, 0, 0, 0, 1]}
    (tmp_path / "a.json").write_text(
        json.dumps({"data": [{"label": "piano", "segments": {"obbAligned": box}}]})
    )
    assert read_annotation(tmp_path / "a.json", strict_classes=False)[0].label == "piano"


ASCII_QUAD = """ply
format ascii 1.0
comment made by hand
element vertex 4
property float x
property float y
property float z
property uchar red
property uchar green
property uchar blue
property uchar alpha
element face 1
property list uchar int vertex_indices
end_header
0 0 0 255 0 0 255
1 0 0 255 0 0 255
1 1 0 255 0 0 255
0 1 0 0 255 0 255
4 0 1 2 3
"""


def test_ascii_meshes_with_polygons_and_alpha_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.ply").write_text(ASCII_QUAD)
    mesh = read_ply(tmp_path / "a.ply")
    assert mesh.faces_F3.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert mesh.colors_V3[3].tolist() == [0, 255, 0]


def test_binary_meshes_with_polygons_are_read(tmp_path: Path) -> None:
    header = ASCII_QUAD.partition("end_header\n")[0].replace("ascii", "binary_big_endian") + "end_header\n"
    rows = np.zeros(4, dtype=[("p", ">f4", 3), ("c", "u1", 4)])
    rows["p"] = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    face = bytes([4]) + np.array([0, 1, 2, 3], dtype=">i4").tobytes()
    (tmp_path / "a.ply").write_bytes(header.encode() + rows.tobytes() + face)
    mesh = read_ply(tmp_path / "a.ply")
    assert mesh.faces_F3.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert mesh.vertices_V3[2].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: "", "not a PLY file"),
        (lambda text: text.replace("end_header", "x"), "no end_header"),
        (lambda text: text.replace("format ascii", "format brass"), "brass"),
        (lambda text: text.replace("property uchar red\n", "property uchar rot\n"), "no vertex colours"),
        (lambda text: text.replace("element face 1", "element face 0"), "no faces"),
        (lambda text: text.replace("1 1 0 255", "1 nan 0 255"), "vertex 2"),
        (lambda text: text.replace("4 0 1 2 3", "4 0 1 2 9"), "damaged"),
        (lambda text: text.replace("4 0 1 2 3", "4 0 x 2 3"), "cannot be read"),
    ],
)
def test_bad_meshes_say_what_is_wrong(tmp_path: Path, edit: object, said: str) -> None:
    (tmp_path / "a.ply").write_text(edit(ASCII_QUAD))  # type: ignore[operator]
    with pytest.raises(SceneError, match=said):
        read_ply(tmp_path / "a.ply")


def test_a_mesh_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", make_scene("a", 0).mesh)
    whole = (tmp_path / "a.ply").read_bytes()
    for share in (0.3, 0.99):
        (tmp_path / "b.ply").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(SceneError, match="cut off"):
            read_ply(tmp_path / "b.ply")
    with pytest.raises(SceneError, match="does not exist"):
        read_ply(tmp_path / "c.ply")


def write_both_folds(root: Path) -> None:
    import msgspec

    for index, fold in enumerate(("Training", "Training", "Validation")):
        write_capture(msgspec.structs.replace(make_scene(f"4100000{index}", index), fold=fold), root)


def test_captures_on_disk_make_an_environment(tmp_path: Path) -> None:
    write_both_folds(tmp_path / "3dod")
    env = NavigationEnvironment(dataset_path=tmp_path)
    env.load_scene("41000001")
    observation = env.reset(env.task_from_pose(env.get_random_pose(), "ep001"))
    assert observation.images[0].width == 128
    with pytest.raises(SceneError, match="41000009"):
        env.load_scene("41000009")


def test_test_scenes_never_train_unless_told(tmp_path: Path) -> None:
    write_both_folds(tmp_path)
    spec = build_navigation({"dataset_path": str(tmp_path)})
    assert {spec.tasks.task(i, "train").data["scene_id"] for i in range(6)} == {"41000000", "41000001"}
    assert {spec.tasks.task(i, "eval").data["scene_id"] for i in range(3)} == {"41000002"}
    spared = CaptureFolder(tmp_path, test_scenes=["41000000"])
    assert spared.scene_ids("train") == ("41000001",)
    told = CaptureFolder(tmp_path, allow_test_scenes=True)
    assert told.scene_ids("train") == ("41000001", "41000002")
    only_test = CaptureFolder(tmp_path / "Validation")
    assert only_test.scene_ids("train") == ()


def test_an_empty_annotation_has_nothing_to_find(tmp_path: Path) -> None:
    folder = write_capture(make_scene("41000000", 0), tmp_path)
    (folder / "41000000_3dod_annotation.json").write_text('{"data": [], "skipped": false}')
    env = NavigationEnvironment(dataset_path=tmp_path)
    env.load_scene("41000000")
    with pytest.raises(SceneError, match="no annotated objects"):
        env.task_from_pose(env.get_random_pose(), "ep")
    spec = build_navigation({"dataset_path": str(tmp_path)})
    assert isinstance(spec, NavigationSpec)
    with pytest.raises(SceneError, match="no train task fits"):
        spec.tasks.task(0, "train")


def test_missing_folders_and_meshes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="does not exist"):
        CaptureFolder(tmp_path / "nowhere")
    with pytest.raises(SceneError, match="holds no scene"):
        CaptureFolder(tmp_path)
    with pytest.raises(SceneError, match=r"42_3dod_mesh\.ply does not exist"):
        load_capture(tmp_path / "42")


def boxed(mesh: Mesh, scene: Scene) -> list[dict[str, object]]:
    return [
        {"id": i, "label": item.label,
         "obb": {"centroid": item.centroid, "axesLengths": item.size, "normalizedAxes": item.axes}}
        for i, item in enumerate(scene.objects)
    ]  # fmt: skip


def test_scannet_and_scannetpp_scenes_load_with_the_same_code(tmp_path: Path) -> None:
    scene = make_scene("s", 3)
    plus = tmp_path / "data" / "00777c41d4" / "scans"
    plus.mkdir(parents=True)
    write_ply(plus / "mesh_aligned_0.05.ply", scene.mesh)
    (plus / "segments_anno.json").write_text(json.dumps({"segGroups": boxed(scene.mesh, scene)}))
    loaded = load_scannetpp(plus.parent)
    assert [item.label for item in loaded.objects] == [item.label for item in scene.objects]
    folder = tmp_path / "scans" / "scene0011_00"
    folder.mkdir(parents=True)
    write_ply(folder / "scene0011_00_vh_clean_2.ply", scene.mesh)
    first = scene.objects[0]
    low, high = first.corners().min(axis=0) - 1e-4, first.corners().max(axis=0) + 1e-4
    inside = ((scene.mesh.vertices_V3 >= low) & (scene.mesh.vertices_V3 <= high)).all(axis=1)
    (folder / "scene0011_00_vh_clean_2.0.010000.segs.json").write_text(
        json.dumps({"segIndices": inside.astype(int).tolist()})
    )
    groups = {"segGroups": [{"id": 0, "label": first.label, "segments": [1]}]}
    (folder / "scene0011_00.aggregation.json").write_text(json.dumps(groups))
    (box,) = load_scannet(folder).objects
    assert box.corners().min(axis=0) == pytest.approx(first.corners().min(axis=0), abs=1e-3)
    source = CaptureFolder(tmp_path)
    # Their folders do not say which scenes are test scenes, so none trains until a question file does.
    assert source.scene_ids("train") == ()
    assert CaptureFolder(tmp_path, test_scenes=["00777c41d4"]).scene_ids("train") == ("scene0011_00",)
