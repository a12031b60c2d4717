"""A pool: several replicas of one model behind the interface of one sampler."""

from areal_agents.inference.pool.agreement import refuse_other_models
from areal_agents.inference.pool.external_router import RouterEngine
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.inference.pool.pool import EnginePool, PoolCounts
from areal_agents.inference.pool.replica import CurrentVersion, Replica

__all__ = [
    "CurrentVersion",
    "EnginePool",
    "PoolCounts",
    "PoolLimits",
    "Replica",
    "RouterEngine",
    "refuse_other_models",
]
