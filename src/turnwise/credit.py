"""Who deserves what: scored groups in, one explained advantage per turn out.

What a turn is paid (`turn_rewards`), in this order:

1. the reward function's step outputs; a turn without one gets `default_step_reward`;
2. without any step outputs, `default_step_reward` for every turn but the last, which gets the episode's score;
3. minus `invalid_action_penalty` where the action was invalid. The episode's score is lowered by the same amount.

Failed, cancelled and unscored episodes take no part in any mean, and each of their turns gets the advantage None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from turnwise import advantages as estimators
from turnwise.columns import CodeArray, Float64Array, first_rows, number_ids
from turnwise.config import CreditConfig
from turnwise.errors import CreditError
from turnwise.state_keys import (
    StateHasher,
    StateKey,
    build_state_hasher,
    hash_state_key,
    number_states,
)
from turnwise.types import Advantages, Episode, Group, Score, StopReason, TurnCredit

_logger = logging.getLogger("turnwise.credit")


def assign_advantages(
    groups: Sequence[Group],
    scores: Mapping[str, Score],
    config: CreditConfig,
    values: Mapping[str, Sequence[float]] | None = None,
    *,
    hasher: StateHasher | None = None,
) -> Advantages:
    """One credit per turn of every episode, with the reasons; `hasher` overrides `config.state_key`.

    `values` (by episode id, one per turn) are read by gae only. Without them, a turn's value is what the other episodes of
    its group got from the same state on, or else from the same turn on.
    """
    table = _tabulate(groups, scores, config, hasher)
    if values is not None and config.estimator != "gae":
        raise CreditError(
            f"values were given but {config.estimator} does not read them; use gae or leave them out"
        )
    credits = _ESTIMATORS[config.estimator](table, config, values)
    by_episode: dict[str, list[TurnCredit]] = {}
    for credit in credits:
        by_episode.setdefault(credit.episode_id, []).append(credit)
    turns = {
        episode.episode_id: tuple(by_episode.get(episode.episode_id) or _left_out(episode))
        for group in groups
        for episode in group.episodes
    }
    result = Advantages(estimator=config.estimator, turns=turns, metrics=_measure(groups, table, turns))
    _log(table, result)
    return result


def turn_rewards(episode: Episode, score: Score, config: CreditConfig) -> tuple[float, ...]:
    """What each turn is paid, penalties included, before any discounting."""
    if score.score is None:
        raise CreditError(f"episode {episode.episode_id} has no score; it takes no part in credit")
    paid: list[float]
    if any(reward is not None for reward in score.step_rewards):
        if len(score.step_rewards) != episode.num_turns:
            raise CreditError(
                f"reward {score.reward_name} gave {len(score.step_rewards)} step rewards to episode {episode.episode_id} "
                f"of {episode.num_turns} turns; one per turn is needed"
            )
        paid = [config.default_step_reward if reward is None else reward for reward in score.step_rewards]
    else:
        paid = [config.default_step_reward] * (episode.num_turns - 1) + [score.score]
    return tuple(
        reward - (0.0 if turn.is_action_valid else config.invalid_action_penalty)
        for reward, turn in zip(paid, episode.turns, strict=True)
    )


class _Table(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The turns that take part, as columns."""

    episodes: tuple[Episode, ...]
    group_ids: list[str]
    """From here on one entry per turn."""
    episode_ids: list[str]
    turn_indices: list[int]
    rewards: list[float]
    state_keys: list[StateKey]
    """Empty when the estimator does not compare states."""
    scores: dict[str, float]
    """By episode id, penalties taken off."""
    groups: dict[str, str]
    """Group id by episode id."""


def _tabulate(
    groups: Sequence[Group], scores: Mapping[str, Score], config: CreditConfig, hasher: StateHasher | None
) -> _Table:
    if hasher is None and config.state_key is not None:
        hasher = build_state_hasher(config.state_key)
    table = _Table(
        episodes=tuple(
            episode for group in groups for episode in group.episodes if _takes_part(episode, scores)
        ),
        group_ids=[], episode_ids=[], turn_indices=[], rewards=[], state_keys=[], scores={}, groups={},
    )  # fmt: skip
    for episode in table.episodes:
        name = episode.episode_id
        if name in table.scores:
            raise CreditError(f"episode id {name} occurs twice; ids must be unique over the batch")
        score = scores[name]
        assert score.score is not None
        num_invalid = sum(not turn.is_action_valid for turn in episode.turns)
        table.scores[name] = score.score - config.invalid_action_penalty * num_invalid
        table.groups[name] = episode.group_id
        table.rewards.extend(turn_rewards(episode, score, config))
        table.group_ids.extend([episode.group_id] * episode.num_turns)
        table.episode_ids.extend([name] * episode.num_turns)
        table.turn_indices.extend(range(episode.num_turns))
        if hasher is not None:
            table.state_keys.extend(hasher(episode, index) for index in range(episode.num_turns))
    return table


