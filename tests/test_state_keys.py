"""What counts as the same state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.reward_episodes import make_episode

from turnwise.errors import CreditError
from turnwise.state_keys import (
    build_state_hasher,
    encode_state_key,
    environment_key,
    hash_state_key,
    last_messages,
    last_observation,
    normalised_text,
    pose_grid,
)
from turnwise.types import Episode, Image, Message, Observation, Role

DISTINCT = [
    None, False, True, 0, 1, 0.0, 1.0, "", "1", b"", b"1", [], [1], [1.0], [[1]], [1, 1], ["1"], {}, {"a": 1}, {"a": 1.0},
    {"a": None}, {"b": 1}, "None", "true", ["a", "b"], ["ab"], {"a": "b"}, [None], float("inf"),
    np.array([1], dtype=np.int32), np.array([1], dtype=np.int64), np.array([1.0]), np.array([[1]]), np.zeros((2, 3)),
    np.zeros((3, 2)), np.zeros(6), np.int64(1), np.float32(1), np.array(["a"]), np.array([True]),
]  # fmt: skip


def test_keys_differ_in_type_shape_and_dtype() -> None:
    encoded = [encode_state_key(key) for key in DISTINCT]
    assert len(set(encoded)) == len(DISTINCT)
    assert len({hash_state_key(key) for key in DISTINCT}) == len(DISTINCT)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1, "b": [2, {"c": 3, "d": 4}]}, {"b": [2, {"d": 4, "c": 3}], "a": 1}),
        ((1, 2), [1, 2]),
        (-0.0, 0.0),
        ({"x": -0.0}, {"x": 0.0}),
        (np.array([-0.0, 1.0]), np.array([0.0, 1.0])),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (float("nan"), float("nan")),
        (np.array([np.nan]), np.array([np.nan])),
        (bytearray(b"x"), b"x"),
    ],
)
def test_equal_content_is_an_equal_key(left: object, right: object) -> None:
    assert encode_state_key(left) == encode_state_key(right)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({1: 2}, "name 1; names in JSON objects are strings"),
        ({1, 2}, "holds a set"),
        (np.array([object()]), "array of Python objects"),
    ],
)
def test_what_has_no_content_is_an_error(key: object, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        encode_state_key(key)


def with_observations(*observations: Observation) -> Episode:
    episode = make_episode(*[f"answer {t}" for t in range(len(observations))])
    turns = tuple(
        msgspec.structs.replace(turn, observation=observation)
        for turn, observation in zip(episode.turns, observations, strict=True)
    )
    return msgspec.structs.replace(episode, turns=turns)


def say(text: str, **fields: object) -> Observation:
    return Observation(messages=(Message(role=Role.USER, content=text),), **fields)


def test_the_environments_key_comes_first_and_the_observation_serves_without_one() -> None:
    episode = with_observations(say("here", state_key={"cell": 3}), say("there"))
    assert environment_key(episode, 0) == {"cell": 3}
    assert environment_key(episode, 1) == last_observation(episode, 1) == [["user", "there"]]


def test_an_observation_with_another_image_is_another_state() -> None:
    black, white = (Image.from_pixels(np.full((2, 2, 3), level, dtype=np.uint8)) for level in (0, 255))
    episode = with_observations(
        *(
            Observation(messages=(Message(role=Role.USER, content=("look", image)),))
            for image in (black, white, black)
        )
    )
    keys = [hash_state_key(last_observation(episode, t)) for t in range(3)]
    assert keys[0] == keys[2] != keys[1]


def test_last_messages_include_the_agents_own() -> None:
    episode = with_observations(say("a"), say("b"))
    assert last_messages(2)(episode, 1) == [["assistant", "answer 0"], ["user", "b"]]
    assert last_messages(9)(episode, 1) == [["user", "a"], ["assistant", "answer 0"], ["user", "b"]]
    assert last_messages(2)(episode, 0) == [["user", "a"]]


def test_normalised_text_ignores_case_punctuation_and_blanks() -> None:
    episode = with_observations(
        say("You see:  a LAMP,\n a mug."), say("you see a lamp a mug"), say("at -1.5 m")
    )
    assert normalised_text(episode, 0) == normalised_text(episode, 1) == "you see a lamp a mug"
    assert normalised_text(episode, 2) == "at -1.5 m"


def test_pose_grid_joins_near_poses_and_wraps_the_heading() -> None:
    def pose(x: float, y: float, heading: float) -> Observation:
        return say("", info={"pose": {"position": [x, y], "heading_degrees": heading}})

    episode = with_observations(
        pose(0.1, 0.2, 358.0), pose(0.4, 0.4, 3.0), pose(0.6, 0.2, 3.0), pose(0.1, 0.2, 90.0)
    )
    keys = [pose_grid(0.5, 30.0)(episode, t) for t in range(4)]
    assert keys == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 3]]
    with pytest.raises(CreditError, match="turn 0 of episode e0 has no pose"):
        pose_grid()(with_observations(say("nowhere")), 0)


def first_letter(episode: Episode, turn_index: int) -> str:
    return episode.turns[turn_index].observation.text[:1]


def test_hashers_have_names() -> None:
    episode = with_observations(say("a"), say("b"))
    assert build_state_hasher("last_messages:1")(episode, 1) == [["user", "b"]]
    assert build_state_hasher(f"{__name__}:first_letter")(episode, 1) == "b"
    for wrong in (
        "last_observatoin",
        "last_messages:x",
        "last_messages:0",
        "no.such:thing",
        f"{__name__}:DISTINCT",
    ):
        with pytest.raises(CreditError):
            build_state_hasher(wrong)
