"""Episodes one at a time, as lists of steps: `RLRolloutWorker` is a thin view on the rollout machinery.

    worker = RLRolloutWorker(TaskDefinition(environment="frozenlake"), AgentPolicy.from_model("tiny"))
    steps, messages, ground_truth = await worker.run_episode()

Every call starts from the same task and seed, so the episodes of one worker form a group that GiGPO can compare.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from turnwise.config import EnvironmentConfig, ModelConfig, RolloutConfig
from turnwise.environment import EnvironmentSpec, Split
from turnwise.environments import build_environment
from turnwise.errors import ConfigError
from turnwise.masking import ActionTokenMasker, TokenBytes
from turnwise.policy import Policy, Request
from turnwise.renderer import Renderer
from turnwise.rewards.arguments import plain_messages
from turnwise.rewards.steps import StepData, steps_of_episode, write_steps
from turnwise.rollout import Agent, Rollouts, collect_groups, episode_seed, run_episode
from turnwise.streams import Conversation
from turnwise.types import Action, Completion, Episode, Group, Json, Message, SamplingParams, Score, Task

if TYPE_CHECKING:
    from turnwise.policies.endpoint import Api

log = logging.getLogger("turnwise.worker")


class TaskDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker plays: an environment, one of its tasks, and how."""

    environment: EnvironmentSpec | EnvironmentConfig | str
    """An environment's name, its config section, or the object itself."""
    task: Task | None = None
    """None takes task `task_index` of the environment's `split`."""
    task_index: int = 0
    split: Split = "train"
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    environment_timeout_s: float = 60.0

    def build(self) -> tuple[EnvironmentSpec, Task]:
        """The environment and the task these values stand for."""
        environment = self.environment
        if isinstance(environment, str):
            environment = EnvironmentConfig(name=environment)
        if isinstance(environment, EnvironmentConfig):
            environment = build_environment(environment)
        return environment, self.task or environment.tasks.task(self.task_index, self.split)


class AgentPolicy:
    """A policy with the tokenizer it speaks through: messages in, an action with its log-probabilities out."""

    def __init__(self, policy: Policy, tokenizer: Any, *, image_processor: Any = None) -> None:
        # Tokenizers and image processors are Hugging Face objects, which share no static types.
        self.policy = policy
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._token_bytes = TokenBytes(tokenizer)

    @classmethod
    def from_model(cls, model: str | ModelConfig = "tiny", *, schedule: str = "lockstep") -> AgentPolicy:
        """A model that is loaded into this process: a name that ships with turnwise, or a folder."""
        from turnwise.models.loading import load_model
        from turnwise.policies.local import LocalPolicy

        if schedule not in ("lockstep", "eager"):
            raise ConfigError(f"schedule is {schedule!r}; use lockstep or eager")
        loaded = load_model(ModelConfig(path=model) if isinstance(model, str) else model)
        policy = LocalPolicy(
            loaded.network,
            loaded.tokenizer,
            image_processor=loaded.image_processor,
            schedule="lockstep" if schedule == "lockstep" else "eager",
        )
        return cls(policy, loaded.tokenizer, image_processor=loaded.image_processor)

    @classmethod
    def from_endpoint(
        cls, base_url: str, model: str, tokenizer: str | Any, *, api: Api = "auto", api_key: str | None = None
    ) -> AgentPolicy:
        """A model behind an OpenAI-compatible server, which speaks through the same tokenizer (an object or its folder).

        A server that takes and returns token ids (vLLM) gives exact log-probabilities. One that only speaks text can be used to collect
        and evaluate; its episodes are marked not token-exact, and the learner refuses them.
        """
        from turnwise.policies.endpoint import EndpointPolicy

        if isinstance(tokenizer, str):
            import transformers

            from turnwise.models.loading import find_model

            tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(tokenizer))
        return cls(EndpointPolicy(base_url, model, tokenizer, api=api, api_key=api_key), tokenizer)

    def make_agent(self, config: RolloutConfig) -> Agent:
        """What rollouts need of it."""
        return Agent(
            policy=self.policy,
            renderer=Renderer(self.tokenizer, image_processor=self.image_processor, history=config.history),
            masker=ActionTokenMasker(
                self._token_bytes,
                min_action_tokens=config.min_action_tokens,
                max_action_tokens=config.max_action_tokens,
            ),
        )

    async def get_action(
        self, messages: Sequence[Message], *, sampling: SamplingParams | None = None, seed: int = 0
    ) -> tuple[Action, Completion]:
        """Answer one conversation, outside any episode."""
        agent = self.make_agent(RolloutConfig())
        conversation = Conversation(agent.renderer)
        conversation.observe(tuple(messages))
        name = f"action-{seed}"
        request = Request(
            stream_id=name,
            group_id=name,
            prompt_ids=conversation.prompt_ids,
            images=conversation.images,
            messages=tuple(messages),
            sampling=sampling or SamplingParams(),
            seed=(seed, episode_seed(name), 0),
        )
        try:
            completion = await self.policy.complete(request)
        finally:
            await self.policy.release(name)
        return agent.masker.mask(completion.completion_ids).action, completion

    async def close(self) -> None:
        await self.policy.close()


