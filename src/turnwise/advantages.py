"""How much better than expected each turn was: columns in, one number per turn out, float64 inside.

Columns are sequences of equal length, one entry per turn (or per episode for the episode-level estimators), and
results are arrays in the same order. A score of None (failed, unscored) takes no part in any mean or deviation and gets
None back; an array that holds a None has dtype object, every other one float64. Equal rewards give exactly 0.0: values
are shifted by one of their group before they are averaged, so that rounding cannot invent a signal.

Deviations are those of a sample (n - 1), and epsilon is added to them: (x - mean) / (std + epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.columns import (
    CodeArray,
    Column,
    Float64Array,
    Mask,
    Singleton,
    centre,
    check_choice,
    check_lengths,
    compare,
    first_rows,
    like,
    number_ids,
    spread,
    stand_alone,
    to_float,
)
from turnwise.errors import CreditError
from turnwise.state_keys import StateKey, number_states

_PIECE = 4096


class Gigpo(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Every quantity GiGPO derives, one entry per turn; None where the episode took no part."""

    step_returns: Column
    """G_k: discounted rewards from this turn to the end of its episode."""
    step_groups: CodeArray
    """Turns with equal numbers were taken in the same state of the same group; -1 where the episode took no part."""
    step_advantages: Column
    """A_S: G_k against the other turns of its step group; 0 for a state seen once."""
    episode_advantages: Column
    """A_E: the episode's score against the other episodes of its group."""
    advantages: Column


def gigpo(
    group_ids: Sequence[Hashable],
    episode_ids: Sequence[Hashable],
    state_keys: Sequence[StateKey],
    rewards: Sequence[float | None] | Float64Array,
    *,
    scores: Mapping[Any, float | None] | None = None,
    gamma: float = 0.95,
    omega: float = 1.0,
    normalize: Literal["mean_std", "mean"] = "mean_std",
    episode_stats: Literal["episodes", "rows"] = "episodes",
    combine: Literal["paper", "convex"] = "paper",
    similarity: float | None = None,
    epsilon: float = 1e-6,
    singleton: Singleton = "raw",
) -> Gigpo:
    """Episode and step credit of GiGPO: A_E + omega A_S (paper), or omega A_E + (1 - omega) A_S (convex).

    Turns of an episode stand in order of appearance. `scores` maps episode id to score; the default is the sum of rewards.
    `similarity` joins text keys whose difflib ratio reaches it. `singleton` is what a group of one gets as A_E.

        gigpo("gg", "ab", ["s", "s"], [1.0, 0.0], omega=0.5).advantages   # [1.06, -1.06]
    """
    check_choice("normalize", normalize, ("mean_std", "mean"))
    check_choice("episode_stats", episode_stats, ("episodes", "rows"))
    check_choice("combine", combine, ("paper", "convex"))
    if combine == "convex" and not 0.0 <= omega <= 1.0:
        raise CreditError(f"omega is {omega}; with combine='convex' it is a share and must lie in [0, 1]")
    rows = _read_rows(group_ids, episode_ids, state_keys, rewards, scores)
    returns = _returns(rows.episode_of, rows.rewards, gamma)
    step_groups = number_states(rows.group_of, rows.state_keys, similarity)
    divides = normalize == "mean_std"
    a_step = compare(returns, step_groups, divides=divides, epsilon=epsilon, singleton="zero")
    if episode_stats == "rows":
        counted = np.arange(len(returns))
    else:
        counted = np.flatnonzero(
            first_rows(rows.episode_of, len(rows.scores))[rows.episode_of] == np.arange(len(returns))
        )
    per_episode = np.zeros(len(rows.scores))
    per_episode[rows.episode_of[counted]] = compare(
        rows.scores[rows.episode_of[counted]],
        rows.group_of[counted],
        divides=divides,
        epsilon=epsilon,
        singleton=singleton,
    )
    a_episode = per_episode[rows.episode_of]
    total = a_episode + omega * a_step if combine == "paper" else omega * a_episode + (1.0 - omega) * a_step
    labels = np.full(len(rows.takes_part), -1, dtype=np.int64)
    labels[rows.takes_part] = step_groups
    return Gigpo(
        step_returns=spread(returns, rows.takes_part),
        step_groups=labels,
        step_advantages=spread(a_step, rows.takes_part),
        episode_advantages=spread(a_episode, rows.takes_part),
        advantages=spread(total, rows.takes_part),
    )


