"""Runs a transformers model over a pack: hidden states of every distinct token, each image through the tower once."""

# Dimensions: T tokens of the tree, D hidden width, V vocabulary.

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.errors import ModelError, SampleError
from turnwise.logprobs import LanguageHead
from turnwise.packs import Pack, image_runs
from turnwise.tree_attention import plan_rectangles, register_tree_attention
from turnwise.types import Image


class TreeModel:
    """A network that reads token trees. Ordinary calls of the same network still work."""

    def __init__(self, network: nn.Module, *, image_processor: Any = None) -> None:
        # transformers' classes are not annotated, hence Any here and below.
        self.network = network
        adapted: Any = network
        self.base: Any = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
        self.image_processor = image_processor
        self.image_token_id: int | None = getattr(self.base.config, "image_token_id", None)
        self._grids: dict[str, tuple[Tensor, Tensor]] = {}
        _check_head(self.base)
        self.base.get_decoder().config._attn_implementation = register_tree_attention()

    @property
    def vocabulary(self) -> int:
        return int(self.base.get_input_embeddings().weight.shape[0])

    @property
    def hidden_width(self) -> int:
        return int(self.base.get_output_embeddings().weight.shape[1])

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def head(self, *, chunk: int, use_amp: bool = False) -> LanguageHead:
        layer = self.base.get_output_embeddings()
        return LanguageHead(layer.weight, getattr(layer, "bias", None), chunk=chunk, amp=use_amp)

    def check(self, pack: Pack) -> None:
        """Refuse tokens that the model does not have."""
        columns = (pack.ids_T, pack.head.target_ids_R, pack.head.kept_ids)
        largest = max(int(column.max(initial=0)) for column in columns)
        if largest < self.vocabulary:
            return
        worst = max(pack.samples, key=lambda sample: int(sample.stream.ids.max()))
        raise SampleError(
            f"episode {worst.episode_id} has token id {largest} but the model knows {self.vocabulary} ids; "
            "the tokenizer does not belong to this model"
        )

    def hidden_states(self, pack: Pack) -> Tensor:
        """[T, D], after the last norm."""
        inputs: dict[str, Any] = {"position_ids": self._positions(pack)}
        if pack.images:
            inputs["mm_encoder_outputs"] = {
                "image": self._image_features([image for _, image in pack.images])
            }
        # A 4-D mask is taken as it is, so transformers builds none; the tree decides who sees whom.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        output = self.base.base_model(
            input_ids=torch.from_numpy(pack.ids_T).to(self.device)[None],
            attention_mask=mask,
            use_cache=False,
            token_tree=plan_rectangles(pack.tree.segments),
            **inputs,
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _positions(self, pack: Pack) -> Tensor:
        if not pack.images:
            return torch.from_numpy(pack.tree.depths_T).to(self.device)[None]
        positions_3T = np.tile(pack.tree.depths_T, (3, 1))
        assert self.image_token_id is not None, "packs with images are built with the placeholder's id"
        for sample, path in zip(pack.samples, pack.tree.paths, strict=True):
            if not sample.stream.images:
                continue
            grids = [self._process(image)[1] for _, _, image in image_runs(sample, self.image_token_id)]
            ids = torch.from_numpy(sample.stream.ids[: len(path)].astype(np.int64))[None]
            if not grids:
                continue
            found, _ = self.base.base_model.get_rope_index(
                ids, (ids == self.image_token_id).int(), image_grid_thw=torch.cat(grids)
            )
            positions_3T[:, path] = found[:, 0].numpy()
        return torch.from_numpy(positions_3T).to(self.device)[:, None]

    def _process(self, image: Image) -> tuple[Tensor, Tensor]:
        """Patches and grid of an image; remembered, since positions and features both need them."""
        if image.sha256 not in self._grids:
            if self.image_processor is None:
                raise ModelError("the episodes have images but the learner was given no image processor")
            done = self.image_processor(images=[image.pixels], return_tensors="pt")
            self._grids[image.sha256] = (done["pixel_values"], done["image_grid_thw"])
        return self._grids[image.sha256]

    def forget_images(self) -> None:
        """Drop the processed images of the last batch."""
        self._grids.clear()

    def _image_features(self, placed: list[Image]) -> Any:
        """What the vision tower says of the images in placeholder order, each distinct one computed once."""
        distinct = list({image.sha256: image for image in placed}.values())
        processed = [self._process(image) for image in distinct]
        features = self.base.base_model.get_image_features(
            torch.cat([pixels for pixels, _ in processed]).to(self.device),
            torch.cat([grid for _, grid in processed]).to(self.device),
            return_dict=True,
        )
        index_of = {image.sha256: index for index, image in enumerate(distinct)}
        order = [index_of[image.sha256] for image in placed]
        features.pooler_output = tuple(features.pooler_output[index] for index in order)
        if getattr(features, "deepstack_features", None) is not None:
            features.deepstack_features = [
                tuple(layer[index] for index in order) for layer in features.deepstack_features
            ]
        return features


def _check_head(base: Any) -> None:
    layer = base.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"the LM head is a {type(layer).__name__}; turnwise needs a plain linear layer (leave lm_head out of lora.targets)"
        )
    config = base.config.get_text_config()
    for name, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(config, name, neutral)
        if value not in (None, neutral):
            raise ModelError(f"the model sets {name} to {value}; turnwise computes plain logits only")
