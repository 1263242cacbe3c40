"""The whole way from an episode to an update, stage by stage: rollout → sandboxed reward → align → GiGPO → PPO.

    python examples/gigpo_ppo_training.py [--iterations 16] [--seed 0] [--json]

A tiny language model learns to cross small frozen lakes on a CPU. The first iteration shows the data that each stage hands to the next; the
last line says how often the agent reaches the goal on maps it never trained on, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from turnwise import (
    AgentPolicy,
    RLRolloutWorker,
    StepData,
    TaskDefinition,
    align_rewards,
    assign_advantages,
    build_rewards,
)
from turnwise.config import (
    CreditConfig,
    EnvironmentConfig,
    LossConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    TrainingConfig,
)
from turnwise.credit import describe_credit
from turnwise.fingerprint import fingerprint
from turnwise.learner import Learner
from turnwise.models.loading import load_model
from turnwise.objective import describe_objective
from turnwise.rewards.arguments import pointwise_arguments
from turnwise.rewards.score import Rewards
from turnwise.rewards.steps import with_credit
from turnwise.samples import build_samples
from turnwise.types import Advantages, Group, Score
from turnwise.worker import score_of_steps

REWARD = Path(__file__).parent / "frozenlake_reward.py"
TASKS_PER_ITERATION, GROUP_SIZE = 12, 8
LAKE = EnvironmentConfig(
    name="frozenlake", params={"size": 3, "ice": 1.0, "min_distance": 1, "max_distance": 2}
)
ROLLOUT = RolloutConfig(max_turns=3, max_new_tokens=24, schedule="eager")
# An invalid action costs more than any wrong move.
CREDIT = CreditConfig(estimator="gigpo", gamma=0.95, omega=1.0, invalid_action_penalty=0.3)
# Episodes that fail are longer; counted per token they would push down all that every answer has in common.
LOSS = LossConfig(name="ppo", aggregate="episode")


async def collect(
    agent: AgentPolicy, iteration: int, seed: int
) -> tuple[list[RLRolloutWorker], list[list[StepData]]]:
    """Stage 1: one worker per task; its episodes start from the same state, so GiGPO can compare them."""
    first = (1000 * seed + iteration) * TASKS_PER_ITERATION
    workers = [
        RLRolloutWorker(
            TaskDefinition(environment=LAKE, task_index=first + number, rollout=ROLLOUT),
            agent, seed=seed, name=f"i{iteration:03d}-t{number:02d}",
        )
        for number in range(TASKS_PER_ITERATION)
    ]  # fmt: skip
    groups = await asyncio.gather(*(worker.run_group(GROUP_SIZE) for worker in workers))
    return workers, [steps for group in groups for steps, _messages, _ground_truth in group]


async def evaluate_steps(
    rewards: Rewards, workers: list[RLRolloutWorker], batch: list[list[StepData]]
) -> list[list[StepData]]:
    """Stages 2 and 3: the user's function judges the messages in the sandbox, and the aligner puts its verdict on the steps."""
    (term,) = rewards.terms
    episodes = {episode.episode_id: episode for worker in workers for episode in worker.episodes}
    played = [steps for steps in batch if steps and episodes[steps[0].episode_id].failure is None]
    calls = [
        pointwise_arguments(episodes[steps[0].episode_id], term.evaluator.declaration, term.params)
        for steps in played
    ]
    outcomes = await term.evaluator.evaluate(calls)
    aligned = []
    for steps, outcome in zip(played, outcomes, strict=True):
        if outcome.error is None:
            (result,) = outcome.results
            aligned.append(list(align_rewards(steps, result, function=term.name)))
    return aligned


def credit_steps(
    groups: list[Group], aligned: list[list[StepData]]
) -> tuple[Advantages, list[list[StepData]]]:
    """Stage 4: GiGPO compares episodes of a group, and moves made in the same state."""
    scores = {
        episode.episode_id: Score(episode_id=episode.episode_id, reward_name="reward", score=None)
        for group in groups
        for episode in group.episodes
    }
    scores.update({steps[0].episode_id: score_of_steps(steps) for steps in aligned})
    advantages = assign_advantages(groups, scores, CREDIT)
    return advantages, [list(with_credit(steps, advantages.turns[steps[0].episode_id])) for steps in aligned]


async def deliver(learner: Learner, agent: AgentPolicy, version: int) -> None:
    """Give the sampler the learner's weights; both sides must then hold the same."""
    received = await agent.policy.load_weights(learner.weights(), version)
    assert received == fingerprint(learner.weights())


