"""The run folder: what is written comes back, and what cannot be right is refused."""

import hashlib
import json

import numpy as np
import pytest

from turnwise import Config, Image, get_debug_config
from turnwise.errors import StoreError
from turnwise.rollout import collect_groups
from turnwise.store.checkpoints import list_checkpoints, save_checkpoint
from turnwise.store.episodes import find_episode, image_path, read_episodes, write_image
from turnwise.store.log import read_records
from turnwise.store.run import Run, file_name, read_config, read_groups, read_scores
from turnwise.types import Advantages, KeptSets, Score, Task, TurnCredit


@pytest.fixture
async def groups(make_rollouts):
    rollouts = make_rollouts(lambda messages: 'go {"add": 1}')
    tasks = [Task(task_id=f"t{i}", data={"target": 2, "scene_id": "42445173"}) for i in range(2)]
    return await collect_groups(tasks, rollouts, label="s0")


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run", get_debug_config())
    yield run
    run.close()


def test_episodes_come_back_as_they_were(run, groups):
    run.record_groups("step-000000", groups)
    for before, after in zip([e for g in groups for e in g.episodes], read_episodes(run.folder), strict=True):
        assert (after.episode_id, after.group_id, after.task) == (
            before.episode_id,
            before.group_id,
            before.task,
        )
        assert after.metrics == before.metrics
        assert after.messages == before.messages
        for mine, stored in zip(before.turns, after.turns, strict=True):
            assert np.array_equal(stored.generated_ids, mine.generated_ids)
            assert np.array_equal(stored.context_input_ids, mine.context_input_ids)
            assert np.array_equal(stored.action_token_mask, mine.action_token_mask)
            assert np.array_equal(stored.logprobs, mine.logprobs)
            assert stored.observation.state_key == mine.observation.state_key
            assert (stored.action, stored.reward, stored.text) == (mine.action, mine.reward, mine.text)
    assert [group.group_id for group in read_groups(run.folder)] == [group.group_id for group in groups]


def test_a_line_has_the_fields_people_look_for(run, groups):
    run.record_groups("step-000000", groups)
    record = next(read_records(run.folder / "episodes.jsonl"))
    assert record["scene_id"] == "42445173"
    assert record["num_turns"] == 2
    assert record["final_reward"] == record["terminal_reward"] == 1.0
    turn = record["turns"][1]
    assert turn["action"] == {"add": 1}
    assert turn["reasoning"] == "go"
    assert turn["masking_method"] == "brace_depth"
    assert turn["action_token_end_index"] - turn["action_token_start_index"] == turn["num_action_tokens"]


def test_a_changed_tensor_file_rejects_its_episodes_by_name(run, groups):
    run.record_groups("step-000000", groups)
    path = run.folder / "tensors" / "step-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(
        StoreError, match=r"episode s0-g000-e00: tensor file .* does not have the recorded content"
    ):
        list(read_episodes(run.folder))
    path.unlink()
    with pytest.raises(StoreError, match=r"episode s0-g000-e00: tensor file .* is missing"):
        list(read_episodes(run.folder))


def test_an_unknown_episode_is_named(run, groups):
    run.record_groups("step-000000", groups)
    assert find_episode(run.folder, "s0-g001-e01").task.task_id == "t1"
    with pytest.raises(StoreError, match="has no episode 'nope'"):
        find_episode(run.folder, "nope")


def test_scores_and_advantages_are_kept_beside_the_episodes(run):
    score = Score(episode_id="e", reward_name="my/file.py:fn", score=0.5, step_rewards=(0.1, None))
    run.record_scores([score])
    assert read_scores(run.folder, "my/file.py:fn") == {"e": score}
    credit = TurnCredit(episode_id="e", turn_index=0, advantage=0.25)
    run.record_advantages(Advantages(estimator="rloo", turns={"e": (credit,)}))
    (record,) = read_records(run.folder / "advantages" / "rloo.jsonl")
    assert record["turns"][0]["advantage"] == 0.25
    with pytest.raises(StoreError, match=r"no scores of 'other'; it has: my_file.py_fn"):
        read_scores(run.folder, "other")


def test_names_from_outside_cannot_leave_the_folder():
    assert file_name("../../etc/passwd") == "_.._etc_passwd"
    assert "/" not in file_name("a/b:c")
    assert file_name("...") == "unnamed"


def test_images_are_stored_once_under_their_hash(tmp_path):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    image = Image.from_pixels(pixels)
    path = write_image(tmp_path, image)
    assert path == image_path(tmp_path, image.sha256)
    stored = Image(sha256=image.sha256, width=3, height=2, source=path)
    assert np.array_equal(stored.pixels, pixels)
    assert image.sha256 == hashlib.sha256(b"2x3" + pixels.tobytes()).hexdigest()


def test_kept_sets_know_their_rows():
    kept = KeptSets.from_rows([np.array([1, 2], np.int32), np.array([], np.int32), np.array([7], np.int32)])
    assert [kept.row(i).tolist() for i in range(3)] == [[1, 2], [], [7]]


def test_a_run_folder_is_never_overwritten(run):
    with pytest.raises(StoreError, match=r"is not empty; .*--resume"):
        Run.create(run.folder, Config())


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"is not a run folder: it has no config.yaml"):
        read_config(tmp_path)


def test_the_run_says_what_made_it(run):
    facts = json.loads((run.folder / "environment.json").read_text())
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["seed"] == 0
    assert read_config(run.folder) == run.config


def test_old_checkpoints_go_but_the_best_one_stays(run):
    import torch

    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3), (5, 0.4)):
        run.save_checkpoint(step, {"x": torch.zeros(1)}, {}, score=score)
    assert [step for step, _ in list_checkpoints(run.folder)] == [1, 3, 4, 5]


def test_a_half_written_checkpoint_is_never_chosen(run):
    import torch

    save_checkpoint(run.folder, 3, {"x": torch.zeros(1)}, {"step": 3})
    draft = run.folder / "checkpoints" / ".step-000009.123.draft"
    draft.mkdir()
    (draft / "state.json").write_text("{}")
    assert [step for step, _ in list_checkpoints(run.folder)] == [3]
