"""Token term of the contrastive objective: losses of captions, single words and phrases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from vlp.compilation import region
from vlp.objectives.contrastive import as_pairs, candidate_cross_entropy, match_by_links, positives
from vlp.objectives.loss import Loss, sample_groups
from vlp.precision import full_precision, no_autocast


def word_response(words: Tensor, image_tokens: Tensor, valid: Tensor) -> Tensor:
    """Compute max_m (s_bm - mean_b relu(s_bm)) - mean_m relu(s_bm) of each word and image b.

    s_bm is the dot product of word and patch m of image b; the mean over b skips invalid images.
    words: (..., R, D); image_tokens: (..., B, M, D); valid: (..., B) bool. Returns (..., R, B).
    """
    # A hard maximum selects a patch, which a sum of exponentials does not. The mean over patches
    # lowers the response of words that respond to all patches. The mean over images keeps words
    # from all selecting the same patch, such as a corner.
    image_count = valid.sum(-1, keepdim=True).clamp(min=1)
    image_weights = valid.to(words.dtype) / image_count
    return _WordResponse.apply(words, image_tokens, image_weights)


class _WordResponse(torch.autograd.Function):
    """Word responses with a hand-written gradient, as autograd takes twice the time on a CPU."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, image_tokens: Tensor, image_weights: Tensor) -> Tensor:
        image_count, patch_count = image_tokens.shape[-3:-1]
        with no_autocast(words):
            similarity = words @ image_tokens.flatten(-3, -2).mT
            similarity = similarity.unflatten(-1, (image_count, patch_count))
            mean_over_images = torch.einsum("...rbm,...b->...rm", similarity.relu(), image_weights)
            contrast = similarity - mean_over_images[..., None, :]
        max_contrast, best_patch = contrast.max(-1)
        response = max_contrast - similarity.relu_().mean(-1)
        # The gradient only needs the best patch and the sign of s, which overwrites s.
        is_positive = similarity.gt_(0)
        ctx.save_for_backward(words, image_tokens, image_weights, is_positive, best_patch)
        return response

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        words, image_tokens, image_weights, is_positive, best_patch = ctx.saved_tensors
        patch_count = image_tokens.shape[-2]
        # Each word's gradients at its best patches, summed over images.
        max_grad = grad.new_zeros(*grad.shape[:-1], patch_count)
        max_grad.scatter_add_(-1, best_patch, grad)  # (..., R, M)
        # Both means are subtracted and read relu(s): their gradient is negative, and 0 for s <= 0.
        relu_grad = (grad * (1 / patch_count))[..., None]
        relu_grad = relu_grad + image_weights[..., None, :, None] * max_grad[..., None, :]
        similarity_grad = (is_positive * relu_grad).neg_()
        similarity_grad.scatter_add_(-1, best_patch[..., None], grad[..., None])
        similarity_grad = similarity_grad.flatten(-2)
        words_grad = image_tokens_grad = None
        with no_autocast(words):
            if ctx.needs_input_grad[0]:
                words_grad = similarity_grad @ image_tokens.flatten(-3, -2)
            if ctx.needs_input_grad[1]:
                image_tokens_grad = (similarity_grad.mT @ words).view_as(image_tokens)
        return words_grad, image_tokens_grad, None


@region
def token_losses(
    image_tokens: Tensor,
    text_tokens: Tensor,
    word_mask: Tensor,
    word_ids: Tensor,
    pair_ids: Tensor,
    valid: Tensor,
    scale: Tensor | float,
    group_size: int = 16,
) -> tuple[Loss, Loss]:
    """Compute the losses of captions, summed over texts, and of words, summed over words.

    Logits within sample groups are `scale * word_response`.

    Captions: symmetric cross-entropy of the mean logit of a text's words. Captions of one image,
    and equal captions, share the target; other `related` pairs are no candidates.

    Words: an image is positive for a word if one of its texts in the group has the same word piece.
    The loss is the mean over positive images of -log(e^l+ / (e^l+ + sum e^l-)), the sum over
    negative images. The aim is that of visual word detectors (Fang et al. 2015, section 3), the
    loss is not. A word without negative images is not counted.

    Args:
        image_tokens: (B, M, D), unit length.
        text_tokens: (B, N, D), unit length.
        word_mask: (B, N) bool, True = word piece.
        word_ids: (B, N) int64, ids of word pieces.
        pair_ids: (B, 2) int64, ids of image and caption, or (B,) of images.
        valid: (B,) bool; other rows, and rows of texts without words, are left out as
            queries and as candidates.
        scale: factor of the logits, an inverse temperature.
    """
    groups = sample_groups(image_tokens.shape[0], group_size)
    image_tokens, text_tokens, word_mask, word_ids, pair_ids, valid = (
        x.unflatten(0, groups)
        for x in (image_tokens, text_tokens, word_mask, word_ids, as_pairs(pair_ids), valid)
    )
    valid = valid & word_mask.any(-1)
    positive = positives(pair_ids, pair_ids)
    # is_pair[g, i, t]: a row of group g pairs the image of row i with the caption of row t.
    is_pair = match_by_links(pair_ids, pair_ids, pair_ids)
    # `related(pair_ids, pair_ids)` is `positive | is_pair | is_pair.mT`.
    candidates = valid[:, None, :] & (positive | ~(is_pair | is_pair.mT))
    image_tokens, text_tokens = full_precision(image_tokens, text_tokens)
    response = word_response(text_tokens.flatten(-3, -2), image_tokens, valid)
    response = response.unflatten(-2, text_tokens.shape[-3:-1])  # (groups, texts, N, images)
    word_count = word_mask.sum(-1).clamp(min=1)
    mean_response = (response * word_mask[..., None]).sum(-2) / word_count[..., None]
    is_caption = is_pair.mT & valid[:, :, None] & valid[:, None, :]
    has_word = _images_with_word(word_ids, word_mask, is_caption)
    caption_loss = _caption_loss(scale * mean_response.mT, positive, candidates, valid)
    return caption_loss, _word_loss(scale * response, has_word, word_mask, valid)


