"""The hard bound on staleness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from algorithms_support import episode, group, sample, turn

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.staleness import (
    EpisodeTokens,
    age_weights,
    episode_tokens,
    is_stale,
    leaves_in_time,
    mask_stale,
    stale_share_by_length,
)
from areal_agents.errors import TrainingError

CONFIG = AlgorithmConfig()


def test_tokens_beyond_the_bound_are_masked_and_counted() -> None:
    mixed = sample([9, 1, 2, 3], [1, 2, 3], versions=[-1, 3, 4, 5])
    old = sample([9, 1], [1], versions=[-1, 2])
    fresh = sample([9, 1], [1], versions=[-1, 5])
    kept, report = mask_stale([mixed, old, fresh], version=5, max_staleness=1)
    assert [s.loss_mask.tolist() for s in kept] == [[False, False, True, True], [False, True]]
    assert kept[0].advantages.tolist() == [0, 0, 1, 1]
    assert kept[1] is fresh
    assert (report.masked_tokens, report.dropped_samples) == (2, 1)
    assert report.staleness.tolist() == [1, 0, 0]


def test_a_stale_token_is_scored_in_no_branch() -> None:
    """A stale token of a shared prefix is masked in every branch, so no ratio includes it."""
    branch = replace(
        sample([9, 1, 2, 3, 4], [4], versions=[-1, 3, 5, -1, 5]),
        prefix_mask=np.array([False, True, True, False, False]),
    )
    kept, report = mask_stale([branch], version=5, max_staleness=1)
    assert kept[0].loss_mask.tolist() == [False, False, False, False, True]
    assert kept[0].prefix_mask is not None
    assert kept[0].prefix_mask.tolist() == [False, False, True, False, False]
    # counted only in the sample that trains it
    assert (report.masked_tokens, report.dropped_samples, report.staleness.tolist()) == (0, 0, [0])
    alone, report = mask_stale([replace(branch, versions=branch.versions - 2)], version=5, max_staleness=1)
    assert alone == [] and (report.masked_tokens, report.dropped_samples) == (1, 1)


def test_a_bound_of_zero_trains_only_the_current_version() -> None:
    kept, report = mask_stale([sample([9, 1, 2], [1, 2], versions=[-1, 4, 5])], version=5, max_staleness=0)
    assert kept[0].loss_mask.tolist() == [False, False, True]
    assert report.staleness.tolist() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_the_report_is_computed_from_the_returned_masks(seed: int) -> None:
    """Its largest staleness is that of the trained tokens, so it would reveal a mask that keeps too many."""
    rng = np.random.default_rng(seed)
    version, bound = 9, int(rng.integers(0, 4))
    samples = []
    for length in rng.integers(2, 12, 15):
        trained = [1, *(position for position in range(2, length) if rng.random() < 0.7)]
        samples.append(sample(range(length), trained, versions=rng.integers(3, version + 1, length)))
    before = np.concatenate([version - s.versions[s.loss_mask] for s in samples])
    kept, report = mask_stale(samples, version=version, max_staleness=bound)
    assert report.staleness.max() <= bound
    assert report.staleness.tolist() == [
        version - s.versions[i] for s in kept for i in np.flatnonzero(s.loss_mask)
    ]
    assert sorted(report.staleness) == sorted(before[before <= bound])
    assert report.masked_tokens == (before > bound).sum()
    assert all((s.advantages[~s.loss_mask] == 0).all() and s.loss_mask.any() for s in kept)


def test_without_a_bound_all_tokens_are_kept_even_with_versions_of_another_run() -> None:
    samples = [sample([9, 1, 2], [1, 2], versions=[-1, 0, 40])]
    kept, report = mask_stale(samples, version=3, max_staleness=None)
    assert kept[0] is samples[0] and report.staleness.tolist() == [3, -37]
    assert (report.masked_tokens, report.dropped_samples) == (0, 0)
    old = group([episode([turn("a", versions=[0, 0])])])
    assert not is_stale(old, CONFIG, version=100, max_staleness=None, drop=True)


def test_no_samples_give_an_empty_report() -> None:
    kept, report = mask_stale([], version=3, max_staleness=1)
    assert kept == [] and report.staleness.size == 0


def test_a_version_that_does_not_exist_yet_is_refused_and_the_episode_named() -> None:
    with pytest.raises(
        TrainingError,
        match="group g, episode e: a trained token is of version 6, but the trainer is at version 5",
    ):
        mask_stale([sample([9, 1], [1], versions=[-1, 6])], version=5, max_staleness=1)


def test_a_group_is_stale_if_all_its_tokens_are_or_with_drop_if_any_token_is() -> None:
    old = group([episode([turn("a", versions=[1, 2])]), episode([turn("b", versions=[1, 1])])])
    assert is_stale(old, CONFIG, version=4, max_staleness=1, drop=False)
    assert not is_stale(old, CONFIG, version=4, max_staleness=2, drop=False)
    assert is_stale(old, CONFIG, version=4, max_staleness=2, drop=True)
    assert not is_stale(old, CONFIG, version=3, max_staleness=2, drop=True)
    assert not is_stale(group([episode([])]), CONFIG, version=9, max_staleness=0, drop=True)


def test_an_old_untrained_token_does_not_make_a_group_stale() -> None:
    turns = [turn("a", versions=[1, 1], constrained=True), turn("b", versions=[4, 4])]
    assert not is_stale(group([episode(turns)]), CONFIG, version=4, max_staleness=1, drop=True)


def test_a_new_untrained_token_does_not_keep_a_group_from_being_stale() -> None:
    turns = [turn("a", versions=[1, 1]), turn("b", versions=[4, 4], constrained=True)]
    assert is_stale(group([episode(turns)]), CONFIG, version=4, max_staleness=1, drop=False)


def test_stale_tokens_are_counted_for_each_episode() -> None:
    turns = [turn("a", versions=[1, 3]), turn("b", versions=[1, 1], constrained=True)]
    mixed = group([episode(turns), episode([turn("c", versions=[4, 4])])])
    age = {"version": 4, "max_staleness": 2}
    assert episode_tokens(mixed, CONFIG, **age, dropped=False) == [  # type: ignore[arg-type]
        EpisodeTokens(sampled=4, trainable=2, stale=1),
        EpisodeTokens(sampled=2, trainable=2, stale=0),
    ]
    lost = episode_tokens(mixed, CONFIG, **age, dropped=True)  # type: ignore[arg-type]
    assert [tokens.stale for tokens in lost] == [2, 2]


def test_the_share_of_stale_tokens_is_reported_by_length() -> None:
    episodes = [EpisodeTokens(sampled, trainable=10, stale=sampled // 4) for sampled in range(40, 0, -2)]
    shares = stale_share_by_length(episodes)
    assert list(shares) == [str(decile) for decile in range(1, 11)]
    assert shares["1"] == pytest.approx((0 + 1) / 20) and shares["10"] == pytest.approx((9 + 10) / 20)
    assert stale_share_by_length([EpisodeTokens(5, 4, 1), EpisodeTokens(3, 0, 0)]) == {"6": 0.25}
    assert stale_share_by_length([]) == {}


def test_the_weight_of_a_token_falls_with_its_age() -> None:
    weights = age_weights(np.array([5, 4, 2], np.int32), version=5)
    assert weights.tolist() == pytest.approx([1, 1 / 2, 1 / 4]) and weights.dtype == np.float32


@pytest.mark.parametrize(
    ("versions", "in_time"),
    [
        ([], True),
        ([4], True),  # trained at version 5 with staleness 1
        ([3], False),  # would have staleness 2
        ([4, 4], True),
        ([4, 4, 4], False),  # the third would be trained at version 6
        ([5, 4, 5, 4], True),
        ([5, 5, 5, 4], True),  # 4 and 5 are trained at version 5, and 5 and 5 at version 6
        ([5, 5, 5, 5, 4], False),
    ],
)
def test_whether_groups_left_out_of_a_batch_can_be_trained_in_time(
    versions: list[int], in_time: bool
) -> None:
    assert leaves_in_time(versions, version=4, groups=2, max_staleness=1) is in_time
    assert leaves_in_time(versions, version=4, groups=2, max_staleness=None)