def _takes_part(episode: Episode, scores: Mapping[str, Score]) -> bool:
    if episode.stop_reason in (StopReason.FAILED, StopReason.CANCELLED) or not episode.turns:
        return False
    if episode.episode_id not in scores:
        raise CreditError(
            f"episode {episode.episode_id} has no score; score every episode, with the score None when it cannot be judged"
        )
    return scores[episode.episode_id].score is not None


def _left_out(episode: Episode) -> list[TurnCredit]:
    return [
        TurnCredit(
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            turn_index=turn.turn_index,
            advantage=None,
        )
        for turn in episode.turns
    ]


def _credit_rloo(table: _Table, config: CreditConfig, values: object) -> list[TurnCredit]:
    names = list(table.scores)
    column = estimators.rloo(
        [table.groups[name] for name in names], [table.scores[name] for name in names],
        normalize=bool(config.normalize), singleton="zero",
    )  # fmt: skip
    return _share_out(table, dict(zip(names, column.tolist(), strict=True)))


def _credit_grpo(table: _Table, config: CreditConfig, values: object) -> list[TurnCredit]:
    names = list(table.scores)
    assert config.scale is not None
    column = estimators.grpo(
        [table.groups[name] for name in names], [table.scores[name] for name in names],
        scale=config.scale, singleton="zero",
    )  # fmt: skip
    return _share_out(table, dict(zip(names, column.tolist(), strict=True)))


def _share_out(table: _Table, by_episode: Mapping[str, float]) -> list[TurnCredit]:
    """Every turn of an episode gets the episode's advantage."""
    rows = zip(table.episode_ids, table.turn_indices, table.rewards, strict=True)
    return [
        TurnCredit(
            episode_id=name, group_id=table.groups[name], turn_index=turn_index, step_reward=reward,
            advantage=by_episode[name], episode_advantage=by_episode[name],
        )
        for name, turn_index, reward in rows
    ]  # fmt: skip


def _credit_gigpo(table: _Table, config: CreditConfig, values: object) -> list[TurnCredit]:
    assert config.gamma is not None
    assert config.omega is not None
    assert config.step_norm is not None
    assert config.episode_stats is not None
    assert config.combine is not None
    found = estimators.gigpo(
        table.group_ids, table.episode_ids, table.state_keys, table.rewards, scores=table.scores,
        gamma=config.gamma, omega=config.omega, normalize=config.step_norm, episode_stats=config.episode_stats,
        combine=config.combine, similarity=config.similarity, singleton="zero",
    )  # fmt: skip
    first = first_rows(found.step_groups, int(found.step_groups.max(initial=-1)) + 1)
    sizes = np.bincount(found.step_groups)
    # Similar texts are compared under the key of the first of them.
    anchors = [hash_state_key(table.state_keys[row]) for row in first.tolist()]
    return [
        TurnCredit(
            episode_id=table.episode_ids[row], group_id=table.group_ids[row], turn_index=table.turn_indices[row], step_reward=table.rewards[row],
            step_return=float(found.step_returns[row]), episode_advantage=float(found.episode_advantages[row]),
            step_advantage=float(found.step_advantages[row]), advantage=float(found.advantages[row]),
            anchor=anchors[label], anchor_size=int(sizes[label]),
        )
        for row, label in enumerate(found.step_groups.tolist())
    ]  # fmt: skip


def _credit_reinforce_plus_plus(table: _Table, config: CreditConfig, values: object) -> list[TurnCredit]:
    assert config.gamma is not None
    returns = estimators.step_returns(table.episode_ids, table.rewards, gamma=config.gamma)
    column = estimators.reinforce_plus_plus(table.episode_ids, table.rewards, gamma=config.gamma)
    return _by_turn(table, returns, column)


def _credit_gae(
    table: _Table, config: CreditConfig, values: Mapping[str, Sequence[float]] | None
) -> list[TurnCredit]:
    assert config.gamma is not None
    assert config.lam is not None
    returns = estimators.step_returns(table.episode_ids, table.rewards, gamma=config.gamma)
    column = _values_of_siblings(table, returns) if values is None else _read_values(table, values)
    # One row per episode, padded on the right.
    episode_of, _ = number_ids(table.episode_ids)
    turn_of = np.array(table.turn_indices, dtype=np.int64)
    shape = (len(table.episodes), int(turn_of.max(initial=-1)) + 1)
    rewards_BT, values_BT, mask_BT = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool)
    rewards_BT[episode_of, turn_of] = table.rewards
    values_BT[episode_of, turn_of] = column
    mask_BT[episode_of, turn_of] = True
    advantages_BT = estimators.gae(rewards_BT, values_BT, mask_BT, gamma=config.gamma, lam=config.lam)
    if config.normalize:
        advantages_BT = estimators.whiten(advantages_BT, mask_BT)
    return _by_turn(table, returns, advantages_BT[episode_of, turn_of])


