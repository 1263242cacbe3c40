"""Each turn's advantage lands on exactly that turn's action tokens: ragged turns, several streams, failed episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config import CreditConfig, LossConfig
from turnwise.credit import assign_advantages
from turnwise.minibatch import build_portions
from turnwise.rewards.align import align_rewards
from turnwise.rewards.interface import EvaluateResult, StepOutput
from turnwise.rewards.steps import steps_of_episode
from turnwise.samples import build_samples
from turnwise.types import (
    Action,
    Episode,
    Failure,
    FinishReason,
    Group,
    MaskingMethod,
    Message,
    Observation,
    Role,
    SamplingParams,
    Score,
    StopReason,
    Task,
    TokenStream,
    Turn,
)
from turnwise.worker import score_of_steps

# One turn: tokens given before it, its mask over the sampled ones, its state, whether it opens a new stream.
Shape = tuple[int, list[bool], int, bool]


def build_episode(name: str, shapes: list[Shape], *, failed: bool = False) -> Episode:
    """An episode of these turns. Token ids count up over everything, so each names its own place."""
    streams: list[list[tuple[int, bool]]] = []
    spans = []
    for given_tokens, mask, _, opens in shapes:
        if opens or not streams:
            streams.append([])
        stream = streams[-1]
        prompt_start = len(stream)
        stream.extend((3, False) for _ in range(given_tokens))
        spans.append((len(streams) - 1, prompt_start, len(stream), len(stream) + len(mask)))
        stream.extend((4 + i, True) for i in range(len(mask)))
    frozen = []
    for stream in streams:
        sampled = np.array([is_sampled for _, is_sampled in stream], dtype=bool)
        ids = np.array([token for token, _ in stream], dtype=np.int32)
        frozen.append(
            TokenStream(ids=ids, is_sampled=sampled, logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32))
        )
    turns = tuple(
        Turn(
            turn_index=t,
            stream=frozen[index],
            prompt_start=prompt_start,
            completion_start=start,
            completion_end=end,
            observation=Observation(messages=(Message(role=Role.USER, content="?"),), state_key=state),
            action=Action(value={}, text="{}"),
            text="{}",
            action_token_mask=np.array(mask, dtype=bool),
            masking_method=MaskingMethod.BRACE_DEPTH,
            masking_confidence=1.0,
            finish_reason=FinishReason.END,
            policy_version=0,
        )
        for t, ((index, prompt_start, start, end), (_, mask, state, _)) in enumerate(
            zip(spans, shapes, strict=True)
        )
    )
    return Episode(
        episode_id=name,
        group_id="g",
        task=Task(task_id="t"),
        turns=turns,
        streams=tuple(frozen),
        stop_reason=StopReason.FAILED if failed else StopReason.TERMINAL,
        failure=Failure(stage="step", error="boom") if failed else None,
        sampling=SamplingParams(),
    )


def align(episode: Episode, rewards: list[float]) -> Score:
    """Through the aligner: one step output per turn, given in reverse order."""
    outputs = [StepOutput(step_index=t, base_reward=reward) for t, reward in enumerate(rewards)]
    result = EvaluateResult(score=sum(rewards), step_outputs=outputs[::-1])
    return score_of_steps(align_rewards(steps_of_episode(episode), result))


def check_placement(episodes: list[Episode], scores: dict[str, Score], estimator: str) -> None:
    group = Group(group_id="g", task=episodes[0].task, episodes=tuple(episodes))
    advantages = assign_advantages([group], scores, CreditConfig.model_validate({"estimator": estimator}))
    expected: dict[tuple[str, int, int], float] = {}
    for episode in episodes:
        for turn, credit in zip(episode.turns, advantages.turns[episode.episode_id], strict=True):
            if credit.advantage is None:
                continue
            stream = next(i for i, found in enumerate(episode.streams) if found is turn.stream)
            for offset in np.flatnonzero(turn.action_token_mask):
                expected[episode.episode_id, stream, turn.completion_start + int(offset)] = credit.advantage
    samples = build_samples([group], advantages, tokens_per_pack=4096)
    streams = {episode.episode_id: episode.streams for episode in episodes}
    found: dict[tuple[str, int, int], float] = {}
    portions = build_portions(
        samples, LossConfig(name="ppo"), image_token_id=None, device=torch.device("cpu")
    )
    for portion in portions:
        pack = portion.pack
        rows = zip(
            pack.sample_R.tolist(), pack.row_R.tolist(), portion.terms.advantages_R.tolist(), strict=True
        )
        for owner, row, advantage in rows:
            sample = pack.samples[owner]
            index = next(i for i, known in enumerate(streams[sample.episode_id]) if known is sample.stream)
            found[sample.episode_id, index, int(sample.targets_R[row])] = advantage
    assert found.keys() == expected.keys()
    for place, advantage in expected.items():
        assert found[place] == pytest.approx(advantage, rel=1e-6, abs=1e-7)


def test_ragged_turns_and_a_failed_episode_by_hand() -> None:
    episodes = [
        build_episode(
            "a",
            [(3, [False, True, True], 0, False), (1, [True], 1, False), (2, [False, True, False], 2, True)],
        ),
        build_episode("b", [(3, [True, True, False, True], 0, False)]),
        build_episode("c", [(3, [True, True], 0, False), (1, [True, True], 1, False)], failed=True),
    ]
    scores = {"a": align(episodes[0], [0.5, -0.25, 1.0]), "b": align(episodes[1], [0.0])}
    scores["c"] = Score(episode_id="c", reward_name="reward", score=None, error="failed")
    for estimator in ("gigpo", "rloo", "gae", "reinforce_plus_plus"):
        check_placement(episodes, scores, estimator)


MASKS = st.lists(st.booleans(), min_size=1, max_size=4).filter(any)
TURNS = st.lists(
    st.tuples(st.integers(1, 3), MASKS, st.integers(0, 2), st.booleans()), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TURNS, st.booleans()), min_size=2, max_size=5), st.data())
def test_no_shape_of_episodes_moves_an_advantage(
    shapes: list[tuple[list[Shape], bool]], data: st.DataObject
) -> None:
    episodes, scores = [], {}
    for number, (turns, failed) in enumerate(shapes):
        failed = failed and number > 0
        episode = build_episode(f"e{number}", turns, failed=failed)
        episodes.append(episode)
        rewards = data.draw(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, -0.25]), min_size=len(turns), max_size=len(turns))
        )
        scores[episode.episode_id] = (
            Score(episode_id=episode.episode_id, reward_name="reward", score=None)
            if failed
            else align(episode, rewards)
        )
    check_placement(episodes, scores, "gigpo")
