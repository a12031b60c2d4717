"""The scripted engine: a server without a model that speaks SGLang's HTTP protocol and answers from a script.

Its answers are tokenised with a real tokenizer, so its clients (the proxy, an agent) work exactly as with a
real engine. It needs neither torch nor transformers.
"""

from areal_agents.testing.app import ScriptedApp
from areal_agents.testing.invalid_answers import LIES, Lie
from areal_agents.testing.script import Script, ScriptedCall, ScriptedReply, by_prompt, filler, repeat
from areal_agents.testing.server import running, running_process
from areal_agents.testing.session import ServedCall

__all__ = [
    "LIES",
    "ServedCall",
    "Lie",
    "ScriptedReply",
    "Script",
    "ScriptedApp",
    "ScriptedCall",
    "by_prompt",
    "filler",
    "repeat",
    "running",
    "running_process",
]
