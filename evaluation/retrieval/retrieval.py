"""Text-to-image and image-to-text retrieval: dual encoder first, then re-ranked pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from evaluation.encoder import GIBIBYTE, PADDING, Collection, Encoder, require_finite
from evaluation.jobs import BANK_TEMPERATURE
from evaluation.options import EvalOptions
from evaluation.results import (
    ARROWS,
    Figure,
    Result,
    Table,
    reranked_top,
    truncation_notes,
    untrained_match_notes,
)
from evaluation.retrieval.query_bank import normalised_features
from evaluation.retrieval.rerank import (
    EncodedBlocks,
    PairScorer,
    Search,
    listwise_losses,
    look_up,
    match_batch_for,
    match_pairs,
    nearest_pairs,
    reranked_ranks,
    search,
)
from evaluation.samples import Samples, format_kinds
from evaluation.work_sharding import ProcessGroup, evaluating
from vlp.data.features.store import SourceFeatures, StoredFeatures, stored_sources
from vlp.data.image.transforms import Preprocessing
from vlp.metrics import RECALL_AT, bootstrap_means, chance_recall, percentile_interval
from vlp.models.folder import Loaded, require_tower

Direction = Literal["text_to_image", "image_to_text"]
DIRECTIONS: tuple[Direction, ...] = ("text_to_image", "image_to_text")


def positive_ranks(
    encoded: EncodedBlocks,
    collection: Collection,
    rerank: int = 0,
    temperature: float | None = None,
    match_batch: int | None = None,
    processes: ProcessGroup | None = None,
    quiet: bool = True,
    bank: Collection | None = None,
    bank_temperature: float = BANK_TEMPERATURE,
    add_match_stage: bool = False,
) -> tuple[dict[tuple[str, str], NDArray[np.int64]], dict[tuple[str, str], NDArray[np.float64]]]:
    """Return each query's rank, from 0, of its best positive, and the `listwise_losses`.

    Both are arrays (queries,) by (stage, direction); losses are empty without `rerank`.

    Args:
        rerank: number of nearest candidates to re-rank by similarity / temperature + match score;
            without a temperature, by the match score alone.
        bank: queries for query-bank normalisation of the similarities.
        add_match_stage: also return ranks by the match score alone, as stage `match`.
    """
    processes = processes or ProcessGroup.current()
    positives = dict(zip(DIRECTIONS, collection.positives()))
    features: dict[Direction, tuple[Tensor, Tensor]] = {
        "text_to_image": (collection.text_features, collection.image_features),
        "image_to_text": (collection.image_features, collection.text_features),
    }
    if bank is not None:
        bank_queries = {"text_to_image": bank.text_features, "image_to_text": bank.image_features}
        features = {
            direction: normalised_features(*pair, bank_queries[direction], bank_temperature)
            for direction, pair in features.items()
        }
    searches: dict[Direction, Search] = {
        direction: search(*features[direction], positives[direction], rerank, processes=processes)
        for direction in DIRECTIONS
    }
    all_ranks: dict[tuple[str, str], NDArray[np.int64]] = {
        ("dual", direction): searches[direction].ranks for direction in DIRECTIONS
    }
    losses: dict[tuple[str, str], NDArray[np.float64]] = {}
    if rerank:
        match_scores = _match_scores(encoded, collection, searches, match_batch, processes, quiet)
        for direction in DIRECTIONS:
            dual, direction_positives = searches[direction], positives[direction]
            match = match_scores[direction]
            losses["match", direction] = listwise_losses(dual.nearest, match, direction_positives)
            if add_match_stage:
                all_ranks["match", direction] = reranked_ranks(dual, match, direction_positives)
            scores = match
            # Training draws ITM negatives in proportion to exp(similarity / temperature), so the
            # log-odds compare a pair with similar negatives only; the sum compares it with all.
            if temperature is not None:
                scaled = dual.similarities.astype(np.float64) / temperature
                losses["dual", direction] = listwise_losses(
                    dual.nearest, scaled, direction_positives
                )
                scores = match + scaled
                losses["rerank", direction] = listwise_losses(
                    dual.nearest, scores, direction_positives
                )
            all_ranks["rerank", direction] = reranked_ranks(dual, scores, direction_positives)
    return all_ranks, losses


def _match_scores(
    encoded: EncodedBlocks,
    collection: Collection,
    searches: Mapping[Direction, Search],
    match_batch: int | None,
    processes: ProcessGroup,
    quiet: bool,
) -> dict[Direction, NDArray[np.floating]]:
    """Return the match scores (queries, top) of the nearest candidates by direction."""
    pairs = nearest_pairs(searches["text_to_image"], searches["image_to_text"])
    pairs_per_process = -(-len(pairs.image) // processes.world_size)
    with tqdm(total=pairs_per_process, desc="match", disable=quiet) as bar:
        scorer = PairScorer(encoded, collection)
        match_scores = match_pairs(
            pairs,
            scorer,
            scorer.groups(pairs),
            scorer.order(pairs),
            match_batch_for(encoded.device, match_batch),
            processes=processes,
            on_batch=bar.update,
        )
    require_finite(match_scores)
    nearest_images = searches["text_to_image"].nearest
    nearest_texts = searches["image_to_text"].nearest
    num_texts, num_images = len(nearest_images), len(nearest_texts)
    texts = np.broadcast_to(np.arange(num_texts)[:, None], nearest_images.shape)
    images = np.broadcast_to(np.arange(num_images)[:, None], nearest_texts.shape)
    return {
        "text_to_image": look_up(pairs, match_scores, num_texts, nearest_images, texts),
        "image_to_text": look_up(pairs, match_scores, num_texts, images, nearest_texts),
    }


class StoredSamples(Samples):
    """Samples with unaugmented stored features in place of images; without `features`, images."""

    def __init__(
        self,
        folders: Sequence[str | Path],
        limit: int | None,
        features: Sequence[StoredFeatures],
        preprocessing: Preprocessing,
    ) -> None:
        super().__init__(folders, limit)
        self._stored: list[SourceFeatures] | None = None
        if features:
            self._stored = stored_sources(features, preprocessing, self._items.indices)

    def _image(self, index: int, data: bytes, where: str, min_size: int | None) -> Any:
        if self._stored is None:
            return super()._image(index, data, where, min_size)
        folder, shard, sample, _ = self._items.locate(index)
        # `views` raises BadSample if the image could not be encoded, DataError if it has changed.
        self._stored[folder].views(shard, sample, data, may_flip=False, where=where)
        return self._stored[folder].read(shard, sample, view=0)


def query_rows(
    ranks: Mapping[str, NDArray[np.int64]], direction: str, collection: Collection
) -> list[dict[str, Any]]:
    """Return a row for each query of one direction; `ranks`: (queries,) from 0, by stage.

    Rows hold `direction`, `key` of the image's first sample and `image`; for a caption also
    `caption` (its index within the image) and `text`; and `ranks` by stage, from 1.
    """
    queries: list[dict[str, Any]] = [
        {"key": sample.key, "image": "/".join(sample.image_identity)}
        for sample in collection.samples
    ]
    if direction == "text_to_image":
        images = collection.image_of_text
        # The captions of an image follow each other.
        caption_indices = np.arange(len(images)) - np.searchsorted(images, images)
        queries = [
            {**queries[image], "caption": int(index), "text": text}
            for image, index, text in zip(images, caption_indices, collection.captions)
        ]
    rows = []
    for row, query in enumerate(queries):
        query_ranks = {stage: int(stage_ranks[row]) + 1 for stage, stage_ranks in ranks.items()}
        rows.append({"direction": direction, **query, "ranks": query_ranks})
    return rows


Stage = Literal["dual", "rerank", "match"]
STAGES: tuple[Stage, ...] = ("dual", "rerank", "match")
MEAN = "mean"


class RetrievalResult(Result):
    """Recall by (stage, direction, "R@1" | "R@5" | "R@10" | "mean").

    Direction "both" has only "mean". Predictions are the `query_rows`.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages with figures: `dual`, and by option `rerank` and `match`."""
        return tuple(stage for stage in STAGES if (stage, "both", MEAN) in self.figures)

    def recall(self, stage: Stage, direction: Direction, k: int) -> Figure:
        """Return recall at k of one stage in one direction."""
        return self.figures[stage, direction, f"R@{k}"]

    def mean(self, stage: Stage, direction: Direction | Literal["both"] = "both") -> Figure:
        """Return the mean of R@1, R@5 and R@10, of one direction or of both."""
        return self.figures[stage, direction, MEAN]

    def table(self) -> Table:
        """Return recalls in percent with intervals, a row per direction and stage, and chance."""
        columns = [*(f"R@{k}" for k in RECALL_AT), MEAN]
        images, texts = self.counts["images"], self.counts["texts"]
        candidates = {"text_to_image": images, "image_to_text": texts}
        rows = []
        for direction in DIRECTIONS:
            for stage in self.stages:
                cells = [self.figures[stage, direction, column].percent() for column in columns]
                label = self._label(stage, candidates[direction])
                rows.append([f"{ARROWS[direction]}, {label}", *cells])
            chances = [self.figures["dual", direction, column].chance for column in columns]
            rows.append([f"{ARROWS[direction]}, chance", *(f"{100 * c:.1f}" for c in chances)])
        for stage in self.stages:
            label = self._label(stage, max(images, texts))
            rows.append([f"both, {label}", *[""] * len(RECALL_AT), self.mean(stage).percent()])
        title = f"Retrieval: {images} images, {texts} captions"
        return Table(title, ["", *columns], rows, self.table_notes())

    def _label(self, stage: Stage, candidates: int) -> str:
        """Return a stage's name, with the number of re-ranked candidates of a query."""
        top = min(self.facts["rerank"] or 0, candidates)
        if stage == "match":
            return f"top {top} by the match score alone"
        return f"re-ranked top {top}" if stage == "rerank" else "dual encoder"

    def plain_figures(self) -> dict[str, Any]:
        """Return a list of figures with stage, direction and name."""
        names = ("stage", "direction", "name")
        return {
            "figures": [
                dict(zip(names, key)) | figure._asdict() for key, figure in self.figures.items()
            ]
        }


