"""The durable store: the only connection between rollout and training.

Writes of the proxy return futures that resolve once they are committed (`asyncio.wrap_future`
awaits them); writes of the trainer return after the commit; reads see one consistent snapshot.
Anything acknowledged survives the death of any process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from areal_agents.core.rollout import RecordedEpisode, Reward, RolloutGroup, Split
from areal_agents.core.trajectory import Turn
from areal_agents.store import episodes, groups, leases, reads, retention, rewards, versions, waiting
from areal_agents.store.codec import encode_turn
from areal_agents.store.config import Durability
from areal_agents.store.database import Database, store_path, store_url
from areal_agents.store.episodes import SealedStatus
from areal_agents.store.rows import (
    EpisodeRow,
    EpisodeState,
    EpisodeSummary,
    NewEpisode,
    OpenEpisode,
    OpenGroup,
    TurnTime,
    UntrainedGroup,
    VersionRow,
    WaitingGroup,
)
from areal_agents.store.trainer_lock import TrainerLock


class Store:
    """An open store. Thread-safe; every process opens its own. Use as a context manager or close it."""

    def __init__(self, database: Database, url: str) -> None:
        self._database = database
        self.url = url
        self._trainer = TrainerLock(self.path)

    @classmethod
    def open(cls, url_or_path: str | Path, durability: Durability = "process") -> Store:
        """Open or create a store; one of the previous schema is migrated first.

        StoreError if it is unusable, foreign or of another schema, or if it must be migrated while another
        process has it open.
        """
        url = store_url(url_or_path)
        return cls(Database(url, durability), url)

    @property
    def path(self) -> Path:
        """The file that holds it; what belongs to it in other files lies beside."""
        return store_path(self.url)

    def close(self) -> None:
        """Commit what is queued and let go of the file. Idempotent."""
        self._database.close()
        self._trainer.let_go()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cursor(self) -> int:
        """A mark for `wait`: it changes with any commit of any process. Meaningless to other objects."""
        return self._database.cursor()

    def wait(self, cursor: int, timeout_s: float) -> int:
        """Block until something was committed since `cursor`, at most `timeout_s`; the new cursor.

        Take the cursor, look, and then wait: so no change is missed.
        """
        return self._database.wait(cursor, timeout_s)

    # -- the proxy writes ---------------------------------------------------------------------

    def open_episode(self, new: NewEpisode) -> Future[EpisodeRow]:
        """Open an episode. Conflict if its group has no place for it."""
        return self._database.submit(lambda c: episodes.insert_episode(c, new))

    def add_turn(self, episode_id: str, *turns: Turn, opening: NewEpisode | None = None) -> Future[None]:
        """Record a turn, or siblings together: all of them or none. Conflict unless the episode is open.

        `opening` is an episode that may not have been opened yet: it is opened in the same transaction if
        the store does not have it, and then SessionTaken may be raised too.
        """
        rows = [encode_turn(episode_id, turn, time.time()) for turn in turns]

        def write(connection: sa.Connection) -> None:
            if opening is not None:
                episodes.insert_if_missing(connection, opening)
            for row in rows:
                episodes.insert_turn(connection, row)

        return self._database.submit(write)

    def discard_turn(self, turn_id: str, reason: str | None) -> Future[None]:
        """Note that a turn never reached its client, so that it is not trained; None takes that back."""
        return self._database.submit(lambda c: episodes.discard_turn(c, turn_id, reason))

    def set_rewards(self, episode_id: str, given: Sequence[Reward]) -> Future[EpisodeState]:
        """Set rewards; the last write of a name wins. NotFound; Conflict once the group is leased."""

        def write(connection: sa.Connection) -> EpisodeState:
            rewards.write_rewards(connection, episode_id, given)
            return episodes.state_of(connection, episode_id)

        return self._database.submit(write)

    def claim_episode(self, episode_id: str, expected_owner: str | None, owner: str) -> Future[bool]:
        """Make `owner` the owner of an open episode if `expected_owner` still is; whether it was."""
        return self._database.submit(lambda c: episodes.claim_episode(c, episode_id, expected_owner, owner))

    def mark_limit(self, episode_id: str, limit: str) -> Future[None]:
        """Note the limit that the policy ran into: finishing then makes the episode truncated."""
        return self._database.submit(lambda c: episodes.mark_limit(c, episode_id, limit))

    def seal(
        self,
        episode_id: str,
        status: SealedStatus,
        *,
        given: Sequence[Reward] = (),
        error: str | None = None,
        truncated_reward: float = 0.0,
        require_turn: bool = False,
    ) -> Future[EpisodeState]:
        """End an episode, with its last rewards; what it is then.

        Conflict if it ended otherwise; NoTurn if `require_turn` and the model was never called.
        """
        return self._database.submit(
            lambda c: episodes.seal_episode(
                c,
                episode_id,
                status,
                given=given,
                error=error,
                truncated_reward=truncated_reward,
                require_turn=require_turn,
            )
        )

    def fail_unrewarded(self, ids: Sequence[str]) -> Future[list[str]]:
        """Fail the episodes that `unrewarded_episodes` still has; returns their ids."""
        return self._database.submit(lambda c: episodes.fail_unrewarded(c, ids))

    def empty_groups(self, ids: Sequence[str], *, keep_versions: int) -> Future[int]:
        """Give up the texts and tokens of expired groups, see `expired_groups`; how many turns had any.

        A group that a resume could bring back is left alone. Freed space goes back to the disk.
        """

        def write(connection: sa.Connection) -> int:
            emptied = retention.empty_groups(connection, ids, keep_versions=keep_versions)
            retention.return_space(connection)
            return emptied

        return self._database.submit(write)

    def drop_open_group(self, group_id: str, reason: str) -> Future[None]:
        """Give up a group that the trainer has not taken. Conflict if it has."""
        return self._database.submit(lambda c: groups.drop_group(c, group_id, reason))

    # -- the trainer writes -------------------------------------------------------------------

    def become_trainer(self, wait_s: float = 0.0) -> None:
        """Be the one trainer of this store until it is closed; one that is ending is given `wait_s`.

        Conflict if another process is it: two would train the same groups.
        """
        self._trainer.take(wait_s)

    def lease_group_ids(self, count: int, *, step: int) -> list[str]:
        """Take the `count` oldest complete training groups, or none if there are fewer; their ids.

        Their rewards are closed from here on. What a dead trainer had leased is complete again before.
        Conflict if another trainer has the store.
        """
        self.become_trainer()
        holder = self._trainer.holder
        return self._database.submit(
            lambda c: leases.take_groups(c, count, step=step, holder=holder)
        ).result()

    def lease_groups(self, count: int, *, step: int) -> list[RolloutGroup]:
        """Take groups as `lease_group_ids` does, and load them."""
        ids = self.lease_group_ids(count, step=step)
        with self._database.read() as connection:
            return reads.load_groups(connection, ids) if ids else []

    def lease_replays(
        self, count: int, *, step: int, min_version: int, max_uses: int
    ) -> list[tuple[str, int]]:
        """Lease up to `count` trained groups for one more use in `step`; (group, use) of each.

        Leased are groups that are trained in all their uses so far, the last of them in an earlier step, that
        have fewer than `max_uses` uses, and none of whose sampled tokens is older than `min_version`. Those
        that were submitted last come first: their tokens are the least stale, and the order of submission
        is one that no clock and no resume changes. Groups without sampled tokens, and groups whose turns were
        given up (`store.retain`), are passed over.

        A reuse counts neither in the gate nor in `group_counts`, and leaves the state of its group alone.

        Args:
            count: at least 1; fewer are leased where there are fewer.
            step: the step that trains them.
            min_version: every version from this one on is within the staleness bound at `step`.
            max_uses: uses of a group in all, its first one included.

        Raises:
            ValueError: `count` or `max_uses` is below 1.
            Conflict: another trainer has the store.
        """
        self.become_trainer()
        holder = self._trainer.holder
        return self._database.submit(
            lambda c: leases.take_replays(
                c, count, step=step, min_version=min_version, max_uses=max_uses, holder=holder
            )
        ).result()

    def mark_trained(self, group_ids: Iterable[str | tuple[str, int]], *, step: int, version: int) -> None:
        """Note that leased groups were trained into `version`. Conflict if one is not leased for `step`.

        A group is given as (group, use), or as its id alone for its first use.
        """
        ids = list(group_ids)
        self._database.submit(lambda c: leases.mark_trained(c, ids, step=step, version=version)).result()

    def drop_group(self, group_id: str, reason: str, *, step: int, use: int = 0) -> None:
        """Drop a complete or leased group for good. Conflict in any other state.

        With a `use` above 0, end a leased reuse instead: the group stays trained, and is not reused any more.
        """
        self._database.submit(lambda c: leases.drop_leased(c, group_id, reason, step=step, use=use)).result()

    def commit_checkpoint(self, step: int) -> None:
        """Note that a resume can start after `step`."""
        self._database.submit(lambda c: leases.write_checkpoint(c, step)).result()

    def return_leases(self, after_step: int) -> int:
        """Make the groups of all steps after `after_step` complete again; how many. For a resume.

        Reuses in those steps, and reuses that are only leased, are deleted.
        """
        return self._database.submit(lambda c: leases.return_leases(c, after_step)).result()

    def publish_version(
        self, version: int, *, step: int, path: str | Path, checksum: str | None = None
    ) -> None:
        """Make `version` the current policy. Conflict unless its number is a new maximum."""
        self._database.submit(
            lambda c: versions.insert_version(c, version, step=step, path=str(path), checksum=checksum)
        ).result()

    # -- everybody reads ----------------------------------------------------------------------

    def latest_version(self) -> VersionRow | None:
        """The current policy version, None before the first."""
        with self._database.read() as connection:
            return versions.latest_version(connection)

    def max_version(self) -> int:
        """The largest version number ever published, -1 before the first."""
        with self._database.read() as connection:
            return versions.max_version(connection)

    def steps_behind(self, version: int) -> dict[int, int]:
        """By how many steps each version of an earlier process run lags behind `version`."""
        with self._database.read() as connection:
            return versions.steps_behind(connection, version)

    def latest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint, None without one."""
        with self._database.read() as connection:
            return versions.latest_checkpoint(connection)

    def failed_episodes(self, split: Split = "train") -> int:
        """How many episodes of the split failed, since the store began."""
        with self._database.read() as connection:
            return reads.failed_episodes(connection, split)

    def in_flight_episodes(self) -> int:
        """Training episodes submitted and not yet trained, for the gate."""
        with self._database.read() as connection:
            return reads.in_flight_episodes(connection)

    def expired_groups(self, *, keep_versions: int, after_step: int, limit: int) -> list[tuple[str, int]]:
        """(group, step of its last use) of up to `limit` groups whose turns can be given up, by that step.

        Trained or dropped by the trainer, before the last `keep_versions` versions, and in a step that the
        checkpoint before the newest one has in it: so no resume can bring them back.
        """
        with self._database.read() as connection:
            return retention.expired_groups(
                connection, keep_versions=keep_versions, after_step=after_step, limit=limit
            )

    def group_counts(self, split: Split = "train") -> dict[str, int]:
        """How many groups are pending, complete, leased, trained and dropped."""
        with self._database.read() as connection:
            return reads.group_counts(connection, split)

    def waiting_groups(self) -> list[WaitingGroup]:
        """The training groups that the trainer has not taken yet, oldest first: pending and complete."""
        with self._database.read() as connection:
            return waiting.waiting_groups(connection)

    def untrained_groups(self) -> list[UntrainedGroup]:
        """The training groups that are neither trained nor dropped, oldest first."""
        with self._database.read() as connection:
            return waiting.untrained_groups(connection)

    def abandoned_groups(self) -> list[str]:
        """Pending training groups that others than our runner began, and in which nothing is under way."""
        with self._database.read() as connection:
            return waiting.abandoned_groups(connection)

    def episodes(
        self,
        split: str | None = None,
        status: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        group_id: str | None = None,
    ) -> list[EpisodeSummary]:
        """The episodes that fit every given condition, in the order of opening."""
        with self._database.read() as connection:
            return reads.summaries(
                connection, split=split, status=status, group_id=group_id, metadata=metadata
            )

    def open_groups(self) -> list[OpenGroup]:
        """The pending groups and the attempts at each of their places."""
        with self._database.read() as connection:
            return reads.open_groups(connection)

    def task_ids_started(self, split: Split = "train") -> list[tuple[str, int]]:
        """(task id, epoch) of every group, in the order of starting; group ids are "<task id>@<epoch>"."""
        with self._database.read() as connection:
            return reads.tasks_started(connection, split)

    def load_episode(self, episode_id: str) -> RecordedEpisode:
        """An episode with its turns and rewards. NotFound if it is unknown."""
        with self._database.read() as connection:
            return reads.load_episodes(connection, [episode_id])[0]

    def load_group(self, group_id: str) -> RolloutGroup:
        """A group with its scored episodes. NotFound if it is unknown."""
        return self.load_groups([group_id])[0]

    def load_groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        """Groups with their scored episodes, in the order of `group_ids`. NotFound if one is unknown."""
        with self._database.read() as connection:
            return reads.load_groups(connection, group_ids)

    def groups_ended_at(self, group_ids: Sequence[str]) -> dict[str, float | None]:
        """By group id, when the last of its episodes ended, in seconds since the epoch; None if none has."""
        with self._database.read() as connection:
            return reads.groups_ended_at(connection, group_ids)

    def turn_times(self, split: Split = "train") -> list[TurnTime]:
        """When the turns of scored episodes were recorded: by episode, and in order within it."""
        with self._database.read() as connection:
            return reads.turn_times(connection, split)

    def recorded_groups(self) -> list[str]:
        """The ids of the training groups that were completed and not dropped, oldest first."""
        with self._database.read() as connection:
            return reads.recorded_groups(connection)

    def episode_row(self, episode_id: str) -> EpisodeRow:
        """An episode without its turns. NotFound if it is unknown."""
        with self._database.read() as connection:
            return reads.episode_row(connection, id=episode_id)

    def episode_row_by_key(self, key_hash: str) -> EpisodeRow:
        """The episode that has a key, without its turns. NotFound if there is none."""
        with self._database.read() as connection:
            return reads.episode_row(connection, key_hash=key_hash)

    def episode_by_key(self, key_hash: str) -> tuple[EpisodeRow, list[Turn]]:
        """The episode that has a key, and its turns. NotFound if there is none."""
        with self._database.read() as connection:
            row = reads.episode_row(connection, key_hash=key_hash)
            return row, reads.turns_of(connection, row.id)

    def unrewarded_episodes(self) -> list[str]:
        """The finished episodes of groups that wait for a reward, oldest first."""
        with self._database.read() as connection:
            return episodes.unrewarded(connection)

    def open_episodes(self) -> list[OpenEpisode]:
        """Every open episode, oldest first."""
        with self._database.read() as connection:
            return reads.open_episodes(connection)

    def open_implicit_episode(self, implicit_key: str) -> EpisodeRow | None:
        """The open episode that bare calls opened under a key, None without one."""
        with self._database.read() as connection:
            return reads.open_implicit_episode(connection, implicit_key)

    def open_implicit_episodes(self) -> list[tuple[EpisodeRow, list[Turn]]]:
        """The open episodes that bare calls opened, and their turns."""
        with self._database.read() as connection:
            rows = reads.open_implicit_episodes(connection)
            return [(row, reads.turns_of(connection, row.id)) for row in rows]

    def turns_of(self, episode_id: str) -> list[Turn]:
        """The turns of one episode, in the order of recording."""
        with self._database.read() as connection:
            return reads.turns_of(connection, episode_id)

    def episode_of_turn(self, turn_id: str) -> EpisodeRow:
        """The episode that a completion belongs to. NotFound if it is unknown."""
        with self._database.read() as connection:
            return reads.episode_row(connection, id=reads.episode_of_turn(connection, turn_id))
