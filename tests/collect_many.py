"""Collects many episodes and prints the memory in use after the first half and at the end: `collect_many.py FOLDER NUMBER`."""

import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from conftest import CountingGame
from turnwise import EpisodeBatchCollector, EpisodeSimulator
from turnwise.config import ModelConfig
from turnwise.models.loading import load_model
from turnwise.policies.scripted import ScriptedPolicy


def main(folder: str, number: int) -> None:
    tokenizer = load_model(ModelConfig(path="tiny")).tokenizer
    policy = ScriptedPolicy(tokenizer, lambda messages: 'one more {"add": 1}')
    simulator = EpisodeSimulator(policy, tokenizer, min_action_tokens=1)
    collector = EpisodeBatchCollector(simulator, CountingGame, folder, max_concurrent=50)
    collector.collect_batch(num_episodes=100)
    tracemalloc.start()
    sizes = []
    for _ in range(2):
        collector.collect_batch(num_episodes=number // 2)
        sizes.append(tracemalloc.get_traced_memory()[0])
    assert collector.get_statistics()["mean_reward"] == 1.0
    print(*sizes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