class _Rows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows that take part."""

    group_of: CodeArray
    episode_of: CodeArray
    state_keys: Sequence[StateKey]
    rewards: Float64Array
    scores: Float64Array
    """One per episode, by number."""
    takes_part: Mask
    """One per row given."""


def _read_rows(
    group_ids: Sequence[Hashable],
    episode_ids: Sequence[Hashable],
    state_keys: Sequence[StateKey],
    rewards: Sequence[float | None] | Float64Array,
    scores: Mapping[Any, float | None] | None,
) -> _Rows:
    check_lengths(group_ids=group_ids, episode_ids=episode_ids, state_keys=state_keys, rewards=rewards)
    group_of, _ = number_ids(group_ids)
    episode_of, episodes = number_ids(episode_ids)
    _check_one_group(group_of, episode_of, episodes, group_ids)
    reward, has_reward = to_float("reward", rewards)
    score, is_scored = _scores_of(episodes, episode_of, reward, has_reward, scores)
    takes_part = is_scored[episode_of]
    unpaid = np.flatnonzero(takes_part & ~has_reward)
    if len(unpaid):
        raise CreditError(
            f"row {unpaid[0]} (episode {episode_ids[unpaid[0]]!r}) has no reward but its episode takes part; "
            "give a number, or give the episode the score None"
        )
    if not takes_part.all():
        group_of, episode_of, reward = group_of[takes_part], episode_of[takes_part], reward[takes_part]
        state_keys = [key for key, part in zip(state_keys, takes_part.tolist(), strict=True) if part]
    return _Rows(
        group_of=group_of,
        episode_of=episode_of,
        state_keys=state_keys,
        rewards=reward,
        scores=score,
        takes_part=takes_part,
    )


def rloo(
    group_ids: Sequence[Hashable],
    scores: Sequence[float | None] | Float64Array,
    *,
    normalize: bool = False,
    epsilon: float = 1e-4,
    singleton: Singleton = "raw",
) -> Column:
    """Each score minus the mean of the others in its group; `normalize` then whitens over the batch.

    rloo(["g", "g", "g"], [1.0, 0.0, None])   # [1.0, -1.0, None]
    """
    group_of, score, is_scored = _prepare(group_ids, scores)
    centred, count = centre(score, group_of)
    size = count[group_of]
    advantage = np.where(size > 1, centred * size / np.maximum(size - 1, 1), stand_alone(score, singleton))
    if normalize:
        advantage = compare(
            advantage,
            np.zeros(len(advantage), dtype=np.int64),
            divides=True,
            epsilon=epsilon,
            singleton="zero",
        )
    return spread(advantage, is_scored)


def grpo(
    group_ids: Sequence[Hashable],
    scores: Sequence[float | None] | Float64Array,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-6,
    singleton: Singleton = "raw",
) -> Column:
    """Each score minus its group's mean, divided by the deviation of the group, of the batch, or not (Dr. GRPO).

    grpo(["g", "g"], [1.0, 0.0], scale="none")   # [0.5, -0.5]
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    group_of, score, is_scored = _prepare(group_ids, scores)
    if scale != "batch":
        advantage = compare(score, group_of, divides=scale == "group", epsilon=epsilon, singleton=singleton)
        return spread(advantage, is_scored)
    centred = compare(score, group_of, divides=False, epsilon=epsilon, singleton=singleton)
    deviation = float(np.std(score, ddof=1)) if len(score) > 1 else 1.0
    return spread(centred / (deviation + epsilon), is_scored)


