"""Where scenes come from: made to order in memory, or folders of captures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from turnwise.environment import Split
from turnwise.environments.navigation.arkitscenes import load_capture
from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.params import NavigationParams
from turnwise.environments.navigation.scannet import load_scannet, load_scannetpp
from turnwise.environments.navigation.scenes import Scene
from turnwise.environments.navigation.world import SceneSource
from turnwise.errors import ConfigError, SceneError

_SPLIT_CODES: dict[str, int] = {"train": 0, "eval": 1}


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
        if len(parts) != 4 or parts[2] not in _SPLIT_CODES or not (parts[1] + parts[3]).isdigit():
            raise SceneError(
                f"scene {scene_id!r} is not one of the made scenes; their ids look like made-{self.seed}-train-00000"
            )
        scene = make_scene(scene_id, (int(parts[1]), _SPLIT_CODES[parts[2]], int(parts[3])), self.options)
        return scene if parts[2] == "train" else msgspec.structs.replace(scene, fold="Validation")


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    dataset: str
    fold: str


class CaptureFolder:
    """Captures on disk: ARKitScenes (with or without `3dod/<fold>`), ScanNet and ScanNet++, found by their mesh files.

    ARKitScenes' fold Validation holds VSI-Bench's test scenes, and so do ScanNet's and ScanNet++'s validation splits, which
    their folders do not tell. So only fold Training trains, and ScanNet scenes only when `test_scenes` says which to spare.
    """

    def __init__(
        self, root: Path, *, test_scenes: Iterable[str] | None = None, allow_test_scenes: bool = False, strict_classes: bool = True
    ) -> None:  # fmt: skip
        if not root.is_dir():
            raise SceneError(
                f"dataset folder {root} does not exist; `turnwise scenes make --out {root}` makes one"
            )
        self.root = root
        self._strict_classes = strict_classes
        self._entries = _find_captures(root)
        if not self._entries:
            raise SceneError(
                f"dataset folder {root} holds no scene: no *_3dod_mesh.ply, *_vh_clean_2.ply or scans/mesh_aligned_0.05.ply"
            )
        spared = None if test_scenes is None else frozenset(test_scenes)
        trained = {
            name
            for name, entry in self._entries.items()
            if allow_test_scenes or _may_train(name, entry, spared)
        }
        tested = [name for name in self._entries if allow_test_scenes or name not in trained]
        if allow_test_scenes and len(self._entries) > 1:
            # Asked to train on everything: every tenth scene is still kept for evaluation.
            tested = sorted(self._entries)[::10]
            trained -= set(tested)
        self._ids: dict[Split, tuple[str, ...]] = {
            "train": tuple(sorted(trained)),
            "eval": tuple(sorted(tested)),
        }

    def scene_ids(self, split: Split) -> tuple[str, ...]:
        return self._ids[split]

    def load(self, scene_id: str) -> Scene:
        entry = self._entries.get(scene_id)
        if entry is None:
            some = ", ".join(sorted(self._entries)[:5])
            raise SceneError(
                f"scene {scene_id!r} is not in {self.root}; it holds {len(self._entries)}, such as {some}"
            )
        if entry.dataset == "arkitscenes":
            return load_capture(entry.folder, fold=entry.fold, strict_classes=self._strict_classes)
        loaders: dict[str, Callable[[Path], Scene]] = {"scannet": load_scannet, "scannetpp": load_scannetpp}
        return loaders[entry.dataset](entry.folder)


def open_source(params: NavigationParams, test_scenes: Iterable[str] | None = None) -> SceneSource:
    """The scenes that the settings name."""
    if params.dataset_path is not None:
        if params.generate is not None:
            raise ConfigError("navigation got both dataset_path and generate; choose one")
        return CaptureFolder(
            Path(params.dataset_path), test_scenes=test_scenes, allow_test_scenes=params.allow_test_scenes,
            strict_classes=params.strict_classes,
        )  # fmt: skip
    made = params.scene_orders()
    return GeneratedScenes(
        made.scene_options(), seed=made.seed, num_train=made.num_train_scenes, num_eval=made.num_eval_scenes
    )


def _may_train(name: str, entry: _Entry, spared: frozenset[str] | None) -> bool:
    if spared is not None and name in spared:
        return False
    return entry.fold == "Training" or (entry.dataset != "arkitscenes" and spared is not None)


def _find_captures(root: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for depth in range(4):
        for path in sorted(root.glob("/".join([*"*" * depth, "*_3dod_mesh.ply"]))):
            fold = path.parent.parent.name
            entries[path.parent.name] = _Entry(
                folder=path.parent,
                dataset="arkitscenes",
                fold=fold if fold in ("Training", "Validation") else "Validation",
            )
        for path in sorted(root.glob("/".join([*"*" * depth, "*_vh_clean_2.ply"]))):
            entries[path.parent.name] = _Entry(folder=path.parent, dataset="scannet", fold="")
        for path in sorted(root.glob("/".join([*"*" * depth, "scans", "mesh_aligned_0.05.ply"]))):
            entries[path.parent.parent.name] = _Entry(folder=path.parent.parent, dataset="scannetpp", fold="")
    return entries
