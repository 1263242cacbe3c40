import math

import numpy as np
import pytest

from turnwise.environments.navigation.furniture import Shape
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.render import Camera, RayCaster, camera_to_world, project
from turnwise.environments.navigation.scenes import Mesh, Pose
from turnwise.environments.navigation.world import World
from turnwise.errors import SceneError


def box_room(half_x: float, half_y: float, height: float = 3.0) -> Mesh:
    """The six faces around the origin."""
    shape = Shape()
    shape.box((-half_x, -half_y, 0.0), (half_x, half_y, height), (200, 100, 50))
    vertices, faces, colors = shape.arrays()
    return Mesh(vertices_V3=vertices.astype(np.float32), faces_F3=faces, colors_V3=colors)


def test_depth_of_a_wall_is_exact_to_a_millimetre_at_centre_and_corner() -> None:
    # The wall stands 2 m ahead; planar depth is the same all over it, although the corner ray is √3 as long.
    frame = RayCaster(box_room(2.0, 50.0, 100.0)).render(
        Camera.with_view(129, 129, 90), camera_to_world(Pose(x=0, y=0, yaw_degrees=0), 50.0)
    )
    assert frame.depth[64, 64] == pytest.approx(2.0, abs=1e-3)
    for corner in ((0, 0), (0, 128), (128, 0), (128, 128)):
        assert frame.depth[corner] == pytest.approx(2.0, abs=1e-3)


def test_moving_half_a_metre_changes_the_depth_by_half_a_metre() -> None:
    caster, camera = RayCaster(box_room(3.0, 3.0)), Camera.with_view(65, 65, 60)
    before = caster.render(camera, camera_to_world(Pose(x=0.0, y=0.0, yaw_degrees=90), 1.2)).depth
    after = caster.render(camera, camera_to_world(Pose(x=0.0, y=0.5, yaw_degrees=90), 1.2)).depth
    assert before[32, 32] == pytest.approx(3.0, abs=1e-3)
    assert before[32, 32] - after[32, 32] == pytest.approx(0.5, abs=1e-3)


def test_four_quarter_turns_show_the_same_image_again() -> None:
    world = World(make_scene("s", 3), Agent())
    pose, camera = world.grid.random_pose(np.random.default_rng(0)), Camera.with_view(64, 64, 90)
    first = world.render(pose, camera)
    seen = []
    for _ in range(4):
        pose = pose.turned(90.0)
        seen.append(world.render(pose, camera))
    assert np.array_equal(seen[-1].pixels, first.pixels)
    assert np.array_equal(seen[-1].depth, first.depth)
    assert not np.array_equal(seen[0].pixels, first.pixels)


def test_corners_of_an_annotated_box_land_on_the_right_pixels() -> None:
    # A red cube of 1 m whose near face is 2 m ahead: its corners are at ±0.5 m, so at ±fx/4 pixels.
    shape = Shape()
    shape.box((2.0, -0.5, 0.0), (3.0, 0.5, 1.0), (255, 0, 0))
    vertices, faces, colors = shape.arrays()
    caster = RayCaster(Mesh(vertices_V3=vertices.astype(np.float32), faces_F3=faces, colors_V3=colors))
    camera = Camera.with_view(101, 101, 90)
    matrix = camera_to_world(Pose(x=0, y=0, yaw_degrees=0), 0.5)
    corners = np.array([[2.0, 0.5, 1.0], [2.0, -0.5, 0.0]])
    pixels = project(corners, camera, matrix)
    assert pixels[0] == pytest.approx([50 - 50.5 / 4, 50 - 50.5 / 4, 2.0])
    assert pixels[1] == pytest.approx([50 + 50.5 / 4, 50 + 50.5 / 4, 2.0])
    is_red = caster.render(camera, matrix).depth > 0
    rows, columns = np.nonzero(is_red)
    assert (columns.min(), columns.max()) == (math.ceil(pixels[0, 0]), math.floor(pixels[1, 0]))
    assert (rows.min(), rows.max()) == (math.ceil(pixels[0, 1]), math.floor(pixels[1, 1]))