def reinforce_plus_plus(
    episode_ids: Sequence[Hashable],
    rewards: Sequence[float | None] | Float64Array,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
) -> Column:
    """Discounted returns whitened over the whole batch, no groups needed; an episode with a None reward takes no part.

    reinforce_plus_plus(["a", "a", "b"], [0.0, 1.0, 0.0])   # returns 1, 1, 0 → [0.58, 0.58, -1.15]
    """
    check_lengths(episode_ids=episode_ids, rewards=rewards)
    episode_of, episodes = number_ids(episode_ids)
    reward, has_reward = to_float("reward", rewards)
    takes_part = np.bincount(episode_of[~has_reward], minlength=len(episodes))[episode_of] == 0
    returns = _returns(episode_of[takes_part], reward[takes_part], gamma)
    return spread(whiten(returns, epsilon=epsilon), takes_part)


def gae(
    rewards_BT: npt.ArrayLike, values_BT: npt.ArrayLike, mask_BT: npt.ArrayLike, *, gamma: float, lam: float
) -> Float64Array:
    """Generalised advantages per row; masked positions are skipped over and get 0. Returns are advantages + values.

    gae([[0.0, 1.0]], [[0.5, 0.5]], [[1, 1]], gamma=1.0, lam=1.0)   # [[0.5, 0.5]]
    """
    reward = np.atleast_2d(np.asarray(rewards_BT, dtype=np.float64))
    value = np.atleast_2d(np.asarray(values_BT, dtype=np.float64))
    is_real = np.atleast_2d(np.asarray(mask_BT)).astype(bool)
    if not reward.shape == value.shape == is_real.shape:
        raise CreditError(
            f"gae got rewards {reward.shape}, values {value.shape} and mask {is_real.shape}; all need one shape [B, T]"
        )
    for name, column in (("reward", reward), ("value", value)):
        if not np.isfinite(column[is_real]).all():
            raise CreditError(f"gae got a {name} that is not finite at an unmasked position")
    advantages = np.zeros_like(reward)
    next_value = np.zeros(len(reward))
    running = np.zeros(len(reward))
    for t in range(reward.shape[1] - 1, -1, -1):
        real = is_real[:, t]
        delta = np.where(real, reward[:, t] + gamma * next_value - value[:, t], 0.0)
        running = np.where(real, delta + gamma * lam * running, running)
        next_value = np.where(real, value[:, t], next_value)
        advantages[:, t] = np.where(real, running, 0.0)
    return advantages


def whiten(
    values: npt.ArrayLike, mask: npt.ArrayLike | None = None, *, epsilon: float = 1e-8
) -> Float64Array:
    """(x - mean) / sqrt(variance + epsilon) over the unmasked entries; masked ones get 0."""
    value = np.asarray(values, dtype=np.float64)
    is_real = np.ones(value.shape, dtype=bool) if mask is None else np.asarray(mask).astype(bool)
    whitened = np.zeros_like(value)
    kept = value[is_real]
    if len(kept) < 2:
        return whitened
    shifted = kept - kept[0]
    centred = shifted - shifted.mean()
    whitened[is_real] = centred / math.sqrt(float(centred @ centred) / (len(kept) - 1) + epsilon)
    return whitened


def step_returns(
    episode_ids: Sequence[Hashable], rewards: Sequence[float] | Float64Array, *, gamma: float
) -> Float64Array:
    """G_k = r_k + gamma G_{k+1} within each episode, 0 after its last turn."""
    check_lengths(episode_ids=episode_ids, rewards=rewards)
    reward, has_reward = to_float("reward", rewards)
    if not has_reward.all():
        raise CreditError(f"row {int(np.argmin(has_reward))} has the reward None; a return needs a number")
    return _returns(number_ids(episode_ids)[0], reward, gamma)


