"""A pool: several replicas of one model behind the interface of one sampler."""

from areal_agents.inference.pool.addresses import following_engines
from areal_agents.inference.pool.agreement import refuse_other_models
from areal_agents.inference.pool.external_router import RouterEngine
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.inference.pool.pool import EnginePool, PoolCounts
from areal_agents.inference.pool.replica import CurrentVersion, Replica
from areal_agents.inference.pool.sides import canary_engines, is_of_canary

__all__ = [
    "CurrentVersion",
    "EnginePool",
    "PoolCounts",
    "PoolLimits",
    "Replica",
    "RouterEngine",
    "canary_engines",
    "following_engines",
    "is_of_canary",
    "refuse_other_models",
]