def test_furniture_is_drawn_where_its_annotation_says() -> None:
    scene = make_scene("s", 5, SceneOptions(max_rooms=1))
    world, camera = World(scene, Agent()), Camera.with_view(160, 160, 90)
    rng, num_seen = np.random.default_rng(1), 0
    for _ in range(40):
        pose = world.grid.random_pose(rng)
        for item in scene.objects:
            if not world.sight(pose, item, camera).is_visible:
                continue
            matrix = world.camera_matrix(pose)
            depth = world.caster.render(camera, matrix).depth
            rows, columns = np.nonzero(depth)
            x = (columns - camera.cx) / camera.fx * depth[rows, columns]
            y = (rows - camera.cy) / camera.fy * depth[rows, columns]
            points = np.stack([x, y, depth[rows, columns]], axis=1) @ matrix[:3, :3].T + matrix[:3, 3]
            local = (points - np.array(item.centroid)) @ np.array(item.axes).reshape(3, 3).T
            num_seen += bool((np.abs(local) <= np.array(item.size) / 2 + 1e-3).all(axis=1).any())
            break
    assert num_seen >= 30


def test_a_cameras_axes_are_right_down_and_forward() -> None:
    level = camera_to_world(Pose(x=1, y=2, yaw_degrees=0), 3.0)
    assert level[:3].T.tolist() == [[0, -1, 0], [0, 0, -1], [1, 0, 0], [1, 2, 3]]
    for yaw, pitch in ((30.0, -40.0), (-120.0, 25.0)):
        matrix = camera_to_world(Pose(x=0, y=0, yaw_degrees=yaw), 0.0, pitch)[:3, :3]
        assert matrix @ matrix.T == pytest.approx(np.eye(3))
        assert np.linalg.det(matrix) == pytest.approx(1.0)
        assert matrix[2, 2] == pytest.approx(math.sin(math.radians(pitch)))


def test_a_miss_has_no_depth() -> None:
    frame = RayCaster(box_room(1.0, 1.0)).render(
        Camera.with_view(32, 32, 60), camera_to_world(Pose(x=5, y=0, yaw_degrees=0), 1.0)
    )
    assert (frame.depth == 0.0).all()


def test_smooth_vertex_colours_are_mixed_across_a_face() -> None:
    mesh = Mesh(
        vertices_V3=np.array([[2, -2, -2], [2, 2, -2], [2, 0, 2]], dtype=np.float32),
        faces_F3=np.array([[0, 1, 2]], dtype=np.int32),
        colors_V3=np.array([[240, 0, 0], [0, 240, 0], [0, 0, 240]], dtype=np.uint8),
    )
    pixels = (
        RayCaster(mesh)
        .render(Camera.with_view(33, 33, 90), camera_to_world(Pose(x=0, y=0, yaw_degrees=0), -2 / 3))
        .pixels
    )
    # The camera looks at the middle of the triangle, so the three colours weigh the same.
    assert np.ptp(pixels[16, 16].astype(int)) <= 12
    assert pixels[16, 16].sum() > 0


@pytest.mark.parametrize(
    ("vertices", "faces", "colors", "said"),
    [
        ([[0, 0, 0]], [], [[0, 0, 0]], "needs a triangle mesh"),
        ([[0, 0, 0]] * 3, [[0, 1, 2]], [[0, 0, 0]], "it needs one each"),
        ([[0, 0, math.nan], [0, 0, 0], [1, 0, 0]], [[0, 1, 2]], [[0, 0, 0]] * 3, "vertex 0"),
        ([[0, 0, 0]] * 3, [[0, 1, 9]], [[0, 0, 0]] * 3, "the mesh is damaged"),
    ],
)
def test_bad_meshes_are_refused(vertices: list, faces: list, colors: list, said: str) -> None:
    with pytest.raises(SceneError, match=said):
        Mesh(
            vertices_V3=np.array(vertices, dtype=np.float32),
            faces_F3=np.array(faces, dtype=np.int32).reshape(-1, 3),
            colors_V3=np.array(colors, dtype=np.uint8),
        )