def compute_loo_baseline(rewards: Any) -> Any:
    """For each reward the mean of the others (0 for a single one). Takes a sequence, an array, a tensor or a batch with `.rewards`.

    compute_loo_baseline([1.0, 0.0, 0.5])   # [0.25, 0.75, 0.5]
    """
    rewards = getattr(rewards, "rewards", rewards)
    reward, is_scored = to_float("reward", rewards)
    kept = reward[is_scored]
    if len(kept) < 2:
        return like(rewards, spread(np.zeros(len(kept)), is_scored))
    shifted = kept - kept[0]
    baseline = kept[0] + (shifted.sum() - shifted) / (len(kept) - 1)
    return like(rewards, spread(baseline, is_scored))


def compute_advantages(rewards: Any, baselines: Any, normalize: bool = True, epsilon: float = 1e-8) -> Any:
    """Rewards minus baselines; `normalize` then makes mean 0 and deviation 1 over all of them.

    compute_advantages([1.0, 0.0], [0.0, 1.0], normalize=False)   # [1.0, -1.0]
    """
    check_lengths(rewards=rewards, baselines=baselines)
    reward, is_scored = to_float("reward", rewards)
    baseline, has_baseline = to_float("baseline", baselines)
    is_scored = is_scored & has_baseline
    advantage = reward[is_scored] - baseline[is_scored]
    if normalize and len(advantage) > 1:
        advantage = compare(
            advantage,
            np.zeros(len(advantage), dtype=np.int64),
            divides=True,
            epsilon=epsilon,
            singleton="raw",
        )
    return like(rewards, spread(advantage, is_scored))


def _prepare(group_ids: Sequence[Hashable], scores: Any) -> tuple[CodeArray, Float64Array, Mask]:
    check_lengths(group_ids=group_ids, scores=scores)
    score, is_scored = to_float("score", scores)
    return number_ids(group_ids)[0][is_scored], score[is_scored], is_scored


def _returns(episode_of: CodeArray, reward: Float64Array, gamma: float) -> Float64Array:
    if not 0.0 <= gamma <= 1.0:
        raise CreditError(f"gamma is {gamma}; a discount must lie in [0, 1]")
    running = [0.0] * (int(episode_of.max()) + 1 if len(episode_of) else 0)
    returns = np.empty(len(reward))
    # In pieces, so that the Python numbers of one piece stay in the processor's cache.
    for stop in range(len(reward), 0, -_PIECE):
        piece = slice(max(stop - _PIECE, 0), stop)
        backwards = []
        for episode, paid in zip(
            reversed(episode_of[piece].tolist()), reversed(reward[piece].tolist()), strict=True
        ):
            running[episode] = paid + gamma * running[episode]
            backwards.append(running[episode])
        returns[piece] = backwards[::-1]
    return returns


def _scores_of(
    episodes: list[Hashable],
    episode_of: CodeArray,
    reward: Float64Array,
    has_reward: Mask,
    scores: Mapping[Any, float | None] | None,
) -> tuple[Float64Array, Mask]:
    if scores is None:
        total = np.bincount(episode_of, weights=np.where(has_reward, reward, 0.0), minlength=len(episodes))
        return total.astype(np.float64, copy=False), np.ones(len(episodes), dtype=bool)
    missing = next((name for name in episodes if name not in scores), None)
    if missing is not None:
        raise CreditError(
            f"episode {missing!r} has turns but no score; give one, or None when it takes no part"
        )
    return to_float("score", [scores[name] for name in episodes])


def _check_one_group(
    group_of: CodeArray, episode_of: CodeArray, episodes: list[Hashable], group_ids: Sequence[Hashable]
) -> None:
    first = first_rows(episode_of, len(episodes))
    strays = np.flatnonzero(group_of != group_of[first[episode_of]])
    if len(strays):
        row = int(strays[0])
        raise CreditError(
            f"episode {episodes[episode_of[row]]!r} is in group {group_ids[int(first[episode_of[row]])]!r} and, at row {row}, "
            f"in group {group_ids[row]!r}; episode ids must be unique over the batch"
        )
