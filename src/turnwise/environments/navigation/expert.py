"""Experts that know the way: an upper bound, and a teacher for imitation.

`shortest` knows the whole map and walks the shortest way. `sighted` only goes where its camera shows the goal: until
then it looks around, and after a whole turn in vain it moves on along the way and looks again. What it does follows from
what it sees, so a policy that sees the same can learn it.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from turnwise.environments.navigation.actions import ActionLimits, Command
from turnwise.environments.navigation.geodesic import DistanceField
from turnwise.environments.navigation.render import Camera
from turnwise.environments.navigation.scenes import Pose, SceneObject
from turnwise.environments.navigation.world import Sighting, World

ExpertMode = Literal["shortest", "sighted"]


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that an expert may know at one turn."""

    world: World
    pose: Pose
    goal: SceneObject
    field: DistanceField
    camera: Camera
    pitch_degrees: float = 0.0

    def sight(self) -> Sighting:
        return self.world.sight(self.pose, self.goal, self.camera, self.pitch_degrees)


class ExpertTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the expert says and does."""

    reasoning: str
    command: Command


class Expert:
    """Chooses one turn at a time, in multiples of a rotation and a forward step; remembers only how long it has looked."""

    def __init__(
        self,
        mode: ExpertMode = "shortest",
        *,
        limits: ActionLimits | None = None,
        rotation_step_degrees: float = 15.0,
        forward_step_m: float = 0.25,
        look_degrees: float = 90.0,
        require_done: bool = False,
    ) -> None:
        self.mode = mode
        self.limits = limits or ActionLimits()
        self.rotation_step = rotation_step_degrees
        self.forward_step = forward_step_m
        self.look_degrees = look_degrees
        self.require_done = require_done
        self._looked_degrees = 0.0

    def reset(self) -> None:
        """Forget the last episode."""
        self._looked_degrees = 0.0

    def act(self, situation: Situation) -> ExpertTurn:
        """The next turn; in the goal region it says that it is done."""
        sighting = situation.sight() if self.mode == "sighted" else None
        reasoning = describe(situation.goal, sighting or situation.sight())
        if situation.field.at(situation.pose.x, situation.pose.y) == 0.0 and self.require_done:
            return ExpertTurn(reasoning=reasoning, command=Command(is_done=True))
        if (
            sighting is not None
            and not sighting.is_visible
            and self._looked_degrees < 360.0 - self.look_degrees
        ):
            self._looked_degrees += self.look_degrees
            return ExpertTurn(reasoning=reasoning, command=Command(rotation_degrees=self.look_degrees))
        self._looked_degrees = 0.0
        return ExpertTurn(reasoning=reasoning, command=self.step_towards(situation))

    def step_towards(self, situation: Situation) -> Command:
        """The collision-free turn that leaves the least way to go."""
        grid, pose = situation.world.grid, situation.pose
        span = math.floor(self.limits.max_rotation_degrees / self.rotation_step + 1e-9)
        rotations = np.arange(-span, span + 1) * self.rotation_step
        forwards = (
            np.arange(1, math.floor(self.limits.max_forward_m / self.forward_step + 1e-9) + 1)
            * self.forward_step
        )
        angles = np.radians(pose.yaw_degrees + rotations)
        headings = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        num_checks = max(1, math.ceil(self.forward_step / (grid.cell_m / 2)))
        reaches = np.arange(1, len(forwards) * num_checks + 1) * (self.forward_step / num_checks)
        points = np.array([pose.x, pose.y]) + headings[:, None] * reaches[None, :, None]
        is_open = np.logical_and.accumulate(grid.are_free(points), axis=1)[:, num_checks - 1 :: num_checks]
        ends = points[:, num_checks - 1 :: num_checks]
        left_to_go = np.where(is_open, situation.field.at_points(ends), np.inf)
        # Equal ways: the shorter walk, then the smaller turn.
        cost = left_to_go + 1e-3 * forwards[None] + 1e-5 * np.abs(rotations)[:, None]
        best = np.unravel_index(int(np.argmin(cost)), cost.shape)
        if not np.isfinite(cost[best]):
            return Command(rotation_degrees=min(self.look_degrees, self.limits.max_rotation_degrees))
        return Command(rotation_degrees=float(rotations[best[0]]), forward_m=float(forwards[best[1]]))


def describe(goal: SceneObject, sighting: Sighting) -> str:
    """One short sentence about where the goal is in the picture."""
    if not sighting.is_visible:
        return f"I do not see the {goal.name}."
    side = "ahead"
    if abs(sighting.bearing_degrees) > 10.0:
        side = "on the left" if sighting.bearing_degrees > 0 else "on the right"
    return f"I see the {goal.name} {side}."