class RLRolloutWorker:
    """Plays one task over and over and hands each episode out as steps, messages and ground truth."""

    def __init__(
        self,
        task_definition: TaskDefinition,
        agent_policy: AgentPolicy,
        *,
        seed: int = 0,
        name: str = "worker",
        save_to: Path | str | None = None,
        save_every: int = 1,
        save_when: Callable[[Episode], bool] | None = None,
    ) -> None:
        """Episode ids start with `name`. Every `save_every`-th episode, and each that `save_when` accepts, goes to `save_to`."""
        if save_every < 0:
            raise ConfigError(f"save_every is {save_every}; use 0 for never or a positive number")
        self.environment, self.task = task_definition.build()
        self.name = name
        self.episodes: list[Episode] = []
        self._save_to = None if save_to is None else Path(save_to)
        self._save_every = save_every
        self._save_when = save_when
        self._rollouts = Rollouts(
            agent=agent_policy.make_agent(task_definition.rollout),
            environment=self.environment,
            config=task_definition.rollout,
            seed=seed,
            environment_timeout_s=task_definition.environment_timeout_s,
        )

    async def run_episode(self) -> tuple[list[StepData], list[dict[str, Json]], Json]:
        """Play the task once: its steps, the messages as a reward function reads them, and the ground truth."""
        episode_id = f"{self.name}-e{len(self.episodes):04d}"
        episode = await run_episode(self._rollouts, self.task, episode_id=episode_id, group_id=self.name)
        return self._hand_out(episode), plain_messages(episode), episode.task.ground_truth

    async def run_group(self, num_episodes: int) -> list[tuple[list[StepData], list[dict[str, Json]], Json]]:
        """Play the task `num_episodes` times at once."""
        config = self._rollouts.config.model_copy(update={"group_size": num_episodes})
        rollouts = msgspec.structs.replace(self._rollouts, config=config)
        label = f"{self.name}-b{len(self.episodes):04d}"
        (group,) = await collect_groups([self.task], rollouts, label=label)
        # All of a worker's episodes start alike, whatever call they come from.
        episodes = [msgspec.structs.replace(episode, group_id=self.name) for episode in group.episodes]
        return [
            (self._hand_out(episode), plain_messages(episode), episode.task.ground_truth)
            for episode in episodes
        ]

    def group(self) -> Group:
        """The episodes so far, as the group that estimators and samples read."""
        return Group(group_id=self.name, task=self.task, episodes=tuple(self.episodes))

    def _hand_out(self, episode: Episode) -> list[StepData]:
        steps = list(steps_of_episode(episode))
        self._log(episode, steps)
        number = len(self.episodes)
        self.episodes.append(episode)
        is_due = self._save_every > 0 and number % self._save_every == 0
        if self._save_to is not None and (
            is_due or (self._save_when is not None and self._save_when(episode))
        ):
            self._save_to.mkdir(parents=True, exist_ok=True)
            write_steps(self._save_to / f"{episode.episode_id}.steps.jsonl", steps)
        return steps

    def _log(self, episode: Episode, steps: Sequence[StepData]) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for step in steps:
                log.debug("%s", describe_step(step))
        log.info(
            "episode %s: %d steps, stopped by %s, environment reward %+.3f%s",
            episode.episode_id, len(steps), episode.stop_reason, episode.final_reward,
            f", failed in {episode.failure.stage}: {episode.failure.error}" if episode.failure else "",
        )  # fmt: skip


def describe_step(step: StepData) -> str:
    """One line with everything known about a step: what was seen, said, done, and how likely it was."""
    logprobs = np.array(step.policy_logprobs)
    likely = f"sum {logprobs.sum():.3f}, least {logprobs.min():.3f}" if len(logprobs) else "no tokens"
    value = "none" if step.policy_value_estimate is None else f"{step.policy_value_estimate:+.3f}"
    return (
        f"episode {step.episode_id} step {step.step_index}: observation {step.observation.text!r}, "
        f"{len(step.observation.images)} images; answer {step.text!r}; action {step.action.value}; "
        f"log-probs of {len(logprobs)} tokens: {likely}; value {value}; reward {step.environment_reward:+.3f}; "
        f"{'done' if step.is_done else 'goes on'}"
    )


def score_of_steps(steps: Sequence[StepData], reward_name: str = "reward") -> Score:
    """What aligned steps say about their episode, for `assign_advantages`."""
    if not steps:
        raise ConfigError("an episode without steps has no score; leave it out, or give it Score(score=None)")
    step_rewards = tuple(step.base_reward for step in steps)
    return Score(
        episode_id=steps[0].episode_id,
        reward_name=reward_name,
        score=steps[0].score,
        step_rewards=step_rewards if any(reward is not None for reward in step_rewards) else (),
    )
