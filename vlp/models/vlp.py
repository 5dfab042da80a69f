"""The VLP model: two encoders in one contrastive space and a cross-modal encoder with ACE-RPE."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import record_function

from vlp.data.text.tokenizer import TextTokens
from vlp.layers.blocks import INIT_STD, pool_states, pooled_width
from vlp.layers.temperature import Temperature
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import (
    CrossEncoder,
    CrossFeatures,
    ImageFeatures,
    ImageKeyValues,
    PairIndices,
    TextFeatures,
)
from vlp.models.image_encoder import ImageEncoder, PatchEdit
from vlp.models.text_encoder import TextEncoder, require_ids
from vlp.models.towers import resolve_architecture
from vlp.positions import PositionEncoding
from vlp.positions.anchor_field import (
    AnchorPaths,
    PathSettings,
    compute_paths,
    join_paths,
    uniform_paths,
)
from vlp.precision import at_least_float32

# Width that INIT_STD is meant for. Image and cross-modal encoders scale INIT_STD by
# sqrt(768 / width), as 0.02 at width 128 keeps activations near zero for hundreds of steps. The
# text encoder keeps 0.02, as larger values mix its tokens too early.
REFERENCE_WIDTH = 768

# Smallest delta: the distance of an anchor is at most 1 / delta.
MIN_THRESHOLD = 1e-3


class TokenScore(nn.Module):
    """FILIP's score as a term of the match score (Yao et al. 2021, section 3.1, text to image).

    It is the mean over words of the best patch's cosine, times `initial_factor` and a learned
    factor that starts at 1.
    """

    def __init__(self, initial_factor: float) -> None:
        super().__init__()
        # Two factors, so that Adam's step is proportional to the initial one.
        self.initial_factor = initial_factor
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor) -> Tensor:
        """Score pairs -> (B,); a text without words scores 0.

        Args:
            image_tokens: (B, M, D) of unit length, or (M, D) of one image for all texts.
            text_tokens: (B, N, D) of unit length.
            word_mask: (B, N) bool, True = word piece.
        """
        with torch.autocast(text_tokens.device.type, enabled=False):
            best_cosine = (text_tokens @ image_tokens.mT).amax(-1)
        word_count = word_mask.sum(-1).clamp(min=1)
        word_sum = (best_cosine * word_mask).sum(-1)
        return self.initial_factor * self.factor * word_sum / word_count


class VLPModel(nn.Module):
    """Vision-language model: two encoders, then `match`, `anchor_paths` or `cross`.

    `temperature()` is the learned softmax temperature of feature cosines. `anchor_threshold`, saved
    with the weights, is delta of Eq. 4: configured, or the running quantile of training.
    """

    anchor_threshold: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_architecture(config)
        width = config.text.width
        self.text_encoder = TextEncoder(config.text, config.embed_dim)
        self.image_encoder = ImageEncoder(config.image, config.embed_dim)
        self.cross_encoder = CrossEncoder(
            config.cross, width, config.text.max_tokens, config.image.grid
        )
        if config.token_projection:
            self.text_tokens = nn.Linear(width, config.embed_dim, bias=False)
            self.image_tokens = nn.Linear(width, config.embed_dim, bias=False)
        self.feature_dropout = nn.Dropout(config.feature_dropout)
        self.match_head = nn.Linear(pooled_width(config.cross.pooling, width), 2)
        if config.cross.token_score:
            self.token_score = TokenScore(config.cross.token_score)
        self.temperature = Temperature(config.temperature)
        if config.text.architecture is None:
            _initialise(INIT_STD, self.text_encoder.layers)
        _initialise(INIT_STD, self.match_head)
        scaled_std = INIT_STD * (REFERENCE_WIDTH / width) ** 0.5
        if config.image.architecture is None:
            _initialise(scaled_std, self.image_encoder.vit.get_submodule("blocks"))
        _initialise(scaled_std, self.cross_encoder)
        projections = [self.text_encoder.projection, self.image_encoder.projection]
        if config.token_projection:
            projections += [self.text_tokens, self.image_tokens]
        for projection in projections:
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.anchor_options = config.cross.anchor_options
        self.register_buffer("anchor_threshold", torch.tensor(self.anchor_options.threshold or 0.0))

    @property
    def match_is_trained(self) -> bool:
        """Return whether the match head's biases differ from their initial 0."""
        # Binary ITM moves them. Listwise ITM does so by rounding only: a common bias has no
        # gradient there.
        return bool(self.match_head.bias.any())

    def freeze_modules(self, names: Iterable[str]) -> None:
        """Freeze the modules `names`, which no loss trains: weight decay would shrink them.

        Token projections stay trainable if anchor paths pass a gradient to them. Names that the
        model lacks are skipped.
        """
        frozen_names, options = {*names}, self.anchor_options
        cross = self.config.cross
        has_anchors = cross.has_paths and "uniform" not in cross.position
        paths_read_tokens = has_anchors and options.features == "projected"
        exempt_modules: set[nn.Module] = set()
        if paths_read_tokens and options.path_gradient and "cross_encoder" not in frozen_names:
            exempt_modules = {self._token_projection("image"), self._token_projection("text")}
        for name, module in self.named_modules():
            if name in frozen_names and module not in exempt_modules:
                module.requires_grad_(False)

    def encode_image(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> ImageFeatures:
        """Encode images (B, 3, height, width) from the model folder's preprocessing.

        pixels: may be a stored tower output; edit_patches: as in `ImageEncoder.tower`.
        """
        encoder = self.image_encoder
        output = encoder(pixels, edit_patches)
        states = encoder.drop_summary_tokens(output)
        # Dropout of image features only: texts have `text.dropout`.
        feature = self.feature_dropout(encoder.project(output))
        tokens = self._token_projection("image")(states[:, 1:])
        return ImageFeatures(states, _unit(feature), _unit(tokens))

    def encode_text(
        self,
        text_ids: Tensor | TextTokens,
        attention_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> TextFeatures:
        """Encode texts: `encode_text(text(["a dog"]))`, with the tokenizer of `vlp.load`.

        Args:
            text_ids: (B, N) int64, [CLS] first, or the tokenizer's output with both masks.
            attention_mask: (B, N) bool, True = not padding.
            word_mask: (B, N) bool, True = word piece, False = padding, [CLS] or [SEP].
        """
        if isinstance(text_ids, TextTokens):
            text_ids, attention_mask, word_mask = text_ids
        if attention_mask is None or word_mask is None:
            raise ValueError("encode_text needs TextTokens, or text_ids with both masks")
        # Checked only where reading values is free: on a CPU, for plain tensors outside of graphs.
        if (
            type(attention_mask) is Tensor
            and attention_mask.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and (~attention_mask[:, 0] & attention_mask.any(1)).any()
        ):
            raise ValueError("attention_mask: texts are padded on the left; pad on the right")
        states = self.text_encoder(require_ids(text_ids), attention_mask)
        return TextFeatures(
            states=states,
            feature=_unit(self.project_text(states, attention_mask)),
            tokens=_unit(self._token_projection("text")(states)),
            attention_mask=attention_mask,
            word_mask=word_mask,
        )

    def project_text(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Pool and project text states (B, N, width), mask (B, N) -> (B, d), not normalised."""
        pooled = pool_states(states, self.config.text.pooling, attention_mask)
        return self.text_encoder.projection(pooled)

    def anchor_features(self, image: ImageFeatures, text: TextFeatures) -> tuple[Tensor, Tensor]:
        """Return the inputs of Eq. 3: (B, M, D) of the patches and (B, N, D) of the tokens."""
        if self.anchor_options.features == "encoder":
            return image.states[:, 1:], text.states
        return image.tokens, text.tokens

    def anchor_paths(
        self, image: ImageFeatures, text: TextFeatures, pairs: PairIndices | None = None
    ) -> AnchorPaths | None:
        """Compute paths of the pairs (papers.md#ace-a7); None without a cross-modal encoding.

        pairs: indices of text and image of each pair; None pairs them row by row.
        """
        cross = self.config.cross
        if not cross.has_paths:
            return None
        word_mask = text.word_mask if pairs is None else text.word_mask[pairs.texts]
        if "uniform" in cross.position:
            return uniform_paths(word_mask, image.tokens.shape[1], cross.anchor.groups)
        image_tokens, text_tokens = self.anchor_features(image, text)
        if not self.anchor_options.path_gradient:
            image_tokens, text_tokens = image_tokens.detach(), text_tokens.detach()
        if pairs is not None:
            image_tokens, text_tokens = image_tokens[pairs.images], text_tokens[pairs.texts]
        with record_function("pass/anchor_paths"):
            return compute_paths(image_tokens, text_tokens, word_mask, self.path_settings)

    @property
    def path_settings(self) -> PathSettings:
        """Return the settings of anchor paths, with the current threshold."""
        cross, options = self.config.cross, self.anchor_options
        return PathSettings(
            grid=self.config.image.grid,
            # A quantile is 0 before the first step and may be negative; delta must be positive.
            threshold=self.anchor_threshold.clamp(min=MIN_THRESHOLD),
            groups=cross.anchor.groups,
            text_window=options.text_window,
            patch_window=options.patch_window,
            metric=options.metric,
            hard=options.tau is None,
            tau=options.tau or 1e4,  # not read by hard anchors
            with_alignment="alignment" in cross.position,
            unreachable=options.unreachable,
        )

    def cross(
        self,
        image: ImageFeatures,
        text: TextFeatures,
        pairs: PairIndices | None = None,
        need_image: bool = True,
        image_kv: ImageKeyValues | None = None,
        query_indices: Tensor | None = None,
    ) -> CrossFeatures:
        """Compute cross-modal states of B pairs; arguments as in `CrossEncoder.forward`."""
        paths = self.anchor_paths(image, text, pairs)
        text_states, image_states = self.cross_encoder(
            text.states,
            image.states,
            text.attention_mask,
            paths,
            pairs,
            need_image,
            image_kv,
            query_indices,
        )
        attention_mask = text.attention_mask
        if pairs is not None:
            attention_mask = attention_mask[pairs.texts]
        token_score = None
        if self.config.cross.token_score:
            image_tokens, text_tokens, word_mask = image.tokens, text.tokens, text.word_mask
            if pairs is not None:
                image_tokens = image_tokens[pairs.images]
                text_tokens, word_mask = text_tokens[pairs.texts], word_mask[pairs.texts]
            token_score = self.token_score(image_tokens, text_tokens, word_mask)
        return CrossFeatures(text_states, image_states, paths, attention_mask, token_score)

    def cross_multi_image(
        self, images: Sequence[ImageFeatures], text: TextFeatures, image_type_embeddings: Tensor
    ) -> CrossFeatures:
        """Compute cross-modal states of B texts with several images each, in one pass.

        Tokens of all images are concatenated as keys of the text's cross-attention; paths,
        positions and image self-attention stay within each image.

        Args:
            images: features of the B first images, of the B second images, ...
            image_type_embeddings: (len(images), width), added to all tokens of an image.
        """
        states = torch.cat(
            [image.states + embedding for image, embedding in zip(images, image_type_embeddings)],
            dim=1,
        )
        paths_by_image = (self.anchor_paths(image, text) for image in images)
        # Without a cross-modal encoding no image has paths.
        all_paths = [paths for paths in paths_by_image if paths is not None]
        paths = join_paths(all_paths) if all_paths else None
        text_states, _ = self.cross_encoder(
            text.states, states, text.attention_mask, paths, need_image=False
        )
        return CrossFeatures(text_states, None, paths, text.attention_mask)

    def warn_if_match_is_untrained(self) -> None:
        """Warn the caller's caller if the match score is meaningless."""
        # Reading the value of a weight would break the graph of `torch.export`.
        if not torch.compiler.is_compiling() and not self.match_is_trained:
            warnings.warn(
                "the match score was never trained (no ITM), so it is meaningless", stacklevel=3
            )

    def match(self, image: ImageFeatures, text: TextFeatures) -> Tensor:
        """Compute log-odds that row i's text describes row i's image: (B,) float32.

        If one of the two has a single row, it is matched with every row of the other.
        """
        self.warn_if_match_is_untrained()
        pairs = broadcast_pairs(len(image.states), len(text.states), text.states.device)
        logits = self.itm_logits(self.cross(image, text, pairs, need_image=False)).float()
        return logits[:, 1] - logits[:, 0]

    def itm_logits(self, features: CrossFeatures) -> Tensor:
        """Compute ITM logits (B, 2), not matched and matched."""
        pooled = pool_states(features.text, self.config.cross.pooling, features.attention_mask)
        logits = self.match_head(pooled)
        if features.token_score is None:
            return logits
        not_matched, matched = logits.float().unbind(1)
        return torch.stack([not_matched, matched + features.token_score], dim=1)

    def _token_projection(self, modality: Literal["image", "text"]) -> nn.Linear:
        """Return the tokens' projection, or the feature's without `token_projection`."""
        if self.config.token_projection:
            return self.image_tokens if modality == "image" else self.text_tokens
        encoder = self.image_encoder if modality == "image" else self.text_encoder
        return encoder.projection


def broadcast_pairs(images: int, texts: int, device: torch.device) -> PairIndices | None:
    """Return the pairs of one image with all texts, or of one text with all images.

    None for equal counts: row i of the images belongs to row i of the texts.
    """
    if images == texts:
        return None
    if 1 not in (images, texts):
        raise ValueError(
            f"{images} images and {texts} texts cannot be paired: counts must be equal or one of "
            "them 1"
        )
    rows = torch.arange(max(images, texts), device=device)
    zeros = torch.zeros_like(rows)
    return PairIndices(rows, zeros) if images == 1 else PairIndices(zeros, rows)


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(at_least_float32(x), dim=-1)


def _initialise(std: float, *modules: nn.Module) -> None:
    """Initialise linear layers, except in position encodings: normal weights, zero biases."""
    for module in modules:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if not isinstance(module, PositionEncoding):
            _initialise(std, *module.children())
