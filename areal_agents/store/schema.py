"""The tables of the store. Each has one writer: the proxy writes tasks, groups, episodes, turns and rewards;
the trainer writes leases, versions and checkpoints; each process of a cluster writes its own row of roles.

The state of a group is therefore in two tables. `groups.state` is pending, complete or dropped; once the
trainer takes the group, its row of use 0 in `leases` (leased, trained or dropped) takes precedence.

The rows of use 1, 2, … are reuses from the replay buffer and do not affect the state of the group. The uses
of a group are numbered without gaps, each was leased in a later step than the one before it, and all but the
last are trained.
"""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA_VERSION = 9  # the newest revision of migrations/versions

metadata = sa.MetaData()

# Alembic's own table, which says which schema the store has.
alembic_version = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

# The order of insertion. Only an INTEGER PRIMARY KEY is counted up by SQLite, and it has 64 bits there.
_SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

store_meta = sa.Table(
    "store_meta",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column(
        "uid", sa.Text, primary_key=True
    ),  # digest of id and input, because two data sets may share an id
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("input", sa.JSON, nullable=False),
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("seq", _SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("task_uid", sa.Text, sa.ForeignKey("tasks.uid"), nullable=False),
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("surplus", sa.Integer),  # episodes beyond `size`; null: none
    sa.Column("version", sa.Integer),  # no token of the group is older; null in rows of earlier releases
    sa.Column("state", sa.Text, nullable=False),  # pending | complete | dropped
    sa.Column("reason", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("completed_at", sa.Float),
    sa.Column("runner", sa.Text),  # the rollout process that plays it; null if there is a single one
    sa.Index("groups_by_state", "state", "split"),
)

episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("seq", _SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("key_hash", sa.Text, nullable=False, unique=True),  # sha256 of the episode's key
    sa.Column("task_uid", sa.Text, sa.ForeignKey("tasks.uid"), nullable=False),
    sa.Column("group_id", sa.Text, sa.ForeignKey("groups.id")),
    sa.Column("index", sa.Integer, nullable=False),  # index in the group; 0 without a group
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("limit_reached", sa.Text),  # the limit that the policy ran into, if any
    sa.Column("error", sa.Text),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("sampling", sa.JSON, nullable=False),
    sa.Column("implicit_key", sa.Text),  # set if a call without an episode opened it
    sa.Column("owner", sa.Text),  # the proxy worker that has it in memory; null if there is a single one
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Index("episodes_by_group", "group_id"),
    sa.Index("episodes_by_status", "status", "split"),
    sa.Index("episodes_by_implicit_key", "implicit_key"),
)

turns = sa.Table(
    "turns",
    metadata,
    sa.Column("seq", _SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("episode_id", sa.Text, sa.ForeignKey("episodes.id"), nullable=False),
    sa.Column("parent", sa.Text),
    sa.Column("codec", sa.Integer, nullable=False),  # 0: the blobs were deleted, see retention.py
    sa.Column("created_at", sa.Float, nullable=False),
    # Small columns precede the large ones, so that a summary never reads a blob.
    sa.Column("sampled_tokens", sa.Integer, nullable=False),
    sa.Column("version_min", sa.Integer),
    sa.Column("version_max", sa.Integer),
    sa.Column("finish_reason", sa.Text, nullable=False),
    sa.Column("discarded", sa.Text),  # why the turn is not trained, for example: it never reached the client
    sa.Column("constrained", sa.Integer),  # 1 if the turn is; null if not, and in rows of earlier releases
    sa.Column("record", sa.LargeBinary, nullable=False),  # JSON: messages, reply, sampling, fork, …
    sa.Column("prompt_ids", sa.LargeBinary, nullable=False),  # int32 little-endian [P]
    sa.Column("token_ids", sa.LargeBinary, nullable=False),  # int32 little-endian [C]
    # float32 and int32 little-endian [C]; empty for an imported turn
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("versions", sa.LargeBinary, nullable=False),
    # int16 little-endian [R, layers, k]; null if routing is not recorded; the record has layers and k
    sa.Column("routed_experts", sa.LargeBinary),
    sa.Index("turns_by_episode", "episode_id"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("episode_id", sa.Text, sa.ForeignKey("episodes.id"), primary_key=True),
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("group_id", sa.Text, sa.ForeignKey("groups.id"), primary_key=True),
    sa.Column("use", sa.Integer, primary_key=True, autoincrement=False),  # 0 is the first
    sa.Column("state", sa.Text, nullable=False),  # leased | trained | dropped
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),  # the trainer process, see TrainerLock
    sa.Column("version", sa.Integer),  # the version that a trained group was trained into
    sa.Column("reason", sa.Text),
    sa.Index("leases_by_state", "state"),
    sa.Index("leases_by_step", "step"),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("checksum", sa.Text),  # of its manifest in an object storage; null: it is in none
    sa.Column("object_folder", sa.Text),  # its folder in the object storage
    sa.Column("published_at", sa.Float, nullable=False),
    sa.Column("folder_pending", sa.Integer),  # 1: the folder at `path` is not complete yet; null: it is
    # candidate | promoted | rolled_back; null: it was never a candidate, and is for every replica
    sa.Column("canary", sa.Text),
    sa.Column("share", sa.Float),  # of the conversations that a candidate serves
    sa.Column("canary_after", sa.Integer),  # episodes.seq: those after it are compared; null: not served yet
    sa.Column("verdict", sa.JSON),  # why a candidate was promoted or rolled back, see canary.py
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

# One row for each process of a run that is started on several machines, see roles.py.
roles = sa.Table(
    "roles",
    metadata,
    sa.Column("role", sa.Text, primary_key=True),  # supervisor | engine | proxy | rollout | trainer
    sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.Integer, nullable=False),  # counts the processes that have had the place
    sa.Column("state", sa.Text, nullable=False),  # running | ended
    sa.Column("url", sa.Text),  # where the others reach it; null: it is not reached, or not yet
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),  # by the clock of the database, as beat_at
    sa.Column("beat_at", sa.Float, nullable=False),
)

# One row for each engine that reads its weights from an object storage, see engine_weights.py.
engine_weights = sa.Table(
    "engine_weights",
    metadata,
    sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("process", sa.Text, nullable=False),  # that writes the row
    sa.Column("epoch", sa.Integer),  # of the place of the process, see roles.py; null: it has no place
    sa.Column("version", sa.Integer),  # that it has loaded since it was started; null: none
    sa.Column("problem", sa.Text),  # why it has no newer version; null: nothing is wrong
    sa.Column("pause_s", sa.Float, nullable=False),
    sa.Column("fetch_s", sa.Float, nullable=False),
    sa.Column("received_bytes", sa.BigInteger, nullable=False),
    sa.Column("agreement", sa.Float),
    sa.Column("busy_s", sa.Float),
    sa.Column("beat_at", sa.Float, nullable=False),  # by the clock of the database
)

# How many transactions each process has committed: what tells a process whose connection was lost whether its
# last one was. Only a store in PostgreSQL has rows; those of processes that have ended are deleted in time.
writers = sa.Table(
    "writers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("commits", sa.BigInteger, nullable=False),
    sa.Column("committed_at", sa.Float, nullable=False),  # by the clock of the database
)