def _by_turn(table: _Table, returns: Float64Array, column: Float64Array) -> list[TurnCredit]:
    rows = zip(
        table.episode_ids, table.turn_indices, table.rewards, returns.tolist(), column.tolist(), strict=True
    )
    return [
        TurnCredit(
            episode_id=name, group_id=table.groups[name], turn_index=turn_index, step_reward=reward, step_return=step_return, advantage=advantage
        )
        for name, turn_index, reward, step_return, advantage in rows
    ]  # fmt: skip


_ESTIMATORS = {
    "rloo": _credit_rloo,
    "grpo": _credit_grpo,
    "gigpo": _credit_gigpo,
    "reinforce_plus_plus": _credit_reinforce_plus_plus,
    "gae": _credit_gae,
}


def _read_values(table: _Table, values: Mapping[str, Sequence[float]]) -> Float64Array:
    column: list[float] = []
    for episode in table.episodes:
        given = values.get(episode.episode_id)
        if given is None or len(given) != episode.num_turns:
            raise CreditError(
                f"episode {episode.episode_id} has {episode.num_turns} turns but "
                f"{'no' if given is None else len(given)} values; gae needs one per turn"
            )
        column.extend(given)
    return np.array(column, dtype=np.float64)


def _values_of_siblings(table: _Table, returns: Float64Array) -> Float64Array:
    """What other episodes of the group got from the same state on, else from the same turn on, else 0."""
    group_of, _ = number_ids(table.group_ids)
    episode_of, _ = number_ids(table.episode_ids)
    same_state = number_states(group_of, table.state_keys, None)
    same_turn, _ = number_ids(list(zip(table.group_ids, table.turn_indices, strict=True)))
    by_turn, has_turn = _mean_of_others(same_turn, episode_of, returns)
    by_state, has_state = _mean_of_others(same_state, episode_of, returns)
    return np.where(has_state, by_state, np.where(has_turn, by_turn, 0.0))


def _mean_of_others(
    codes: CodeArray, episode_of: CodeArray, returns: Float64Array
) -> tuple[Float64Array, CodeArray]:
    """Per row the mean return of the rows with its code in other episodes, and how many there are."""
    own, _ = number_ids(list(zip(codes.tolist(), episode_of.tolist(), strict=True)))
    count = np.bincount(codes)[codes] - np.bincount(own)[own]
    total = np.bincount(codes, weights=returns)[codes] - np.bincount(own, weights=returns)[own]
    return total / np.maximum(count, 1), count


def _measure(
    groups: Sequence[Group], table: _Table, turns: Mapping[str, tuple[TurnCredit, ...]]
) -> dict[str, float]:
    given = np.array(
        [credit.advantage for row in turns.values() for credit in row if credit.advantage is not None]
    )
    silent = sum(is_without_signal(group, turns) for group in groups)
    num_episodes = sum(len(group.episodes) for group in groups)
    metrics = {
        "credit/episodes_left_out": float(num_episodes - len(table.episodes)),
        "credit/groups_without_signal": silent / len(groups) if groups else 0.0,
        "credit/advantage_mean": float(given.mean()) if len(given) else 0.0,
        "credit/advantage_std": float(given.std()) if len(given) else 0.0,
    }
    sizes = [credit.anchor_size for row in turns.values() for credit in row if credit.anchor_size is not None]
    if sizes:
        metrics["credit/singleton_anchors"] = sum(size == 1 for size in sizes) / len(sizes)
    return metrics


def is_without_signal(group: Group, turns: Mapping[str, tuple[TurnCredit, ...]]) -> bool:
    """True when no turn of the group has an advantage other than 0."""
    return not any(credit.advantage for episode in group.episodes for credit in turns[episode.episode_id])


def _log(table: _Table, result: Advantages) -> None:
    if table.episodes and result.metrics["credit/groups_without_signal"] == 1.0:
        _logger.warning(
            "%s gives no signal: the episodes of each group have equal rewards, so every advantage is 0",
            result.estimator,
        )
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for row in result.turns.values():
        for credit in row:
            _logger.debug("%s", describe_credit(credit))


def describe_credit(credit: TurnCredit) -> str:
    """One line with every quantity that was computed: A_E, anchor, G_k, A_S and the advantage."""
    named = {
        "r": credit.step_reward, "G_k": credit.step_return, "A_E": credit.episode_advantage,
        "A_S": credit.step_advantage, "A": credit.advantage,
    }  # fmt: skip
    parts = [f"{name}={value:+.4f}" for name, value in named.items() if value is not None]
    if credit.anchor is not None:
        parts.insert(-1, f"anchor={credit.anchor} of {credit.anchor_size}")
    if credit.advantage is None:
        parts.append("takes no part")
    return f"episode {credit.episode_id} turn {credit.turn_index}: {' '.join(parts)}"