def _caption_loss(logits: Tensor, positive: Tensor, candidates: Tensor, valid: Tensor) -> Loss:
    """Compute the captions' loss from logits (groups, images, texts).

    positive, candidates: (groups, S, S) bool for groups of S samples; both directions share them.
    """
    i2t = candidate_cross_entropy(logits, positive, candidates)
    t2i = candidate_cross_entropy(logits.mT, positive, candidates)
    return Loss(torch.where(valid, i2t + t2i, 0).sum() / 2, valid.sum())


def _word_loss(logits: Tensor, has_word: Tensor, word_mask: Tensor, valid: Tensor) -> Loss:
    """Compute the words' loss from logits (groups, texts, N, images).

    has_word: as logits, bool, True = positive image; word_mask: (groups, texts, N); valid: (groups,
    texts), False also for texts without words.
    """
    negative = ~has_word & valid[:, None, None, :]
    lowest = torch.finfo(logits.dtype).min
    log_sum = logits.masked_fill(~negative, lowest).logsumexp(-1, keepdim=True)
    pair_losses = torch.where(has_word, functional.softplus(log_sum - logits), 0)
    word_losses = pair_losses.sum(-1) / has_word.sum(-1).clamp(min=1)
    is_counted = word_mask & valid[..., None] & negative.any(-1)
    return Loss(torch.where(is_counted, word_losses, 0).sum(), is_counted.sum())


def _images_with_word(word_ids: Tensor, word_mask: Tensor, is_caption: Tensor) -> Tensor:
    """Return whether some caption of an image has the word, (groups, texts, N, images) bool.

    is_caption: (groups, texts, images) bool, True where a text describes an image.
    """
    equal = word_ids[:, :, :, None, None] == word_ids[:, None, None, :, :]
    in_text = (equal & word_mask[:, None, None, :, :]).any(-1)  # (groups, texts, N, texts)
    has_word = in_text.flatten(1, 2).float() @ is_caption.float() > 0
    return has_word.unflatten(1, word_ids.shape[1:])


# Maximum distance between words of one phrase, in tokens.
PHRASE_REACH = 2
# Difference in selectivity, in units of cosine, from which a word follows its neighbour.
PHRASE_MARGIN = 0.2
# Inverse temperature of the softmax over patches.
PHRASE_SCALE = 10.0


@region
def phrase_loss(
    image_tokens: Tensor, text_tokens: Tensor, word_mask: Tensor, valid: Tensor
) -> Loss:
    """Compute a cross-entropy by which words attend to the patches of more selective neighbours.

    s_mn is the cosine of patch m and word n; the selectivity of a word is sel_n = max_m s_mn -
    mean_m relu(s_mn). Its leader is the most selective word at a distance of 1 to `PHRASE_REACH`,
    and the loss of the word is

        relu(sel_leader - sel_n - PHRASE_MARGIN) * H(softmax_m(a s_m,leader), softmax_m(a s_mn)),

    where H(target, attention) is the cross-entropy and a = PHRASE_SCALE. Gradients flow through the
    attention only. So "circle" in "a red circle" learns to select the patches of "red". This needs
    a text encoder that reads word order. The term is not from a paper (docs/results/anchors.md).
    The loss is a sum over words.

    image_tokens: (B, M, D) and text_tokens: (B, N, D), unit length; word_mask: (B, N) bool, True =
    word piece; valid: (B,) bool, False = not counted.
    """
    image_tokens, text_tokens = full_precision(image_tokens, text_tokens)
    is_counted = word_mask & valid[:, None]
    with no_autocast(text_tokens):
        similarity = text_tokens @ image_tokens.mT  # (B, N, M)
    with torch.no_grad():
        # -2: below the selectivity of any word.
        selectivity = similarity.amax(-1) - similarity.relu().mean(-1)
        selectivity = selectivity.masked_fill(~is_counted, -2.0)
        positions = torch.arange(is_counted.shape[1], device=is_counted.device)
        distance = (positions[:, None] - positions).abs()
        in_reach = (distance > 0) & (distance <= PHRASE_REACH)
        in_reach_selectivity = selectivity[:, None, :].masked_fill(~in_reach, -2.0)
        leader_selectivity, leader = in_reach_selectivity.max(-1)  # (B, N)
        attention = (PHRASE_SCALE * similarity).softmax(-1)
        target = attention.gather(1, leader[..., None].expand_as(attention))
        lead = (leader_selectivity - selectivity - PHRASE_MARGIN).clamp(min=0)
        weight = torch.where(is_counted, lead, 0)
    losses = -(target * (PHRASE_SCALE * similarity).log_softmax(-1)).sum(-1)
    return Loss((weight * losses).sum(), is_counted.sum())
