import numpy as np
import pytest

from turnwise.environments.navigation.furniture import SHAPES, build_piece
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.scenes import CLASSES
from turnwise.errors import SceneError


def test_every_class_has_a_shape_that_stands_on_the_floor() -> None:
    assert set(SHAPES) == set(CLASSES)
    for label in CLASSES:
        vertices, faces, colors = build_piece(label, "red")
        assert vertices[:, 2].min() == pytest.approx(0.0), label
        assert faces.max() == len(vertices) - 1
        assert (colors == np.array([205, 40, 35])).all(axis=1).any(), f"a red {label} shows its colour"


def test_a_seed_makes_the_same_bytes_and_another_seed_other_ones() -> None:
    first, again, other = make_scene("a", 4), make_scene("a", 4), make_scene("a", 5)
    assert first.mesh.vertices_V3.tobytes() == again.mesh.vertices_V3.tobytes()
    assert first.mesh.colors_V3.tobytes() == again.mesh.colors_V3.tobytes()
    assert first.objects == again.objects
    assert first.mesh.vertices_V3.tobytes() != other.mesh.vertices_V3.tobytes()


def test_furniture_leaves_room_to_walk_between() -> None:
    for seed in range(5):
        scene = make_scene("a", seed, SceneOptions(max_rooms=1))
        assert len(scene.objects) >= 2
        for i, item in enumerate(scene.objects):
            for other in scene.objects[i + 1 :]:
                assert item.floor_distance(other.footprint()).min() > 0.5


def test_only_the_chosen_classes_and_colours_are_used() -> None:
    scene = make_scene("a", 1, SceneOptions(classes=("chair", "sofa"), colors=("red", "blue"), max_objects=4))
    assert {item.label for item in scene.objects} <= {"chair", "sofa"}
    assert {item.color for item in scene.objects} <= {"red", "blue"}
    assert scene.objects[0].name.split()[0] in ("red", "blue")


def test_distinct_colours_name_a_piece_by_its_colour_alone() -> None:
    options = SceneOptions(max_rooms=1, min_objects=5, max_objects=6, distinct_colors=True)
    for seed in range(5):
        colors = [item.color for item in make_scene("a", seed, options).objects]
        assert len(colors) >= 3
        assert len(colors) == len(set(colors))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_rooms": 9}, "between 1 and 4"),
        ({"classes": ("sofa", "spaceship")}, "spaceship"),
        ({"colors": ()}, "it is empty"),
        ({"min_objects": 0}, "at least 1"),
        ({"min_room_m": 9.0}, "come first"),
    ],
)
def test_impossible_orders_are_refused(options: dict, said: str) -> None:
    with pytest.raises(SceneError, match=said):
        SceneOptions(**options)
