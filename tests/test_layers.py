"""Imports point along the way the data goes, and the package stays light until it is used."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "turnwise"

# Layer and room, one a line. A module may import from its own layer and from those with a smaller number.
LEVEL = {
    "errors": 0,
    "types": 1,
    "columns": 2,
    "config": 2,
    "environment": 2,
    "fingerprint": 2,
    "json_parse": 2,
    "state_keys": 2,
    "token_bytes": 2,
    "action_tracker": 3,
    "advantages": 3,
    "grammar": 3,
    "losses": 3,
    "masking": 3,
    "objective": 3,
    "policy": 3,
    "renderer": 3,
    "rewards": 3,
    "sampling": 3,
    "schedule": 3,
    "templates": 3,
    "credit": 4,
    "logprobs": 4,
    "packs": 4,
    "samples": 4,
    "store": 4,
    "streams": 4,
    "tasks": 4,
    "token_tree": 4,
    "tree_attention": 4,
    "aborted": 5,
    "environments": 5,
    "minibatch": 5,
    "models": 5,
    "policies": 5,
    "reference": 5,
    "rollout": 5,
    "value_head": 5,
    "audit": 6,
    "batch": 6,
    "branching": 6,
    "collector": 6,
    "credit_report": 6,
    "evaluate": 6,
    "learner": 6,
    "rescore": 6,
    "simulator": 6,
    "tally": 6,
    "teacher_forcing": 6,
    "plots": 6,
    "view": 6,
    "worker": 6,
    "tracking": 7,
    "trainer": 7,
    "verify": 7,
    "branch_run": 8,
    "demo": 8,
    "imitate": 8,
    "cli": 9,
    "__main__": 10,
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("turnwise."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "turnwise":
            rooms.update(alias.name for alias in node.names if (SOURCE / f"{alias.name}.py").exists())
        elif isinstance(node, ast.Import):
            rooms.update(
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("turnwise.")
            )
    return rooms


def test_every_room_has_a_layer():
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")} - {
        "__init__"
    }
    assert rooms - set(LEVEL) == set()


def test_imports_never_point_back():
    backward = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        backward += [
            f"{path.relative_to(SOURCE)} imports {other}"
            for other in imported_rooms(path)
            if LEVEL[other] > LEVEL[room]
        ]
    assert backward == []


def test_importing_turnwise_or_asking_for_help_loads_no_heavy_package():
    for statement in ("import turnwise", "import turnwise.cli"):
        code = f"{statement}; import sys; print([m for m in ('torch', 'transformers', 'ray', 'nicegui') if m in sys.modules])"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == "[]"


def test_public_names_are_exactly_all():
    import turnwise

    listed = {name for name in dir(turnwise) if not name.startswith("_")}
    assert listed == set(turnwise.__all__)
    for name in turnwise.__all__:
        assert getattr(turnwise, name) is not None
