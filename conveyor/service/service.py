"""The whole service: one object that HTTP talks to."""

from __future__ import annotations

from conveyor.domain.submission import Limits
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.service.callers import Caller, derive_keyring, identify
from conveyor.service.context import Context, ServiceOptions
from conveyor.service.exports import RunExports
from conveyor.service.file_inputs import FileInputs
from conveyor.service.idempotency import IdempotentRequests
from conveyor.service.jobs import JobCommands, JobQueries
from conveyor.service.links import ExportLinks, LinkSigner, UploadSigner
from conveyor.service.notifier import WorkNotifier
from conveyor.service.reruns import Reruns
from conveyor.service.results import Cursors, Results
from conveyor.service.submit import Additions, Submissions


class Service:
    """The operations of the API, grouped by what they are about.

    `submissions` and `additions` bring tasks in, `reruns` brings them back, `lifecycle` changes
    states, `listing` reads jobs and runs, `results` reads what became of tasks, `inputs` takes
    files of tasks, `exports` makes archives of results.
    """

    def __init__(self, binding: Binding, options: ServiceOptions, clock: Clock) -> None:
        self.options = options
        self._keyring = derive_keyring(
            [binding.root_secret, *options.older_secrets], binding.sealing_secrets
        )
        context = Context(binding=binding, clock=clock, options=options, keyring=self._keyring)
        announcer = WorkNotifier(binding.queues, binding.signals, binding.tasks)
        once = IdempotentRequests(
            binding.idempotency,
            clock,
            claim=options.idempotency_claim,
            ttl=options.idempotency_ttl,
        )
        limits = Limits(
            max_inline_tasks=options.max_inline_tasks,
            max_add_tasks=options.max_add_tasks,
            max_open_job_tasks=options.max_open_job_tasks,
        )
        cursors = Cursors(self._keyring.cursors)
        links = LinkSigner(self._keyring.links, origin=options.public_origin)
        self.submissions = Submissions(context, announcer=announcer, once=once, limits=limits)
        self.additions = Additions(context, announcer=announcer, once=once, limits=limits)
        self.reruns = Reruns(context, announcer, once)
        self.lifecycle = JobCommands(context, announcer)
        self.listing = JobQueries(context, cursors)
        self.results = Results(context, cursors, links)
        uploads = UploadSigner(self._keyring.uploads, origin=options.public_origin)
        self.inputs = FileInputs(context, uploads)
        downloads = ExportLinks(self._keyring.exports, origin=options.public_origin)
        self.exports = RunExports(context, downloads, announcer)

    def identify(self, api_key: str | None) -> Caller:
        """The caller that an API key stands for. Raises ConveyorError(unauthenticated)."""
        return identify(api_key, self._keyring)
