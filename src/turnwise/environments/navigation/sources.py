"""Where scenes come from: made to order in memory, or folders of captures."""

from __future__ import annotations

from turnwise.environment import Split
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.params import GenerateParams
from turnwise.environments.navigation.scenes import Scene
from turnwise.environments.navigation.world import SceneSource
from turnwise.errors import ConfigError, SceneError

_SPLIT_CODES: dict[Split, int] = {"train": 0, "eval": 1}


class GeneratedScenes:
    """Scenes made when asked for; train and eval scenes come from different seeds."""

    def __init__(
        self, options: SceneOptions, *, seed: int = 0, num_train: int = 256, num_eval: int = 64
    ) -> None:
        self.options = options
        self.seed = seed
        self._ids: dict[Split, tuple[str, ...]] = {
            "train": tuple(f"made-{seed}-train-{i:05d}" for i in range(num_train)),
            "eval": tuple(f"made-{seed}-eval-{i:05d}" for i in range(num_eval)),
        }

    def scene_ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def load(self, scene_id: str) -> Scene:
        parts = scene_id.split("-")
        try:
            _, seed, split, index = parts
            code = _SPLIT_CODES[split]  # type: ignore[index]  # an unknown split is the KeyError below
            return make_scene(scene_id, (int(seed), code, int(index)), self.options)
        except (ValueError, KeyError) as error:
            if isinstance(error, SceneError):
                raise
            raise SceneError(
                f"scene {scene_id!r} is not one of the made scenes; ids look like {self._ids['train'][:1] or 'made-0-train-00000'}"
            ) from None


def open_source(dataset_path: str | None, generate: GenerateParams | None) -> SceneSource:
    """The scenes that the settings name."""
    if dataset_path is not None:
        if generate is not None:
            raise ConfigError("both dataset_path and generate are given; choose one")
        raise NotImplementedError
    chosen = generate or GenerateParams()
    return GeneratedScenes(
        chosen.scene_options(),
        seed=chosen.seed,
        num_train=chosen.num_train_scenes,
        num_eval=chosen.num_eval_scenes,
    )
