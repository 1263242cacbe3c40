"""Small episodes with exact log-probs, and the plain per-turn computation that the learner must agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.types import (
    Action,
    Advantages,
    Episode,
    FinishReason,
    Group,
    KeptSets,
    MaskingMethod,
    Observation,
    SamplingParams,
    StopReason,
    Task,
    TokenStream,
    Turn,
    TurnCredit,
)

VOCABULARY = 97


def tiny_network(
    seed: int = 0, *, num_layers: int = 2, dtype: torch.dtype = torch.float32, tie: bool = True
) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=tie, attn_implementation="sdpa",
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype)


def make_stream(
    pieces: Sequence[tuple[Sequence[int], bool]],
    *,
    kept: KeptSets | None = None,
    banned_ids: Sequence[int] = (),
    images: tuple = (),
) -> TokenStream:
    """A stream from (ids, was it sampled) pieces; log-probs are filled in by `with_logprobs`."""
    ids = np.concatenate([np.asarray(piece, dtype=np.int32) for piece, _ in pieces])
    is_sampled = np.concatenate([np.full(len(piece), sampled) for piece, sampled in pieces])
    return TokenStream(
        ids=ids, is_sampled=is_sampled, logprobs=np.zeros(len(ids), dtype=np.float32), kept=kept,
        banned_ids=np.asarray(banned_ids, dtype=np.int32), images=images,
    )  # fmt: skip


def spans(stream: TokenStream) -> list[tuple[int, int]]:
    """(start, end) of each sampled run."""
    edges = np.flatnonzero(np.diff(stream.is_sampled.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


def make_episode(
    episode_id: str,
    streams: Sequence[TokenStream],
    *,
    group_id: str = "g0",
    masks: Sequence[np.ndarray] | None = None,
    temperature: float = 1.0,
    **fields: object,
) -> Episode:
    """An episode whose turns are the sampled runs of its streams, in order."""
    turns: list[Turn] = []
    for stream in streams:
        for start, end in spans(stream):
            mask = np.ones(end - start, dtype=bool) if masks is None else masks[len(turns)]
            turns.append(
                Turn(
                    turn_index=len(turns), stream=stream, prompt_start=0, completion_start=start, completion_end=end,
                    observation=Observation(messages=()), action=Action(value={}), text="", action_token_mask=mask,
                    masking_method=MaskingMethod.BRACE_DEPTH, masking_confidence=1.0, finish_reason=FinishReason.END,
                    policy_version=0,
                )
            )  # fmt: skip
    return Episode(
        episode_id=episode_id, group_id=group_id, task=Task(task_id=group_id), turns=tuple(turns), streams=tuple(streams),
        stop_reason=StopReason.TERMINAL, sampling=SamplingParams(temperature=temperature, max_new_tokens=16), **fields,
    )  # fmt: skip


def make_groups(episodes: Sequence[Episode]) -> list[Group]:
    names = dict.fromkeys(episode.group_id for episode in episodes)
    return [
        Group(
            group_id=name, task=Task(task_id=name),
            episodes=tuple(episode for episode in episodes if episode.group_id == name),
        )
        for name in names
    ]  # fmt: skip


def make_advantages(episodes: Sequence[Episode], values: Sequence[Sequence[float | None]]) -> Advantages:
    return Advantages(
        estimator="test",
        turns={
            episode.episode_id: tuple(
                TurnCredit(episode_id=episode.episode_id, turn_index=index, advantage=value)
                for index, value in enumerate(row)
            )
            for episode, row in zip(episodes, values, strict=True)
        },
    )


def random_advantages(episodes: Sequence[Episode], seed: int = 0) -> Advantages:
    rng = np.random.default_rng(seed)
    return make_advantages(episodes, [rng.normal(size=len(episode.turns)).tolist() for episode in episodes])


def turn_logprobs(
    network: nn.Module, turn: Turn, temperature: float, forward: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Seed 003's way: one forward pass per turn over its whole context; log-probs and entropies of its tokens."""
    stream = turn.stream
    ids = torch.from_numpy(stream.ids[: turn.completion_end].astype(np.int64))[None]
    if forward is None:
        logits_TV = network(input_ids=ids, use_cache=False).logits[0]
    else:
        logits_TV = forward(ids, stream)
    logits_TV = logits_TV[turn.completion_start - 1 : turn.completion_end - 1] / temperature
    allowed_TV = torch.ones_like(logits_TV, dtype=torch.bool)
    allowed_TV[:, torch.from_numpy(stream.banned_ids.astype(np.int64))] = False
    if stream.kept is not None:
        first = int(stream.is_sampled[: turn.completion_start].sum())
        for row in range(len(turn.generated_ids)):
            kept = stream.kept.row(first + row)
            if len(kept):
                allowed_TV[row] = False
                allowed_TV[row, torch.from_numpy(kept.astype(np.int64))] = True
    logprobs_TV = torch.log_softmax(logits_TV.masked_fill(~allowed_TV, -torch.inf), dim=-1)
    probs_TV = logprobs_TV.exp()
    entropies_T = -(probs_TV * logprobs_TV.masked_fill(~allowed_TV, 0.0)).sum(-1)
    targets_T = torch.from_numpy(turn.generated_ids.astype(np.int64))
    return logprobs_TV.gather(1, targets_T[:, None])[:, 0], entropies_T


def with_logprobs(
    network: nn.Module,
    episodes: Sequence[Episode],
    noise: float = 0.0,
    forward: Callable[..., Tensor] | None = None,
) -> list[Episode]:
    """Fill in the log-probs that the network gives, off by `noise`."""
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for episode in episodes:
            for turn in episode.turns:
                found_T, _ = turn_logprobs(network, turn, episode.sampling.temperature, forward)
                shift_T = noise * rng.normal(size=len(found_T))
                values_T = np.minimum(found_T.float().numpy() + shift_T, 0.0)
                turn.stream.logprobs[turn.completion_start : turn.completion_end] = values_T
    return list(episodes)


def gradients(network: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.grad.detach().clone()
        for name, tensor in network.named_parameters()
        if tensor.grad is not None
    }


def relative_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """‖first - second‖ / ‖second‖ over all tensors of both."""
    assert first.keys() == second.keys()
    gap = sum(float((first[name] - second[name]).double().square().sum()) for name in second)
    size = sum(float(second[name].double().square().sum()) for name in second)
    return (gap / size) ** 0.5
