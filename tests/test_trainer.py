"""The loop: same seed, same bits; resume equals an uninterrupted run; tokens trained on are tokens sampled."""

import asyncio
import json
import signal
import threading

import numpy as np
import pytest

from turnwise import Config, get_debug_config
from turnwise.errors import StoreError, TrainingError
from turnwise.fingerprint import fingerprint
from turnwise.store.checkpoints import list_checkpoints
from turnwise.store.episodes import read_episodes
from turnwise.store.run import Run, read_metrics
from turnwise.trainer import build_stages, deliver_weights, evaluate_run, restore, train


class Quiet:
    def on_episode(self, episode):
        pass

    def on_step(self, step, metrics):
        pass


def debug_config(*overrides):
    return get_debug_config().with_overrides(
        ["training.num_steps=3", "environment.params={size: 3}", "storage.checkpoint_every=2", *overrides]
    )


def run_once(folder, config, *, watch=None):
    stages = build_stages(config)
    run = Run.create(folder, config)
    try:
        asyncio.run(train(run, stages, watch or Quiet()))
    finally:
        run.close()
    return fingerprint(stages.learner.weights())


def tokens_and_rewards(folder):
    return [
        (episode.episode_id, [turn.generated_ids.tolist() for turn in episode.turns], episode.final_reward)
        for episode in read_episodes(folder)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run_once(folder, debug_config())


def test_the_same_seed_gives_the_same_tokens_rewards_and_weights_twice(finished, tmp_path):
    folder, weights = finished
    assert run_once(tmp_path / "again", debug_config()) == weights
    assert tokens_and_rewards(tmp_path / "again") == tokens_and_rewards(folder)


def test_another_seed_gives_other_tokens(finished, tmp_path):
    folder, _ = finished
    run_once(tmp_path / "other", debug_config("training.seed=1", "training.num_steps=1"))
    assert tokens_and_rewards(tmp_path / "other") != tokens_and_rewards(folder)[:4]


class StopAfter:
    """Stands for Ctrl-C during step `step`."""

    def __init__(self, step):
        self.step = step

    def on_episode(self, episode):
        pass

    def on_step(self, step, metrics):
        if step == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_stopped_by_ctrl_c_and_resumed_equals_an_uninterrupted_one(finished, tmp_path, step):
    folder, weights = finished
    run_once(tmp_path / "stopped", debug_config(), watch=StopAfter(step))
    assert [number for number, _ in list_checkpoints(tmp_path / "stopped")] == [step + 1]
    run = Run.open(tmp_path / "stopped")
    stages = build_stages(run.config)
    first_step = restore(run, stages)
    assert first_step == step + 1
    asyncio.run(train(run, stages, Quiet(), first_step=first_step))
    run.close()
    assert fingerprint(stages.learner.weights()) == weights
    assert tokens_and_rewards(tmp_path / "stopped") == tokens_and_rewards(folder)


class Crash(Exception):
    pass


class CrashAfter(StopAfter):
    def on_step(self, step, metrics):
        if step == self.step:
            raise Crash


def test_a_crashed_run_goes_on_from_its_checkpoint_and_repeats_what_was_lost(finished, tmp_path):
    folder, weights = finished
    with pytest.raises(Crash):
        run_once(tmp_path / "crashed", debug_config(), watch=CrashAfter(2))
    run = Run.open(tmp_path / "crashed")
    stages = build_stages(run.config)
    first_step = restore(run, stages)
    assert first_step == 2
    asyncio.run(train(run, stages, Quiet(), first_step=first_step))
    run.close()
    assert fingerprint(stages.learner.weights()) == weights
    assert tokens_and_rewards(tmp_path / "crashed") == tokens_and_rewards(folder)
    aside = (tmp_path / "crashed" / "superseded" / "episodes.jsonl").read_text().splitlines()
    assert {json.loads(line)["episode_id"][:7] for line in aside} == {"s000002"}


def test_trained_tokens_are_sampled_tokens_with_their_own_logprobs(finished):
    folder, _ = finished
    for metrics in read_metrics(folder):
        assert metrics["logprob_gap"] < 1e-4
    for episode in read_episodes(folder):
        for turn in episode.turns:
            assert turn.stream.is_sampled[turn.completion_start : turn.completion_end].all()
            assert not turn.stream.is_sampled[turn.prompt_start : turn.completion_start].any()
            assert np.all(turn.logprobs <= 0)


def test_every_step_is_one_line_of_metrics(finished):
    folder, _ = finished
    assert [metrics["step"] for metrics in read_metrics(folder)] == [0, 1, 2]
    assert {"reward/mean", "time/rollout", "time/update", "tokens/action_share"} <= set(
        read_metrics(folder)[0]
    )


def test_a_stored_run_can_be_evaluated_without_being_changed(finished):
    folder, _ = finished
    before = sorted((path.name, path.stat().st_size) for path in folder.rglob("*") if path.is_file())
    config = debug_config("evaluation.num_tasks=3")
    evaluation = asyncio.run(evaluate_run(folder, config, Quiet()))
    assert evaluation.num_episodes == 3
    assert sorted((path.name, path.stat().st_size) for path in folder.rglob("*") if path.is_file()) == before


def test_a_policy_that_does_not_hold_the_weights_it_was_sent_stops_the_run(tmp_path):
    config = debug_config()
    stages = build_stages(config)
    run = Run.create(tmp_path / "run", config)

    async def keep_old_weights(weights, version):
        return "0" * 64

    stages.rollouts.agent.policy.load_weights = keep_old_weights
    with pytest.raises(TrainingError, match="holds weights 000000000000 after being sent"):
        asyncio.run(deliver_weights(run, stages, version=1))
    run.close()


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path):
    run = Run.create(tmp_path / "run", Config())
    with pytest.raises(StoreError, match="has no checkpoint"):
        restore(run, None)
    run.close()


def test_ctrl_c_is_left_alone_outside_the_main_thread():
    from turnwise.trainer import stop_on_interrupt

    seen = []

    def check():
        with stop_on_interrupt() as is_interrupted:
            seen.append(is_interrupted())

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert seen == [False]