def evaluate_retrieval(
    loaded: Loaded,
    shards: Sequence[str | Path],
    options: EvalOptions = EvalOptions(),
    *,
    rerank: int = 0,
    rerank_by: Literal["sum", "match", "both"] = "sum",
    temperature: float | None = None,
    match_batch: int | None = None,
    memory: int = 2 * GIBIBYTE,
    features: str | Path | Sequence[str | Path] = (),
    bank: Sequence[str | Path] = (),
    bank_temperature: float = BANK_TEMPERATURE,
) -> RetrievalResult:
    """Evaluate recall on the shards; the same for any number of processes.

    Args:
        shards: shard folders, evaluated as one set. Samples of the same source and image_id are one
            image with several captions.
        rerank: number of each query's nearest candidates to re-rank as stage `rerank`, or 0.
        rerank_by: "sum" ranks by similarity / temperature + match score, the log-odds of the
            cross-modal encoder; "match" by the match score alone, as ALBEF does; "both" as "sum",
            and by the match score alone as a further stage `match`.
        temperature: divides the similarity in the sum; None: the model's.
        match_batch: maximum pairs of a cross-modal call; None: 64 on a CPU, 1,024 elsewhere.
        memory: bytes of token states kept for re-ranking, for images and for captions each.
        features: folders with stored features by the model's frozen tower (`vlp data features`) for
            all shards, the bank's included; images are then never decoded.
        bank: shard folders of other pairs, such as training pairs, for query-bank normalisation.

    `facts["list_loss"]` of the result is the mean `listwise_losses` by "SCORE/DIRECTION", with
    `dual` for the similarity, `match` for the match score and `rerank` for the sum.
    """
    processes = ProcessGroup.current()
    if rerank_by == "match":
        temperature = None
    elif temperature is None:
        temperature = loaded.model.temperature().item()
    folders = [features] if isinstance(features, str | Path) else features
    stored = [StoredFeatures(folder) for folder in folders]
    for store in stored:
        require_tower(store, loaded.model)
    samples = StoredSamples(shards, options.limit, stored, loaded.preprocess)
    quiet = not (options.progress and processes.first)
    with evaluating(loaded.model, options.device) as torch_device:
        # Token states are kept only for re-ranking.
        encoder = Encoder(loaded, samples, options, torch_device, memory if rerank else 0)
        collection = encoder.collect(processes)
        bank_collection, common_images = None, 0
        if bank:
            bank_samples = StoredSamples(bank, None, stored, loaded.preprocess)
            bank_encoder = Encoder(loaded, bank_samples, options, torch_device)
            bank_collection = bank_encoder.collect(processes, "bank")
            bank_images = {sample.image_identity for sample in bank_collection.samples}
            images = {sample.image_identity for sample in collection.samples}
            common_images = len(bank_images & images)
        with encoder.prefetch_images():
            all_ranks, losses = positive_ranks(
                encoder,
                collection,
                rerank,
                temperature,
                match_batch,
                processes,
                quiet,
                bank_collection,
                bank_temperature,
                add_match_stage=rerank_by == "both",
            )
    mean_losses = {
        (stage, direction): float(np.nanmean(query_losses))
        for (stage, direction), query_losses in sorted(losses.items())
        if not np.isnan(query_losses).all()
    }
    bank_skipped = {} if bank_collection is None else bank_collection.skipped
    notes: list[str] = []
    if rerank:
        top = reranked_top(rerank, len(collection.samples), len(collection.captions))
        notes += _rerank_notes(top, temperature, mean_losses)
        notes += untrained_match_notes(loaded.model.match_is_trained, "re-ranking")
    if bank:
        skipped_text = format_kinds(bank_skipped) if bank_skipped else "none"
        notes.append(
            f"Similarities are normalised by the queries of {', '.join(map(str, bank))} at "
            f"temperature {bank_temperature:g}; skipped there: {skipped_text}."
        )
    if common_images:
        notes.append(f"{common_images} of the images are in the bank: recall is biased upwards.")
    notes += _collection_notes(collection)
    predictions: list[dict[str, Any]] = []
    for direction in DIRECTIONS:
        ranks = {stage: rank for (stage, side), rank in all_ranks.items() if side == direction}
        predictions += query_rows(ranks, direction, collection)
    return RetrievalResult(
        kind="retrieval",
        counts={"images": len(collection.image_features), "texts": len(collection.text_features)},
        shards=tuple(map(str, shards)),
        figures=_figures(all_ranks, collection, options.resamples),
        predictions=predictions,
        skipped=collection.skipped,
        notes=tuple(notes),
        facts={
            "rerank": rerank,
            "list_loss": {"/".join(key): loss for key, loss in mean_losses.items()},
            "temperature": temperature if rerank else None,
            "match_trained": loaded.model.match_is_trained,
            "bank": list(map(str, bank)),
            "bank_temperature": bank_temperature if bank else None,
            "bank_skipped": bank_skipped,
            "bank_shared": common_images,
        },
    )


