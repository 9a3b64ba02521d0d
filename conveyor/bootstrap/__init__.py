"""Wire a running API and worker from the settings. The only room that knows both bindings.

A binding is imported lazily, so that a process loads only the one it uses.
"""

from conveyor.bootstrap.development import Planter as Planter
from conveyor.bootstrap.development import Runtime as Runtime
from conveyor.bootstrap.development import open_dev as open_dev
from conveyor.bootstrap.loop import Chores as Chores
from conveyor.bootstrap.loop import LoopOptions as LoopOptions
from conveyor.bootstrap.loop import Outside as Outside
from conveyor.bootstrap.loop import WorkerPorts as WorkerPorts
from conveyor.bootstrap.loop import assemble_worker as assemble_worker
from conveyor.bootstrap.loop import build_worker as build_worker
