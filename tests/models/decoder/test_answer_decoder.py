import itertools

import pytest
import torch
from tests_support import tiny_config
from torch.nn import functional

from vlp.config import ConfigError
from vlp.layers.attention import Past
from vlp.models.decoder import (
    AnswerDecoder,
    AnswerDecoderConfig,
    AnswerRanking,
    SpecialIds,
    answer_likelihood,
    beam_search,
    generate,
    initialise_decoder,
)
from vlp.models.pretrained.published import Published
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead
from vlp.positions.base import PositionContext

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = 24


def model(layout="ace", layers=2):
    cross = {"layout": layout, "layers": layers}
    return VLPModel(tiny_config(text={"vocab_size": WORDS}, cross=cross)).double()


def decoder(of=None, seed=1, **options):
    """In float64, with weights that are far from zero so that words differ in likelihood."""
    of = of or model()
    torch.manual_seed(seed)
    config = AnswerDecoderConfig.model_validate({"layers": 2, **options})
    made = AnswerDecoder(config, of.config, MLMHead(of.config.text.width, WORDS)).double()
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    return made.eval()


def embedding(of):
    words = of.text_encoder.embedding
    with torch.no_grad():
        words.word.weight.add_(torch.randn_like(words.word.weight))
    return words


def padded(texts):
    ids = torch.full((len(texts), max(map(len, texts)) + 2), PAD)
    for row, text in enumerate(texts):
        ids[row, : len(text) + 2] = torch.tensor([CLS, *text, SEP])
    return ids


SILENT = (PAD, UNK, CLS, MASK)
MARKS = SpecialIds(CLS, SEP, SILENT)


@pytest.fixture
def parts():
    of = model()
    made, words = decoder(of), embedding(of)
    states = torch.randn(3, 5, 16, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[2, 3:] = False
    return made, words, states, mask


def written_out(made, words, states, mask, ids):
    x = words(ids)
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in made.layers:
        for attention, norm, source, hidden in (
            (layer.attention, layer.attention_norm, None, later),
            (layer.cross_attention, layer.cross_norm, states, ~mask[:, None, None]),
        ):
            source = x if source is None else source
            projected = attention.query(x), attention.key(source), attention.value(source)
            query, key, value = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in projected)
            logits = (query @ key.mT / 8**0.5).masked_fill(hidden, -torch.inf)
            out = attention.output((logits.softmax(-1) @ value).transpose(1, 2).flatten(-2))
            x = norm(x + out)
        x = layer.feed_forward_norm(x + layer.feed_forward(x))
    return x


class TestDecoder:
    def test_the_definition(self, parts):
        made, words, states, mask = parts
        ids = torch.randint(5, WORDS, (3, 6))
        out = made(ids, made.remember(states, mask), words)
        torch.testing.assert_close(out, written_out(made, words, states, mask, ids))

    def test_token_by_token_is_the_whole_text(self, parts):
        made, words, states, mask = parts
        memory = made.remember(states, mask)
        ids = torch.randint(5, WORDS, (3, 6))
        pasts = [Past() for _ in made.layers]
        steps = [made(ids[:, : n + 1], memory, words, pasts) for n in range(6)]
        assert all(step.shape == (3, 1, 16) for step in steps)
        whole = made(ids, memory, words)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-12, atol=1e-12)

    def test_own_words_are_used_in_and_out(self):
        of = model()
        made, words = decoder(of, embedding="own"), embedding(of)
        memory = made.remember(torch.randn(1, 2, 16, dtype=torch.float64))
        ids = padded([[7, 8]])
        before = made.logits(made(ids, memory, words), words)
        words.word.weight.data.zero_()
        assert torch.equal(before, made.logits(made(ids, memory, words), words))
        shared = decoder(of)
        states = shared(ids, shared.remember(torch.randn(1, 2, 16).double()), words)
        assert torch.equal(shared.logits(states, words), shared.head.bias.expand(1, 4, WORDS))

    def test_bf16_has_no_nan_and_finite_gradients(self, parts):
        made, words, states, mask = parts
        made, words = made.float(), words.float()
        mask[2] = False
        with torch.autocast("cpu", torch.bfloat16):
            memory = made.remember(states.float(), mask)
            found = answer_likelihood(made, memory, padded([[7], [8, 9], [5]]), words, PAD)
        assert found.log_probability.dtype == torch.float32
        found.log_probability.sum().backward()
        assert all(p.grad.isfinite().all() for p in made.parameters())

    def test_heads_that_do_not_divide(self):
        with pytest.raises(ConfigError, match="heads 3 do not divide"):
            decoder(heads=3)


