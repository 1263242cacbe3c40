"""The collector: many episodes, kept on disk, read one at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import CountingGame
from turnwise import EpisodeBatchCollector, EpisodeSimulator
from turnwise.errors import StoreError
from turnwise.policies.scripted import ScriptedPolicy
from turnwise.store.log import RecordLog


@pytest.fixture
def simulator(tiny):
    policy = ScriptedPolicy(tiny.tokenizer, lambda messages: 'one more {"add": 1}')
    return EpisodeSimulator(policy, tiny.tokenizer, min_action_tokens=1)


def test_the_snippet_of_the_first_document_runs(simulator, tmp_path):
    env, initial_pose = CountingGame(), {"target": 2}
    collector = EpisodeBatchCollector(
        simulator=simulator, output_dir=tmp_path / "rl_data", save_format="both"
    )
    episode = collector.collect_episode(env, initial_pose)
    stats = collector.get_statistics()
    assert (stats["num_episodes"], stats["num_turns"], stats["mean_reward"]) == (1, 2, 1.0)
    seen = 0
    for ep_data in collector.iter_episodes_jsonl():
        assert ep_data["episode_id"] == "episode_000"
        assert ep_data["final_reward"] == 1.0
        for turn in ep_data["turns"]:
            tensors = collector.load_episode_tensors(ep_data["episode_id"], turn["turn_index"])
            generated_ids = tensors["generated_ids"]
            action_mask = tensors["action_token_mask"]
            stored = episode.turns[turn["turn_index"]]
            assert generated_ids.tolist() == stored.generated_ids.tolist()
            assert action_mask.dtype == torch.bool
            assert action_mask.tolist() == stored.action_token_mask.tolist()
            start, end = turn["action_token_start_index"], turn["action_token_end_index"]
            assert action_mask[start:end].all()
            assert turn["action"] == {"add": 1}
            seen += 1
    assert seen == 2
    shown = torch.load(tmp_path / "rl_data/tensors/episode_000/turn_00.pt", weights_only=True)
    assert shown["generated_ids"].tolist() == episode.turns[0].generated_ids.tolist()


def test_the_snippet_of_the_third_document_runs(simulator, tmp_path):
    collector = EpisodeBatchCollector(
        simulator=simulator,
        env=CountingGame(),
        output_dir=str(tmp_path / "episodes"),
        num_episodes=3,
        save_format="both",
    )
    episodes = collector.collect_batch()
    assert [episode.episode_id for episode in episodes] == ["ep001", "ep002", "ep003"]
    assert all(episode.is_valid for episode in episodes)
    assert len((tmp_path / "episodes/episode_manifest.jsonl").read_text().splitlines()) == 3
    tensors = torch.load(tmp_path / "episodes/ep001_tensors.pt", weights_only=True)
    turn = episodes[0].turns[0]
    assert tensors["turns"][0]["generated_ids"].tolist() == turn.generated_ids.tolist()
    assert tensors["turns"][0]["action_token_mask"].tolist() == turn.action_token_mask.tolist()
    assert tensors["turns"][0]["input_token_length"] == turn.input_token_length


def test_a_manifest_line_has_the_fields_of_the_documents(simulator, tmp_path):
    collector = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    collector.collect_episode(
        initial_pose={"target": 1, "scene_id": "42445173", "question_id": "q0", "question": "where?"}
    )
    (record,) = collector.iter_episodes_jsonl()
    assert {
        "episode_id",
        "scene_id",
        "question_id",
        "question",
        "num_turns",
        "terminal_reward",
        "is_valid",
    } <= set(record)
    assert {"masking_quality", "final_reward", "turns"} <= set(record)
    named = {
        "turn_index",
        "observation",
        "action",
        "reasoning",
        "num_action_tokens",
        "masking_method",
        "masking_confidence",
    }
    assert named <= set(record["turns"][0])


@pytest.mark.parametrize(("save_format", "has_pt"), [("jsonl", False), ("full", True), ("both", True)])
def test_tensors_load_the_same_in_every_format(simulator, tmp_path, save_format, has_pt):
    collector = EpisodeBatchCollector(simulator, CountingGame(), tmp_path, save_format=save_format)
    episode = collector.collect_episode(initial_pose={"target": 1})
    assert bool(list(tmp_path.rglob("*.pt"))) == has_pt
    tensors = collector.load_episode_tensors("episode_000", 0)
    turn = episode.turns[0]
    assert tensors["generated_ids"].tolist() == turn.generated_ids.tolist()
    assert tensors["context_input_ids"].tolist() == turn.context_input_ids.tolist()
    assert tensors["logprobs"].tolist() == turn.logprobs.tolist()
    assert tensors["input_token_length"] == turn.input_token_length
    assert collector.load_episode("episode_000").streams[0].ids.tolist() == episode.streams[0].ids.tolist()


def test_a_function_that_makes_environments_lets_episodes_run_together(simulator, tmp_path):
    made = []

    def make():
        made.append(CountingGame())
        return made[-1]

    seen = []
    collector = EpisodeBatchCollector(simulator, make, tmp_path, max_concurrent=4, on_episode=seen.append)
    episodes = collector.collect_batch(num_episodes=10)
    assert len(made) == 4
    assert [episode.episode_id for episode in seen] == list(episodes.episode_ids)
    assert [len(wave) for wave in (episodes[:4], episodes[8:])] == [4, 2]
    assert episodes[-1].episode_id == "ep010"
    assert all(episode.final_reward == 1.0 for episode in episodes)


def test_a_class_of_environments_makes_them(simulator, tmp_path):
    collector = EpisodeBatchCollector(simulator, CountingGame, tmp_path)
    assert [episode.final_reward for episode in collector.collect_batch(num_episodes=2)] == [1.0, 1.0]
    assert collector.collect_episode(initial_pose={"target": 1}).final_reward == 1.0


def test_an_environment_that_can_be_cloned_is(simulator, tmp_path):
    class Cloneable(CountingGame):
        clones = 0

        def clone(self):
            Cloneable.clones += 1
            return Cloneable()

    EpisodeBatchCollector(simulator, Cloneable(), tmp_path, max_concurrent=3).collect_batch(num_episodes=6)
    assert Cloneable.clones == 2


def test_given_poses_are_used_in_order(simulator, tmp_path):
    collector = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    episodes = collector.collect_batch(initial_poses=[{"target": 1}, {"target": 3}])
    assert [episode.num_turns for episode in episodes] == [1, 3]


def test_a_later_session_goes_on_in_the_same_folder(simulator, tmp_path):
    with EpisodeBatchCollector(simulator, CountingGame(), tmp_path) as first:
        first.collect_batch(num_episodes=2)
    second = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    assert second.get_statistics() == first.get_statistics()
    assert second.collect_batch(num_episodes=1).episode_ids == ("ep003",)
    assert second.load_episode("ep001").episode_id == "ep001"
    assert second.get_statistics()["num_episodes"] == 3


def test_a_record_cut_by_a_crash_is_left_out_and_written_over(simulator, tmp_path):
    with EpisodeBatchCollector(simulator, CountingGame(), tmp_path) as first:
        first.collect_batch(num_episodes=2)
    log = tmp_path / "episodes.jsonl"
    log.write_bytes(log.read_bytes()[:-10])
    second = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    assert second.get_statistics()["num_episodes"] == 1
    second.collect_batch(num_episodes=1)
    assert [record["episode_id"] for record in second.iter_episodes_jsonl()] == ["ep001", "ep002"]


def test_reading_does_not_lock_the_folder_and_writing_does(simulator, tmp_path):
    writer = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    writer.collect_episode()
    reader = EpisodeBatchCollector(simulator, CountingGame(), tmp_path)
    assert reader.get_statistics()["num_episodes"] == 1
    with pytest.raises(StoreError, match="being written"):
        reader.collect_episode()
    writer.close()
    RecordLog(tmp_path / "episodes.jsonl").close()


def test_mistakes_are_named(simulator, tmp_path):
    with pytest.raises(ValueError, match="save_format is 'zip'"):
        EpisodeBatchCollector(simulator, output_dir=tmp_path, save_format="zip")
    collector = EpisodeBatchCollector(simulator, output_dir=tmp_path)
    with pytest.raises(StoreError, match="needs an environment"):
        collector.collect_episode()
    with pytest.raises(StoreError, match="needs an environment"):
        collector.collect_batch()
    with pytest.raises(StoreError, match="cannot be a file name"):
        collector.collect_episode(CountingGame(), episode_id="../evil")
    collector.collect_episode(CountingGame(), episode_id="a")
    with pytest.raises(StoreError, match="already has an episode 'a'"):
        collector.collect_episode(CountingGame(), episode_id="a")
    with pytest.raises(StoreError, match="has no episode 'b'"):
        collector.load_episode_tensors("b", 0)
    with pytest.raises(StoreError, match="there is no turn 9"):
        collector.load_episode_tensors("a", 9)
    with pytest.raises(StoreError, match="has no scenes"):
        EpisodeBatchCollector(simulator, CountingGame(), tmp_path).collect_batch(scene_id="x")


def test_dropped_episodes_are_counted_with_their_reasons(tiny, tmp_path):
    policy = ScriptedPolicy(tiny.tokenizer, lambda messages: "no idea")
    silent = EpisodeSimulator(policy, tiny.tokenizer, max_turns=2)
    collector = EpisodeBatchCollector(silent, CountingGame(), tmp_path)
    collector.collect_batch(num_episodes=2)
    statistics = collector.get_statistics()
    assert (statistics["num_dropped"], statistics["dropout_rate"]) == (2, 1.0)
    assert statistics["dropout_reasons"] == {"no_json": 2}
    assert statistics["masking_methods"] == {"failed": 4}
    assert statistics["stop_reasons"] == {"max_turns": 2}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path):
    program = Path(__file__).with_name("collect_many.py")
    shown = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "300"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    half, full = map(int, shown.stdout.split())
    # The second half may cost an index entry each (some 200 bytes), not the episodes themselves.
    assert full - half < 250_000


def test_the_navigation_snippet_runs_with_a_vision_language_model(tmp_path):
    from turnwise import NavigationEnvironment
    from turnwise.models.tiny_vision import build_image_processor, build_network, build_tokenizer

    tokenizer = build_tokenizer()
    model, image_processor = build_network(tokenizer), build_image_processor()

    # What `AutoProcessor` gives: a tokenizer and an image processor.
    processor = SimpleNamespace(tokenizer=tokenizer, image_processor=image_processor)
    env = NavigationEnvironment(
        generate={"num_train_scenes": 2, "num_eval_scenes": 1, "max_rooms": 1}, width=64, height=64
    )
    scene_id = env.worlds.source.scene_ids("train")[0]
    env.load_scene(scene_id)
    simulator = EpisodeSimulator(
        model=model, processor=processor, min_action_tokens=10, max_action_tokens=100, do_sample=True, temperature=1.0,
        max_turns=2, max_new_tokens=20,
    )  # fmt: skip
    initial_pose = env.get_random_pose()
    episode = simulator.run_episode(env, initial_pose, "ep001")
    assert episode.failure is None, episode.failure
    assert episode.num_turns == 2
    assert len(episode.streams[0].images) == 2
    # A network that was never trained finds no action, and the episode says so.
    assert not episode.is_valid
    assert episode.dropout_reason is not None
    simulator.log_stats()

    collector = EpisodeBatchCollector(
        simulator=simulator, env=env, output_dir=tmp_path / "episodes", num_episodes=2
    )
    episodes = collector.collect_batch(scene_id=scene_id)
    assert [stored.task.data["scene_id"] for stored in episodes] == [scene_id] * 2
    assert all(stored.failure is None for stored in episodes)
    assert episodes[0].task.data["start"] != episodes[1].task.data["start"]
    assert episodes[0].turns[0].observation.images[0].pixels.shape == (64, 64, 3)
    simulator.close()
