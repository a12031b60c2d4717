"""A trainer in a process of its own, for tests that kill it: RUN_DIR MODEL ENGINE_URL STEPS."""

from __future__ import annotations

import sys
import threading

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference import SGLangEngine
from areal_agents.process_control import collect_seldom
from areal_agents.store import Store
from areal_agents.training.config import TrainerConfig
from areal_agents.training.run import run

if __name__ == "__main__":
    collect_seldom()
    run_dir, model, engine_url, steps = sys.argv[1:]
    with Store.open(f"{run_dir}/store.db") as store:
        run(
            TrainerConfig(steps=int(steps), lr=1e-2, checkpoint_every=2, batch_timeout_s=120, threads=1),
            AlgorithmConfig(),
            store=store,
            engines=[SGLangEngine(engine_url)],
            model_path=model,
            run_dir=run_dir,
            groups=2,
            max_staleness=20,
            stop=threading.Event(),
        )
