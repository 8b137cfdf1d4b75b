"""Which samples make up a minibatch: streams of text, buckets, held-out samples."""

import pytest
import torch

from pipebench.model.sampling import InOrder, Sampler, Streams, UnitShape, Varying, mix, name_hash


class TestStreams:
    @pytest.mark.parametrize(("chunks", "rows", "streams"), [(43, 4, 2), (24, 2, 3), (7, 7, 1)])
    def test_a_minibatch_continues_the_one_a_stream_ago(self, chunks: int, rows: int, streams: int) -> None:
        sampler = Streams(chunks, rows, streams)
        for k in range(3 * sampler.minibatches_per_epoch):
            stream = sampler.stream(k)
            assert stream.number == k % streams
            if not stream.starts:
                assert list(sampler.indices(k)) == [i + 1 for i in sampler.indices(k - streams)]
        epoch = [i for k in range(sampler.minibatches_per_epoch) for i in sampler.indices(k)]
        assert len(epoch) == len({*epoch}) == sampler.num_samples == chunks // (rows * streams) * rows * streams
        assert max(epoch) < chunks

    def test_every_epoch_starts_anew(self) -> None:
        sampler = Streams(43, 4, 2)
        starts = [k for k in range(25) if sampler.stream(k).starts]
        assert starts == [0, 1, 10, 11, 20, 21]
        assert list(sampler.indices(10)) == list(sampler.indices(0)) == [0, 5, 10, 15]

    def test_covering_rows_leave_no_chunk_out(self) -> None:
        sampler = Streams(43, 4, 2, covers=True)
        epoch = sorted(i for k in range(sampler.minibatches_per_epoch) for i in sampler.indices(k))
        assert epoch[:43] == list(range(43))
        assert len(epoch) == 48
        assert {sampler.size(k) for k in range(sampler.minibatches_per_epoch)} == {4}


class TestBuckets:
    def test_minibatches_are_of_one_bucket_but_where_buckets_meet(self) -> None:
        buckets = [i % 3 for i in range(103)]
        sampler = Sampler(103, 10, 4, lambda: buckets)
        made = [sampler.indices(k) for k in range(sampler.minibatches_per_epoch)]
        assert sorted(i for indices in made for i in indices) == list(range(103))
        assert [len(indices) for indices in made] == [10] * 10 + [3]
        mixed = [indices for indices in made if len({buckets[i] for i in indices}) > 1]
        assert len(mixed) <= 2

    @pytest.mark.parametrize(("num_samples", "size"), [(103, 10), (100, 10), (7, 10), (5000, 64)])
    @pytest.mark.parametrize("has_buckets", [True, False])
    def test_order_equals_that_of_lists(self, num_samples: int, size: int, has_buckets: bool) -> None:
        """An epoch's order takes 8 bytes a sample, and is what sorting and shuffling lists gives."""
        buckets = [i * i % 5 for i in range(num_samples)] if has_buckets else None
        sampler = Sampler(num_samples, size, 4, lambda: buckets)
        for epoch in range(3):
            generator = torch.Generator().manual_seed(mix(4, name_hash("epoch"), epoch))
            order = torch.randperm(num_samples, generator=generator).tolist()
            cut = num_samples // size * size
            if buckets is not None:
                order.sort(key=buckets.__getitem__)
                shuffled = torch.randperm(num_samples // size, generator=generator).tolist()
                order = [i for k in shuffled for i in order[k * size : (k + 1) * size]] + order[cut:]
            first = epoch * sampler.minibatches_per_epoch
            made = [sampler.indices(first + k) for k in range(sampler.minibatches_per_epoch)]
            assert made == [order[at : at + size] for at in range(0, num_samples, size)]
            assert sampler._permutation(epoch).nbytes == 8 * num_samples

    def test_order_of_buckets_and_samples_changes_with_epoch_and_seed(self) -> None:
        buckets = [i % 3 for i in range(103)]
        first, again, other = (Sampler(103, 10, seed, lambda: buckets) for seed in (4, 4, 5))
        assert [first.indices(k) for k in range(22)] == [again.indices(k) for k in range(22)]
        assert first.indices(0) != first.indices(11)
        assert first.indices(0) != other.indices(0)

    def test_buckets_are_read_when_they_are_needed_only(self) -> None:
        def unread() -> list[int]:
            raise AssertionError("read")

        sampler = Sampler(103, 10, 4, unread)
        assert (sampler.size(10), sampler.samples_before(12)) == (3, 113)
        with pytest.raises(AssertionError, match="read"):
            sampler.indices(0)


def test_held_out_samples_keep_their_order() -> None:
    sampler = InOrder(10, 4)
    assert [list(sampler.indices(k)) for k in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class TestVarying:
    LENGTHS = ((9, 0.2), (20, 0.5), (50, 0.3))

    def test_a_minibatch_s_length_depends_on_seed_and_number(self) -> None:
        first, again, other = (Varying(4003, 4, seed, self.LENGTHS) for seed in (3, 3, 4))
        drawn = [first.columns(k) for k in range(4000)]
        assert [again.columns(k) for k in reversed(range(4000))] == drawn[::-1]
        assert [other.columns(k) for k in range(4000)] != drawn
        for columns, share in self.LENGTHS:
            assert abs(drawn.count(columns) / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5

    def test_microbatches_are_as_long_as_their_minibatch(self) -> None:
        sampler = Varying(4003, 4, 3, self.LENGTHS)
        columns = sampler.columns(7)
        assert sampler.sizes(7, 3) == [UnitShape(2, columns), UnitShape(1, columns), UnitShape(1, columns)]
        assert sampler.sizes(1000, 4)[:2] == [UnitShape(1, sampler.columns(1000)), UnitShape(1, sampler.columns(1000))]
        assert sampler.sizes(1000, 4)[3] == 0
        assert Sampler(4003, 4, 3).sizes(1000, 4) == [1, 1, 1, 0]

    def test_which_samples_they_are_isnt_known(self) -> None:
        with pytest.raises(NotImplementedError):
            Varying(4003, 4, 3, self.LENGTHS).indices(0)
