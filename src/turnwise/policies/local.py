"""`LocalPolicy`: samples with a transformers model in this process, keeping each stream's cache from turn to turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from turnwise.errors import ContextOverflowError, PolicyError
from turnwise.fingerprint import fingerprint
from turnwise.policies.runner import Runner, Statistics
from turnwise.policies.scheduler import Scheduler
from turnwise.policies.sequences import Sequence, Vocabulary
from turnwise.policies.vision import ImageInputs
from turnwise.policies.weights import load_into
from turnwise.policy import Request, TokenEvent
from turnwise.types import Completion


class LocalPolicy:
    """Samples from `network`, which is its own while a completion is awaited.

    Many `complete` calls may wait at once; they are batched. A turn computes only the tokens that its stream has not seen.
    """

    def __init__(
        self,
        network: Any,  # a transformers causal or Qwen3-VL model, or a PEFT wrapper of one
        tokenizer: Any,  # a Hugging Face tokenizer
        *,
        image_processor: Any = None,
        schedule: Literal["lockstep", "eager"] = "lockstep",
        kv_budget_mb: int = 2048,
        version: int = 0,
    ) -> None:
        self._network = network
        self._vocabulary = Vocabulary(tokenizer, network)
        has_images = getattr(network.config, "image_token_id", None) is not None
        self._images = ImageInputs(network, image_processor) if has_images else None
        self._max_context = int(network.config.get_text_config().max_position_embeddings)
        runner = Runner(
            network,
            self._vocabulary,
            image_token_id=None if self._images is None else self._images.image_token_id,
            budget_bytes=kv_budget_mb * 2**20,
        )
        self._runner = runner
        self._max_cached = runner.store.memory.largest_free
        self._scheduler = Scheduler(runner, is_lockstep=schedule == "lockstep", version=version)
        self._handovers: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="turnwise-images")
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def statistics(self) -> Statistics:
        """What has been computed so far, and how long the model took for it."""
        return msgspec.structs.replace(self._runner.statistics)

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion:
        """Sample the next turn of a stream; `on_token` is called on this event loop for each token."""
        self._check(request)
        sequence = Sequence(request, self._vocabulary, asyncio.get_running_loop(), on_token)
        if self._images is not None:
            sequence.preparation = self._threads.submit(self._images.prepare, request)
            sequence.preparation.add_done_callback(lambda _: self._scheduler.post([]))
        self._hand_over(lambda: self._scheduler.take(sequence))
        try:
            return await sequence.future
        except asyncio.CancelledError:
            self._scheduler.post([lambda: self._scheduler.drop(sequence)])
            raise

    async def release(self, stream_id: str) -> None:
        """The stream will not be extended again; its memory is free for others."""
        self._hand_over(lambda: self._scheduler.release(stream_id))

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        """Copy these tensors into the network once nothing is being sampled, and return the fingerprint of the network's own."""

        def load() -> str:
            own = load_into(self._network, weights)
            self._scheduler.forget_caches()
            self._scheduler.version = version
            return fingerprint(own)

        return str(await asyncio.wrap_future(self._scheduler.between_batches(load)))

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._scheduler.close)
        self._threads.shutdown(wait=False)

    def _check(self, request: Request) -> None:
        if self._is_closed:
            raise PolicyError(f"stream {request.stream_id} asked a policy that is closed")
        if len(request.prompt_ids) == 0:
            raise PolicyError(
                f"stream {request.stream_id} has an empty prompt; a completion needs something to continue"
            )
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        for limit, what, remedy in (
            (self._max_context, "the model's context", "end the episode sooner or lower max_new_tokens"),
            (self._max_cached, "the cache memory", "raise kv_budget_mb"),
        ):
            if num_prompt + num_new > limit:
                raise ContextOverflowError(
                    f"stream {request.stream_id} has a prompt of {num_prompt} tokens and asks for up to {num_new} more, but "
                    f"{what} holds {limit}; {remedy}"
                )
        if self._images is not None and request.prompt_ids[-1] == self._images.image_token_id:
            raise PolicyError(
                f"the prompt of stream {request.stream_id} ends inside an image; end it with the end-of-image marker"
            )
        if request.images and self._images is None:
            raise PolicyError(
                f"stream {request.stream_id} has {len(request.images)} images but {type(self._network).__name__} reads text only"
            )

    def _hand_over(self, command: Callable[[], None]) -> None:
        """Pass a command on after every task that is ready now had its turn, so that turns asked together start together."""
        loop = asyncio.get_running_loop()
        if loop not in self._handovers:
            self._handovers[loop] = []
            loop.call_soon(self._flush, loop)
        self._handovers[loop].append(command)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduler.post(self._handovers.pop(loop, []))