class TestLikelihood:
    TEXTS = ([7, 8, 9], [], [10, 11])

    def test_it_is_the_sum_of_log_probabilities(self, parts):
        made, words, states, mask = parts
        found = answer_likelihood(made, made.remember(states, mask), padded(self.TEXTS), words, PAD)
        for row, text in enumerate(self.TEXTS):
            ids = torch.tensor([[CLS, *text, SEP]])
            memory = made.remember(states[row : row + 1], mask[row : row + 1])
            odds = made.logits(made(ids, memory, words), words).log_softmax(-1)[0]
            said = [*text, SEP]
            each = odds[range(len(said)), said]
            torch.testing.assert_close(found.log_probability[row], each.sum())
            assert found.tokens[row] == len(said)
            assert found.correct[row] == (odds[: len(said)].argmax(-1) == torch.tensor(said)).sum()

    def test_smoothing_spreads_the_target(self, parts):
        made, words, states, mask = parts
        memory, ids = made.remember(states, mask), padded([[7], [8], [9]])
        found = answer_likelihood(made, memory, ids, words, PAD, smoothing=0.3)
        odds = made.logits(made(ids[:, :-1], memory, words), words).log_softmax(-1)
        target = 0.7 * functional.one_hot(ids[:, 1:], WORDS) + 0.3 / WORDS
        torch.testing.assert_close(found.log_probability, (odds * target).sum((1, 2)))


