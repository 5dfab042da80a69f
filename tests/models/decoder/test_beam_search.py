"""Beam search against trying everything, and what it tells the decoder of its beams."""

from __future__ import annotations

import itertools

import pytest
import torch

from vlp.models.decoder import beam_search


class TestBeamSearch:
    def table(self, rows, words, length, seed):
        """Log-probabilities of a next word by row and everything said before."""
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
        """The best of all sequences, tried one by one."""
        best = (-torch.inf, ())
        for said in itertools.product(range(words), repeat=length):
            over = said.index(end) + 1 if end in said else length
            score = sum(float(table[row, said[:n]][said[n]]) for n in range(over))
            best = max(best, (score / ((5 + over) / 6) ** penalty, said[:over]))
        return list(best[1])

    @pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
    @pytest.mark.parametrize("seed", range(4))
    def test_enough_beams_find_the_best(self, seed, penalty) -> None:
        rows, words, length, end = 3, 3, 4, 1
        table, step = self.table(rows, words, length, seed)
        found = beam_search(step, rows, 0, end, length, 200, penalty)
        for row, said in enumerate(found.tolist()):
            wanted = self.best(table, row, words, length, end, penalty)
            assert said[: len(wanted)] == wanted
            assert set(said[len(wanted) :]) <= {end}

    def test_one_beam_is_greedy(self) -> None:
        table, step = self.table(2, 4, 5, 7)
        found = beam_search(step, 2, 0, 1, 5)
        for row, said in enumerate(found.tolist()):
            greedy: list[int] = []
            while len(greedy) < 5 and 1 not in greedy:
                greedy.append(int(table[row, tuple(greedy)].argmax()))
            assert said[: len(greedy)] == greedy

    def test_it_stops_when_all_have_ended(self) -> None:
        def step(ids, parents):
            return torch.tensor([0.1, 0.9]).log().expand(len(ids), 2)

        assert beam_search(step, 3, 0, 1, 50).tolist() == [[1]] * 3

    @pytest.mark.parametrize("wrong", [{"beams": 0}, {"length": 0}])
    def test_nothing_to_search(self, wrong) -> None:
        with pytest.raises(ValueError, match="finds nothing"):
            beam_search(
                lambda ids, parents: ids, **{"rows": 1, "start": 0, "end": 1, "length": 2, **wrong}
            )

    @pytest.mark.parametrize("beams", [1, 3, 50])
    def test_parents_tell_whose_text_goes_on(self, beams) -> None:
        """A decoder that keeps its texts by the parents has those that it is handed."""
        _, step = self.table(2, 3, 4, 5)
        kept: list[list[int]] = []

        def remembering(ids, parents):
            nonlocal kept
            # The first call has one row for each sequence, each its own parent.
            before = kept or [[]] * len(ids)
            kept = [
                before[parent] + [own[-1]] for parent, own in zip(parents.tolist(), ids.tolist())
            ]
            assert kept == ids.tolist()
            return step(ids, parents)

        beam_search(remembering, 2, 0, 1, 4, beams)
        assert len(kept[0]) == 4
