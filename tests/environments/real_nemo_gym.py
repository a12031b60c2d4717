"""Runs a server of the installed NeMo Gym without its head server: `python real_nemo_gym.py PORT`."""

from __future__ import annotations

import sys

import uvicorn
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt import app

if __name__ == "__main__":
    port = int(sys.argv[1])
    config = {"host": "127.0.0.1", "port": port, "entrypoint": "app.py", "name": "counter"}
    head = BaseServerConfig(host="127.0.0.1", port=1)  # never called
    server = app.StatefulCounterResourcesServer(
        config=app.StatefulCounterResourcesServerConfig(**config),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    uvicorn.run(server.setup_webserver(), port=port, log_level="warning")