def _rerank_notes(
    top: int, temperature: float | None, mean_losses: Mapping[tuple[str, str], float]
) -> list[str]:
    """Return notes on the scores and losses of re-ranking; losses are by (stage, direction)."""
    score = "the match score alone"
    if temperature is not None:
        score = f"similarity / {temperature:.3g} + match score"
    listing = ", ".join(
        f"{stage} {ARROWS[direction]} {loss:.3f}"
        for (stage, direction), loss in mean_losses.items()
    )
    average = "List loss in nats, mean over queries with a positive among the re-ranked"
    return [f"At most the top {top} were re-ranked by {score}.", f"{average}: {listing or 'none'}."]


def _collection_notes(collection: Collection) -> list[str]:
    """Return notes on captions of several images, byte-identical images and truncated captions."""
    notes = []
    images_of_text, _ = collection.positives()
    # The second column, if there is one, holds a caption's second image.
    if num_common := int((images_of_text[:, 1:2] != PADDING).sum()):
        notes.append(f"{num_common} captions also describe another image: correct for both.")
    if collection.copies:
        notes.append(
            f"{collection.copies} images without image_id are byte-identical to an earlier one, "
            "whose captions count as wrong; give both one image_id."
        )
    num_texts = len(collection.captions)
    return [*notes, *truncation_notes(collection.num_truncated, num_texts, "captions")]