async def measure_success(agent: AgentPolicy, num_tasks: int) -> float:
    """Share of held-out maps on which the greedy agent reaches the goal."""
    greedy = ROLLOUT.model_copy(update={"temperature": 0.0})
    workers = [
        RLRolloutWorker(
            TaskDefinition(environment=LAKE, task_index=number, split="eval", rollout=greedy),
            agent, name=f"eval-{number}",
        )
        for number in range(num_tasks)
    ]  # fmt: skip
    await asyncio.gather(*(worker.run_episode() for worker in workers))
    return sum(worker.episodes[0].metrics.get("success", 0.0) for worker in workers) / num_tasks


def show(title: str, *lines: object) -> None:
    print(f"\n── {title} " + "─" * (90 - len(title)))
    for line in lines:
        print(f"   {line}")


def show_stages(
    batch: list[list[StepData]],
    aligned: list[list[StepData]],
    credited: list[list[StepData]],
    advantages: Advantages,
) -> None:
    """One episode of the first batch on its way through the stages."""
    steps = max(credited, key=lambda found: (found[0].score or 0.0, -len(found)))
    name = steps[0].episode_id
    raw = next(found for found in batch if found and found[0].episode_id == name)
    judged = next(found for found in aligned if found[0].episode_id == name)
    show("1  rollout: StepData", f"episode {name}, {len(raw)} steps")
    for step in raw:
        print(f"   {step.step_index}: {step.observation.text}  →  {step.text}")
        print(
            f"      log-probs {[round(logprob, 2) for logprob in step.policy_logprobs]}, tokens {step.span.completion_start}–{step.span.completion_end}"
        )
    show(
        "2  sandboxed reward, 3 aligned",
        f"score {judged[0].score} on every step, base rewards {[round(step.base_reward or 0, 3) for step in judged]}",
    )
    show("4  GiGPO", *(describe_credit(credit) for credit in advantages.turns[name]))


async def train(iterations: int, seed: int, eval_tasks: int) -> dict[str, Any]:
    """Run it all; returns the figures of each iteration."""
    agent = AgentPolicy.from_model("tiny", schedule="eager")
    training = TrainingConfig(
        num_steps=iterations, learning_rate=1e-3, num_epochs=2, num_minibatches=2, seed=seed
    )
    learner = Learner(load_model(ModelConfig(path="tiny")).network, loss=LOSS, training=training)
    figures: list[dict[str, float]] = []
    started = time.monotonic()
    print(describe_objective(LOSS, CREDIT))
    with build_rewards(
        RewardsConfig.model_validate({"functions": [{"name": f"{REWARD}:nearer_to_goal"}]})
    ) as rewards:
        print(f"reward {rewards.name} runs in the sandbox tier: {rewards.terms[0].evaluator.tier}")
        await deliver(learner, agent, version=0)
        before = await measure_success(agent, eval_tasks)
        for iteration in range(iterations):
            workers, batch = await collect(agent, iteration, seed)
            aligned = await evaluate_steps(rewards, workers, batch)
            groups = [worker.group() for worker in workers]
            advantages, credited = credit_steps(groups, aligned)
            update = learner.update(
                build_samples(groups, advantages, tokens_per_pack=training.tokens_per_pack)
            )
            await deliver(learner, agent, version=iteration + 1)
            if iteration == 0:
                show_stages(batch, aligned, credited, advantages)
                show(
                    "5  PPO update",
                    f"{update.num_optimizer_steps} optimizer steps on {update.metrics['trained_tokens']:.0f} action tokens",
                    {name: round(value, 4) for name, value in update.metrics.items()},
                )
                print()
            figures.append(describe_iteration(aligned, advantages, update.metrics))
            print(
                f"iteration {iteration + 1:2d}/{iterations}  "
                + "  ".join(f"{name} {value:.3f}" for name, value in figures[-1].items())
            )
        after = await measure_success(agent, eval_tasks)
    await agent.close()
    return {"before": before, "after": after, "seconds": time.monotonic() - started, "iterations": figures}


def describe_iteration(
    aligned: list[list[StepData]], advantages: Advantages, update: Any
) -> dict[str, float]:
    return {
        "success": sum(steps[0].score or 0.0 for steps in aligned) / max(1, len(aligned)),
        "turns": sum(len(steps) for steps in aligned) / max(1, len(aligned)),
        "no_signal": advantages.metrics["credit/groups_without_signal"],
        "singletons": advantages.metrics.get("credit/singleton_anchors", 0.0),
        "loss": update["loss"],
        "grad_norm": update["grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-tasks", type=int, default=160, help="held-out maps before and after")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    result = asyncio.run(train(arguments.iterations, arguments.seed, arguments.eval_tasks))
    print(
        f"\nsuccess on {arguments.eval_tasks} new maps: {result['before']:.2f} before, {result['after']:.2f} after; {result['seconds']:.0f} s"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