class TestGeneration:
    @pytest.mark.parametrize("beams", [1, 3])
    def test_the_cache_changes_nothing(self, parts, beams):
        made, words, states, mask = parts
        memory = made.remember(states, mask)
        texts = generate(made, memory, words, MARKS, 6, beams)

        def step(ids, parents):
            repeated = memory.select(torch.arange(3).repeat_interleave(len(ids) // 3))
            scores = made.logits(made(ids, repeated, words)[:, -1], words)
            return scores.index_fill(1, torch.tensor(SILENT), -torch.inf).log_softmax(-1)

        assert torch.equal(texts, beam_search(step, 3, CLS, SEP, 6, beams))
        assert len(set(map(tuple, texts.tolist()))) > 1

    def test_enough_beams_find_the_likeliest_text(self, parts):
        made, words, states, mask = parts
        memory = made.remember(states, mask)
        silent = (*SILENT, *range(9, WORDS))  # four words and the end are left
        found = generate(made, memory, words, SpecialIds(CLS, SEP, silent), 3, 200, penalty=0)
        spoken = [SEP, *range(5, 9)]
        texts = [
            [*text, SEP] for n in range(3) for text in itertools.product(spoken[1:], repeat=n)
        ] + [list(text) for text in itertools.product(spoken[1:], repeat=3)]
        for row in range(3):
            own = made.remember(states[row : row + 1], mask[row : row + 1])

            @torch.no_grad()
            def odds(text, own=own):
                ids = torch.tensor([[CLS, *text]])
                logits = made.logits(made(ids[:, :-1], own, words), words)
                logits[..., list(silent)] = -torch.inf
                return float(logits.log_softmax(-1)[0, range(len(text)), text].sum())

            best = max(texts, key=odds)
            said = found[row].tolist()
            assert said[: len(best)] == best
            assert set(said[len(best) :]) <= {SEP}


class TestRanking:
    @pytest.fixture
    def answers(self):
        words = torch.randint(5, 12, (400, 3), generator=torch.Generator().manual_seed(3)).tolist()
        texts = {tuple(text[: 1 + n % 3]): None for n, text in enumerate(words)}
        return padded([list(text) for text in texts][:40])

    def brute_force(self, parts, answers):
        made, words, states, mask = parts
        memory = made.remember(states, mask)
        texts = [answer[answer != PAD].expand(3, -1) for answer in answers]
        odds = [answer_likelihood(made, memory, ids, words, PAD) for ids in texts]
        return torch.stack([part.log_probability for part in odds], 1)

    def rank(self, parts, answers, **options):
        made, words, states, mask = parts
        return AnswerRanking(made, answers, words, PAD, **options)(made.remember(states, mask))

    @pytest.mark.parametrize("candidates", [40, 400, None])
    @pytest.mark.parametrize("logits", [2**26, 500, 1])
    def test_all_candidates_are_brute_force(self, parts, answers, candidates, logits, monkeypatch):
        monkeypatch.setattr("vlp.models.decoder.MAX_LOGITS", logits)
        found = self.rank(parts, answers, candidates=candidates)
        odds, best = self.brute_force(parts, answers).max(1)
        assert torch.equal(found.best, best)
        torch.testing.assert_close(found.log_probability, odds, rtol=1e-12, atol=1e-12)

    def test_candidates_are_those_of_the_first_token(self, parts, answers):
        made, words, states, mask = parts
        odds = self.brute_force(parts, answers)
        memory = made.remember(states, mask)
        first = made.logits(made(torch.full((3, 1), CLS), memory, words)[:, 0], words)
        for candidates in (1, 3, 10):
            found = self.rank(parts, answers, candidates=candidates).best
            for row in range(3):
                by_first = sorted(
                    range(len(answers)), key=lambda n, row=row: (-first[row, answers[n, 1]], n)
                )
                chosen = by_first[:candidates]
                assert found[row] == max(chosen, key=lambda n, row=row: odds[row, n])

    def test_the_first_of_equals_wins(self, parts):
        found = self.rank(parts, padded([[7], [7], [7]]), candidates=None)
        assert found.best.tolist() == [0, 0, 0]

    def test_memory_is_bounded(self, parts, answers, monkeypatch):
        monkeypatch.setattr("vlp.models.decoder.MAX_LOGITS", 20 * WORDS)
        most = []
        parts[0].head.register_forward_hook(lambda _, given, out: most.append(out.numel()))
        self.rank(parts, answers, candidates=None)
        assert max(most) <= 20 * WORDS

    @pytest.mark.parametrize(("answers", "candidates"), [(0, 3), (2, 0)])
    def test_nothing_to_rank(self, parts, answers, candidates):
        with pytest.raises(ValueError, match=f"not {answers} and {candidates}"):
            self.rank(parts, padded([[7], [8]])[:answers], candidates=candidates)


def bert(layers=3, width=16, **more):
    state = {
        f"encoder.layer.{n}.{module}.{kind}": torch.randn(
            *sizes[: 2 if kind == "weight" and "Norm" not in module else 1]
        ).double()
        for n in range(layers)
        for module, sizes in {
            **{f"attention.self.{one}": (width, width) for one in ("query", "key", "value")},
            "attention.output.dense": (width, width),
            "attention.output.LayerNorm": (width,),
            "intermediate.dense": (32, width),
            "output.dense": (width, 32),
            "output.LayerNorm": (width,),
        }.items()
        for kind in ("weight", "bias")
    }
    return {**state, "embeddings.word_embeddings.weight": torch.randn(WORDS, width), **more}


class TestStart:
    @pytest.mark.parametrize("layout", ["ace", "text", "albef"])
    def test_it_computes_what_the_cross_encoder_does(self, layout):
        """One token, so that causal attention sees what full attention sees; paths are zero."""
        of = model(layout)
        made = AnswerDecoder(AnswerDecoderConfig(layers=2), of.config, MLMHead(16, WORDS)).double()
        (report,) = initialise_decoder(made, of)
        assert "cross-modal encoder -> answer decoder" in str(report)
        ids, states = torch.tensor([[CLS]]), torch.randn(1, 5, 16, dtype=torch.float64)
        wanted = of.text_encoder.embedding(ids)
        context = PositionContext((1, 1), 1)
        for layer in of.cross_encoder.layers:
            for encoding in layer.cross_attention.positions:
                for table in encoding.parameters():
                    table.data.zero_()
            layer.cross_attention.positions = torch.nn.ModuleList()
            wanted = layer("self_attend", wanted, None, context)
            wanted = layer("cross_attend", wanted, states, None, context)
        out = made(ids, made.remember(states), of.text_encoder.embedding)
        torch.testing.assert_close(out, wanted)

    def test_more_layers_than_the_cross_encoder(self):
        of = model()
        made = AnswerDecoder(AnswerDecoderConfig(layers=3), of.config, MLMHead(16, WORDS)).double()
        before = made.layers[2].attention.query.weight.clone()
        (report,) = initialise_decoder(made, of)
        assert any("layers" in part for part in report.missing)
        assert torch.equal(made.layers[2].attention.query.weight, before)
        shared = of.cross_encoder.layers[1].attention.query.weight
        assert torch.equal(made.layers[1].attention.query.weight, shared)

    def test_own_words_start_as_the_encoders(self):
        of = model()
        made = decoder(of, embedding="own", start="none")
        (report,) = initialise_decoder(made, of)
        assert "text encoder" in report.source
        own, theirs = made.embedding.state_dict(), of.text_encoder.embedding.state_dict()
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)
        assert initialise_decoder(decoder(of, start="none"), of) == []

    def test_the_last_layers_of_a_bert(self, monkeypatch):
        state = bert()
        monkeypatch.setattr("vlp.models.decoder.read_bert", lambda name: Published(state))
        of = model()
        made = decoder(of, weights="some-bert")
        crossed = made.layers[0].cross_attention.query.weight.clone()
        (report,) = initialise_decoder(made, of)
        for number in range(2):
            wanted = state[f"encoder.layer.{number + 1}.output.dense.weight"]
            assert torch.equal(made.layers[number].feed_forward.contract.weight, wanted)
        assert torch.equal(made.layers[0].cross_attention.query.weight, crossed)
        assert report.unused

    @pytest.mark.parametrize(
        ("published", "message"),
        [
            (Published(bert(layers=1)), "has 1 layers, decoder.layers needs 2"),
            (Published(bert(strange=torch.zeros(1))), "no rule maps these keys of BERT: strange"),
            (Published(bert(width=8)), r"is \(8, 8\) there and \(16, 16\) here"),
            (Published(bert(), {"num_attention_heads": 16}), r"set decoder\.heads=16"),
        ],
    )
    def test_a_bert_that_does_not_fit(self, monkeypatch, published, message):
        monkeypatch.setattr("vlp.models.decoder.read_bert", lambda name: published)
        of = model()
        with pytest.raises(ValueError, match=message):
            initialise_decoder(decoder(of, weights="some-bert"), of)
        with pytest.raises(ConfigError, match=r"the cross-modal encoder has \d heads"):
            initialise_decoder(decoder(of, heads=1, start="cross"), of)


class TestBeamSearch:
    def table(self, rows, words, length, seed):
        rng = torch.Generator().manual_seed(seed)
        table = {
            (row, said): torch.randn(words, generator=rng, dtype=torch.float64).log_softmax(0)
            for row in range(rows)
            for many in range(length)
            for said in itertools.product(range(words), repeat=many)
        }

        def step(ids, parents):
            beams = len(ids) // rows
            said = [(n // beams, tuple(row[1:])) for n, row in enumerate(ids.tolist())]
            return torch.stack([table[one] for one in said])

        return table, step

    def best(self, table, row, words, length, end, penalty):
        best = (-torch.inf, ())
        for said in itertools.product(range(words), repeat=length):
            over = said.index(end) + 1 if end in said else length
            score = sum(float(table[row, said[:n]][said[n]]) for n in range(over))
            best = max(best, (score / ((5 + over) / 6) ** penalty, said[:over]))
        return list(best[1])

    @pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
    @pytest.mark.parametrize("seed", range(4))
    def test_enough_beams_find_the_best(self, seed, penalty):
        rows, words, length, end = 3, 3, 4, 1
        table, step = self.table(rows, words, length, seed)
        found = beam_search(step, rows, 0, end, length, 200, penalty)
        for row, said in enumerate(found.tolist()):
            wanted = self.best(table, row, words, length, end, penalty)
            assert said[: len(wanted)] == wanted
            assert set(said[len(wanted) :]) <= {end}

    def test_one_beam_is_greedy(self):
        table, step = self.table(2, 4, 5, 7)
        found = beam_search(step, 2, 0, 1, 5)
        for row, said in enumerate(found.tolist()):
            greedy: list[int] = []
            while len(greedy) < 5 and 1 not in greedy:
                greedy.append(int(table[row, tuple(greedy)].argmax()))
            assert said[: len(greedy)] == greedy

    def test_it_stops_when_all_have_ended(self):
        def step(ids, parents):
            return torch.tensor([0.1, 0.9]).log().expand(len(ids), 2)

        assert beam_search(step, 3, 0, 1, 50).tolist() == [[1]] * 3

    @pytest.mark.parametrize("wrong", [{"beams": 0}, {"length": 0}])
    def test_nothing_to_search(self, wrong):
        with pytest.raises(ValueError, match="at least 1 beam"):
            beam_search(
                lambda ids, parents: ids, **{"rows": 1, "start": 0, "end": 1, "length": 2, **wrong}
            )