def _figures(
    all_ranks: dict[tuple[str, str], NDArray[np.int64]], collection: Collection, resamples: int
) -> dict[tuple[str, str, str], Figure]:
    """Compute recall at each k and the means, with intervals from the same resamples of images."""
    images, texts = len(collection.image_features), len(collection.text_features)
    num_captions = np.bincount(collection.image_of_text, minlength=images).astype(np.float64)
    num_positives = [(indices != PADDING).sum(axis=1) for indices in collection.positives()]
    chances = {
        "text_to_image": [chance_recall(num_positives[0], images, k) for k in RECALL_AT],
        "image_to_text": [chance_recall(num_positives[1], texts, k) for k in RECALL_AT],
    }
    figures: dict[tuple[str, str, str], Figure] = {}
    for stage in dict.fromkeys(stage for stage, _ in all_ranks):
        # Hits and queries per image: all captions of an image are resampled together.
        hit_columns, query_columns = [], []
        for direction in DIRECTIONS:
            by_text = direction == "text_to_image"
            query_image = collection.image_of_text if by_text else np.arange(images)
            for k in RECALL_AT:
                is_hit = all_ranks[stage, direction] < k
                hit_columns.append(np.bincount(query_image, is_hit, minlength=images))
                query_columns.append(num_captions if by_text else np.ones(images))
        hits, queries = np.stack(hit_columns, axis=1), np.stack(query_columns, axis=1)
        point = _with_means(hits.sum(axis=0, keepdims=True) / queries.sum(axis=0))[0]
        resampled = _with_means(bootstrap_means(hits, queries, resamples=resamples))
        low, high = percentile_interval(resampled)
        chance = _with_means(np.array([chances["text_to_image"] + chances["image_to_text"]]))[0]
        names = [*(f"R@{k}" for k in RECALL_AT), MEAN]
        keys: list[tuple[str, str]] = [(side, name) for side in DIRECTIONS for name in names]
        for column, key in enumerate([*keys, ("both", MEAN)]):
            cells = (array[column] for array in (point, low, high, chance))
            figures[stage, *key] = Figure(*map(float, cells))
    return figures


def _with_means(recalls: NDArray[np.float64]) -> NDArray[np.float64]:
    """Insert each direction's mean after its half of the recalls (., 2 x k); append their mean."""
    parts = np.split(recalls, 2, axis=1)
    means = [part.mean(axis=1, keepdims=True) for part in parts]
    return np.concatenate([parts[0], means[0], parts[1], means[1], sum(means) / 2], axis=1)
