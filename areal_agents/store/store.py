"""The durable store, the only connection between rollout and training.

Writes of the proxy return futures that resolve after the commit (`asyncio.wrap_future` makes them awaitable);
writes of the trainer return after the commit; each read sees one consistent snapshot. An acknowledged write
survives the death of any process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from areal_agents.core.rollout import RecordedEpisode, Reward, RolloutGroup, Split
from areal_agents.core.trajectory import Turn
from areal_agents.store import (
    canary,
    deletion,
    engine_weights,
    episodes,
    groups,
    leases,
    ownership,
    reads,
    retention,
    rewards,
    roles,
    run_id,
    versions,
    waiting,
)
from areal_agents.store.codec import encode_turn
from areal_agents.store.config import Durability
from areal_agents.store.database import Database, Job, T
from areal_agents.store.engine_weights import EngineWeights, EngineWeightsRow
from areal_agents.store.episodes import SealedStatus
from areal_agents.store.roles import Role, RoleRow
from areal_agents.store.rows import (
    Activity,
    Admission,
    EndedEpisode,
    EpisodeRow,
    EpisodeState,
    EpisodeSummary,
    GroupHistory,
    NewEpisode,
    NewGroup,
    OpenEpisode,
    OpenGroup,
    ScoredConversation,
    ServedVersions,
    TaskGroup,
    TurnTime,
    UntrainedGroup,
    VersionRow,
    WaitingGroup,
)
from areal_agents.store.trainer_lock import TrainerLock
from areal_agents.store.urls import backend_of, store_path, store_url


class Store:
    """An open store. Thread-safe; every process opens its own. Use it as a context manager, or close it."""

    def __init__(self, database: Database, url: str) -> None:
        self._database = database
        self.url = url
        self._trainer = TrainerLock.of(url)

    @classmethod
    def open(cls, url_or_path: str | Path, durability: Durability = "process") -> Store:
        """Open or create a store; a store of the previous schema is migrated first.

        Raises StoreError if it is unusable, not a store or of another schema, or if it must be migrated while
        another process has it open.
        """
        url = store_url(url_or_path)
        return cls(Database(backend_of(url, durability)), url)

    @property
    def path(self) -> Path:
        """The file of the store; its other files are in the same folder. StoreError if it has none."""
        return store_path(self.url)

    def close(self) -> None:
        """Commit the queued writes and close every connection. Idempotent."""
        self._database.close()
        self._trainer.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cursor(self) -> int:
        """Return a number that changes with any commit of any process, for `wait` of this object only."""
        return self._database.cursor()

    def wait(self, cursor: int, timeout_s: float) -> int:
        """Block until a commit after `cursor`, for at most `timeout_s`, and return the new cursor.

        To miss no change, take the cursor, then read, and then wait.
        """
        return self._database.wait(cursor, timeout_s)

    # -- the proxy writes ---------------------------------------------------------------------

    def open_episode(self, new: NewEpisode) -> Future[EpisodeRow]:
        """Open an episode. Conflict if it does not fit into its group."""
        return self._database.submit(lambda c: episodes.insert_episode(c, new))

    def begin_group(self, new: NewGroup) -> Future[Admission]:
        """Begin a training group before its first episode, if the gate admits it and no other process has it.

        Repeating this changes nothing, and has the same result while the group is pending.
        """
        return self._database.submit(lambda c: episodes.begin_group(c, new))

    def claim_group(self, group_id: str, expected: str | None, runner: str | None) -> Future[bool]:
        """Make `runner` the rollout process of a pending group if `expected` is, or if it is so already.

        The result is whether `runner` has the group now.
        """
        return self._database.submit(lambda c: groups.claim_group(c, group_id, expected, runner))

    # With an `owner`, a write to an open episode has an effect only while that proxy is the episode's owner.

    def add_turn(
        self,
        episode_id: str,
        *turns: Turn,
        opening: NewEpisode | None = None,
        owner: str | None = None,
    ) -> Future[None]:
        """Record a turn, or several siblings, all or none. Conflict unless the episode is open.

        `opening` is an episode that may not have been opened yet: if the store does not have it, it is opened
        in the same transaction, which may then raise SessionTaken too. OwnedElsewhere if `owner` is not the
        episode's owner.
        """
        created_at = time.time()

        def encode() -> list[dict[str, Any]]:
            return [encode_turn(episode_id, turn, created_at) for turn in turns]

        # Compressing experts takes milliseconds per thousand tokens, so it is left to the writer's thread.
        has_experts = any(turn.completion.routed_experts is not None for turn in turns)
        rows = [] if has_experts else encode()

        def write(connection: sa.Connection) -> None:
            if opening is not None:
                episodes.insert_if_missing(connection, opening)
            for row in rows or encode():
                episodes.insert_turn(connection, row, owner=owner)

        return self._database.submit(write, only_adds=opening is None)

    def discard_turn(self, turn_id: str, reason: str | None, *, owner: str | None = None) -> Future[None]:
        """Record why a turn never reached its client, so that it is not trained; None clears the reason."""
        return self._database.submit(lambda c: episodes.discard_turn(c, turn_id, reason, owner=owner))

    def set_rewards(
        self, episode_id: str, given: Sequence[Reward], *, owner: str | None = None
    ) -> Future[EpisodeState]:
        """Set rewards; the last write of a name wins. NotFound, or Conflict once the group is leased.

        `owner` is the owner that the open episode had when the rewards arrived, which need not be the proxy
        that writes them; OwnedElsewhere if the episode was taken over since.
        """

        def write(connection: sa.Connection) -> EpisodeState:
            rewards.write_rewards(connection, episode_id, given, owner=owner)
            return episodes.state_of(connection, episode_id)

        return self._database.submit(write)

    def claim_episode(self, episode_id: str, expected_owner: str | None, owner: str) -> Future[bool]:
        """Make `owner` the owner of an open episode if `expected_owner` is; the result is whether it was."""
        return self._database.submit(lambda c: ownership.claim_episode(c, episode_id, expected_owner, owner))

    def mark_limit(self, episode_id: str, limit: str, *, owner: str | None = None) -> Future[None]:
        """Record the limit that the policy ran into; finishing the episode then makes it truncated."""
        return self._database.submit(lambda c: episodes.mark_limit(c, episode_id, limit, owner=owner))

    def seal(
        self,
        episode_id: str,
        status: SealedStatus,
        *,
        given: Sequence[Reward] = (),
        error: str | None = None,
        truncated_reward: float = 0.0,
        require_turn: bool = False,
        owner: str | None = None,
    ) -> Future[EpisodeState]:
        """End an episode, with its last rewards; the result is its state.

        Conflict if it ended in another way; NoTurn if `require_turn` and the model was never called;
        OwnedElsewhere if it is open and `owner` is not its owner.
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
                owner=owner,
            )
        )

    def add_ended(self, ended: Sequence[EndedEpisode]) -> Future[None]:
        """Record whole episodes that have ended elsewhere, all or none.

        Nothing of them is seen before all of them are finished, so no proxy ever has one of them in memory.
        """

        def write(connection: sa.Connection) -> None:
            for one in ended:
                episodes.insert_episode(connection, one.new)
                for turn in one.turns:
                    episodes.insert_turn(connection, encode_turn(one.new.id, turn, time.time()))
                episodes.seal_episode(connection, one.new.id, "finished", given=one.rewards)

        return self._database.submit(write)

    def fail_unrewarded(self, ids: Sequence[str]) -> Future[list[str]]:
        """Mark the given episodes that still wait for a reward as failed; the result is their ids."""
        return self._database.submit(lambda c: episodes.fail_unrewarded(c, ids))

    def empty_groups(self, ids: Sequence[str], *, keep_versions: int) -> Future[int]:
        """Delete the texts and tokens of expired groups, see `expired_groups`; the result counts the turns.

        A group that a resume could train again is not changed. Free space is returned to the disk.
        """

        def write(connection: sa.Connection) -> int:
            emptied = retention.empty_groups(connection, ids, keep_versions=keep_versions)
            retention.return_space(connection)
            return emptied

        return self._database.submit(write)

    def drop_open_group(self, group_id: str, reason: str) -> Future[None]:
        """Drop a group. Conflict if the trainer has taken it."""
        return self._database.submit(lambda c: groups.drop_group(c, group_id, reason))

    def delete_episodes(self, ids: Sequence[str]) -> Future[list[str]]:
        """Delete episodes with everything recorded of them; the result is the ids of those that existed.

        Conflict if one is open. Call `clear_log` afterwards: until then the database has copies.
        """
        return self._database.submit(lambda c: deletion.delete_episodes(c, ids))

    def clear_log(self, timeout_s: float = 30.0, *, is_alone: bool = False) -> None:
        """Return free space to the disk, and remove what the database keeps of old rows: `deletion.clear`.

        StoreError if readers hold it for longer than `timeout_s`.
        """
        self._database.submit(retention.return_all_space).result()
        deletion.clear(self.url, timeout_s, is_alone=is_alone)

    # -- the trainer writes -------------------------------------------------------------------

    def become_trainer(self, wait_s: float = 0.0) -> None:
        """Become the only trainer of this store until it is closed; wait `wait_s` for one that is ending.

        Conflict if another process is the trainer, because two would train the same groups.
        """
        self._trainer.take(wait_s)

    def lease_group_ids(self, count: int, *, step: int) -> list[str]:
        """Lease the `count` oldest complete training groups, or none if there are fewer; return their ids.

        They accept no more rewards. Groups that a dead trainer had leased are made complete again first.
        Raises Conflict if another process is the trainer of the store.
        """
        self.become_trainer()
        holder = self._trainer.holder
        return self._as_trainer(lambda c: leases.take_groups(c, count, step=step, holder=holder))

    def lease_replays(
        self, count: int, *, step: int, min_version: int, max_uses: int
    ) -> list[tuple[str, int]]:
        """Lease up to `count` trained groups for one more use in `step`; return (group, use) of each.

        A group is leased if it was trained in all its uses so far, the last of them in an earlier step, if it
        has fewer than `max_uses` uses, and if none of its sampled tokens is older than `min_version`. The
        groups that were submitted last come first: their tokens are the least stale, and neither clocks nor
        resumes change the order of submission. Groups without sampled tokens, and groups whose turns were
        deleted (`store.retain`), are skipped.

        A reuse counts neither in the gate nor in `group_counts`, and does not change the state of its group.

        Args:
            count: at least 1; fewer are leased if there are fewer.
            step: the step that trains them.
            min_version: the oldest version that is within the staleness bound at `step`.
            max_uses: the most uses of a group, including its first one.

        Raises:
            ValueError: `count` or `max_uses` is below 1.
            Conflict: another process is the trainer of the store.
        """
        self.become_trainer()
        holder = self._trainer.holder
        return self._as_trainer(
            lambda c: leases.take_replays(
                c, count, step=step, min_version=min_version, max_uses=max_uses, holder=holder
            )
        )

    def mark_trained(self, group_ids: Iterable[str | tuple[str, int]], *, step: int, version: int) -> None:
        """Record that leased groups were trained into `version`. Conflict if one is not leased for `step`.

        A group is given as (group, use), or as its id alone for its first use.
        """
        ids = list(group_ids)
        self._as_trainer(lambda c: leases.mark_trained(c, ids, step=step, version=version))

    def drop_group(self, group_id: str, reason: str, *, step: int, use: int = 0) -> None:
        """Drop a complete or leased group for good. Conflict in any other state.

        With a `use` above 0, end a leased reuse instead: the group stays trained, and is not reused again.
        """
        self._as_trainer(lambda c: leases.drop_leased(c, group_id, reason, step=step, use=use))

    def commit_checkpoint(self, step: int) -> None:
        """Record that a resume can start after `step`."""
        self._as_trainer(lambda c: leases.write_checkpoint(c, step))

    def return_leases(self, after_step: int) -> int:
        """Make the groups of all steps after `after_step` complete again, for a resume; return how many.

        Reuses in those steps, and reuses that are only leased, are deleted.
        """
        return self._as_trainer(lambda c: leases.return_leases(c, after_step))

    def publish_version(
        self,
        version: int,
        *,
        step: int,
        path: str | Path,
        checksum: str | None = None,
        object_folder: str | None = None,
        folder_pending: bool = False,
    ) -> None:
        """Make `version` the current policy. Conflict unless its number is above all earlier ones.

        With `folder_pending` the folder at `path` need not exist before `mark_folder_written`. A version in
        an object storage has an `object_folder` there, and the `checksum` of its manifest.
        """
        self._as_trainer(
            lambda c: versions.insert_version(
                c, version, step=step, path=str(path), checksum=checksum, object_folder=object_folder,
                folder_pending=folder_pending,
            )
        )  # fmt: skip

    def check_trainer(self) -> None:
        """Raise Conflict if this process was the trainer of the store, and another one is now."""
        self._as_trainer(lambda c: None)

    def object_folders(self) -> set[str]:
        """Return the folders of published versions in the object storage. Conflict as `check_trainer`."""
        return self._as_trainer(versions.object_folders)

    def mark_folder_written(self, version: int) -> None:
        """Record that the folder of a published version is complete."""
        self._as_trainer(lambda c: versions.mark_folder_written(c, version))

    def publish_candidate(self, version: int, *, step: int, path: str | Path, share: float) -> None:
        """Publish a version for the replicas of the canary only. Conflict if there is a candidate."""
        self._as_trainer(
            lambda c: canary.insert_candidate(c, version, step=step, path=str(path), share=share)
        )

    def begin_comparison(self, version: int) -> None:
        """Compare the conversations that are opened from now on; has no effect if that was called before."""
        self._as_trainer(lambda c: canary.begin_comparison(c, version))

    def promote_candidate(self, version: int, verdict: Mapping[str, Any]) -> None:
        """Make the candidate the version of all replicas. Conflict if it is not the candidate."""
        self._as_trainer(lambda c: canary.promote_candidate(c, version, verdict))

    def roll_back_candidate(
        self, version: int, verdict: Mapping[str, Any], *, restored: int, step: int, path: str | Path
    ) -> None:
        """End the candidate, and publish the weights before it as version `restored`.

        Conflict if it is not the candidate.
        """
        self._as_trainer(
            lambda c: canary.roll_back_candidate(
                c, version, verdict, restored=restored, step=step, path=str(path)
            )
        )

    def _as_trainer(self, job: Job[T]) -> T:
        """Return the result of a write of the trainer. Conflict if another process is the trainer now."""

        self._trainer.take_back()

        def write(connection: sa.Connection) -> T:
            self._trainer.check(connection)
            return job(connection)

        return self._database.submit(write).result()

    # -- the operator's command writes --------------------------------------------------------

    def freeze(self, frozen: bool) -> None:
        """Order that nothing is trained, published or decided, until it is taken back with False."""
        self._database.submit(lambda c: canary.freeze(c, frozen)).result()

    def give_order(self, version: int, order: canary.Order) -> None:
        """Order what becomes of the candidate. Conflict if `version` is not the candidate."""
        self._database.submit(lambda c: canary.give_order(c, version, order)).result()

    # -- each process of a cluster writes its own place ----------------------------------------

    def claim_role(self, role: Role, index: int, *, host: str, pid: int, gone: int | None = None) -> RoleRow:
        """Take a place in the run, see `roles.claim`. Conflict if another process has it."""
        job = partial(roles.claim, role=role, index=index, host=host, pid=pid, gone=gone)
        return self._database.submit(job).result()

    def beat_role(self, role: Role, index: int, epoch: int, *, url: str | None) -> bool:
        """Write a heartbeat and the address; return whether the place is still that of this process."""
        job = partial(roles.beat, role=role, index=index, epoch=epoch, url=url)
        return self._database.write_beside(job)

    def leave_role(self, role: Role, index: int, epoch: int) -> None:
        """Leave a place in the run; no effect if another process has it."""
        self._database.submit(partial(roles.leave, role=role, index=index, epoch=epoch)).result()

    def show_engine_weights(self, weights: EngineWeights) -> bool:
        """Write what an engine has that reads its weights from an object storage.

        Return whether its place is still that of this process; if not, nothing is written.
        """
        return self._database.write_beside(lambda c: engine_weights.show(c, weights))

    def leave_engine_weights(self, index: int, process: str) -> None:
        """Remove what `process` wrote about an engine."""
        self._database.submit(lambda c: engine_weights.leave(c, index, process)).result()

    def engine_weights(self) -> list[EngineWeightsRow]:
        """Return what each engine has that reads its weights from an object storage, by index."""
        return self._database.query(engine_weights.all_of)

    def run_id(self) -> str:
        """Return a random name of this store, under which an object storage has the versions of its run."""
        return self._database.submit(run_id.of).result()

    def write_run(self, record: dict[str, Any]) -> None:
        """Write what each process of a run on several machines reads first."""
        self._database.submit(lambda c: roles.write_run(c, record)).result()

    def read_run(self) -> dict[str, Any]:
        """Return what `write_run` wrote. NotFound if no such run was started on the store."""
        return self._database.query(roles.read_run)

    def role_rows(self, role: Role | None = None) -> list[RoleRow]:
        """Return the places of a role, or of all roles, by role and index."""
        return self._database.query(lambda c: roles.all_of(c, role))

    def addresses(self, role: Role) -> dict[int, str]:
        """Return the addresses of the running processes of a role by index."""
        return {row.index: row.url for row in self.role_rows(role) if row.is_alive and row.url is not None}

    # -- everybody reads ----------------------------------------------------------------------

    def served_versions(self) -> ServedVersions | None:
        """Return what replicas serve, or None before the first version."""
        return self._database.query(canary.served_versions)

    def scored_conversations(self, *, after: int, settle_s: float) -> list[ScoredConversation]:
        """Return the rewarded implicit training episodes that were opened after the one with number `after`,
        in the order in which they ended, once `settle_s` seconds have passed since."""
        return self._database.query(
            lambda c: canary.scored_conversations(c, after=after, settle_s=settle_s, now=time.time())
        )

    def is_frozen(self) -> bool:
        """Whether the operator has frozen the run."""
        return self._database.query(canary.is_frozen)

    def order_for(self, version: int) -> canary.Order | None:
        """Return the operator's order for a candidate; None if there is none."""
        return self._database.query(lambda c: canary.order_for(c, version))

    def latest_version(self) -> VersionRow | None:
        """Return the current policy version, or None before the first."""
        return self._database.query(versions.latest_version)

    def max_version(self) -> int:
        """Return the largest version number that was ever published, or -1 before the first."""
        return self._database.query(versions.max_version)

    def steps_behind(self, version: int) -> dict[int, int]:
        """Return by how many steps each version from before a resume lags behind `version`."""
        return self._database.query(lambda c: versions.steps_behind(c, version))

    def failed_episodes(self, split: Split = "train") -> int:
        """Return how many episodes of the split have failed."""
        return self._database.query(lambda c: reads.failed_episodes(c, split))

    def episode_counts(self, split: Split) -> dict[str, int]:
        """Return how many episodes of the split have each status that any has."""
        return self._database.query(lambda c: reads.episode_counts(c, split))

    def constrained_turns(self, split: Split = "train", *, latest: int = 256) -> tuple[int, int]:
        """Return how many of the latest turns of the split are constrained, and how many these turns are."""
        return self._database.query(lambda c: reads.constrained_turns(c, split, latest))

    def activity(self) -> Activity:
        """Return which episodes are open, and when the last model call ended."""
        unrewarded = len(self.unrewarded_episodes())
        return self._database.query(lambda c: reads.activity(c, unrewarded))

    def sampled_tokens_per_s(self, *, within_s: float = 30.0, latest: int = 1000) -> float:
        """Return the tokens that were sampled per second, from the turns of the last `within_s` seconds.

        At most the `latest` turns are read; if they are all younger, the rate is that of their own time.
        """
        return self._database.query(
            lambda c: reads.sampled_tokens_per_s(c, now=time.time(), within_s=within_s, latest=latest)
        )

    def episodes_with_reward(self, name: str, split: Split = "train") -> int:
        """Return how many episodes of the split have a reward of this name."""
        return self._database.query(lambda c: reads.episodes_with_reward(c, name, split))

    def last_failure(self, split: Split = "train") -> str | None:
        """Return why the episode of the split failed that ended last; None if none has failed."""
        return self._database.query(lambda c: reads.last_failure(c, split))

    def expired_groups(self, *, keep_versions: int, after_step: int, limit: int) -> list[tuple[str, int]]:
        """Return (group, step of its last use) of up to `limit` groups whose turns can be deleted, by step.

        The trainer trained or dropped them before the last `keep_versions` versions, in a step that the
        second newest checkpoint covers, so that no resume can train them again.
        """
        return self._database.query(
            lambda c: retention.expired_groups(
                c, keep_versions=keep_versions, after_step=after_step, limit=limit
            )
        )

    def group_counts(self, split: Split = "train") -> dict[str, int]:
        """Return how many groups are pending, complete, leased, trained and dropped."""
        return self._database.query(lambda c: reads.group_counts(c, split))

    def waiting_groups(self) -> list[WaitingGroup]:
        """Return the pending and complete training groups that the trainer has not leased, oldest first."""
        return self._database.query(waiting.waiting_groups)

    def untrained_groups(self) -> list[UntrainedGroup]:
        """Return the training groups that are neither trained nor dropped, oldest first."""
        return self._database.query(waiting.untrained_groups)

    def runners(self) -> set[str]:
        """Return the rollout processes, of several, that play the pending training groups."""
        return self._database.query(waiting.runners)

    def groups_begun(self, after: int) -> list[tuple[int, str]]:
        """Return (seq, id) of the training groups begun after the one with number `after`, in order."""
        return self._database.query(lambda c: waiting.groups_begun(c, after))

    def abandoned_groups(self) -> list[str]:
        """Return the pending training groups that no runner submitted and that have no active episode."""
        return self._database.query(waiting.abandoned_groups)

    def episodes(
        self,
        split: str | None = None,
        status: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        group_id: str | None = None,
        *,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[EpisodeSummary]:
        """Return the episodes that match every given condition, in the order in which they were opened.

        With `after`, only those that were opened after that episode (NotFound if it is unknown), and at most
        `limit` of them.
        """
        return self._database.query(
            lambda c: reads.summaries(
                c,
                split=split,
                status=status,
                group_id=group_id,
                metadata=metadata,
                after=after,
                limit=limit,
            )
        )

    def open_groups(self) -> list[OpenGroup]:
        """Return the pending groups with the attempts at each index."""
        return self._database.query(reads.open_groups)

    def task_ids_started(self, split: Split = "train") -> list[tuple[str, int]]:
        """Return (task id, epoch) of every group, oldest first; group ids are "<task id>@<epoch>"."""
        return self._database.query(lambda c: reads.tasks_started(c, split))

    def task_groups(self, split: Split = "train") -> list[TaskGroup]:
        """Return every group with its task, oldest first."""
        return self._database.query(lambda c: reads.task_groups(c, split))

    def group_scores(self, group_ids: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Return the scores of each group that has ended: by index if it is complete, () if dropped."""
        return self._database.query(lambda c: reads.group_scores(c, group_ids))

    def load_episode(self, episode_id: str) -> RecordedEpisode:
        """Return an episode with its turns and rewards. NotFound if it is unknown."""
        return self._database.query(lambda c: reads.load_episodes(c, [episode_id])[0])

    def load_episodes(self, episode_ids: Sequence[str]) -> list[RecordedEpisode]:
        """Return episodes with their turns and rewards, in the order of `episode_ids`. Raises NotFound."""
        return self._database.query(lambda c: reads.load_episodes(c, episode_ids))

    def load_groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        """Return groups with their scored episodes, in the order of `group_ids`. Raises NotFound."""
        return self._database.query(lambda c: reads.load_groups(c, group_ids))

    def group_history(self, group_id: str) -> GroupHistory:
        """Return a group with what the trainer did with it. NotFound if it is unknown."""
        return self._database.query(lambda c: reads.group_history(c, group_id))

    def groups_of_step(self, step: int) -> dict[str, int]:
        """Return the groups that a step was trained on, by id, each with its use."""
        return self._database.query(lambda c: reads.groups_of_step(c, step))

    def published_versions(self) -> list[VersionRow]:
        """Return every published version, oldest first."""
        return self._database.query(versions.published_versions)

    def groups_ended_at(self, group_ids: Sequence[str]) -> dict[str, float | None]:
        """Return, by group id, when its last episode ended, in seconds since the epoch; None if none has."""
        return self._database.query(lambda c: reads.groups_ended_at(c, group_ids))

    def turn_times(self, split: Split = "train") -> list[TurnTime]:
        """Return when the turns of scored episodes were recorded, by episode and in order."""
        return self._database.query(lambda c: reads.turn_times(c, split))

    def recorded_groups(self, split: Split = "train") -> list[str]:
        """Return the ids of the groups of the split that were completed and not dropped, oldest first."""
        return self._database.query(lambda c: reads.recorded_groups(c, split))

    def imported_episodes(self, split: Split = "train") -> int:
        """Return how many episodes of the split have imported turns."""
        return self._database.query(lambda c: reads.imported_episodes(c, split))

    def recorded_alone(self, split: Split = "train") -> list[tuple[str, str]]:
        """Return (id, task id) of the rewarded episodes of the split without a group, oldest first."""
        return self._database.query(lambda c: reads.recorded_alone(c, split))

    def episode_row(self, episode_id: str) -> EpisodeRow:
        """Return an episode without its turns. NotFound if it is unknown."""
        return self._database.query(lambda c: reads.episode_row(c, id=episode_id))

    def episode_row_by_key(self, key_hash: str) -> EpisodeRow:
        """Return the episode with this key, without its turns. NotFound if there is none."""
        return self._database.query(lambda c: reads.episode_row(c, key_hash=key_hash))

    def episode_by_key(self, key_hash: str) -> tuple[EpisodeRow, list[Turn]]:
        """Return the episode with this key and its turns, without routed experts. NotFound if none has it."""

        def read(connection: sa.Connection) -> tuple[EpisodeRow, list[Turn]]:
            row = reads.episode_row(connection, key_hash=key_hash)
            return row, reads.turns_of(connection, row.id)

        return self._database.query(read)

    def unrewarded_episodes(self, *, of_ended_groups: bool = False) -> list[str]:
        """Return the ids of finished episodes in groups that have no reward yet, oldest first.

        With `of_ended_groups`, episodes of groups of which another episode is still open are left out.
        """
        return self._database.query(lambda c: episodes.unrewarded(c, of_ended_groups=of_ended_groups))

    def open_episodes(self) -> list[OpenEpisode]:
        """Return every open episode, oldest first."""
        return self._database.query(reads.open_episodes)

    def open_implicit_episode(self, implicit_key: str) -> EpisodeRow | None:
        """Return the open implicit episode with this key, or None if there is none."""
        return self._database.query(lambda c: reads.open_implicit_episode(c, implicit_key))

    def open_implicit_episodes(self) -> list[tuple[EpisodeRow, list[Turn]]]:
        """Return the open implicit episodes with their turns, without routed experts."""

        def read(connection: sa.Connection) -> list[tuple[EpisodeRow, list[Turn]]]:
            rows = reads.open_implicit_episodes(connection)
            return [(row, reads.turns_of(connection, row.id)) for row in rows]

        return self._database.query(read)

    def turns_of(self, episode_id: str) -> list[Turn]:
        """Return the turns of one episode, without routed experts, in the order of their recording."""
        return self._database.query(lambda c: reads.turns_of(c, episode_id))

    def episode_of_turn(self, turn_id: str) -> EpisodeRow:
        """Return the episode that a completion belongs to. NotFound if it is unknown."""
        return self._database.query(lambda c: reads.episode_row(c, id=reads.episode_of_turn(c, turn_id)))
